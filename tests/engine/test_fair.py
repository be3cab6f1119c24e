"""While requests decode, a prompt is read in pieces that stretch a step no more than was asked; texts stay the same."""

from __future__ import annotations

import dataclasses

import pytest

from engine.load import alone, engine_with, run
from forerun.engine.fair import FIRST_TOKENS, LEAST_TOKENS, Fair
from forerun.types import SamplingParams, StepReport

DECODING = StepReport(num_decoding=2, score_s=0.010)


def mixed(num_tokens: int, seconds: float) -> StepReport:
    return StepReport(num_decoding=2, num_prefill_tokens=num_tokens, score_s=seconds)


def known(stretch: float | None, *reports: StepReport) -> Fair:
    fair = Fair(stretch)
    for report in reports:
        fair.observe(report)
    return fair


def test_a_step_takes_so_many_times_as_long_as_usual() -> None:
    """A usual step takes 10 ms, a token of a prompt 0.2 ms: 20 ms more are 100 tokens."""
    fair = known(3.0, DECODING, mixed(50, 0.020))
    assert fair.tokens(512) == 100
    assert fair.tokens(64) == 64
    assert known(2.0, DECODING, mixed(50, 0.020)).tokens(512) == 50
    assert known(None, DECODING, mixed(50, 0.020)).tokens(512) == 512


def test_what_is_not_known_and_what_is_too_dear() -> None:
    assert known(3.0).tokens(512) == FIRST_TOKENS
    assert known(3.0, DECODING).tokens(512) == FIRST_TOKENS
    assert known(3.0, DECODING, mixed(4, 5.0)).tokens(512) == LEAST_TOKENS
    assert known(3.0, DECODING, mixed(4, 5.0)).tokens(3) == 3
    assert known(3.0, DECODING, mixed(64, 0.001)).tokens(512) == 512, "a token that takes no time"


def test_the_latest_chunks_count_and_the_usual_step_is_a_median() -> None:
    slow = dataclasses.replace(DECODING, score_s=1.0)
    fair = known(3.0, DECODING, DECODING, slow, *[mixed(50, 0.020)] * 9)
    assert fair.tokens(512) == 100, "one step that was disturbed says nothing"
    for _ in range(3):
        fair.observe(mixed(50, 0.030))  # far into a long text
    assert fair.tokens(512) == 50


def test_steps_in_which_nothing_decodes_are_not_limited_and_teach_nothing() -> None:
    fair = known(3.0, DECODING, mixed(50, 0.020), StepReport(num_prefill_tokens=512, score_s=9.0))
    assert fair.tokens(512) == 100


@pytest.mark.parametrize("stretch", [3.0, None])
def test_a_prompt_is_read_in_pieces_beside_others_and_the_texts_are_the_same(
    stretch: float | None, speculation: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler asks; what it is told here is that tokens are dear."""
    monkeypatch.setattr(Fair, "tokens", lambda self, most: most if self.stretch is None else min(most, 5))
    wanted = [
        ([1, 2], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)),
        (list(range(3, 23)) * 3, SamplingParams(temperature=0.8, seed=4, max_tokens=9)),
    ]
    engine, chunks = engine_with(prefill_stretch=stretch), list[int]()
    first = engine.add(*wanted[0])
    engine.step()
    engine.listen(lambda step: chunks.append(step.num_prefill_tokens) if step.num_prefill_tokens else None)
    made = run(engine, [first, engine.add(*wanted[1])])
    assert made == alone(wanted)
    assert chunks[:-1] == ([] if stretch is None else [5] * 11)
    assert sum(chunks) == 59
