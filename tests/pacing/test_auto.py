"""auto, property by property: stable, quick to react, never starved, and within what it is told."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

from forerun.errors import BadOption
from forerun.pacing import auto, make
from forerun.pacing._acceptance import Acceptance
from forerun.pacing._costs import PassTime
from forerun.pacing._drafts import DraftTime
from forerun.pacing._plan import Batch, Candidate, Plan, Search
from forerun.pacing._trials import Request
from forerun.theory import formulas
from forerun.types import SequenceStep, StepReport
from pacing.simulator import CPU, GPU, QUIET, Machine, Track, World

BATCH = Batch([Candidate("model", [0.8, 0.6], 1.0)] * 2, PassTime(), {"model": DraftTime()})


def run(world: World, num_steps: int, **options: float) -> Track:
    return world.run(auto.build(auto.Options(**options), None), num_steps)


# ----------------------------------------------------------------------------------------------------- stability


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("alpha", "num"), [(0.0, 1), (0.4, 1), (0.8, 1), (0.7, 4)])
def test_at_most_one_change_in_32_steps(alpha, num, seed):
    """From step 48 on, at stationary acceptance; a trial counts as two changes."""
    track = run(World(lambda step, b: alpha, num, Machine(CPU, pass_s=0.003), seed=seed), 1200)
    assert max(track.num_changes(b, 48) for b in range(num)) <= (1200 - 48) / 32


def test_a_length_is_held():
    """Acceptance drifts slowly: trials aside, a request keeps each of its lengths for 32 steps."""
    world = World(lambda step, b: 0.7 + 0.15 * math.sin(step / 150), 4, Machine(GPU, pass_s=0.001), seed=1)
    pacing, track, kept = auto.build(auto.Options(), None), Track(), [[] for _ in range(4)]
    for step in range(800):
        world.one(pacing, [world.sequence(b) for b in range(4)], step, track)
        for b, lengths in enumerate(kept):
            lengths.append(pacing._requests[b].length)
    changes = [[i for i in range(65, 800) if lengths[i] != lengths[i - 1]] for lengths in kept]
    assert sum(map(len, changes)) > 4, "no change, no test"
    assert all(later - earlier >= 32 for steps in changes for earlier, later in itertools.pairwise(steps))


@pytest.mark.parametrize("seed", range(3))
def test_reaction_to_a_drafter_that_turns_bad(seed):
    """From 0.9 to 0: plain within 30 steps, and for nearly all of the 200 after them."""
    track = run(World(lambda step, b: 0.9 if step < 600 else 0.0, machine=Machine(CPU, pass_s=0.004), seed=seed), 830)
    assert min(granted[0] for granted in track.granted[600:630]) == 0
    assert sum(granted[0] > 0 for granted in track.granted[630:]) <= 20


@pytest.mark.parametrize("draft", ["model", "lookup"])
@pytest.mark.parametrize("seed", range(2))
def test_probes_find_a_drafter_that_turns_good(seed, draft):
    """From 0 to 0.9: four tokens or more within 320 steps, which is the longest pause between probes and 64."""
    world = World(lambda step, b: 0.0 if step < 900 else 0.9, machine=Machine(CPU), seed=seed, draft=draft)
    track = run(world, 1300)
    assert max(granted[0] for granted in track.granted[600:900]) <= 1, "probes are of one token"
    assert sum(granted[0] >= 4 for granted in track.granted[1220:]) >= 70


@pytest.mark.parametrize("num", [1, 4])
def test_a_drafter_that_was_slow_when_it_was_cold_is_not_given_up_for_ever(num):
    """Sixty times as slow in the first 20 steps: what was seen then is believed less, step by step, drafts or not."""
    world = World(lambda step, b: 0.8, num, Machine(CPU, pass_s=0.06))
    pacing = auto.build(auto.Options(), None)
    world.run(pacing, 20)
    world.machine = Machine(CPU, pass_s=0.001)
    granted = world.run(pacing, 3500).granted[-500:]
    assert sum(sum(lengths) >= num for lengths in granted) > 400


def test_probes_of_a_large_batch_are_those_of_one_drafter():
    """32 requests do not each probe."""
    track = run(World(lambda step, b: 0.0, 32, Machine(CPU, pass_s=0.002)), 500)
    assert 0 < sum(map(sum, track.granted[100:])) <= 60, "tokens in 400 steps of 32 requests"
    assert sum(sum(granted) > 1 for granted in track.granted[100:]) <= 8, "trials of another width"


# --------------------------------------------------------------------------------------- what it is told to keep to


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_fail_are_looked_at_before_the_next_look_is_due(seed, monkeypatch):
    """Looks are rare where they take long; a drafter that turns bad on the way is dropped after eight failures."""
    monkeypatch.setattr(auto._OwnTime, "spacing", lambda own: 400)
    world = World(lambda step, b: 0.9 if step < 200 else 0.0, machine=Machine(CPU, pass_s=0.002), seed=seed)
    granted = run(world, 400).granted
    assert sum(one[0] > 0 for one in granted[100:200]) > 60
    assert sum(one[0] > 0 for one in granted[240:]) <= 44


def test_a_step_that_tested_nothing_asks_for_no_look(monkeypatch):
    """A drafter that finds something in one of 40 steps, and is wrong then, for a request with a length of its own."""
    monkeypatch.setattr(auto._OwnTime, "spacing", lambda own: 400)
    world = World(lambda step, b: 0.0, machine=Machine(CPU, pass_s=1e-5), draft="lookup")
    world.found = lambda step, b: step % 40 == 0
    pacing, track, looks = auto.build(auto.Options(), None), Track(), 0
    for step in range(800):
        world.one(pacing, [world.sequence(0, spec_length=4)], step, track)
        looks += step >= 200 and pacing._has_looked
    assert looks <= 4


@pytest.mark.parametrize(("margin", "begins"), [(0.01, 1.026), (0.1, 1.1)])
def test_drafting_must_be_worth_it(margin, begins):
    """Two requests: a gain that beliefs may be wrong by begins nothing, and what is hardly one ends."""
    requests = [auto.Request("model", Acceptance(80), None, 0, length=length) for length in (0, 0)]
    pacing, search = auto.build(auto.Options(margin=margin), None), Search(BATCH, 100)
    plain = search.plain

    def chosen(gain: float, lengths: tuple[int, int]) -> bool:
        for r, length in zip(requests, lengths, strict=True):
            r.length = length
        better = Plan([1, 1], gain * plain.goodput, plain.seconds, 4.0)
        return pacing._worth_it(search, better, requests) is better

    assert [chosen(gain, (0, 0)) for gain in (1.0, begins - 0.005, begins + 0.005)] == [False, False, True]
    assert [chosen(gain, (2, 0)) for gain in (1.0, 1.01, 1.02)] == [False, False, True]


def test_who_comes_in_between_drafts_no_more_than_is_worth_it():
    """Four requests of a drafter that hardly pays, one replaced every ten steps: none begins where all are plain."""
    world, pacing, track = (
        World(lambda step, b: 0.15, 4, Machine(CPU, pass_s=0.002), seed=3),
        auto.build(auto.Options(), None),
        Track(),
    )
    world.batch = lambda step: [*range(step // 10, step // 10 + 4)]
    decide, found = pacing._decide, list[int]()

    def watch(requests: list[auto.Request]) -> None:
        decide(requests)
        if not any(r.wanted() for r in requests):
            found.append(pacing._typical["model"])

    pacing._decide = watch
    for step in range(800):
        world.one(pacing, [world.sequence(b) for b in world.batch(step)], step, track)
    assert len(found) > 40
    assert sum(found) == 0


def test_free_trials_take_nothing_from_the_others():
    """1, 2, 4, .. 32 requests, in turn: the first trials of plain decoding leave all others their allowance."""
    pacing, least = auto.build(auto.Options(), None), 0.0
    world = World(lambda step, b: 0.9, machine=Machine(GPU, pass_s=0.002), batch=lambda step: range(1 << step // 150))
    for step in range(900):
        world.one(pacing, [world.sequence(b) for b in world.batch(step)], step, Track())
        least = min(least, pacing._trials._allowance)
    assert least > -1.0


def test_limits_and_requests_of_their_own():
    """Limits of each step, spec_length of a request exactly, none never; the world asserts the limits."""
    world = World(lambda step, b: 0.95, 4, Machine(GPU), limit=3)
    world.sequence(1, spec_length=2)
    world.sequence(2, spec_length=9)
    world.sequence(3).draft = "none"
    track = run(world, 100)
    assert {granted[1] for granted in track.granted} == {2}
    assert {granted[2] for granted in track.granted} == {3}
    assert {granted[3] for granted in track.granted} == {0}
    assert track.granted[-1][0] == 3
    world = World(lambda step, b: 0.5, machine=Machine(CPU))
    world.sequence(0, spec_length=30)
    assert {granted[0] for granted in run(world, 20).granted} == {30}, "more than the policy would ever choose"


def test_fewer_rows_beside_prompts():
    """A pass that is wide already pays for each further row."""
    world = World(lambda step, b: 0.6, machine=Machine(CPU, pass_s=0.0005), seed=2)
    world.num_prompt_rows = lambda step: 256 if step % 3 == 0 else 0
    track = run(world, 600)
    beside = [granted[0] for step, granted in enumerate(track.granted) if step >= 200 and step % 3 == 0]
    alone = [granted[0] for step, granted in enumerate(track.granted) if step >= 200 and step % 3]
    assert 0 < sum(beside) / len(beside) < sum(alone) / len(alone) - 1


def test_near_the_end_of_a_request():
    """The last step of a sequence has no room for a draft."""
    world = World(lambda step, b: 1.0, machine=Machine(GPU), max_len=160)
    seq, track, pacing = world.sequence(0), Track(), auto.build(auto.Options(), None)
    step = 0
    while len(seq.tokens) < 160:
        world.one(pacing, [seq], step, track)
        step += 1
    assert len(seq.tokens) == 160


def test_spec_length_is_the_most_that_is_granted():
    track = World(lambda step, b: 1.0, machine=Machine(GPU)).run(make("auto", 4), 200)
    assert max(granted[0] for granted in track.granted) == 4
    track = World(lambda step, b: 1.0, machine=Machine(GPU)).run(make("auto:max_spec_length=7", None), 200)
    assert max(granted[0] for granted in track.granted) == 7
    with pytest.raises(BadOption, match="max_spec_length"):
        make("auto:max_spec_length=0", None)


def test_the_first_step_is_a_sensible_guess():
    """Three tokens for one request, at most 16 rows for several, plain for a batch that is as wide already."""
    for num, most in ((1, 4), (4, 8), (8, 13), (16, 16), (32, 32)):
        granted = run(World(lambda step, b: 0.5, num, Machine(CPU)), 1).granted[0]
        assert num + sum(granted) == most


def test_ended_requests_are_forgotten_and_none_is_legal():
    pacing = auto.build(auto.Options(), None)
    world = World(lambda step, b: 0.8, batch=lambda step: range(step, step + 3))
    world.run(pacing, 50)
    assert len(pacing._requests) == 3
    assert pacing.budget([], [], [], 512) == []


# ------------------------------------------------------------------------------------------------------- catching up


@pytest.mark.parametrize(("left", "starts"), [(10, False), (1000, True)])
def test_catching_up_must_repay(left, starts):
    """2,000 tokens behind, which take as long as 20 steps: not for the last 10 tokens, but for 1,000."""
    pacing = auto.build(auto.Options(), None)
    machine = Machine(CPU, pass_s=0.001, catchup_s=2e-4)
    World(lambda step, b: 0.8, machine=machine, prompt_tokens=500).run(pacing, 200)  # costs and acceptance are known
    world = World(lambda step, b: 0.8, machine=machine, max_len=4000 + left, prompt_tokens=4000)
    late, ready = world.sequence(76), world.sequence(77)
    granted = [pacing.budget([late], [left - 1], [2000], 0)[0] for _ in range(4)]  # a look may have been a moment ago
    assert bool(granted[-1]) == starts
    assert pacing.budget([ready], [left - 1], [0], 0)[0] > 0, "without a lag it pays in either case"


def test_a_drafter_that_is_still_behind_has_not_failed_to_find_anything():
    pacing = auto.build(auto.Options(), None)
    seq = World(lambda step, b: 0.8).sequence(0, spec_length=4)
    for _ in range(20):
        assert pacing.budget([seq], [16], [500], 0) == [4]
        pacing.observe(
            StepReport(num_decoding=1, num_rows=1, score_s=0.01, sequences=[SequenceStep(0, "model", 0, 0, 0)])
        )
    _, found = pacing._known["model"].gains(4)
    assert found == pytest.approx(0.9), "what is believed before anything is known"


# ---------------------------------------------------------------------------------------------------------- the parts


def test_posterior_mean_of_the_products():
    """Beta(8, 2): E[alpha^2] is 0.6545, not 0.64 (book 7.4)."""
    acceptance = Acceptance(1e12)
    acceptance.hits[1], acceptance.misses[1] = 5.0, 1.0
    acceptance.refresh()
    strength = 8.0
    prior = acceptance.means[0] * strength
    a, total = prior + 5, strength + 6
    gains, _ = acceptance.gains(3)
    assert gains[1] / gains[0] == pytest.approx(a / total * acceptance.means[5])
    assert gains[2] / gains[1] == pytest.approx((a + 1) / (total + 1) * acceptance.means[5])


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_acceptance_is_that_of_tested_tokens(alpha):
    """Expected tokens come out as the closed form has them; accepted / drafted would be far below."""
    world = World(lambda step, b: alpha, 8, machine=Machine(GPU), noise=QUIET, seed=3)
    pacing = auto.build(auto.Options(), None)
    world.run(pacing, 800)
    tokens = [1 + sum(r.acceptance.gains(5)[0]) for r in pacing._requests.values()]
    assert sum(tokens) / 8 == pytest.approx(formulas.expected_tokens(alpha, 5), rel=0.06)
    assert all(r.acceptance.gains(5)[1] > 0.95 for r in pacing._requests.values())


def test_a_draft_that_was_not_found_proves_nothing_about_acceptance():
    request = Acceptance(100, Acceptance(1000))
    before = request.means[0]
    for _ in range(50):
        request.count(5, 0, 0, 0)
    gains, found = request.gains(5)
    assert request.means[0] == before
    assert found < 0.1
    assert sum(gains) < 0.35


def test_the_prior_of_a_request_is_what_others_showed():
    known = Acceptance(1000)
    for _ in range(200):
        known.count(4, 4, 1, 0)
    assert sum(Acceptance(100, known).gains(4)[0]) < 0.1


def test_the_first_request_says_less_about_the_next_than_many_do():
    """All accepted in 32 rounds, or in 600: a next one whose first two drafts fail is doubted sooner after the 32."""
    after = {}
    for num_rounds in (32, 600):
        known = Acceptance(10**6)
        for _ in range(num_rounds):
            known.count(4, 4, 4, 4)
        request = Acceptance(10**6, known)
        before = request.gains(1)[0][0]
        for _ in range(2):
            request.count(4, 4, 1, 0)
        after[num_rounds] = request.gains(1)[0][0] / before
    assert after[32] == pytest.approx(8 / 10, rel=0.01)
    assert after[600] == pytest.approx(15.2 / 17.2, rel=0.01)


def test_the_curve_is_learned_while_the_machine_drifts():
    """Widths are never seen in the same minute; the speed halves and doubles in between, by steps and by jumps."""
    passes, true = PassTime(), CPU
    for step in range(3000):
        width = (1, 6, 12, 16, 32)[step // 20 % 5]
        speed = math.exp(0.35 * math.sin(step / 200)) * (2.0 if 1000 < step < 1030 else 1.0)
        noise = 1 + 0.1 * math.sin(step * 12.9898) * 1.4
        passes.observe([0.02 * true(width) * speed * noise], width, 1)
    for width in (6, 12, 16, 32):
        assert passes.rows(width) / passes.rows(1) == pytest.approx(true(width), rel=0.08)


def test_the_cost_of_drafts_is_split_by_passes_and_nodes():
    costs = DraftTime()
    for step in range(400):
        depth, num = 1 + step % 5, 1 + step % 7
        costs.observe(0.01 + depth * 0.05 + depth * num * 0.004, (depth, depth * num, 1, 1))
    costs.fit(PassTime())
    assert costs.of(4, 8) == pytest.approx(0.01 + 0.2 + 0.032, rel=0.03)
    costs.observe_catchup(0.5, 100)
    assert costs.catchup(1000) == pytest.approx(5.0)


def test_what_must_be_won_grows_with_the_requests_that_may_draft() -> None:
    """A gain of 3 %: enough for one request, whatever is decoded plainly beside it, and not enough for 32."""
    pacing, num = auto.build(auto.Options(), None), 32
    search = SimpleNamespace(plain=Plan([0] * num, 1.0, float(num), float(num)))
    drafting = Plan([1] + [0] * (num - 1), 1.03, 40.0, 33.0)
    for num_free, expected in ((1, drafting), (num, search.plain)):
        requests = [Request("model", Acceptance(80), None if i < num_free else 0, 0) for i in range(num)]
        assert pacing._worth_it(search, drafting, requests) is expected  # type: ignore[arg-type]


def test_a_draft_that_may_not_be_found_is_two_widths():
    """One request: the mean time is that of the two passes, not that of the mean width."""
    passes = PassTime()
    for step in range(400):
        passes.observe([0.02 * CPU(1 + step % 20)], 1 + step % 20, 1)
    batch = Batch([Candidate("lookup", [0.2] * 15, 0.3)], passes, {"lookup": DraftTime()})
    expected = 0.3 * passes.rows(16) + 0.7 * passes.rows(1) + batch.drafts["lookup"].of(0.3 * 15, 0.3 * 15)
    assert Search(batch, 100).value([15]).seconds == pytest.approx(expected)
    assert passes.rows(16) == pytest.approx(CPU(16), rel=0.08)


def test_the_search_is_the_best_of_all_plans():
    """Against brute force over all lengths of three requests, one of whose drafts are found half of the time."""
    passes = PassTime()
    for step in range(400):
        passes.observe([0.02 * CPU(1 + step % 24)], 1 + step % 24, 1)
    batch = Batch(
        [
            Candidate("model", [0.9**j for j in range(1, 7)], 1.0),
            Candidate("model", [0.4**j for j in range(1, 4)], 1.0),
            Candidate("lookup", [0.5 * 0.8**j for j in range(1, 7)], 0.5),
        ],
        passes,
        {"model": DraftTime(), "lookup": DraftTime()},
    )
    search = Search(batch, 100)
    best = max(search.value([a, b, c]).goodput for a in range(7) for b in range(4) for c in range(7))
    found = search.best
    assert found.goodput >= 0.98 * best
    assert search.value(found.lengths).goodput == pytest.approx(found.goodput)
