"""Trying what the plan does not use, rarely and within an allowance of time; only the first trials of plain are free.

Two things go stale when they are not used: the time of other widths, which is tried by running another plan for a step,
and the acceptance of a drafter that does not pay, which is tried by one token for one request at a time.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

from forerun.pacing._acceptance import Acceptance
from forerun.pacing._costs import KNOTS, PassTime
from forerun.pacing._drafts import DraftTime
from forerun.pacing._plan import Plan, Search
from forerun.types import Sequence

_FIRST_ALLOWANCE = 6.0  # steps of plain decoding
_MOST_ALLOWANCE = 8.0
_EARLY_STEPS, _EARLY_SPACING, _SPACING = 48, 2, 128  # steps from one trial of a width to the next: at first, most
_GROW = 0.25  # and in between, as a share of all steps
_TRIAL_STEPS = 4  # of a trial that costs little
_PLAIN_STEPS = 2  # of one of plain decoding
_PLAIN_SPACING, _FIRST_PLAIN = (16, 300), 8  # steps between these: least, most; before the first, then twice as many
_FREE_PLAIN = 8  # such trials with batches of one size that are made whatever they seem to cost: beliefs are young
_SEEN_SPACING, _NUM_MARKS = (32, 300), 4  # steps between trials of a width that was seen; such widths, about
_PLAIN = -1  # the stretch of plain decoding, which is no other width's
_OPTIMISM = 1.0  # standard deviations
_WORTH_TRYING = 1.02  # hoped-for gain
_OTHER_WIDTH = 0.12  # relative difference from the present width, below which a trial would teach nothing
_PROBE_SPACING = (8, 72, 256)  # steps from one probe of a drafter to the next: least, most, most for a bad one
_PROBE_RETRY = (6, 64)  # steps after which a probe that could not begin is considered again: where it may by then; else
_BAD = 0.3  # acceptance of first tokens, over all requests, below which a drafter is one
_GIVEN_UP = 64  # from which on its requests are not prepared for it
_PROBE_CREDIT, _MOST_CREDIT = 2, 4  # rejections that end a probe: at first, and after acceptances
_PROBE_TESTS, _PROBE_STEPS = 8, 64  # after which a drafter that does not pay yet will not
_PROBE_HOPE = 0.5  # tokens per step that a probe may turn out to be worth


def size_of(num_sequences: float) -> int:
    """The class of a batch: twice as many sequences are the next one, and a few more or less the same."""
    return round(math.log2(max(1, num_sequences)))


@dataclass(slots=True)
class Request:
    """What the policy knows of one request. asked: its own spec_length; length: what it is paced at, None = new."""

    draft: str
    acceptance: Acceptance
    asked: int | None
    begun: int
    length: int | None = None
    changed: int = 0
    limit: int = 0
    lag: int = 0
    remaining: float = 0.0
    num_rounds: int = 0
    num_probes: int = 0
    num_failed: int = 0  # last drafts in a row of which nothing was accepted
    gains: list[float] = field(default_factory=list)

    def wanted(self) -> int:
        """Its nodes where there is room for them."""
        return (self.length or 0) if self.asked is None else self.asked

    def update(self, limit: int, max_length: int, lag: int, seq: Sequence) -> None:
        """What its sequence shows at the moment."""
        self.limit, self.lag = limit if self.asked is not None else min(limit, max_length), lag
        self.remaining = (seq.max_len - len(seq.tokens)) / 2  # nobody knows where a text will end

    def paced(self) -> int:
        """Its nodes within the limit of this step."""
        return min(self.limit, self.wanted())


@dataclass(slots=True)
class _Probe:
    """One drafter's probes: the request that is being asked, and when the next one may be."""

    spacing: int = _PROBE_SPACING[0]
    next_step: int = 0
    request: Request | None = None
    credit: int = 0
    begun: int = 0
    last_step: int = 0
    num_tests: int = 0
    cost: float = 0.0  # of a step
    saved: float = 0.0  # by an accepted token: what of the cost comes back
    promised: int | None = None  # the sequence that is prepared for it, where it does not pay to prepare any
    needs: float = 0.0  # allowance without which it could not begin when it was considered last, and
    considered: int = 0  # that step

    def may_begin(self, step: int, allowance: float) -> bool:
        """False where it could not when it was considered last, and has not become affordable since."""
        return allowance >= self.needs or step - self.considered >= _PROBE_RETRY[1]

    def stop(self, step: int, failed: bool) -> None:
        known = self.request.acceptance.parent if self.request else None
        is_bad = known is not None and known.means[0] < _BAD
        self.request = None
        self.spacing = min(2 * self.spacing, _PROBE_SPACING[2 if is_bad else 1]) if failed else _PROBE_SPACING[0]
        self.next_step = step + self.spacing


class Trials:
    """share: of all time, what trials may cost, but for the first ones of plain decoding."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._allowance = _FIRST_ALLOWANCE
        self._next_trial = 0
        self._seen: dict[tuple[int, int], int] = {}  # (size of the batch, stretch of widths) -> when it last ran
        self._trial: list[tuple[Request, int]] = []
        self._left = 0  # steps of it
        self._was_stale = False  # the last one was of a width that had been seen
        self._probes: dict[str, _Probe] = {}
        self._num_plain = Counter[int]()  # trials of plain decoding, with batches of each size
        self.early_plain_step = sys.maxsize  # at which the next early one of these is due, if one is
        self._num_steps = Counter[int]()  # with batches of each size
        self._size = self._last_step = 0  # of the last look
        self._next_step = 0  # before which `lengths` need not be asked

    @property
    def is_running(self) -> bool:
        """True while a trial of a width has steps left."""
        return self._left > 0

    def earn(self, seconds: float) -> None:
        """The share of a step that takes so many units of time."""
        self._allowance = min(self._allowance + self._share * seconds, _MOST_ALLOWANCE)

    def interrupt(self) -> None:
        """Prompts run beside: what a trial would show now is theirs."""
        self._left, self.early_plain_step = 0, sys.maxsize

    def is_due(self, step: int) -> bool:
        """Whether `lengths` wants to be asked in this step."""
        if self._left or step < self._next_step:
            return self._left > 0
        return not self._probes or any(p.request or p.may_begin(step, self._allowance) for p in self._probes.values())

    def welcome(self, r: Request, catchup: float) -> None:
        """Somebody has come, who may be the one that a probe waits for: for whom catching up does not take long."""
        probe = self._probes.get(r.draft)
        if probe is None:  # its drafter is a new one
            self.reconsider()
        else:
            probe.needs = min(probe.needs, catchup + _PROBE_CREDIT * probe.cost)

    def reconsider(self) -> None:
        """Somebody drafts who did not, or does no more: probes that could not begin may be able to."""
        for probe in self._probes.values():
            probe.needs = 0.0

    def promises(self, draft: str, sequence_id: int, step: int) -> bool:
        """Choose one new request to be prepared, where probes have long found nobody who is ready; is it this one?"""
        probe = self._probes.get(draft)
        if probe is None or probe.request is not None:
            return False
        if probe.promised != sequence_id and step - probe.next_step > _PROBE_SPACING[2]:
            probe.promised, probe.next_step = sequence_id, step
        return probe.promised == sequence_id

    def has_given_up(self, draft: str) -> bool:
        """Whether a drafter's probes have failed for long."""
        probe = self._probes.get(draft)
        return probe is not None and probe.spacing > _GIVEN_UP

    def consider(
        self,
        step: int,
        requests: Seq[Request],
        search: Search,
        plan: Plan,
        passes: PassTime,
        drafts: Mapping[str, DraftTime],
    ) -> None:
        """Choose the width that may, with some luck, be better than the present one, and try it next."""
        if not passes.num_steps or not self._share:
            return
        size = size_of(len(requests))
        self._num_steps[self._size] += step - self._last_step
        if size != self._size:  # what the last size had left to wait for is nothing to this one
            self._next_trial = min(self._next_trial, step + _spacing(self._num_steps[size]))
        self._size, self._last_step = size, step
        self._seen[size, _stretch(plan)] = step
        if not _differs(search.plain, plan):
            self._seen[size, _PLAIN] = step
        chosen = self._stale(step, size, search, plan, requests, drafts)
        cost = 0.0 if chosen is None else chosen.seconds * _loss(chosen, plan)
        is_due = chosen is None or (self._was_stale and chosen is not search.plain)  # each in turn
        if is_due and step >= self._next_trial and passes.is_settled:
            hoped, hoped_cost = self._hoped(search, plan, passes)
            self._was_stale = hoped is None
            chosen, cost = (chosen, cost) if hoped is None else (hoped, hoped_cost)
        elif chosen is not None:
            self._was_stale = self._was_stale or chosen is not search.plain
        if chosen is None:
            return
        catchup = _catchup(chosen, requests, drafts)
        is_free = chosen is search.plain and self._num_plain[size] < _FREE_PLAIN
        if cost + catchup > self._allowance and not is_free:
            return
        most = _PLAIN_STEPS if chosen is search.plain else _TRIAL_STEPS
        self._left = most if is_free else max(1, min(most, int(self._allowance / 4 / max(cost, 1e-3))))
        if not is_free:  # nothing is taken from trials of what may be better, neither time nor turns
            self._allowance -= cost * self._left + catchup
            self._next_trial = step + _spacing(self._num_steps[size])
        self._seen[size, _PLAIN if chosen is search.plain else _stretch(chosen)] = step
        self._num_plain[size] += chosen is search.plain
        self._trial = [(r, k) for r, k in zip(requests, chosen.lengths, strict=True) if r.asked is None]

    def _stale(
        self,
        step: int,
        size: int,
        search: Search,
        plan: Plan,
        requests: Seq[Request],
        drafts: Mapping[str, DraftTime],
    ) -> Plan | None:
        """The best mark that was not seen for long and can be paid: the less a trial costs, the sooner that is."""
        stale, self.early_plain_step = list[Plan](), sys.maxsize
        for mark in search.marks:
            is_plain = mark is search.plain
            seen = self._seen.get((size, _PLAIN if is_plain else _stretch(mark)))
            if (not is_plain and seen is None) or not _differs(mark, plan):
                continue
            least, most = _PLAIN_SPACING if is_plain else _SEEN_SPACING
            loss = _loss(mark, plan)
            # Trials of plain take two thirds of the share at most, those of all other marks the whole one.
            num_steps = 1.5 * _PLAIN_STEPS if is_plain else _TRIAL_STEPS * _NUM_MARKS
            spacing = min(max(least, num_steps * loss / self._share), most)
            early = _FIRST_PLAIN << min(8, self._num_plain[size])
            is_early = is_plain and early < _SPACING
            if is_early:
                self.early_plain_step = early + (step if seen is None else seen)
            spacing = early if is_early else spacing
            if seen is None or (step - seen >= spacing and (is_early or step >= self._next_trial)):
                cost = loss * mark.seconds + _catchup(mark, requests, drafts)
                if cost <= self._allowance or (is_plain and self._num_plain[size] < _FREE_PLAIN):
                    stale.append(mark)
        return max(stale, key=lambda mark: mark.goodput, default=None)

    def _hoped(self, search: Search, plan: Plan, passes: PassTime) -> tuple[Plan | None, float]:
        """The mark of highest hope, and what a step of it may cost."""
        hope, chosen, cost = plan.goodput * _WORTH_TRYING, None, 0.0
        for mark in search.marks:
            if not _differs(mark, plan):
                continue
            spread = min(1.0, passes.spread(mark.rows, plan.rows, mark.seconds, plan.seconds, len(plan.lengths)))
            hoped = mark.goodput * math.exp(_OPTIMISM * spread)
            loss = max(0.0, mark.seconds * (math.exp(spread) - mark.goodput / plan.goodput))
            if hoped > hope and loss < self._allowance:
                hope, chosen, cost = hoped, mark, loss
        return chosen, cost

    def lengths(
        self,
        step: int,
        requests: Seq[Request],
        granted: list[int],
        passes: PassTime,
        drafts: Mapping[str, DraftTime],
        plan: Plan,
    ) -> list[int]:
        """The lengths of this step: those of the plan, or of what is being tried."""
        if self._left:
            self._left, trial = self._left - 1, {id(r): k for r, k in self._trial}
            self._next_step = step + 1
            return [min(trial.get(id(r), k), r.limit) for r, k in zip(requests, granted, strict=True)]
        idle: dict[str, list[int]] = {}
        for i, r in enumerate(requests):
            if r.length == 0 and r.asked is None and r.limit:
                idle.setdefault(r.draft, []).append(i)
        for draft, members in idle.items():
            self._probe(step, draft, members, requests, granted, passes, drafts[draft], plan)
        for probe in self._probes.values():
            if probe.request is not None and probe.last_step < step:  # the plan uses it now, or it has ended
                probe.stop(step, failed=not probe.request.length)
        soon = step + _PROBE_RETRY[0]
        due = [step + 1 if p.request else max(p.next_step, soon) for p in self._probes.values()]
        self._next_step = min(due, default=soon)
        return granted

    def _probe(
        self,
        step: int,
        draft: str,
        members: Seq[int],
        requests: Seq[Request],
        granted: list[int],
        passes: PassTime,
        drafts: DraftTime,
        plan: Plan,
    ) -> None:
        """One token for the request that is asked for its drafter, if one is."""
        probe = self._probes.setdefault(draft, _Probe(next_step=step + _PROBE_SPACING[0]))
        if probe.request is not None and (step - probe.begun >= _PROBE_STEPS or self._allowance < 0):
            probe.stop(step, failed=True)
        if probe.request is None and step >= probe.next_step:
            self._start(step, probe, [requests[i] for i in members], passes, drafts, plan)
        for i in members:
            if requests[i] is probe.request:
                granted[i] = 1
                probe.last_step = step
                self._allowance -= probe.cost

    def _start(
        self, step: int, probe: _Probe, members: Seq[Request], passes: PassTime, drafts: DraftTime, plan: Plan
    ) -> None:
        """Ask for the request that was asked least, of those whose catching up can be afforded."""
        cost = passes.rows(plan.rows + 1) - passes.rows(plan.rows) + drafts.of(1, 1)
        room = self._allowance - _PROBE_CREDIT * cost
        probe.considered, probe.cost, probe.needs = step, cost, _PROBE_CREDIT * cost
        if room < 0:
            return
        catchups = [(r.num_probes, drafts.catchup(r.lag), i) for i, r in enumerate(members)]
        repaid = [asked for asked in catchups if asked[1] * plan.goodput <= _PROBE_HOPE * members[asked[2]].remaining]
        near = [asked for asked in repaid if asked[1] <= room]
        if not near:
            probe.needs += min((catchup for _, catchup, _ in repaid), default=math.inf)
            return
        _, catchup, i = min(near)
        r = members[i]
        self._allowance -= catchup
        r.num_probes += 1
        probe.request, probe.credit, probe.begun, probe.last_step = r, _PROBE_CREDIT, step, step
        probe.num_tests, probe.promised, probe.saved = 0, None, min(cost, 1 / plan.goodput)

    def observe(self, step: int, r: Request, num_tested: int, num_accepted: int) -> None:
        """A probed request was tested: go on while its tokens are accepted."""
        probe = self._probes.get(r.draft)
        if probe is None or probe.request is not r:
            return
        if num_tested:
            probe.num_tests += 1
            probe.credit = min(_MOST_CREDIT, probe.credit + (1 if num_accepted else -1))
            self._allowance += probe.saved if num_accepted else 0.0
        if probe.credit <= 0 or probe.num_tests >= _PROBE_TESTS:
            probe.stop(step, failed=True)


def _spacing(num_steps: int) -> int:
    """Steps from one trial of a width to the next, after so many: rarely trying what one knows."""
    return _EARLY_SPACING if num_steps < _EARLY_STEPS else int(min(_GROW * num_steps, _SPACING))


def _stretch(plan: Plan) -> int:
    """The place of a plan's width among the knots."""
    return bisect_left(KNOTS, plan.rows)


def _loss(mark: Plan, plan: Plan) -> float:
    """The share of a step of another plan that is lost by it."""
    return max(0.0, 1 - mark.goodput / plan.goodput)


def _catchup(mark: Plan, requests: Seq[Request], drafts: Mapping[str, DraftTime]) -> float:
    """What it takes until all that draft in a plan are ready to."""
    lags = [(r.draft, r.lag) for r, k in zip(requests, mark.lengths, strict=True) if r.asked is None and k and r.lag]
    return sum(drafts[draft].catchup(lag) for draft, lag in lags)


def _differs(mark: Plan, plan: Plan) -> bool:
    return abs(mark.rows - plan.rows) >= _OTHER_WIDTH * plan.rows
