"""What a look computes, in C++ and in Python: the same numbers but for rounding, from the same observations."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from forerun import native
from forerun.pacing import _twins, auto
from forerun.pacing._acceptance import Acceptance
from forerun.pacing._costs import KNOTS, PassTime
from forerun.pacing._drafts import DraftTime
from forerun.pacing._plan import Batch, Candidate, Search
from pacing.simulator import CPU, PER_ROW, Machine, Noise, World

WIDTHS = (0.5, 1, 1.5, 2, 3.7, 8, 9, 13, 16, 31, 40, 64.5, 100, 700, 4096, 9000)


@pytest.fixture(name="module")
def native_module() -> Any:
    module = native.extension()
    if module is None:
        (pytest.fail if os.environ.get("FORERUN_REQUIRE_NATIVE") else pytest.skip)(str(native.why_not()))
    return module


def check_passes(one: Any, other: Any) -> None:
    assert [one.rows(width) for width in WIDTHS] == pytest.approx([other.rows(width) for width in WIDTHS], rel=1e-9)
    for a, b in ((1, 8), (8, 40), (64, 8), (3.5, 900), (16, 16)):
        numbers = a, b, one.of(a, 8), one.of(b, 8), 8
        assert one.spread(*numbers) == pytest.approx(other.spread(*numbers), rel=1e-6, abs=1e-9)
    for name in ("is_settled", "num_steps", "widest"):
        assert getattr(one, name) == getattr(other, name)
    assert one.per_prompt_row() == pytest.approx(other.per_prompt_row(), rel=1e-9)
    assert one.unit_s(0.03, 7, 12, 3) == pytest.approx(other.unit_s(0.03, 7, 12, 3), rel=1e-9)
    for rows, num_sequences in ((1, 1), (8, 4), (33, 32)):
        assert one.of(rows, num_sequences) == pytest.approx(other.of(rows, num_sequences), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_passes_and_drafts(module, seed):
    """Runs of every length and width, mixed passes, jumps of the machine, outliers, other numbers of requests."""
    rng, speed = random.Random(seed), 1.0
    passes, drafts = (PassTime(), module.PassTime()), (DraftTime(), module.DraftTime())
    check_passes(*passes)
    for rows in rng.choice(((), (20, 200), (33,))):
        for passed in passes:
            passed.observe_prompts(0.01 * CPU(rows), rows, 0, 0)
    for _ in range(150):
        speed *= rng.choice((1, 1, 1, 1, 1.8, 1 / 1.8)) * rng.uniform(0.97, 1.03)
        rows, num = rng.choice((1, 2, 5, 8, 13, 16, 24, 33, 64, 100, 513, 2000)), rng.choice((1, 1, 2, 3, 9, 40, 90))
        run_s = [0.01 * CPU(rows) * speed * rng.uniform(0.9, 1.1) * rng.choice((1,) * 30 + (5,)) for _ in range(num)]
        sequences, ratio = min(rows, rng.choice((1, 8, 8, 500))), rng.uniform(0.0, 0.5)
        shape = rng.randint(1, 9), rng.randint(1, 40), rows, sequences
        other = rng.randint(1, 600)
        for passed, draft in zip(passes, drafts, strict=True):
            passed.observe(run_s, rows, sequences, disturbance=0.2 * (num == 2))
            if num == 3:
                passed.observe_prompts(max(run_s) * 3, other, rows, sequences)
                passed.observe_prompts(max(run_s) * 4, other, 0, 0)
                passed.rest(num)
                draft.observe_catchup(ratio, other)
            draft.observe(ratio, shape, num)
            draft.fade(num)
            draft.fit(passed)
        check_passes(*passes)
        of = [(draft.of(0, 0), draft.of(3, 8), draft.of(8, 8), draft.catchup(17)) for draft in drafts]
        assert of[0] == pytest.approx(of[1], rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_acceptance(module, seed):
    """A drafter and three of its requests, one of which turns bad: rates, gains and alarms."""
    rng, alarms = random.Random(seed), [0, 0]
    known = Acceptance(800), module.Acceptance(800)
    own = [[Acceptance(80, known[0]) for _ in range(3)], [module.Acceptance(80, known[1]) for _ in range(3)]]
    assert own[1][0].parent is not None
    assert known[1].parent is None
    for step in range(300):
        i, granted = rng.randrange(3), rng.randint(1, 12)
        drafted = rng.choice((0, granted, granted, rng.randint(0, granted)))
        alpha = 0.0 if i == 2 and step > 150 else 0.97
        accepted = next((k for k in range(drafted) if rng.random() > alpha), drafted)
        numbers = granted, drafted, min(accepted + 1, drafted), accepted
        for twin in range(2):
            alarms[twin] += own[twin][i].count(*numbers)
            known[twin].count(*numbers)
        limit = rng.randint(0, 20)
        python, cpp = own[0][i].gains(limit), own[1][i].gains(limit)
        assert python[0] == pytest.approx(cpp[0], rel=1e-9)
        assert python[1] == pytest.approx(cpp[1], rel=1e-9)
        for name in ("means", "hits", "misses"):
            assert getattr(known[0], name) == pytest.approx(getattr(known[1], name), rel=1e-9)
    assert alarms[0] == alarms[1] > 0


def batches(module: Any, rng: random.Random) -> tuple[Batch, Batch]:
    """The same requests and costs for both."""
    sides = []
    made = [PassTime(), module.PassTime()], [[DraftTime() for _ in "ml"], [module.DraftTime() for _ in "ml"]]
    curve = rng.choice((CPU, PER_ROW))
    for rows in (*KNOTS[:14], 90, 130) * 3:
        for passes in made[0]:
            passes.observe([0.01 * curve(rows)] * 2, rows, 4)
    for depth in (1, 3, 6):
        ratio = rng.uniform(0.01, 0.4) * depth
        for drafts, passes in zip(made[1], made[0], strict=True):
            for draft in drafts:
                draft.observe(ratio, (depth, 4 * depth, 8, 4), 30)
                draft.fit(passes)
    candidates = []
    for _ in range(rng.choice((1, 2, 5, 17, 32))):
        alpha, longest, kind = rng.uniform(0.0, 0.99), rng.choice((0, 1, 4, 16)), rng.choice("mml")
        found = 1.0 if kind == "m" else rng.choice((1.0, 0.3, 0.0))
        fixed = rng.choice((None, None, None, 0, 3))
        candidates.append((kind, [found * alpha ** (i + 1) for i in range(longest)], found, fixed))
    for passes, drafts in zip(made[0], made[1], strict=True):
        own = [Candidate(kind, gains, found, fixed) for kind, gains, found, fixed in candidates]
        sides.append(Batch(own, passes, dict(zip("ml", drafts, strict=True))))
    return sides[0], sides[1]


@pytest.mark.parametrize("seed", range(40))
def test_plans(module, seed):
    rng = random.Random(seed)
    python, cpp = batches(module, rng)
    num, most = len(python.candidates), rng.choice((20.0, 60.0, 1e9))
    found = [Search(batch, most) for batch in (python, cpp)]
    for name in ("plain", "best", "drafting"):
        one, other = (getattr(search, name) for search in found)
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.goodput, one.seconds, one.rows) == pytest.approx((other.goodput, other.seconds, other.rows))
            assert sum(one.lengths) == sum(other.lengths)  # among equal ones either may come first
    numbers = [[(mark.goodput, mark.rows) for mark in search.marks] for search in found]
    assert len(numbers[0]) == len(numbers[1])
    for one, other in zip(*numbers, strict=True):
        assert one == pytest.approx(other)
    lengths = [rng.randint(0, 20) for _ in range(num)]
    values = [search.value(lengths) for search in found]
    assert values[0].goodput == pytest.approx(values[1].goodput)
    assert values[0].seconds == pytest.approx(values[1].seconds)


def test_what_is_no_plan_is_refused(module):
    with pytest.raises((ValueError, IndexError)):
        module.Plans([[0.5]], [1.0], [1], [-1], module.PassTime(), [module.DraftTime()])
    with pytest.raises((ValueError, TypeError)):
        module.Plans([[0.5]], [1.0], [0], [-1], module.PassTime(), [None])
    plans = module.Plans([[0.5]], [1.0], [0], [-1], module.PassTime(), [module.DraftTime()])
    with pytest.raises((ValueError, IndexError)):
        plans.value([1, 2])
    with pytest.raises((ValueError, IndexError)):
        plans.value([-1])
    with pytest.raises((ValueError, IndexError)):
        plans.plan(0)


@pytest.mark.parametrize(("num", "curve"), [(1, CPU), (3, PER_ROW), (16, PER_ROW)])
def test_both_grant_the_same(module, monkeypatch, num, curve):
    """A whole run of a noisy machine, decision by decision."""
    granted = []
    for chosen in (None, module):
        monkeypatch.setattr(_twins, "_native", lambda chosen=chosen: chosen)
        world = World(lambda step, b: 0.5 + 0.4 * (b % 2), num, Machine(curve), Noise(0.08, 0.001, 0.01), seed=5)
        pacing = auto.build(auto.Options(), None)
        granted.append(world.run(pacing, 500).granted)
        assert isinstance(pacing.times.passes, PassTime) == (chosen is None)
    assert granted[0] == granted[1]
    assert any(map(any, granted[0]))
