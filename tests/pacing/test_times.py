"""What auto believes of time: one curve for batches of all sizes, drift told from noise, drafts fitted to the curve."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import numpy as np
import pytest

from forerun.pacing import auto
from forerun.pacing._costs import PassTime, _Roughness
from forerun.pacing._drafts import DraftTime
from forerun.pacing._plan import Batch, Candidate, Search
from forerun.pacing._times import StepTimes
from forerun.pacing._trials import size_of
from forerun.types import DraftStep, StepReport
from pacing.simulator import CPU, QUIET, Machine, Track, World

SIZES = {1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3, 11: 3, 12: 4, 15: 4, 16: 4, 22: 4, 31: 5, 32: 5}


def test_sizes_of_batches():
    """1, 2, 4, 8, ... are in the middle of theirs: a request that ends makes no other batch of 16."""
    assert {num: size_of(num) for num in SIZES} == SIZES


def report(num: int, rows: int, pass_s: float, draft_s: float = 0.0) -> StepReport:
    made = StepReport(num_decoding=num, num_rows=rows, score_s=pass_s, draft_s=draft_s)
    if rows > num:
        made.drafts["model"] = DraftStep(draft_s, num, rows - num, (rows - num) // num)
    return made


def test_batches_of_all_sizes_teach_one_curve():
    """16 rows of 2, 8 and 16 requests differ by what each request adds; no size is asked for what others have shown."""
    times, per_sequence = StepTimes(), 0.06
    true = {(num, rows): CPU(rows) + per_sequence * (num - 1) for num in (2, 8, 16) for rows in (num, 2 * num, 32)}
    for i in range(600):
        num = (2, 8, 16)[i // 8 % 3]
        rows = num * (1 + i // 4 % 2)
        times.observe(report(num, rows, 0.01 * true[num, rows], 0.002 if rows > num else 0.0))
    times.learn()
    for num, rows in true:
        assert times.passes.of(rows, num) / times.passes.of(2, 2) == pytest.approx(
            true[num, rows] / true[2, 2], rel=0.04
        )
    assert times.drafts["model"].of(1, 2) == pytest.approx(0.2, rel=0.1)
    assert times.drafts["model"].of(1, 16) == pytest.approx(0.2, rel=0.1)


def test_what_a_step_takes_besides_its_models_is_counted():
    """The scheduler belongs to every step, asking drafters to those that draft, the policy's own time to none."""
    bare, real = StepTimes(), StepTimes()
    for i in range(100):
        rows = 4 * (1 + i // 4 % 2)
        bare.observe(report(4, rows, 0.01 * CPU(rows), 0.002 if rows > 4 else 0.0))
        made = report(4, rows, 0.01 * CPU(rows), 0.002 if rows > 4 else 0.0)
        made.schedule_s, made.pacing_s = 0.01, 0.004
        made.draft_s += 0.004 + (0.001 if rows > 4 else 0.0)
        real.observe(made)
    for times in (bare, real):
        times.learn()
    growth = [times.passes.of(8, 4) / times.passes.of(4, 4) for times in (bare, real)]
    assert growth[1] == pytest.approx((CPU(8) + 1) / (CPU(4) + 1), rel=0.01)
    assert growth[1] < growth[0]
    drafts = [times.drafts["model"].of(1, 4) / times.passes.of(4, 4) for times in (bare, real)]
    assert drafts[0] == pytest.approx(0.002 / (0.01 * CPU(4)), rel=0.02)
    assert drafts[1] == pytest.approx(0.003 / (0.01 * CPU(4) + 0.01), rel=0.02)


def test_the_first_pass_behind_a_prompt_says_less():
    """It takes an eighth longer, once for each prompt: the width that runs there is not taken for a slower one."""
    times = StepTimes()
    for i in range(200):
        times.observe(StepReport(num_prefill_tokens=90, num_rows=90, score_s=0.2))
        rows = 4 if i % 2 else 8
        for behind in range(2):
            times.observe(report(1, rows, 0.01 * CPU(rows) * (1.125 if rows == 4 and not behind else 1.0)))
    times.learn()
    assert times.passes.rows(8) / times.passes.rows(4) == pytest.approx(CPU(8) / CPU(4), rel=0.015)


@pytest.mark.parametrize("twin", ["native", "python"])
@pytest.mark.parametrize("warm_up", [[], [(92, 92, 0, 20446), (4, 0, 1, 2288), (1, 0, 1, 1860), (1, 0, 1, 1301)]])
def test_passes_behind_a_long_prompt_say_little(warm_up, twin):
    """Microseconds of a real engine: its first two passes of four rows were cold, those of eight and more were not.

    Two warm ones of four rows, at the end, tell what the others take beside them.
    """
    steps = [*warm_up, (359, 359, 0, 65391), (4, 0, 4, 2247), (4, 0, 4, 2092), *[(8, 0, 4, 2050)] * 6, (12, 0, 4, 2840)]
    steps += [(12, 0, 4, 2880), (16, 0, 4, 3711), (16, 0, 4, 3714), (4, 0, 4, 1240), (4, 0, 4, 1265), (8, 0, 4, 2060)]
    times = StepTimes() if twin == "native" else StepTimes(PassTime(), defaultdict(DraftTime))
    for rows, prefill, decoding, us in steps:
        times.observe(StepReport(num_rows=rows, num_prefill_tokens=prefill, num_decoding=decoding, score_s=us * 1e-6))
        times.learn()
    passes = times.passes
    for rows, us in ((8, 2050), (12, 2860), (16, 3712)):
        assert passes.of(rows, 4) / passes.of(4, 4) == pytest.approx(us / 1250, rel=0.12), rows


@pytest.mark.parametrize("rows", [16, 64, 512])
def test_the_longer_a_prompt_the_less_the_next_pass_says(rows):
    """A pass of a width that was seen for long takes half as long again, behind a prompt."""
    times = StepTimes(PassTime(), defaultdict(DraftTime))
    for _ in range(60):
        times.observe(report(1, 4, 0.01))
    times.observe(StepReport(num_prefill_tokens=rows, num_rows=rows, score_s=0.1))
    times.observe(report(1, 4, 0.015))
    times.learn()
    deviation = 0.9 * min(1.0, rows / 256)
    before = PassTime()
    before.observe([0.01] * 60, 4, 1)
    before.rest(1)
    before.observe([0.015], 4, 1, disturbance=deviation)
    assert times.passes._state[0] == pytest.approx(before._state[0], abs=1e-3)
    assert math.exp(times.passes._state[0]) * times.passes.of(4, 1) < 0.0115


def test_faster_passes_count_more_where_little_is_known():
    """The first passes of a width took twice as long as two later ones, or half: a cold machine explains the former."""
    moved = []
    for later_s in (0.01, 0.04):
        passes = PassTime()
        for _ in range(2):
            passes.observe([0.02] * 4, 4, 4)
            passes.observe([0.05] * 8, 8, 4)
        before = math.log(passes.of(4, 4) / passes.of(8, 4))
        passes.observe([later_s] * 2, 4, 4)
        passes.observe([0.05] * 8, 8, 4)
        moved.append(math.log(passes.of(4, 4) / passes.of(8, 4)) - before)
    assert moved[0] < -0.2
    assert 0 < moved[1] < -moved[0] / 2


@pytest.mark.parametrize("other", [4, 6])
def test_a_new_speed_is_noticed_between_long_prompts(other):
    """The machine becomes half as fast; six passes of two widths follow each long prompt. Five later it is known."""
    times = StepTimes(PassTime(), defaultdict(DraftTime))
    for i in range(35):
        seconds = 0.01 if i < 30 else 0.02
        times.observe(StepReport(num_prefill_tokens=512, num_rows=512, score_s=80 * seconds))
        for j in range(6):
            times.observe(report(1, (4, other)[j % 2], seconds))
        times.learn()
    assert math.exp(times.passes._state[0]) * times.passes.of(4, 1) == pytest.approx(0.02, rel=0.05)


def test_one_request_tells_what_a_batch_may_expect():
    """Widths that one request has shown are no guess for 16; only what sequences add is."""
    known, new = StepTimes().passes, StepTimes().passes
    for _ in range(60):
        for rows in (1, 8, 16, 24, 32):
            known.observe([0.01 * CPU(rows)] * 4, rows, 1)
    alone, beside = (known.spread(32, 16, known.of(32, num), known.of(16, num), num) for num in (1, 16))
    assert beside > 1.2 * alone, "nobody has seen yet what sequences add"
    for passes in (known, new):
        passes.observe([0.01 * (CPU(16) + 0.3)], 16, 16)
    sure, unsure = (passes.spread(32, 16, passes.of(32, 16), passes.of(16, 16), 16) for passes in (known, new))
    assert sure < 0.1 < unsure
    assert known.of(32, 16) / known.of(16, 16) == pytest.approx((CPU(32) + 0.3) / (CPU(16) + 0.3), rel=0.04)


def test_one_slow_step_among_like_ones_leaves_no_trace():
    """One step in five that takes ten times as long, five of a width after five of another."""
    times = StepTimes()
    for i in range(300):
        rows = 1 + i // 5 % 2
        times.observe(report(1, rows, 0.01 * (1 + 0.5 * (rows - 1)) * (10 if i % 5 == 2 else 1)))
    times.learn()
    passes = times.passes
    assert passes.rows(2) / passes.rows(1) == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize(("noise", "drift"), [(0.1, 0.004), (0.05, 0.025), (0.04, 0.02)])
def test_drift_is_told_from_noise(noise, drift):
    rng, level, roughness = random.Random(3), 0.0, _Roughness()
    for _ in range(40):
        run = []
        for _ in range(32):
            level += drift * rng.gauss(0, 1)
            run.append(np.exp(level + noise * rng.gauss(0, 1)) * 0.01)
        roughness.observe(run)
    assert roughness.noise**0.5 == pytest.approx(noise, rel=0.3)
    assert roughness.drift**0.5 == pytest.approx(drift, rel=0.4, abs=0.012)


def test_widths_are_compared_where_they_follow_one_another():
    """The machine is half as fast in every other stretch of 40 steps: only neighbours say what a width takes."""
    passes, rng = PassTime(), random.Random(1)
    for stretch in range(60):
        speed = 1 + stretch % 2
        for rows, num in ((8, 30), (32, 4), (8, 6)):
            passes.observe([0.01 * CPU(rows) / CPU(8) * speed * rng.uniform(0.95, 1.05) for _ in range(num)], rows, 8)
    assert passes.rows(32) / passes.rows(8) == pytest.approx(CPU(32) / CPU(8), rel=0.06)


def test_a_single_slow_pass_is_no_news_of_the_curve():
    """Ten times as slow once, of a width that was seen often: the curve hardly moves."""
    passes = PassTime()
    for _ in range(60):
        for rows in (8, 32):
            passes.observe([0.01 * CPU(rows)] * 4, rows, 8)
    before = passes.rows(32) / passes.rows(8)
    passes.observe([0.1 * CPU(32)], 32, 8)
    assert passes.rows(32) / passes.rows(8) == pytest.approx(before, rel=0.02)


def test_many_widths_are_what_each_is():
    passes = PassTime()
    for step in range(100):
        passes.observe([0.02 * CPU(1 + step % 20)], 1 + step % 20, 1)
    widths = [1.0, 1.5, 7.3, 16, 24, 100, 5000]
    assert passes.rows_of(np.array(widths)) == pytest.approx([passes.rows(width) for width in widths])


def test_drafts_follow_the_curve_and_take_no_negative_time():
    """What a draft took is known over a pass of 32 rows; what is believed of that doubles, and so does the draft."""
    drafts, flat, steep = DraftTime(), PassTime(), PassTime()
    for passes, most in ((flat, 1.0), (steep, 2.0)):
        for step in range(300):
            passes.observe([0.01 * (most if step % 2 else 1.0)], 32 if step % 2 else 8, 8)
    for _ in range(20):
        drafts.observe(0.3, (1, 24, 32, 8), 8)
    drafts.fit(flat)
    before = drafts.of(1, 24)
    drafts.fit(steep)
    assert drafts.of(1, 24) / before == pytest.approx(
        (steep.of(32, 8) / steep.of(8, 8)) / (flat.of(32, 8) / flat.of(8, 8)), rel=0.1
    )
    for depth, nodes, ratio in ((1, 2, 0.3), (1, 16, 0.1), (4, 16, 0.2)):  # more nodes in less time: noise
        for _ in range(30):
            drafts.observe(ratio, (depth, nodes, 8, 8))
    drafts.fit(flat)
    assert min(drafts.of(1, 0), drafts.of(0, 1), drafts.of(0, 0)) >= 0


def test_the_deepest_request_pays_for_its_passes():
    """Seven requests of 0.6 and one of 0.98: drafting deep for that one alone is not worth so many passes."""
    passes, dear, free = PassTime(), DraftTime(), DraftTime()
    for step in range(400):
        passes.observe([0.02 * (1 + 0.01 * (step % 30))], 8 + step % 30, 8)
    for depth in (1, 2, 3, 5, 8):
        for _ in range(20):
            dear.observe(0.3 * depth, (depth, 8 * depth, 16, 8))
            free.observe(0.0, (depth, 8 * depth, 16, 8))
    dear.fit(passes)
    free.fit(passes)
    candidates = [Candidate("model", [0.6**j for j in range(1, 8)], 1.0) for _ in range(7)]
    candidates.append(Candidate("model", [0.98**j for j in range(1, 17)], 1.0))
    cheap = Search(Batch(candidates, passes, {"model": free}), 200).best
    batch = Batch(candidates, passes, {"model": dear})
    search = Search(batch, 200)
    found = search.best
    assert max(cheap.lengths) == 16
    assert 1 <= max(found.lengths) <= 4
    assert min(found.lengths) >= 1, "the others draft along while they cost no further pass"
    assert found.goodput >= max(search.value([k] * 7 + [deep]).goodput for k in range(5) for deep in range(k, 17))


# ----------------------------------------------------------------------------------------------------- when it looks


def looks(own_s: float, num_steps: int, alpha: float = 0.7) -> list[int]:
    """Steps at which pacing looked; a look takes so many seconds, of a step of about 20 ms."""
    pacing, steps = auto.build(auto.Options(), None), []
    observe = pacing.observe

    def slow(report: StepReport) -> None:
        if pacing._has_looked:
            steps.append(pacing._step)
            report.draft_s += own_s
            report.pacing_s += own_s
        observe(report)

    pacing.observe = slow
    World(lambda step, b: alpha, 4, Machine(CPU, pass_s=0.002)).run(pacing, num_steps)
    return steps


def test_looks_take_two_thousandths_of_the_time_at_most():
    """Steps of 20 ms: a look of 1 ms every 25 steps, one of 10 ms no more rarely than the cap, one of no time soon."""
    for look_s, apart in ((0.0, 4), (0.001, 25), (0.01, 64)):
        own = auto._OwnTime()
        for step in range(1000):
            if (behind := step % 20) < 2:
                pacing_s = 0.0005 + look_s * (not behind)
                own.observe(StepReport(score_s=0.02, draft_s=0.001 + pacing_s, pacing_s=pacing_s), not behind)
        assert own.spacing() == pytest.approx(apart, abs=2)
    assert len(looks(0.0, 800, 0.9)) > 2 * len(looks(0.01, 800, 0.9))


def test_looks_are_timed_beside_the_steps_behind_them():
    """Steps of 22 ms, whoever looks: what a step takes is known from those behind looks."""
    world = World(lambda step, b: 0.0, machine=Machine(CPU, pass_s=0.04), noise=QUIET)
    pacing = auto.build(auto.Options(), None)
    track = world.run(pacing, 400)
    assert pacing._own._step_s == pytest.approx(track.seconds[-1], rel=0.05)


def test_of_those_who_come_together_no_more_draft_than_there_is_room_for(monkeypatch):
    """Four tokens are typical, and five more rows may be run: one of three draws on them."""
    world, pacing = World(lambda step, b: 0.8), auto.build(auto.Options(), None)
    monkeypatch.setattr(pacing, "_max_rows", lambda num: num + 5)
    pacing._typical = {"model": 4}
    seqs = [world.sequence(b) for b in range(3)]
    pacing._meet(seqs, [0, 1, 2], [9] * 3, [0] * 3)
    assert pacing._lengths == [4, 0, 0]
    pacing._meet(seqs[1:], [1, 2], [9] * 2, [0] * 2)
    assert pacing._lengths == [4, 0], "the next one draws on what the first has left"


def test_trials_are_as_frequent_with_a_new_size_of_batch_as_with_a_new_engine():
    """600 steps of one request, then sixteen: the next trial is a few steps away again, not a hundred."""
    world = World(lambda step, b: 0.8, machine=Machine(CPU, pass_s=0.002))
    world.batch = lambda step: range(1) if step < 600 else range(1, 17)
    pacing, apart = auto.build(auto.Options(), None), dict[int, int]()
    for step in range(640):
        had = pacing._trials._next_trial
        world.one(pacing, [world.sequence(b) for b in world.batch(step)], step, Track())
        if pacing._trials._next_trial != had:
            apart[step] = pacing._trials._next_trial - pacing._step
    assert max(apart.values()) > 100
    assert min(gap for step, gap in apart.items() if step > 600) < 20


def test_who_comes_in_between_begins_as_a_typical_one():
    """No new plan for one request of eight: it drafts at once, as far as the others do on average."""
    world = World(lambda step, b: 0.8, 8, Machine(CPU, pass_s=0.001), seed=2)
    pacing = auto.build(auto.Options(), None)
    track = world.run(pacing, 300)
    pacing._next_look = 10**6  # none until then
    world.batch = lambda step: [*range(7), 99]
    track = world.run(pacing, 1)
    others = track.granted[0][:7]
    assert min(others) - 1 <= track.granted[0][7] <= max(others) + 1
    assert track.granted[0][7] > 0
