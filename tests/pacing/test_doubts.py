"""When auto gives up what it believes of a width: not for one pass that was held up, but for two trials that agree."""

from __future__ import annotations

import math
import random

import pytest

from forerun.pacing._costs import PassTime
from pacing.simulator import PER_ROW


def trial(passes: PassTime, seconds: float) -> None:
    """Of 16 rows, before and behind passes of 32."""
    passes.observe([seconds] * 2, 16, 4)
    passes.observe([0.01] * 10, 32, 4)


def ratio_after(*trials_s: float, jump: float = 0.0) -> float:
    """Of 16 and 32 rows, which take the same at first. jump: seconds of passes for a while, before the last trial."""
    passes = PassTime()
    for _ in range(10):
        passes.observe([0.01] * 10, 16, 4)
        passes.observe([0.01] * 10, 32, 4)
    for seconds in trials_s[:-1]:
        trial(passes, seconds)
    for _ in range(8 if jump else 0):
        passes.observe([jump] * 4, 32, 4)
    for _ in range(8 if jump else 0):
        passes.observe([0.01] * 4, 32, 4)
    trial(passes, trials_s[-1])
    return passes.of(16, 4) / passes.of(32, 4)


def test_off_once_and_once_more_is_not_twice():
    """A trial in between that agreed, or a machine whose speed changed meanwhile, clears what was noted of a width."""
    assert ratio_after(0.006, 0.006) < 0.75
    assert ratio_after(0.006, 0.01, 0.006) > 0.85
    assert ratio_after(0.006, 0.006, jump=0.03) > 0.85


@pytest.mark.parametrize(("num", "narrow", "wide"), [(1, 1, 8), (1, 3, 8), (4, 16, 32), (16, 16, 32), (4, 7, 14)])
def test_a_width_that_is_off_twice_is_learned_anew(num, narrow, wide):
    """After 100 passes each of two widths that take the same, the narrow one turns out to be much faster."""
    passes, learned = PassTime(), []
    for _ in range(10):
        passes.observe([0.01] * 10, narrow, num)
        passes.observe([0.01] * 10, wide, num)
    before = math.log(passes.of(narrow, num) / passes.of(wide, num))
    for _ in range(3):
        passes.observe([0.006] * 2, narrow, num)
        passes.observe([0.01] * 10, wide, num)
        learned.append((math.log(passes.of(narrow, num) / passes.of(wide, num)) - before) / math.log(0.6))
    assert learned[0] < 0.3, "once may be chance"
    assert learned[1] > 0.7
    assert learned[2] > 0.9


def test_single_passes_that_were_held_up_do_not_make_a_width_unknown():
    """One pass in twenty takes three times as long; widths change at every step, as where drafts find nothing."""
    passes, rng, worst = PassTime(), random.Random(2), 0.0
    for step in range(3000):
        rows = rng.choice((2, 4, 8))
        slow = 3 if rng.random() < 0.05 else 1
        passes.observe([0.01 * PER_ROW(rows) * slow * rng.uniform(0.95, 1.05)], rows, 1)
        if step > 200:
            ratio = passes.rows(8) / passes.rows(2) / (PER_ROW(8) / PER_ROW(2))
            worst = max(worst, abs(math.log(ratio)))
    assert worst < 0.1


@pytest.mark.parametrize("slower", [1.3, 2.0, 10.0])
def test_a_pass_that_was_held_up_hardly_moves_a_width_that_was_seldom_seen(slower):
    """Twelve passes of four rows, then one that took longer: the further off it is, the less it counts."""
    passes = PassTime()
    for _ in range(3):
        for rows in (4, 8):
            passes.observe([0.01 * PER_ROW(rows)] * 4, rows, 1)
    before = passes.rows(4) / passes.rows(8)
    passes.observe([slower * 0.01 * PER_ROW(4)], 4, 1)
    assert passes.rows(4) / passes.rows(8) == pytest.approx(before, rel=0.03)


@pytest.mark.parametrize("place", [1, 3])
def test_a_pass_behind_a_prompt_does_not_hide_a_new_speed(place):
    """The machine becomes half as fast. The fifth pass shows it, whether or not a disturbed one came in between."""
    passes = PassTime()
    for _ in range(20):
        for rows in (4, 8):
            passes.observe([0.01], rows, 1)
    for i in range(5):
        if i == place:
            passes.observe([0.02], 8, 1, disturbance=0.9)
        passes.observe([0.02], 4 if i % 2 else 8, 1)
    assert math.exp(passes._state[0]) * passes.of(4, 1) == pytest.approx(0.02, rel=0.03)
