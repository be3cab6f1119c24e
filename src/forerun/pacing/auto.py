"""As many tokens as pay, none where none do: the plan of most expected tokens per second, from what was measured.

Acceptance is learned per request (_acceptance.py), the time of passes and drafts per engine (_costs.py), and a plan for
the whole batch follows from both (_plan.py). What the plan does not use is tried now and then (_trials.py), because
nothing else would tell that it has become worth using. Seconds come from StepReports alone; nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.pacing import Pacing
from forerun.pacing._acceptance import Acceptance
from forerun.pacing._plan import Batch, Candidate, Plan, Search
from forerun.pacing._times import StepTimes
from forerun.pacing._trials import Request, Trials, size_of
from forerun.pacing._twins import acceptance
from forerun.types import Sequence, StepReport

_DRAFTER_MEMORY = 10  # an engine remembers so many times longer than a request
_UNSEEN_ROWS, _UNSEEN_NODES = 16, 5  # that are taken for affordable before anything was measured
_UNSEEN_REQUESTS = 3  # of a drafter, that are prepared for drafting by then: enough to find out
_WIDER = 1.4  # and how much wider than ever seen a pass may become at once
_LEARNING_STEPS = 32  # of a request, in which its length may change at every look; and of an engine, to get going
_LOOK_STEPS = (4, 64)  # from one look at what was measured to the next: least, and most where looking takes long
_EARLY_LOOKS = 6  # with costs that are new: what they know of so many steps moves the next look one step further away
_MOST_IDLE = 3  # times that a look which changed nothing moves the next one further away
_BEHIND = 2  # steps of the plan behind a trial: without them, the machine may have changed its speed just then
_OWN_SHARE = 0.002  # of all time, which looking may take
_WEIGHT = 0.25  # of what one look says drafting saves
_OWN_WEIGHT = 0.2  # of one step in averages of what looks take
_CLEAR_GAIN = 1.1  # for which a length may change before its time
_FAILED = (8, 16, 24, 32, 48, 64, 96, 128)  # drafts in a row without an accepted token, at which somebody has to look
# Gain over plain decoding from which on drafting begins, and goes on: for one request, and what each doubling of their
# number adds, because of many some are always being prepared for it.
_WORTH_BEGINNING, _WORTH_STAYING = (0.02, 0.006), (0.01, 0.004)
_SINGLE_CHANGES = 4  # requests per plan that are considered one by one


@dataclass(frozen=True)
class Options:
    """How eagerly lengths change, and what may be spent on finding out."""

    max_spec_length: int = field(
        default=16, metadata={"help": "most tokens drafted per request and step", "min": 1, "max": 64}
    )
    margin: float = field(
        default=0.01,
        metadata={"help": "relative gain in tokens per second below which nothing changes", "min": 0.0, "max": 1.0},
    )
    hold_steps: int = field(
        default=32, metadata={"help": "steps that a request keeps its length, unless much has changed", "min": 1}
    )
    memory_rounds: int = field(
        default=80, metadata={"help": "rounds after which a test of acceptance counts 1/e", "min": 5, "max": 10000}
    )
    trial_share: float = field(
        default=0.006, metadata={"help": "share of the time that trials may cost", "min": 0.0, "max": 0.5}
    )


class AutoPacing(Pacing):
    """Looks every few steps at what was measured, and plans anew. Who comes in between begins as a typical one."""

    def __init__(self, options: Options, max_length: int) -> None:
        self.options, self.max_length = options, max_length
        self._times = StepTimes()
        self._known: dict[str, Acceptance] = {}
        self._requests: dict[int, Request] = {}
        self._trials = Trials(options.trial_share)
        self._step = self._next_look = self._last_look = 0
        self._own, self._has_looked = _OwnTime(), False
        self._is_beside_prompts = False
        self._is_unlike, self._least = True, 1  # the batch is another one than that of the last look; steps since then
        self._num_changed = 0  # requests that came or went since the last look
        self._num_idle = 0  # looks since something changed
        self._typical: dict[str, int] = {}  # length of a request of which nothing is known, by drafter
        self._saving = 0.0  # units of time per token, by drafting
        self._first: defaultdict[str, set[int]] = defaultdict(set)  # prepared before anything is known, by drafter
        self._are_enough: set[str] = set()  # drafters that more requests are ready for than the plan lets draft
        self._ids: list[int] = []
        self._present: list[Request] = []
        self._lengths: list[int] = []  # what each is paced at, whatever its limit
        self._plan = Plan([], 0.0, 1.0, 0.0)
        self._asked: list[tuple[int, Request, int, int]] = []  # of this step: place, request, granted, lag
        self._rounds: list[tuple[Request, tuple[int, int, int, int]]] = []  # that were not looked at yet

    @property
    def times(self) -> StepTimes:
        return self._times

    def budget(self, seqs: Seq[Sequence], limits: Seq[int], lags: Seq[int], num_other_rows: int) -> list[int]:
        self._step += 1
        ids = [seq.id for seq in seqs]
        if ids != self._ids:
            self._meet(seqs, ids, limits, lags)
        self._is_beside_prompts, self._has_looked = num_other_rows > 0, False
        trials = self._trials
        if num_other_rows:
            trials.interrupt()
        is_trial_due = not num_other_rows and trials.is_due(self._step)
        if is_trial_due or self._is_unlike or self._step >= self._next_look:  # seldom
            self._consider(seqs, limits, lags, is_trial_due)
        granted = self._lengths
        is_drafting = any(granted)
        if is_drafting:
            granted = [min(pair) for pair in zip(limits, granted, strict=True)]
        if num_other_rows:
            granted = self._beside_prompts(granted)
        else:
            trials.earn(self._plan.seconds)
            if is_trial_due or trials.is_running:  # which a look may just have begun
                granted, is_drafting = self._try(granted), True
        asked = enumerate(granted) if is_drafting else ()
        self._asked = [(b, self._present[b], num, lags[b]) for b, num in asked if num]
        return granted

    def _consider(self, seqs: Seq[Sequence], limits: Seq[int], lags: Seq[int], is_trial_due: bool) -> None:
        """Look, where it is time to; what sequences show is brought up to date for that and for a trial."""
        is_calm = self._step >= self._next_look or (self._is_unlike and not self._is_beside_prompts)
        self._has_looked = is_calm and not self._trials.is_running and self._step >= self._last_look + self._least
        if self._has_looked or is_trial_due:
            for b, (r, seq) in enumerate(zip(self._present, seqs, strict=True)):
                r.update(limits[b], self.max_length, lags[b], seq)
        if self._has_looked:
            self._look()

    def _meet(self, seqs: Seq[Sequence], ids: list[int], limits: Seq[int], lags: Seq[int]) -> None:
        """Other sequences than before: some have come, some have gone. Of the others nothing is asked."""
        known = dict(zip(self._ids, zip(self._present, self._lengths, strict=True), strict=True))
        came = {b: self._request(seqs[b]) for b, number in enumerate(ids) if number not in known}
        known |= {ids[b]: (r, r.wanted()) for b, r in came.items()}
        self._num_changed += 2 * len(came) + len(self._ids) - len(ids)
        self._is_unlike |= size_of(len(ids)) != size_of(len(self._ids)) or self._num_changed >= 2 * len(ids)
        present, lengths = map(list, zip(*[known[number] for number in ids], strict=True)) if ids else ([], [])
        self._ids, self._present, self._lengths = ids, present, lengths  # all, or nothing where this is interrupted
        new = {b: r for b, r in enumerate(present) if r.length is None and r.asked is None and not r.lag}
        room = self._max_rows(len(ids)) - len(ids) - sum(self._lengths) if new else 0.0
        for b, r in new.items():
            r.update(limits[b], self.max_length, lags[b], seqs[b])
            self._trials.welcome(r, self._times.drafts[r.draft].catchup(r.lag) if r.lag else 0.0)
            if not r.lag:
                self._is_unlike |= r.draft not in self._typical
                self._lengths[b] = self._welcome(r, room)
                room -= self._lengths[b]

    def _welcome(self, r: Request, room: float) -> int:
        """What a new request drafts until the next look: as much as a typical one, if there is room for more rows."""
        r.gains, _ = r.acceptance.gains(r.limit)
        typical = min(self._typical.get(r.draft, 0), len(r.gains))
        if r.draft in self._typical and typical <= room:
            r.length = typical
        return r.wanted()

    def _max_rows(self, num_requests: int) -> float:
        """Rows beyond which no plan goes: nobody knows what they would take."""
        return max(min(_UNSEEN_ROWS, num_requests + _UNSEEN_NODES), _WIDER * self._times.passes.widest)

    def _look(self) -> None:
        """Count what happened since the last look, and plan anew. Where nothing changes, looks become rarer."""
        self._last_look, self._is_unlike = self._step, False
        self._learn()
        self._num_changed = 0
        if self._present:
            self._decide(self._present)
        lengths = [r.wanted() for r in self._present]
        self._num_idle = min(self._num_idle + 1, _MOST_IDLE)
        if lengths != self._lengths:
            self._lengths, self._num_idle = lengths, 0
            self._trials.reconsider()
        known_steps = self._times.passes.num_steps
        is_early = known_steps < _LEARNING_STEPS
        self._least = 1 if is_early else _LOOK_STEPS[0]
        spacing = 1 + known_steps // _EARLY_LOOKS if is_early else (1 + self._num_idle) * self._own.spacing()
        self._next_look = min(self._step + spacing, max(self._step + _LOOK_STEPS[0], self._trials.early_plain_step))

    def _try(self, granted: list[int]) -> list[int]:
        """What is to be tried in this step, if anything. A look at it waits for what the plan takes behind it."""
        if self._trials.is_running:
            self._next_look = max(self._next_look, self._step + 1 + _BEHIND)
        return self._trials.lengths(
            self._step, self._present, list(granted), self._times.passes, self._times.drafts, self._plan
        )

    def prepares(self, seq: Sequence) -> bool:
        """Whether what drafting saves at present, until the likely end of a sequence, exceeds what preparing takes.

        Now and then for one that it does not pay for: else nobody would hear of a drafter that has become better.
        """
        if seq.params.spec_length is not None:
            return True
        if not self._times.passes.num_steps:
            first = self._first[seq.draft]
            if len(first) < _UNSEEN_REQUESTS or self._step > _LEARNING_STEPS:
                first.add(seq.id)
            return seq.id in first
        costs = self._times.drafts.get(seq.draft)
        if costs is None:
            return True
        saves = self._saving * (seq.max_len - len(seq.tokens)) / 2 > costs.catchup(len(seq.tokens))
        is_used = any(r.length for r in self._present if r.draft == seq.draft)
        if saves and (is_used or not self._trials.has_given_up(seq.draft)) and seq.draft not in self._are_enough:
            return True
        return self._trials.promises(seq.draft, seq.id, self._step)

    def end(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)
        self._first[seq.draft].discard(seq.id)

    def observe(self, report: StepReport) -> None:
        for b, r, granted, lag in self._asked:
            step = report.sequences[b]
            if lag and not step.num_drafted:
                continue
            self._rounds.append((r, (granted, step.num_drafted, step.num_tested, step.num_accepted)))
            self._trials.observe(self._step, r, step.num_tested, step.num_accepted)
            r.num_failed = 0 if step.num_accepted else r.num_failed + (step.num_tested > 0)
            is_worse = step.num_tested and r.asked is None and r.num_failed in _FAILED
            if is_worse or (step.num_accepted and not r.wanted()):
                self._next_look = self._step + 1  # worse, or better, than thought
        self._asked = []
        if self._has_looked or self._step == self._last_look + 1:
            self._own.observe(report, self._has_looked)
        self._times.observe(report)

    def _learn(self) -> None:
        """Count the rounds since the last look."""
        for r, numbers in self._rounds:
            if r.acceptance.count(*numbers):
                r.begun = self._step  # it learns as a new request does
            if r.num_rounds < _LEARNING_STEPS:  # behind these, more is heard of requests that draft well
                self._known[r.draft].count(*numbers)
            r.num_rounds += 1
        self._rounds = []
        self._times.learn()

    def _request(self, seq: Sequence) -> Request:
        r = self._requests.get(seq.id)
        if r is None or r.draft != seq.draft:
            known = self._known.get(seq.draft)
            if known is None:
                known = self._known[seq.draft] = acceptance(self.options.memory_rounds * _DRAFTER_MEMORY)
            asked = 0 if seq.draft == "none" else seq.params.spec_length
            r = Request(seq.draft, acceptance(self.options.memory_rounds, known), asked, self._step)
            self._requests[seq.id] = r
        return r

    def _decide(self, requests: list[Request]) -> None:
        """A new plan, and new lengths where it is better enough."""
        candidates = []
        for r in requests:
            r.gains, found = r.acceptance.gains(r.limit if r.asked is None else min(r.asked, r.limit))
            candidates.append(Candidate(r.draft, r.gains, found, None if r.asked is None else r.paced()))
        batch = Batch(candidates, self._times.passes, self._times.drafts)
        search, ideal = self._search(batch, requests)
        ideal = self._worth_it(search, ideal, requests)
        best = ideal.lengths
        for r, length in zip(requests, best, strict=True):
            if r.length is None:
                r.length = length
        self._plan = search.value([r.paced() for r in requests])
        gain, is_over = ideal.goodput / self._plan.goodput, ideal is search.plain and self._plan.rows > ideal.rows
        if gain > 1 + self.options.margin or is_over:
            changed = [i for i, r in enumerate(requests) if gain > _CLEAR_GAIN or self._may_change(r)]
            self._change(search, requests, {i: best[i] for i in changed}, ideal)
        else:
            self._change_single(search, requests, best)
        asked = any(r.asked for r in requests)
        plain = search.value([0] * len(requests)) if asked else search.plain
        if all(r.limit >= r.wanted() for r in requests if r.asked is None):
            drafting = search.drafting or plain
            self._saving += _WEIGHT * (1 / plain.goodput - 1 / drafting.goodput - self._saving)
            self._are_enough = _enough_are_ready(requests)
        if not self._is_beside_prompts:
            self._trials.consider(self._step, requests, search, self._plan, self._times.passes, self._times.drafts)
        self._typical = self._typical_lengths(requests, self._worth_it(search, search.best, requests))

    def _typical_lengths(self, requests: list[Request], plan: Plan) -> dict[str, int]:
        """What a plan would grant to requests that are as good as their drafter's are on average, and ready."""
        deepest = max(plan.lengths)
        free = [(r.gains, k) for r, k in zip(requests, plan.lengths, strict=True) if r.asked is None]
        price = max((gains[k] for gains, k in free if k < min(deepest, len(gains))), default=0.0)
        typical = dict[str, int]()
        for draft in {r.draft for r in requests}:
            gains, _ = acceptance(self.options.memory_rounds, self._known[draft]).gains(deepest)
            typical[draft] = sum(gain > price for gain in gains)
        return typical

    def _search(self, batch: Batch, requests: list[Request]) -> tuple[Search, Plan]:
        """All plans, and the best one in which no drafter catches up for a request that will not repay it."""
        max_rows = self._max_rows(len(requests))
        late = [i for i, r in enumerate(requests) if r.lag and r.asked is None]
        search = Search(batch, max_rows)
        if not any(search.best.lengths[i] for i in late):
            return search, search.best
        for i in late:
            batch.candidates[i].fixed = 0
        ready = Search(batch, max_rows).best
        used = [i for i in late if search.best.lengths[i]]
        gain = (search.best.goodput - ready.goodput) / len(used)
        repaid = [i for i in used if self._repays(gain, search.best, ready, i, requests[i])]
        if len(repaid) == len(used):
            return search, search.best
        for i in repaid:
            batch.candidates[i].fixed = None
        return search, Search(batch, max_rows).best if repaid else ready

    def _worth_it(self, search: Search, ideal: Plan, requests: list[Request]) -> Plan:
        """Plain decoding, unless drafting is faster by more than beliefs may be wrong; to stay with it takes less."""
        is_drafting = any(r.wanted() for r in requests if r.asked is None)
        alone, doubled = _WORTH_STAYING if is_drafting else _WORTH_BEGINNING
        num_free = sum(r.asked is None for r in requests)
        gain = max(alone + doubled * math.log2(max(1, num_free)), 0.0 if is_drafting else self.options.margin)
        return ideal if ideal.goodput > (1 + gain) * search.plain.goodput else search.plain

    def _repays(self, gain: float, plan: Plan, ready: Plan, i: int, r: Request) -> bool:
        """Whether catching up costs less than it brings until the likely end of a request.

        gain: tokens per unit of time, over `ready`, the best plan in which nobody catches up.
        """
        seconds = plan.seconds * r.remaining / (1 + sum(r.gains[: plan.lengths[i]]))
        return gain * seconds > ready.goodput * self._times.drafts[r.draft].catchup(r.lag)

    def _may_change(self, r: Request) -> bool:
        return self._step - r.begun < _LEARNING_STEPS or self._step - r.changed >= self.options.hold_steps

    def _change(
        self, search: Search, requests: list[Request], lengths: dict[int, int], expected: Plan | None = None
    ) -> None:
        """Give requests other lengths. expected: a plan whose values are known, which it may come out as."""
        for i, length in lengths.items():
            r = requests[i]
            if r.asked is None and r.length != length:
                r.length, r.changed = length, self._step
        paced = [r.paced() for r in requests]
        self._plan = expected if expected is not None and expected.lengths == paced else search.value(paced)

    def _change_single(self, search: Search, requests: list[Request], best: Seq[int]) -> None:
        """Where the batch as a whole is well served: the requests whose own length is furthest off."""
        off = [
            (abs(k - r.paced()), i)
            for i, (r, k) in enumerate(zip(requests, best, strict=True))
            if r.asked is None and k != r.paced()
        ]
        for _, i in sorted(off, reverse=True)[:_SINGLE_CHANGES]:
            if len(requests) == 1 or not self._may_change(requests[i]):
                continue
            other = search.value([best[i] if j == i else r.paced() for j, r in enumerate(requests)])
            if other.goodput > self._plan.goodput * (1 + self.options.margin / len(requests)):
                self._change(search, requests, {i: best[i]})

    def _beside_prompts(self, granted: list[int]) -> list[int]:
        """Rows beside a prompt chunk cost as much as its own: keep those that are worth it at the usual speed."""
        if not any(granted):
            return granted
        least = self._plan.goodput * self._times.passes.per_prompt_row()
        lengths = []
        for r, length in zip(self._present, granted, strict=True):
            while length and r.asked is None and (length > len(r.gains) or r.gains[length - 1] < least):
                length -= 1
            lengths.append(length)
        return lengths


def _enough_are_ready(requests: list[Request]) -> set[str]:
    """Drafters that at least as many requests are ready for, and may not use, as those that draft."""
    idle, drafting = Counter[str](), Counter[str]()
    for r in requests:
        if r.wanted():
            drafting[r.draft] += 1
        elif r.asked is None and not r.lag:
            idle[r.draft] += 1
    return {name for name, number in idle.items() if number >= drafting[name]}


class _OwnTime:
    """What a look takes: the policy's time in steps with one, over that of the steps behind."""

    def __init__(self) -> None:
        self._own_s = {True: 0.0, False: 0.0}  # of steps with a look, and of those behind
        self._step_s = 0.0

    def observe(self, report: StepReport, has_looked: bool) -> None:
        """The numbers of a step with a look, or of the one behind."""
        self._own_s[has_looked] += _OWN_WEIGHT * (report.pacing_s - self._own_s[has_looked])
        self._step_s += (not has_looked) * _OWN_WEIGHT * (report.seconds - self._step_s)

    def spacing(self) -> int:
        """Steps from one look to the next."""
        look_s = self._own_s[True] - self._own_s[False]
        least, most = _LOOK_STEPS
        return round(min(max(look_s / max(_OWN_SHARE * self._step_s, 1e-9), least), most))


def build(options: Options, spec_length: int | None) -> AutoPacing:
    """A policy that decides by itself. spec_length, where given, is the most that it grants."""
    return AutoPacing(options, min(options.max_spec_length, spec_length or options.max_spec_length))
