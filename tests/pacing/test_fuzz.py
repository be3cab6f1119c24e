"""auto on whatever may come: nothing is granted beyond a limit, nothing grows, and it goes on looking."""

from __future__ import annotations

import random

import pytest

from forerun.pacing import auto
from forerun.params import SamplingParams
from forerun.types import DraftStep, Sequence, SequenceStep, StepReport
from pacing.simulator import CPU, Machine, World, fixed_rate

NAMES = ["model", "model", "model", "lookup", "none"]


class Anything:
    """Requests of several drafters that come and go, with limits, lags, prompts and seconds of every size."""

    def __init__(self, seed: int) -> None:
        self.rng, self.present, self.num_made = random.Random(seed), list[Sequence](), 0

    def come_and_go(self, pacing: auto.AutoPacing) -> None:
        rng = self.rng
        for seq in [seq for seq in self.present if rng.random() < 0.05]:
            pacing.end(seq)
            self.present.remove(seq)
        for _ in range(rng.choice((0, 0, 0, 1, 1, 8)) if len(self.present) < 20 else 0):
            own = rng.choice((None, None, None, 1, 7, 40))
            params = SamplingParams(spec_length=own)
            made = Sequence(self.num_made, [0] * 30, 30, params, 0, 30 + rng.randint(1, 400), draft=rng.choice(NAMES))
            self.present.append(made)
            self.num_made += 1

    def step(self, pacing: auto.AutoPacing) -> None:
        rng, seqs = self.rng, list(self.present)
        limits = [rng.choice((0, 1, 5, 16, 64)) for _ in seqs]
        lags = [rng.choice((0, 0, 0, 3, 500)) for _ in seqs]
        num_other = rng.choice((0, 0, 1, 512))
        for seq in seqs:
            pacing.prepares(seq)
        granted = pacing.budget(seqs, limits, lags, num_other)
        assert all(0 <= k <= limit for k, limit in zip(granted, limits, strict=True))
        assert all(k == 0 for k, seq in zip(granted, seqs, strict=True) if seq.draft == "none")
        report = StepReport(num_decoding=len(seqs), num_prefill_tokens=num_other)
        scale = 10 ** rng.uniform(-6, 0)
        for seq, granted_tokens in zip(seqs, granted, strict=True):
            drafted = rng.randint(0, granted_tokens)
            accepted = rng.randint(0, drafted)
            tested = min(accepted + 1, drafted)
            report.sequences.append(SequenceStep(seq.id, seq.draft, drafted, tested, accepted))
            if granted_tokens:
                had = report.drafts.get(seq.draft, DraftStep(0.0, 0, 0, 0))
                nodes, depth = had.num_nodes + drafted, max(had.depth, drafted)
                report.drafts[seq.draft] = DraftStep(scale * rng.random(), had.num_sequences + 1, nodes, depth)
            report.num_drafted += drafted
        report.num_rows = num_other + len(seqs) + report.num_drafted
        report.draft_s = sum(step.seconds for step in report.drafts.values())
        report.score_s = scale * rng.random()
        pacing.observe(report)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"trial_share": 0.0}, {"max_spec_length": 1}])
def test_anything(options, seed):
    pacing, world = auto.build(auto.Options(**options), None), Anything(seed)
    for _ in range(700):
        world.come_and_go(pacing)
        world.step(pacing)
    assert set(pacing._requests) <= {seq.id for seq in world.present}
    assert len(pacing._rounds) < 100 * 20
    assert len(pacing._times._waiting) <= 32


def test_prompts_in_every_step_do_not_stop_it_from_looking():
    """Acceptance falls while every step has a prompt chunk: lengths follow."""
    world = World(lambda step, b: 0.9 if step < 200 else 0.0, 4, Machine(CPU, pass_s=0.004), seed=4)
    world.num_prompt_rows = lambda step: 8 if step >= 100 else 0
    track = world.run(auto.build(auto.Options(), None), 500)
    assert any(any(granted) for granted in track.granted[120:200])
    assert sum(any(granted) for granted in track.granted[350:]) <= 20


def test_a_drafter_that_was_given_up_comes_back_where_prompts_are_long():
    """Never right for a thousand steps, then nearly always; no probe can afford to read a prompt of 12,000 tokens."""
    machine = Machine(CPU, pass_s=0.001, catchup_s=2e-4)
    pacing = auto.build(auto.Options(), None)
    world = World(lambda step, b: 0.0, 2, machine, prompt_tokens=12_000)
    bad = world.run(pacing, 1000)
    assert sum(map(sum, bad.granted[500:])) < 100
    good = World(lambda step, b: 0.9, 2, machine, prompt_tokens=12_000, seed=1)
    drafted = 0
    for wave in range(12):
        seqs = [good.sequence(100 + 2 * wave + b) for b in range(2)]
        for seq in seqs:
            good.lag[seq.id] = 0 if pacing.prepares(seq) else 12_000
        track = type(bad)()
        for step in range(100):
            good.one(pacing, seqs, step, track)
        drafted = sum(map(sum, track.granted))
        for seq in seqs:
            pacing.end(good.seqs.pop(seq.id))
    assert drafted > 2 * 100
    assert track.rate() > 1.5 * fixed_rate(good, 0, 0, 1)
