"""What speculation with a pair of models must do, for the shipped pair and for the same at true shapes."""

import json
import logging
from collections.abc import Callable

import pytest

from forerun import LLM, SamplingParams
from forerun.engine.opened import SHIPPED_TARGET
from support import heard

Make = Callable[..., LLM]  # an engine on the pair, with these options

PROMPTS = [
    json.loads(line)["text"]
    for line in (SHIPPED_TARGET.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:6]
]


def greedy_parity(make: Make, num_tokens: int) -> None:
    """Greedy outputs with speculation, fixed and paced, are plain decoding's, token for token."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    plain = [out.token_ids for out in make(use_speculative_decoding=False).generate(PROMPTS, params)]
    for options in ({}, {"spec_length": 5}):
        outs = make(**options).generate(PROMPTS, params)
        assert [out.token_ids for out in outs] == plain
        if options:  # paced, a busy machine may find in time that no draft pays
            assert sum(out.report.num_accepted for out in outs) > 0


def e2e(make: Make, num_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    """Sampled: a text, an acceptance rate in the output and in the log, and with a seed the plain decoder's text."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True)
    with caplog.at_level(logging.INFO, logger="forerun"):
        (out,) = make(spec_length=5).generate(PROMPTS[0], params)
    report = out.report
    assert out.text.strip()
    assert len(out.token_ids) == num_tokens
    assert report.acceptance_rate == report.num_accepted / report.num_drafted > 0
    assert len(report.acceptance_rates) == sum(drafted > 0 for drafted, _ in report.rounds)
    logged = [record.getMessage() for record in caplog.records if "alpha-hat" in record.getMessage()]
    assert f"alpha-hat {report.alpha_hat:.2f}" in logged[-1]
    assert make(use_speculative_decoding=False).generate(PROMPTS[0], params)[0].token_ids == out.token_ids


def continuous_batching(make: Make, num_tokens: int) -> None:
    """Requests with and without speculation side by side; each writes what it writes alone."""
    llm, plain = make(max_batch_size=4), make(use_speculative_decoding=False)
    choices = [(None, None), ("none", None), ("lookup", 3), ("model", 2), ("model", None), ("none", None)]
    params = [
        SamplingParams(max_tokens=num_tokens, temperature=0.7 * (i % 2), seed=i, draft=d, spec_length=k)
        for i, (d, k) in enumerate(choices)
    ]
    reports = heard(llm)
    outs = llm.generate(PROMPTS, params)
    assert max(report.num_decoding for report in reports) > 1
    for out, prompt, asked in zip(outs, PROMPTS, params, strict=True):
        alone = SamplingParams(**{**vars(asked), "draft": None, "spec_length": None})
        assert out.token_ids == plain.generate(prompt, alone)[0].token_ids
        assert out.finish_reason in ("stop", "length")
        assert (out.report.num_drafted == 0) >= (asked.draft == "none")
