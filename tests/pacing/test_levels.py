"""Levels of beam searches: deep where rows are cheap and drafts are right, none where they are not, and probes."""

import pytest

from forerun.pacing.auto import AutoPacing
from forerun.pacing.cost import Costs
from forerun.pacing.fixed import FixedPacing
from forerun.pacing.levels import MOST_LEVELS, PROBE_PASSES, Levels
from forerun.pacing.pass_time import PassTime
from forerun.types import SamplingParams, Sequence, SequenceStep

FLAT = PassTime((1, 32), (1.0, 1.1), one_row_s=1.0)
STEEP = PassTime((1, 32), (1.0, 32.0), one_row_s=1.0)


def search(number: int = 0, **given: object) -> Sequence:
    params = SamplingParams(**{"temperature": 0.0, "num_beams": 4, "draft_beams": 8, **given})  # type: ignore[arg-type]
    return Sequence(number, [1], 1, params, 0, 50, draft="model")


def levels(target: PassTime, draft_s: float) -> Levels:
    return Levels(Costs(target, {"model": PassTime((1, 32), (1.0, 1.1), one_row_s=draft_s)}))


def told(own: Levels, accepted: int, tested: int, times: int = 50) -> None:
    for _ in range(times):
        own.observe([SequenceStep(0, "model", 8, tested, tuple(range(accepted)))])


def test_as_deep_as_it_pays() -> None:
    """With a share of 1 each level is one step more for little; by rows that cost, none is worth it."""
    seq = search()
    cheap, dear = levels(FLAT, 0.15), levels(STEEP, 0.01)
    assert cheap.wanted([seq], 0) > 0
    told(cheap, 4, 4)
    assert cheap.wanted([seq], 0) == MOST_LEVELS
    told(cheap, 0, 1, times=300)
    assert cheap.wanted([seq], 0) == dear.wanted([seq], 0) == 0
    slow = levels(FLAT, 2.0)
    told(slow, 4, 4)
    assert slow.wanted([seq], 0) == 0, "a pass of the drafter takes longer than one of the target"


def test_other_rows_count() -> None:
    """Beside many rows a pass is on the steep part of the curve."""
    bent = PassTime((1, 16, 64), (1.0, 1.0, 20.0), one_row_s=1.0)
    own, seq = levels(bent, 0.01), search(draft_beams=4)
    assert own.wanted([seq], 0) > own.wanted([seq], 30) == 0


def test_what_does_not_pay_is_tried_again() -> None:
    own, seq = levels(FLAT, 0.1), search()
    own.wanted([seq], 0)
    told(own, 0, 1)
    assert [own.wanted([seq], 0) for _ in range(2 * PROBE_PASSES)].count(1) == 2


def test_widths_are_known_apart() -> None:
    own, wide, narrow = levels(FLAT, 0.1), search(0), search(1, draft_beams=4)
    own.wanted([wide, narrow], 0)
    told(own, 0, 1)
    assert own.wanted([wide], 0) == 0 < own.wanted([narrow], 0)
    own.end(wide)
    assert own.wanted([wide], 0) == 0, "what was learnt of its kind stays"


@pytest.mark.parametrize("number", [1, 3])
def test_the_policies_say_it(number: int) -> None:
    assert FixedPacing(number).levels([search()], 0) == number
    auto = AutoPacing(number, Costs(FLAT, {"model": PassTime((1, 32), (1.0, 1.1), one_row_s=0.01)}))
    assert auto.levels([search()], 0) == min(number, Levels(auto.costs).wanted([search()], 0))
