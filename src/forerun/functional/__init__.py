"""Speculation with modules and functions that you bring along (extra `hf`; docs/use/functional.md).

`speculative_generate`, `autoregressive_generate`, `beam_search_generate` and `ngram_assisted_speculative_generate`
generate with any module in the form of Hugging Face transformers, given as an object. They take logits processors of
your own. In one line:

    from forerun.functional import speculate_with
    print(speculate_with(model, tokenizer, draft="suffix").generate("def fib(n):").text)

`speculate` is speculative sampling outside of language models: a slow function runs on a guess of the input that
another slow function will choose.
"""

from importlib.util import find_spec

from forerun.errors import not_installed

if find_spec("torch") is None:
    raise not_installed("forerun.functional", "hf", "torch")

from forerun.functional.caching import prune_cache, prune_dynamic_cache, prune_tuple_cache
from forerun.functional.decoding import (
    autoregressive_generate,
    beam_search_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from forerun.functional.parallel import Choice, Speculated, speculate
from forerun.functional.processors import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
    max_fn,
)
from forerun.functional.with_model import Speculating, speculate_with

__all__ = [
    "Choice",
    "GreedyProcessor",
    "LogitsProcessor",
    "MultinomialProcessor",
    "NucleusProcessor",
    "Speculated",
    "Speculating",
    "TopKNucleusProcessor",
    "TopKProcessor",
    "autoregressive_generate",
    "beam_search_generate",
    "max_fn",
    "ngram_assisted_speculative_generate",
    "prune_cache",
    "prune_dynamic_cache",
    "prune_tuple_cache",
    "speculate",
    "speculate_with",
    "speculative_generate",
]
