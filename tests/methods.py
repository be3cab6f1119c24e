"""What tests of every method must know of some: options without which a drafter cannot be built, and variants.

A drafter that needs nothing has no entry here, and is tested with its defaults.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forerun.drafters import Target, artifacts
from forerun.models.named import DATA
from forerun.train import datastore


def small_datastore(target: Target, folder: Path) -> Mapping[str, Any]:
    """A datastore of some of the held-out texts; of random ones where a target has no tokenizer."""
    if target.tokenizer is None:
        rng = random.Random(0)
        texts = [[rng.randrange(target.num_ids) for _ in range(12)] for _ in range(40)]
    else:
        lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [target.tokenizer.encode(json.loads(line)["text"]) for line in lines[:60]]
    fingerprint = artifacts.fingerprint(target.tokenizer, target.num_ids)
    datastore.save(datastore.joined(texts, target.num_ids), folder / "datastore", fingerprint)
    return {"path": str(folder / "datastore")}


# By drafter: (target, an empty folder) -> the options that it cannot do without, such as a file fitted for the target.
NEEDS: dict[str, Callable[[Target, Path], Mapping[str, Any]]] = {
    "datastore": small_datastore,
    # The toy's only layer is the whole target, which a draft temperature makes wrong sometimes.
    "early_exit": lambda target, _: {"draft_temperature": 0.5} if _num_layers(target) == 1 else {},
    # Small decoders have rows of 48 weights, and the toy rounds its logits.
    "self": lambda target, _: {} if _num_layers(target) == 1 else {"quantization": "int8:group=16"},
}

# By drafter: options worth runs of their own in the proof by enumeration, beside the defaults.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "model": [
        {"draft_temperature": 0.0},
        {"draft_temperature": 0.4, "draft_top_k": 2},
        {"draft_top_k": 1},
        {"draft_vocab": 2},
    ],
    "lookup": [{"max_n": 2, "min_n": 2}],
    "suffix": [{"shape": "tree", "max_spec_factor": 4.0}, {"max_cached_tokens": 0, "min_token_prob": 0.0}],
    "datastore": [{"shape": "tree"}, {"max_match": 1, "num_continuations": 4}],
    "recycle": [{"shape": "path"}, {"top": 2, "shared": True, "from_prompt": False, "max_rows": 2}],
    "lookahead": [{"guesses": 1}, {"window": 2, "ngram": 2, "guesses": 3}],
    "unigram": [{"draws": "sampled"}],
    "bigram": [{"draws": "sampled"}, {"draws": "sampled", "k": 0.0}],
    "ngram": [{"max_n": 3, "filler_top_k": 2, "max_ngrams": 16}, {"max_n": 2}],
    "prediction": [{"resync_n": 1}],
    "mixed": [{"of": "(lookup:min_n=2)+(cascade:of=(model:draft_temperature=0.5))"}],
    "switch": [{"of": "lookup+(model:draft_temperature=0.5)+cascade", "hysteresis": 0}],
    "several": [{"of": "model+(model:draft_temperature=0.5)"}],
    "tree": [
        {"shape": "2"},
        {"shape": "2", "draws": "independent"},
        {"shape": "2", "draws": "point"},
        {"shape": "best_first", "draws": "point", "top_k": 2, "depth": 1},
        {"shape": "3", "of": "(model:draft_temperature=0.4,draft_top_k=2)"},
    ],
    "cascade": [
        {"of": "(model:draft_temperature=0.4,draft_top_k=2)", "inner": "mixed", "inner_length": 2},
        {"inner": "(cascade:of=(model:draft_temperature=0.5))"},
    ],
    "early_exit": [{"draft_temperature": 0.0}, {"draft_temperature": None, "draft_top_k": 2}],
    "self": [{"quantization": "int8", "draft_temperature": 0.6}],
}


def _num_layers(target: Target) -> int:
    return target.model.config.cache_shape.num_layers
