"""What auto corrects itself by: plans against plain steps beside them, and costs by the size of the batch."""

from __future__ import annotations

import math

import pytest

from forerun.pacing._check import PlanCheck, size_of
from forerun.pacing._times import StepTimes
from forerun.types import DraftStep, StepReport

FIRST_GUESS = math.exp(0.05)


def told(check: PlanCheck, planned_s: float, plain_s: float, predicted: float, num: int = 8, times: int = 1) -> None:
    for _ in range(times):
        for seconds, is_plain in [(planned_s, False)] * 4 + [(plain_s, True)] * 2 + [(planned_s, False)] * 4:
            check.observe(seconds, num, is_plain, predicted)


def test_a_plan_that_takes_longer_than_it_promised_is_corrected():
    """1.6 times a plain step where 1.25 were predicted: the factor goes to 1.28, half of the way at first."""
    check = PlanCheck()
    assert check.factor(8) == pytest.approx(FIRST_GUESS)
    told(check, 1.6, 1.0, 1.25)
    assert check.num_checks(8) == 1
    assert check.factor(8) == pytest.approx(math.sqrt(FIRST_GUESS * 1.28))
    told(check, 1.6, 1.0, 1.25, times=40)
    assert check.factor(8) == pytest.approx(1.28, rel=0.01)
    assert check.factor(32) == pytest.approx(FIRST_GUESS), "another size of batch"


def test_only_steps_of_one_batch_beside_each_other_are_compared():
    check = PlanCheck()
    for seconds, num, is_plain in [(1.0, 8, False)] * 4 + [(1.0, 8, True)] * 2 + [(9.0, 12, False)] * 8:
        check.observe(seconds, num, is_plain, 1.0)
    assert check.num_checks(8) == check.num_checks(12) == 0
    check = PlanCheck()
    for seconds, is_plain in [(1.0, True)] * 5 + [(5.0, False)] * 8:
        check.observe(seconds, 12, is_plain, 1.0)
    assert check.num_checks(12) == 0, "plain steps with nothing before them"


def test_what_was_too_slow_is_tried_again():
    check = PlanCheck()
    told(check, 2.0, 1.0, 1.0, times=30)
    assert check.factor(8) == pytest.approx(math.exp(0.4), rel=0.01), "the most"
    for _ in range(3000):
        check.forget(8)
    assert check.factor(8) == pytest.approx(FIRST_GUESS, rel=0.01)


def test_sizes_of_batches():
    """1, 2, 4, 8, ... are in the middle of theirs: a request that ends makes no other batch of 16."""
    assert [size_of(num) for num in (1, 2, 3, 4, 5, 6, 11, 12, 15, 16, 22, 31, 32)] == [
        0,
        1,
        2,
        2,
        2,
        3,
        3,
        4,
        4,
        4,
        4,
        5,
        5,
    ]


def report(num: int, rows: int, pass_s: float, draft_s: float = 0.0) -> StepReport:
    made = StepReport(num_decoding=num, num_rows=rows, score_s=pass_s, draft_s=draft_s)
    if rows > num:
        made.drafts["model"] = DraftStep(draft_s, num, rows - num, (rows - num) // num)
    return made


def test_costs_are_those_of_a_batch_of_this_size():
    """Of 2 requests, 4 rows are as fast as 2; of 16, 32 take twice as long as 16. Each says so, and not the other's."""
    times = StepTimes()
    for i in range(200):
        times.observe(report(2, 2 + 2 * (i % 2), 0.01, 0.002 * (i % 2)))
    times.learn()
    first = times.of(16).passes
    assert first.rows(4) == pytest.approx(times.of(2).passes.rows(4)), "begins with what is known"
    for i in range(200):
        times.observe(report(16, 16 + 16 * (i % 2), 0.02 * (1 + i % 2), 0.002 * (i % 2)))
    few, many = times.of(2), times.of(16)
    assert few.passes.rows(4) / few.passes.rows(2) == pytest.approx(1.0, abs=0.03)
    assert many.passes.rows(32) / many.passes.rows(16) == pytest.approx(2.0, rel=0.05)
    assert few.drafts["model"].of(1, 2) == pytest.approx(0.2 * few.passes.rows(2), rel=0.1)
    assert many.drafts["model"].of(1, 16) == pytest.approx(0.1 * many.passes.rows(16), rel=0.15)


def test_reports_of_like_steps_count_as_their_median():
    """One step in five that takes ten times as long, looked at five by five, leaves no trace in the curve."""
    times = StepTimes()
    for i in range(300):
        rows = 1 + i // 5 % 2
        times.observe(report(1, rows, 0.01 * (1 + 0.5 * (rows - 1)) * (10 if i % 5 == 2 else 1)))
        if i % 5 == 4:
            times.learn()
    passes = times.of(1).passes
    assert passes.rows(2) / passes.rows(1) == pytest.approx(1.5, rel=0.02)
