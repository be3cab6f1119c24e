"""What prompts cost says what a wide pass will, before any was tried."""

from __future__ import annotations

import math

import pytest

from forerun.pacing import Pacing, auto
from forerun.pacing._times import StepTimes
from forerun.types import StepReport
from pacing.simulator import COMPUTE_BOUND, CPU, GPU, PER_ROW, Curve, Machine, World, oracle, points

STEEP = points((1, 1.0), (4, 1.2), (16, 3.9), (32, 7.75), (64, 15.0), (512, 117.0))  # a few cores: rows are dear


def prompt(rows: int, curve: Curve) -> StepReport:
    return StepReport(num_prefill_tokens=rows, num_rows=rows, score_s=0.01 * curve(rows))


def decoding(num: int, rows: int, curve: Curve) -> StepReport:
    return StepReport(num_decoding=num, num_rows=rows, score_s=0.01 * curve(rows))


def learned(*reports: StepReport) -> StepTimes:
    times = StepTimes()
    for report in reports:
        times.observe(report)
    times.learn()
    return times


@pytest.mark.parametrize("num", [4, 16])
@pytest.mark.parametrize("curve", [STEEP, PER_ROW, COMPUTE_BOUND])
def test_one_prompt_and_one_step_tell_the_next_widths(num, curve):
    """Growth from the first pass to one of two and three times its rows, which nobody has run, where rows are dear."""
    told = learned(prompt(400, curve), decoding(num, num, curve)).passes
    blind = learned(decoding(num, num, curve)).passes
    for times in (2, 3):
        growth = math.log(curve(times * num) / curve(num))
        off, was_off = (abs(math.log(p.rows(times * num) / p.rows(num)) - growth) for p in (told, blind))
        assert off < 0.2
        assert off < was_off / 2


def test_cheap_prompts_promise_no_more_than_was_hoped():
    """Where nothing else is known, the next row costs a fifth of its share: prompts may be run by faster kernels."""
    told, blind = (learned(*reports, decoding(4, 4, GPU)).passes for reports in ([prompt(400, GPU)], []))
    assert [told.rows(width) for width in (6, 8, 32)] == [blind.rows(width) for width in (6, 8, 32)]


def test_it_does_not_matter_which_came_first():
    before = learned(prompt(400, STEEP), decoding(4, 4, STEEP)).passes
    after = learned(decoding(4, 4, STEEP), prompt(400, STEEP)).passes
    assert after.rows(12) / after.rows(4) == pytest.approx(before.rows(12) / before.rows(4), rel=0.1)


def test_what_was_seen_counts_more_than_what_prompts_say():
    """Prompts of long contexts cost more per row than a draft does: widths that were run are believed."""
    dear = [prompt(512, COMPUTE_BOUND)]
    seen = [decoding(1, rows, GPU) for rows in (1, 4, 8, 12) for _ in range(4)] * 10
    passes = learned(*dear, *seen, *dear).passes
    for rows in (4, 8, 12):
        assert passes.rows(rows) == pytest.approx(GPU(rows), rel=0.05)


def test_short_prompts_say_little():
    """A pass of a few rows is mostly weights: one of 31 before the first step is no news, a late one hardly any."""
    blind = learned(decoding(1, 1, STEEP))
    assert learned(prompt(31, STEEP), decoding(1, 1, STEEP)).passes.rows(8) == blind.passes.rows(8)
    long, short = ([prompt(400, STEEP)] * 5, StepReport(num_prefill_tokens=1, num_rows=1, score_s=0.05))
    first = learned(decoding(1, 1, STEEP), *long).passes.per_prompt_row()
    assert first == pytest.approx(0.229, rel=0.02)
    then = learned(decoding(1, 1, STEEP), *long, short).passes.per_prompt_row()
    assert then == pytest.approx(first, rel=0.02), "four units more, for one row"


def test_what_is_left_of_a_prompt_whose_beginning_was_cached_does_not_replace_the_first():
    """One long prompt before anything, then a few rows: in no time, or in that of a slow pass."""
    first = learned(prompt(400, STEEP), decoding(1, 1, STEEP))
    for rows, score_s in ((5, 0.0101), (1, 0.015), (8, 0.05)):
        rest = StepReport(num_prefill_tokens=rows, num_rows=rows, score_s=score_s)
        then = learned(prompt(400, STEEP), decoding(1, 1, STEEP), rest)
        assert then.passes.per_prompt_row() == pytest.approx(first.passes.per_prompt_row(), rel=0.1)


def test_the_longest_prompt_speaks_for_the_first_ones():
    """A tail of 33 rows that took longer than it had to, and 32 requests on a machine where rows cost nothing."""
    tail = StepReport(num_prefill_tokens=33, num_rows=33, score_s=0.0108)
    passes = learned(prompt(512, GPU), tail, decoding(32, 32, GPU)).passes
    assert passes.per_prompt_row() < 0.005
    assert learned(tail, decoding(32, 32, GPU)).passes.per_prompt_row() == 0, "one row more is no difference"


def test_one_pass_behind_a_prompt_that_was_held_up_is_no_news():
    """Ten times as slow once, where every other step runs a prompt: an outlier like any other."""
    reports = [prompt(90, STEEP), decoding(4, 4, STEEP)] * 40
    before = learned(*reports).passes.unit_s(1.0, 0, 4, 4)
    slow = StepReport(num_decoding=4, num_rows=4, score_s=0.1 * STEEP(4))
    times = learned(*reports, prompt(90, STEEP), slow)
    first = times.passes.per_prompt_row()
    times.observe(prompt(90, STEEP))
    times.learn()
    assert times.passes.unit_s(1.0, 0, 4, 4) == pytest.approx(before, rel=0.02)
    assert times.passes.per_prompt_row() == pytest.approx(first, rel=0.1)


def test_prompts_that_cost_nothing_at_first_may_cost_something_later():
    times = learned(decoding(1, 1, STEEP), *[prompt(rows, lambda n: 1.0) for rows in range(40, 46)])
    assert times.passes.per_prompt_row() == pytest.approx(0, abs=1e-9)
    for rows in range(400, 440):
        times.observe(prompt(rows, STEEP))
        times.learn()
    assert times.passes.per_prompt_row() == pytest.approx(0.229, rel=0.1)


@pytest.mark.parametrize("curve", [CPU, GPU])
def test_a_first_prompt_that_waits_for_the_machine_is_outlived(curve):
    """Ten times as slow, as where kernels are loaded, and the only one for long: drafting pays, and begins."""

    class Waits(World):
        def run_prompts(self, pacing: Pacing) -> None:
            pacing.observe(
                StepReport(num_prefill_tokens=100, num_rows=100, score_s=10 * self.machine.row_s * curve(100))
            )

    ratios = []
    for seed in range(4):
        world = Waits(lambda step, b: 0.8, machine=Machine(curve, pass_s=0.002), seed=seed)
        ratios.append(world.run(auto.build(auto.Options(), None), 1000).rate() / oracle(world, 0, 1))
    assert math.prod(ratios) ** 0.25 > 0.96, ratios


def test_widths_never_grow_more_than_in_proportion():
    slow = StepReport(num_prefill_tokens=100, num_rows=100, score_s=50.0)  # it waited for the disk
    passes = learned(slow, decoding(4, 4, STEEP)).passes
    assert passes.rows(8) <= 2 * passes.rows(4) * (1 + 1e-9)
    assert passes.rows(64) <= 16 * passes.rows(4) * (1 + 1e-9)


@pytest.mark.parametrize("num", [8, 16])
def test_a_new_engine_finds_out_in_few_wide_steps(num):
    """First fifty steps where plain decoding is best, prompts not counted, over plain: learning costs some 3 %."""
    rates = {}
    for chunk in (0, 512):
        ratios = []
        for seed in range(6):
            world = World(lambda step, b: 0.85, num, Machine(STEEP, pass_s=0.0055), seed=seed, prompt_chunk=chunk)
            track = world.run(auto.build(auto.Options(), None), 50)
            ratios.append(track.rate() / oracle(world, 0, 1))
        rates[chunk] = math.prod(ratios) ** (1 / len(ratios))
    assert rates[512] > 0.96
    assert rates[512] > rates[0] + 0.02, "it is the prompts that tell"
