"""Properties of auto: it reacts quickly, is stable, probes every request, and keeps to its limits."""

import itertools

import pytest

from forerun import SamplingParams
from forerun.errors import BadOption
from forerun.pacing import auto, make
from forerun.pacing.cost import Costs
from forerun.types import Sequence, SequenceStep, StepReport
from pacing.simulator import COMPUTE_BOUND, CPU, QUIET, Machine, World
from refusals import refusal


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_turns_bad_is_dropped(seed):
    """From 0.9 to 0: plain within 90 steps, and for nearly all of the 150 behind them."""
    track = World(lambda step, b: 0.9 if step < 600 else 0.0, machine=Machine(CPU, pass_s=0.004), seed=seed).paced(840)
    assert min(granted[0] for granted in track.granted[600:690]) == 0
    assert sum(granted[0] > 0 for granted in track.granted[690:]) <= 5


@pytest.mark.parametrize("draft", ["model", "lookup"])
@pytest.mark.parametrize("seed", range(2))
def test_probes_find_a_drafter_that_turns_good(seed, draft):
    """From 0 to 0.9: within the longest pause between two probes, and a hundred steps more."""
    track = World(lambda step, b: 0.0 if step < 900 else 0.9, machine=Machine(CPU), seed=seed, draft=draft).paced(1700)
    assert max(granted[0] for granted in track.granted[600:900]) <= 1, "probes are of one node"
    assert sum(granted[0] >= 4 for granted in track.granted[1600:]) >= 90


def test_pauses_between_probes_double():
    track = World(lambda step, b: 0.0, machine=Machine(CPU, pass_s=0.002), noise=QUIET).paced(1200)
    probes = [step for step, granted in enumerate(track.granted) if granted[0] and step > 40]
    pauses = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert all(later == min(2 * earlier, 512) for earlier, later in itertools.pairwise(pauses)), pauses
    assert len(pauses) >= 3


def test_a_batch_whose_drafter_fails_is_probed_as_one():
    track = World(lambda step, b: 0.0, 32, Machine(CPU, pass_s=0.002)).paced(500)
    assert 0 < sum(map(sum, track.granted[100:])) <= 32, "nodes in 400 steps of 32 requests"


def test_lengths_are_per_request():
    track = World(lambda step, b: 0.9 if b % 2 else 0.0, 4, Machine(CPU, pass_s=0.002)).paced(600)
    assert all(sum(granted[b] >= 2 for granted in track.granted[200:]) > 300 for b in (1, 3))
    assert all(sum(granted[b] == 0 for granted in track.granted[200:]) > 300 for b in (0, 2))


def test_a_request_keeps_its_own_length():
    world = World(lambda step, b: 0.0, 2, Machine(COMPUTE_BOUND))
    world.sequence(0, spec_length=4)
    track = world.paced(300)
    assert all(granted[0] == 4 for granted in track.granted)
    assert sum(granted[1] for granted in track.granted) < 30


def test_never_more_than_the_limit_nor_than_spec_length():
    world = World(lambda step, b: 1.0, machine=Machine(CPU, pass_s=0.0001), limit=3)
    assert max(granted[0] for granted in world.paced(100).granted) == 3
    world = World(lambda step, b: 1.0, machine=Machine(CPU, pass_s=0.0001))
    assert max(granted[0] for granted in world.run(auto.build(auto.Options(), 2, Costs()), 100).granted) == 2


def test_hysteresis():
    """With nothing but sampling noise a length is kept most of the time."""
    track = World(lambda step, b: 0.7, machine=Machine(CPU, pass_s=0.003), seed=3).paced(1200)
    assert track.num_changes(0, 100) <= 110, "of 137 plans"


def test_the_net_catches_a_curve_that_lies():
    """Rows cost ten times what the calibration said: plain decoding wins comparisons, and drafting pauses."""
    world = World(lambda step, b: 0.6, machine=Machine(COMPUTE_BOUND, pass_s=0.02), noise=QUIET)
    track = world.run(World(lambda step, b: 0.6, machine=Machine(CPU)).auto(), 1200)
    assert sum(granted[0] > 0 for granted in track.granted[150:]) < 0.4 * 1050


def _report(seq: Sequence, num_drafted: int, num_accepted: int) -> StepReport:
    seq.tokens.extend([1] * (num_accepted + 1))
    round_ = SequenceStep(seq.id, seq.draft, num_drafted, num_drafted, tuple(range(num_accepted)), num_accepted + 1)
    return StepReport(
        num_decoding=1, num_rows=1 + num_drafted, num_emitted=num_accepted + 1, score_s=0.01, sequences=[round_]
    )


def test_nothing_of_an_ended_request_is_kept():
    policy = auto.build(auto.Options(), None, Costs())
    seq = Sequence(0, [1], 1, SamplingParams(), 0, 100, draft="lookup")
    policy.budget([seq], [4])
    policy.observe(_report(seq, 2, 1))
    policy.end(seq)
    assert not policy._requests
    assert not policy._known["lookup"]._requests


def test_unknown_options_are_refused():
    assert "takes no options" in refusal(BadOption, make, "auto:looks=3", None)
    assert "one of adaedl, auto" in refusal(BadOption, make, "cost", None)


def test_a_step_that_could_not_draft_counts_no_grant_of_an_earlier_one():
    """The last token of a request leaves no room for a draft: that is no drafter that found nothing."""
    policy = auto.build(auto.Options(), None, Costs())
    seq = World(lambda step, b: 0.9, machine=Machine(CPU)).sequence(0, spec_length=4)
    assert policy.budget([seq], [8]) == [4]
    policy.observe(StepReport(num_decoding=1, sequences=[SequenceStep(seq.id, seq.draft, 4, 3, (0, 1))]))
    found = policy._of(seq).found_share
    assert policy.budget([seq], [0]) == [0]
    policy.observe(StepReport(num_decoding=1, sequences=[SequenceStep(seq.id, seq.draft, 0, 0, ())]))
    assert policy._of(seq).found_share == found
