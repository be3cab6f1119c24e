"""speculate_with: one line around a model of transformers, with all drafters without a model, and with a module."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from forerun import SamplingParams, drafters, registry
from forerun.errors import BadOption, NotFound, UserError
from forerun.functional import autoregressive_generate, speculate_with
from forerun.models.toy import ToyModel, ToyTable
from forerun.testing.engines import target_for
from functional.modules import PROMPT, ToyModule, generated, module_of, noisy
from methods import NEEDS
from support import rounds_of
from tiny import byte_tokenizer

NUM = 20
CHAT = [{"role": "user", "content": "hi"}]
GREEDY = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True)
PREDICTION = dataclasses.replace(GREEDY, prediction=PROMPT)
KNOWN = target_for(ToyModel(100, seed=0)).opened
WITHOUT_MODEL = [
    name
    for name in registry.names(drafters.__name__)
    if name not in NEEDS  # such as a file
    and not any(own.needs.has_model for own in drafters.wanted(name, KNOWN))
]


@functools.cache
def target(kind: str = "gpt2") -> Any:
    return module_of(kind)


@pytest.mark.parametrize("draft", [*WITHOUT_MODEL, "suffix:shape=tree", "recycle:shape=path", "lookahead:guesses=1"])
def test_every_drafter_without_a_model_says_what_generate_says(draft: str) -> None:
    """Trees, and rows that are only looked at, run as branches of the module's text."""
    speculating = speculate_with(target(), draft=draft, pacing_policy="fixed", spec_length=4)
    out = speculating.generate(PROMPT, GREEDY)
    assert out.token_ids == generated(target(), PROMPT, NUM)
    assert out.report.num_emitted >= NUM
    again = speculating.generate([PROMPT, PROMPT[:4]], GREEDY)
    assert [o.token_ids for o in again] == [out.token_ids, generated(target(), PROMPT[:4], NUM)]


@pytest.mark.parametrize(
    "draft", ["tree", "tree:shape=best_first,draws=point", "cascade:inner=lookup", "several", "mixed"]
)
def test_drafters_that_are_made_of_a_module(draft: str) -> None:
    options: dict[str, Any] = {"draft_model": noisy(target()), "pacing_policy": "fixed", "spec_length": 4}
    out = speculate_with(target(), draft=draft, **options).generate(PROMPT, GREEDY)
    assert out.token_ids == generated(target(), PROMPT, NUM)
    assert out.report.num_accepted > 0


@pytest.mark.parametrize("uses_cache", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_beams_of_a_module_are_those_of_generate(kind: str, uses_cache: bool) -> None:
    """The texts that still compete are open rows of the module's cache from pass to pass."""
    beams = dataclasses.replace(GREEDY, max_tokens=10, num_beams=3, draft_beams=6, n=3, spec_length=2)
    inputs = torch.tensor([PROMPT])
    settings = {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = target(kind).generate(inputs, max_new_tokens=10, **settings)[:, -10:].tolist()
    for draft in ("none", noisy(target(kind))):
        outputs: Any = speculate_with(target(kind), draft=draft, use_cache=uses_cache).generate(PROMPT, beams)
        assert [output.token_ids for output in outputs] == wanted
    assert outputs[0].report.num_accepted > 0


@pytest.mark.parametrize("draft", ["suffix", "suffix:shape=tree", "prediction", "ngram"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_drafters_without_a_model_beside_an_encoder(kind: str, draft: str) -> None:
    """They read what the decoder said and its source, and a prediction."""
    speculating = speculate_with(target(kind), draft=draft, pacing_policy="fixed")
    for params in (GREEDY, PREDICTION):
        assert speculating.generate(PROMPT, params).token_ids == generated(target(kind), PROMPT, NUM)


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("drafts_with_one", [True, False])
def test_an_input_is_a_source_as_in_the_engine(kind: str, drafts_with_one: bool) -> None:
    """An answer may begin as it was told, and several of one source end with nothing left of any."""
    module, params = target(kind), dataclasses.replace(GREEDY, decoder_prompt=[9, 8], n=2)
    drafted = noisy(module) if drafts_with_one else "suffix"
    speculating = speculate_with(module, draft=drafted, pacing_policy="fixed", spec_length=3)
    begun = torch.tensor([[module.config.decoder_start_token_id, 9, 8]])
    for inputs in (PROMPT, PROMPT[2:]):
        wanted = generated(module, inputs, NUM, decoder_input_ids=begun)[2:]
        for out in speculating.generate(inputs, params):
            assert (out.prompt_ids, out.token_ids) == (inputs, wanted)
    for runner in (speculating.engine.runner, *speculating.engine.drafter.first.runners):
        assert runner.cache.texts == {}


def test_what_is_looked_up_may_stand_in_the_source() -> None:
    speculating = speculate_with(target("t5"), draft="lookup", pacing_policy="fixed", spec_length=3)
    rounds = rounds_of(speculating)
    speculating.generate(PROMPT, dataclasses.replace(GREEDY, decoder_prompt=PROMPT[3:5]))
    assert rounds[0].tokens == PROMPT[5:8]


@pytest.mark.parametrize("kind", ["t5", "llama"])
@pytest.mark.parametrize("policy", ["auto", "entropy", "svip"])
def test_a_module_drafts(kind: str, policy: str) -> None:
    out = speculate_with(target(kind), draft=noisy(target(kind)), pacing_policy=policy).generate(PROMPT, GREEDY)
    assert out.token_ids == generated(target(kind), PROMPT, NUM)
    assert out.finish_reason == "length"


def test_trees_of_tuples_and_without_a_cache() -> None:
    """The toy's cache says where a branch was not cut, and no token of the text is run twice."""
    toy = ToyModel(7, 1, ToyTable(scale=2.0))
    near = ToyModule(ToyModel(7, 2, ToyTable(distance=1.0), near=toy))
    plain = autoregressive_generate([1, 2, 3], ToyModule(toy), max_gen_len=NUM, eos_tokens_id=None)
    for use_cache in (True, False):
        options: dict[str, Any] = {"draft": "tree:shape=2", "draft_model": near, "pacing_policy": "fixed"}
        speculating = speculate_with(ToyModule(toy), use_cache=use_cache, **options)
        out = speculating.generate([1, 2, 3], GREEDY)
        assert out.token_ids == plain
        assert 0 < out.report.num_accepted < out.report.num_drafted
        assert speculating.engine.runner.cache.texts == {}  # nothing is left of a text that ended


def test_draws_are_repeated_by_a_seed_and_are_those_without_drafts() -> None:
    drawn = SamplingParams(max_tokens=NUM, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    texts = [
        speculate_with(target(), draft=draft, **options).generate(PROMPT, drawn).token_ids
        for draft, options in (("none", {}), ("suffix", {}), (noisy(target()), {"use_cache": False}))
    ]
    assert texts[0] == texts[1] == texts[2]


# --------------------------------------------------------------------------------------------------------------- texts


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with the end of the text as id 0."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer("<|end|>"), eos_token="<|end|>")


@functools.cache
def speaking() -> Any:
    return module_of("llama", vocab_size=260, max_position_embeddings=256, eos_token_id=0)


def test_texts_conversations_and_ids() -> None:
    own = tokenizer()
    own.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    speculating = speculate_with(speaking(), own)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    out = speculating.generate("a b a b", params)
    assert out.prompt_ids == own("a b a b").input_ids
    ids = out.token_ids
    assert out.text == own.decode(ids[:-1] if ids[-1] == 0 else ids)
    assert max(ids) < 257  # rows behind the last id are padding
    assert speculating.generate(out.prompt_ids, params).token_ids == ids
    (first, second) = speculating.generate([CHAT, "a b a b"], params)
    assert own.decode(first.prompt_ids) == "user: hi\nassistant:"
    assert second.token_ids == ids
    assert speculating.generate(CHAT, params).token_ids == first.token_ids
    stopped = speculating.generate("a b a b", SamplingParams(max_tokens=12, temperature=0.0, stop=out.text[2]))
    assert stopped.text == out.text[: out.text.index(out.text[2])]
    assert len(speculating.generate("a", SamplingParams(max_tokens=3, n=2))) == 2


def test_the_tokenizer_stays_as_it_was() -> None:
    own = tokenizer()
    own.backend_tokenizer.enable_truncation(2)
    speculate_with(speaking(), own)
    assert own.backend_tokenizer.truncation["max_length"] == 2


@pytest.mark.parametrize(
    ("error", "sentence", "make"),
    [
        (BadOption, "needs a model of its own", lambda: speculate_with(target(), draft="self")),
        (BadOption, "needs a model of its own", lambda: speculate_with(target(), draft="cascade")),
        (UserError, "there is no drafter", lambda: speculate_with(target(), draft="sufix")),
        (BadOption, "two draft models", lambda: speculate_with(target(), draft=target(), draft_model=target())),
        (BadOption, "weights are not rounded", lambda: speculate_with(target(), draft="self", draft_model=target())),
        (BadOption, "needs a tokenizer", lambda: speculate_with(target()).generate("text")),
        (BadOption, "is no prompt", lambda: speculate_with(target()).generate([])),
        (BadOption, "is no prompt", lambda: speculate_with(target()).generate(5)),
        (BadOption, "not a fast one", lambda: speculate_with(target(), object())),
        (NotFound, "no chat template", lambda: speculate_with(speaking(), tokenizer()).generate(CHAT)),
        (UserError, "positions|max_seq_len", lambda: speculate_with(target()).generate([5] * 200)),
    ],
    ids=[str(i) for i in range(11)],
)
def test_refused(error: type[UserError], sentence: str, make: Any) -> None:
    with pytest.raises(error, match=sentence):
        make()


def test_a_folder_is_named_where_the_tokenizer_is_from(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert speculate_with(speaking(), loaded).generate("ab", SamplingParams(max_tokens=2)).token_ids
