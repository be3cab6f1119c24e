"""The sentence in the log about a finished request: which length would have paid, from costs that are known here."""

from __future__ import annotations

import re

import pytest

from forerun.engine.advice import Advisor
from forerun.engine.request import Request
from forerun.types import DraftStep, SamplingParams, Sequence, SequenceStep, StepReport

pytestmark = pytest.mark.once("no engine runs: the advisor alone")


def advisor(per_row_s: float, per_draft_pass_s: float, num: int = 1) -> Advisor:
    """Has seen steps of `num` requests at many lengths: a pass takes 1 s + so much per row behind the first."""
    made = Advisor()
    for i in range(400):
        length = i % 12
        report = StepReport(num_decoding=num, num_rows=num * (1 + length), num_drafted=num * length)
        report.score_s = 1 + per_row_s * (report.num_rows - 1)
        report.sequences = [SequenceStep(b, "model", length, length, length) for b in range(num)]
        if length:
            step = DraftStep(per_draft_pass_s * length, num, num * length, length)
            report.drafts, report.draft_s = {"model": step}, step.seconds
        made.observe(report)
    return made


def finished(num_rounds: int, length: int, accepted: int) -> Request:
    """Rounds that drafted and accepted as much each; a rejection is tested, too."""
    seq = Sequence(4, [1] * 50, 10, SamplingParams(), 0, 50, draft="model", finish_reason="length")
    request = Request(seq, None)
    for _ in range(num_rounds):
        tested = min(length, accepted + 1)
        request.report.count(length, accepted, tested)
    return request


@pytest.mark.parametrize(
    ("length", "accepted", "words"),
    [
        (1, 1, "a longer draft, of 1[0-6], would have been [1-9][0-9]*% faster than 1$"),
        (10, 1, "a shorter draft, of [1-3], would have been [1-9][0-9]*% faster than 10$"),
        (4, 0, "plain decoding would have been [1-9][0-9]*% faster than 4$"),
    ],
)
def test_what_would_have_paid(length: int, accepted: int, words: str) -> None:
    sentence = advisor(0.05, 0.05).sentence(finished(200, length, accepted))
    assert sentence.startswith("request 4: 40 tokens in 200 steps (length); model: alpha-hat ")
    assert re.search(words, sentence), sentence


def test_a_length_that_was_right_is_called_so_and_no_draft_is_no_advice() -> None:
    made, request = advisor(0.05, 0.05), finished(200, 3, 2)
    speeds = [made.tokens_per_unit(request, length) for length in range(17)]
    best = speeds.index(max(speeds))
    request.report.rounds = [(best, 2)] * 200
    assert f"{best} tokens per draft were about right" in made.sentence(request)
    assert made.sentence(finished(0, 1, 0)).endswith("; nothing was drafted")


def test_advice_knows_tested_tokens_the_cost_of_drafts_and_how_many_requests_there_are() -> None:
    """Tokens behind a rejection say nothing; a dear drafter and many neighbours each make a draft worth less."""
    made, request = advisor(0.05, 0.01), finished(200, 2, 1)
    assert made.tokens_per_unit(finished(200, 10, 1), 4) == made.tokens_per_unit(request, 4)
    ratio = made.tokens_per_unit(request, 4) / made.tokens_per_unit(request, 0)
    for other in (advisor(0.05, 0.3), advisor(0.05, 0.01, num=12)):
        assert other.tokens_per_unit(request, 4) / other.tokens_per_unit(request, 0) < 0.8 * ratio
