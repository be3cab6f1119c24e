"""When a drafter that does not pay is asked again: for one token, of a request that is near enough."""

from __future__ import annotations

from collections import defaultdict

from forerun.pacing import auto
from forerun.pacing._acceptance import Acceptance
from forerun.pacing._costs import PassTime
from forerun.pacing._drafts import DraftTime
from forerun.pacing._plan import Plan
from forerun.pacing._trials import Request, Trials
from pacing.simulator import CPU, Machine, World


def idle(lag: int) -> Request:
    """A request that does not draft, whose drafter has so many tokens to catch up."""
    return Request("model", Acceptance(80, Acceptance(800)), None, 0, length=0, limit=8, lag=lag, remaining=1000.0)


class Steps:
    """Steps of plain decoding, in which a committed token takes a drafter a hundredth of one to catch up."""

    def __init__(self, share: float, requests: list[Request]) -> None:
        self.trials, self.requests, self.step = Trials(share), requests, 0
        self.passes, self.drafts = PassTime(), DraftTime()
        self.drafts.observe_catchup(1.0, 100)

    def come(self, r: Request) -> None:
        self.trials.welcome(r, self.drafts.catchup(r.lag))
        self.requests.append(r)

    def first_probe(self, num_steps: int) -> int | None:
        """The first of so many further steps in which somebody is granted a token."""
        plan = Plan([0] * len(self.requests), 1.0, 1.0, float(len(self.requests)))
        for _ in range(num_steps):
            self.step += 1
            self.trials.earn(plan.seconds)
            if not self.trials.is_due(self.step):
                continue
            granted = self.trials.lengths(
                self.step, self.requests, list(plan.lengths), self.passes, defaultdict(lambda: self.drafts), plan
            )
            if any(granted):
                return self.step
        return None


def test_who_is_ready_is_asked_as_soon_as_somebody_is():
    assert Steps(0.0, [idle(0)]).first_probe(20) is not None
    steps = Steps(0.0, [idle(5000)])
    assert steps.first_probe(30) is None  # fifty steps to catch up, and there are six to spend
    steps.come(idle(4000))
    assert steps.first_probe(10) is None
    steps.come(idle(0))
    found = steps.first_probe(20)
    assert found is not None
    assert found <= 42


def test_a_probe_begins_when_catching_up_can_be_afforded():
    """Seven steps to catch up, six to spend, and another tenth in each step; rejections are to be paid for, too."""
    found = Steps(0.1, [idle(700)]).first_probe(60)
    assert found is not None
    assert 10 < found < 20


def test_a_probe_that_has_begun_goes_on():
    steps = Steps(0.0, [idle(530)])  # after which almost nothing is left to spend
    found = steps.first_probe(20)
    assert found is not None
    assert steps.first_probe(1) == found + 1


def test_a_policy_says_who_has_come():
    pacing, world, came = auto.build(auto.Options(), None), World(lambda step, b: 0.3, seed=1), list[int]()
    world.batch = lambda step: range(step // 50, step // 50 + 2)
    welcome = pacing._trials.welcome

    def watch(r: Request, catchup: float) -> None:
        came.append(next(b for b, own in pacing._requests.items() if own is r))
        welcome(r, catchup)

    pacing._trials.welcome = watch
    world.run(pacing, 500)
    assert came == list(range(11))


def test_a_policy_says_when_somebody_stops_drafting():
    pacing, steps = auto.build(auto.Options(), None), list[int]()
    world = World(lambda step, b: 0.9 if step < 200 else 0.0, machine=Machine(CPU, pass_s=0.004), seed=1)
    reconsider = pacing._trials.reconsider
    pacing._trials.reconsider = lambda: (steps.append(pacing._step), reconsider())
    track = world.run(pacing, 300)
    assert track.granted[199][0] > 0
    assert track.granted[299] == [0]
    assert max(steps) > 200


def test_whoever_stops_drafting_may_be_asked():
    """Nobody is near; then somebody who drafted, and is ready, does so no more."""
    steps = Steps(0.0, [idle(5000)])
    drafting = idle(0)
    drafting.length = 1
    steps.requests.append(drafting)
    assert steps.first_probe(30) is None
    drafting.length = 0
    steps.trials.reconsider()
    found = steps.first_probe(10)
    assert found is not None


def test_the_drafter_of_a_newcomer_is_not_kept_waiting_by_another_one():
    steps = Steps(0.0, [idle(5000)])
    assert steps.first_probe(30) is None
    other = idle(0)
    other.draft = "other"
    steps.come(other)
    found = steps.first_probe(20)
    assert found is not None


def test_what_could_not_begin_is_considered_again_when_costs_have_changed():
    steps = Steps(0.0, [idle(5000)])
    assert steps.first_probe(30) is None
    for _ in range(200):
        steps.drafts.observe_catchup(0.01, 100)  # a hundred times faster than it was
    found = steps.first_probe(100)
    assert found is not None
    assert found == 1 + 8 + 64
