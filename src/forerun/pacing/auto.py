"""As many tokens as pay, none where none do: the plan of most expected tokens per second, from what was measured.

Acceptance is learned per request (_acceptance.py), the time of passes and drafts per engine (_costs.py), and a plan for
the whole batch follows from both (_plan.py). What the plan does not use is tried now and then (_trials.py), because
nothing else would tell that it has become worth using. Seconds come from StepReports alone; nothing is drawn at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.pacing import Pacing
from forerun.pacing._acceptance import Acceptance
from forerun.pacing._check import PlanCheck
from forerun.pacing._plan import Batch, Candidate, Plan, Search, evaluate
from forerun.pacing._times import Costs, StepTimes
from forerun.pacing._trials import Request, Trials
from forerun.types import Sequence, StepReport

_DRAFTER_MEMORY = 10  # an engine remembers so many times longer than a request
_UNSEEN_ROWS = 16  # rows that are taken for affordable before anything was measured, and
_UNSEEN_NODES = 5  # nodes
_WIDER = 1.5  # and how much wider than ever seen a pass may become at once
_LEARNING_STEPS = 32  # of a request, in which its length may change in every step
_LOOK_STEPS = (4, 16)  # from one look at what was measured to the next: least, and most where looking takes long
_OWN_SHARE = (0.015, 0.025)  # of a step, which looking and planning may take: below, they come oftener; above, rarer
_PLAN_LOOKS = (1, 4)  # looks from one plan to the next: least, and most while nothing happens
_SAME_BATCH = 1 / 8  # share of the requests that may come or go before the others are planned anew
_CLEAR_GAIN = 1.1  # for which a length may change before its time
_PLAIN_SPACING = (48, 168, 300)  # steps between trials of plain decoding: at first, later, and where gains are clear
_FEW_CHECKS, _SURE_GAIN = 4, 1.4
_FEW_REQUESTS = 6  # below which single steps differ too much to be compared
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
        default=0.01, metadata={"help": "share of the time that trials may cost", "min": 0.0, "max": 0.5}
    )


class AutoPacing(Pacing):
    """Plans anew every few steps, and at once where many requests are others. A single new one waits for that plan."""

    def __init__(self, options: Options, max_length: int) -> None:
        self.options, self.max_length = options, max_length
        self._times = StepTimes()
        self._costs = Costs()  # of batches as large as the present one
        self._known: dict[str, Acceptance] = {}
        self._requests: dict[int, Request] = {}
        self._trials = Trials(options.trial_share)
        self._step = self._next_look = self._next_plan = 0
        self._own, self._look_steps, self._plan_looks = _OwnTime(), _LOOK_STEPS[0], _PLAN_LOOKS[0]
        self._num_changed = 0  # requests that came or went since the last plan
        self._check, self._predicted, self._is_planned = PlanCheck(), 1.0, True
        self._saving = 0.0  # units of time per token, by drafting
        self._are_enough: set[str] = set()  # drafters that more requests are ready for than the plan lets draft
        self._ids: list[int] = []
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
        is_new = ids != self._ids
        if is_new or num_other_rows or self._step >= min(self._next_look, self._trials.next_step):
            granted = self._consider(seqs, limits, lags, num_other_rows, is_new)
        else:
            self._trials.earn(self._plan.seconds)
            granted = [min(pair) for pair in zip(limits, self._lengths, strict=True)]
            self._is_planned = granted == self._lengths
        requests = self._requests
        self._asked = [(b, requests[ids[b]], num, lags[b]) for b, num in enumerate(granted) if num]
        return granted

    def _consider(
        self, seqs: Seq[Sequence], limits: Seq[int], lags: Seq[int], num_other_rows: int, is_new: bool
    ) -> list[int]:
        """Look at what was measured, plan anew where it is time, and try something where that is due."""
        if is_new:
            ids = [seq.id for seq in seqs]
            self._num_changed += len(set(ids).symmetric_difference(self._ids))
            self._ids, self._next_plan = ids, min(self._next_plan, self._step + self._look_steps)
        is_other = self._num_changed > _SAME_BATCH * len(seqs)
        self._costs = self._times.of(len(seqs))
        if is_other or self._trials.is_trying or self._step >= self._next_look:
            self._learn()
        for name in {seq.draft for seq in seqs}:
            self._costs.draft(name)
        requests = [self._request(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        is_due = is_other or self._step >= self._next_plan
        if is_due or self._step >= self._trials.next_step:
            for b, r in enumerate(requests):
                r.lag = lags[b]
        if requests and is_due:
            self._num_changed = 0
            self._decide(requests, is_other)
        self._lengths = [r.wanted() for r in requests]
        granted = [r.paced() for r in requests]
        if num_other_rows:
            return self._beside_prompts(requests, granted)
        self._trials.earn(self._plan.seconds)
        lengths = self._trials.lengths(
            self._step, requests, list(granted), self._costs.passes, self._costs.drafts, self._plan
        )
        is_uncut = granted == self._lengths
        self._is_planned = is_uncut and (lengths == granted or not any(lengths))
        return lengths

    def prepares(self, seq: Sequence) -> bool:
        """Whether what drafting saves at present, until the likely end of a sequence, exceeds what preparing takes."""
        if seq.params.spec_length is not None or not self._costs.passes.num_steps:
            return True
        costs = self._costs.drafts.get(seq.draft)
        if costs is None:
            return True
        if self._trials.has_given_up(seq.draft) or seq.draft in self._are_enough:
            return False
        return self._saving * (seq.max_len - len(seq.tokens)) / 2 > costs.catchup(len(seq.tokens))

    def end(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)

    def observe(self, report: StepReport) -> None:
        for b, r, granted, lag in self._asked:
            step = report.sequences[b]
            if lag and not step.num_drafted:
                continue
            self._rounds.append((r, (granted, step.num_drafted, step.num_tested, step.num_accepted)))
            self._trials.observe(self._step, r, step.num_tested, step.num_accepted)
        is_full = report.num_decoding >= _FEW_REQUESTS and not report.num_prefill_tokens
        if is_full and self._is_planned and any(self._lengths):
            seconds = report.draft_s + report.score_s + report.judge_s + report.commit_s
            self._check.observe(seconds, report.num_decoding, not self._asked, self._predicted)
        elif is_full and not any(self._lengths):
            self._check.forget(report.num_decoding)
        self._asked = []
        self._own.observe(report)
        self._times.observe(report)

    def _learn(self) -> None:
        """Count the rounds since the last look."""
        for r, numbers in self._rounds:
            if r.acceptance.count(*numbers):
                r.begun, self._next_plan = self._step, 0  # it learns as a new request does
            self._known[r.draft].count(*numbers)
        self._rounds = []
        self._times.learn()
        self._look_steps = self._own.spacing(self._look_steps)
        self._next_look = self._step + (1 if self._is_early else self._look_steps)

    @property
    def _is_early(self) -> bool:
        return self._costs.passes.num_steps < _LEARNING_STEPS

    def _request(self, seq: Sequence, limit: int) -> Request:
        r = self._requests.get(seq.id)
        if r is None or r.draft != seq.draft:
            known = self._known.get(seq.draft)
            if known is None:
                known = self._known[seq.draft] = Acceptance(self.options.memory_rounds * _DRAFTER_MEMORY)
            asked = 0 if seq.draft == "none" else seq.params.spec_length
            r = Request(seq.draft, Acceptance(self.options.memory_rounds, known), asked, self._step)
            self._requests[seq.id] = r
        r.limit = limit if r.asked is not None else min(limit, self.max_length)
        r.remaining = (seq.max_len - len(seq.tokens)) / 2  # nobody knows where a text will end
        return r

    def _decide(self, requests: list[Request], is_new: bool) -> None:
        """A new plan, and new lengths where it is better enough."""
        candidates = []
        for r in requests:
            r.gains, found = r.acceptance.gains(r.limit if r.asked is None else min(r.asked, r.limit))
            candidates.append(Candidate(r.draft, r.gains, found, None if r.asked is None else r.paced()))
        factor = self._check.factor(len(requests)) if len(requests) >= _FEW_REQUESTS else 1.0
        batch = Batch(candidates, self._costs.passes, self._costs.drafts, factor)
        search, ideal = self._search(batch, requests)
        best, before = ideal.lengths, self._lengths
        for r, length in zip(requests, best, strict=True):
            if r.length is None:
                r.length = length
        self._plan = evaluate(batch, [r.paced() for r in requests])
        gain = ideal.goodput / self._plan.goodput
        if gain > 1 + self.options.margin:
            changed = [i for i, r in enumerate(requests) if is_new or gain > _CLEAR_GAIN or self._may_change(r)]
            self._change(batch, requests, {i: best[i] for i in changed})
        else:
            self._change_single(batch, requests, best)
        plain = evaluate(batch, [0] * len(requests))
        if all(r.limit >= r.wanted() for r in requests):
            self._saving = 1 / plain.goodput - 1 / self._plan.goodput
            self._are_enough = _enough_are_ready(requests)
        self._predicted = self._plan.seconds / batch.factor / plain.seconds
        self._trials.plain_spacing = self._plain_spacing(len(requests), self._plan.goodput / plain.goodput)
        tries = self._trials.consider(self._step, requests, search, self._plan, self._costs.passes, self._costs.drafts)
        self._settle(tries or is_new or before != [r.wanted() for r in requests])

    def _plain_spacing(self, num_requests: int, gain: float) -> int:
        """Steps from one trial of plain decoding to the next: the surer the gain, the rarer."""
        few, many, sure = _PLAIN_SPACING
        if gain > _SURE_GAIN or num_requests < _FEW_REQUESTS:
            return sure
        return few if self._check.num_checks(num_requests) < _FEW_CHECKS else many

    def _settle(self, is_lively: bool) -> None:
        """The next plan is further away while nothing happens."""
        self._plan_looks = _PLAN_LOOKS[0] if is_lively else min(2 * self._plan_looks, _PLAN_LOOKS[1])
        self._next_plan = self._step + (1 if self._is_early else self._plan_looks * self._look_steps)

    def _search(self, batch: Batch, requests: list[Request]) -> tuple[Search, Plan]:
        """All plans, and the best one in which no drafter catches up for a request that will not repay it."""
        max_rows = max(min(_UNSEEN_ROWS, len(requests) + _UNSEEN_NODES), _WIDER * self._costs.passes.widest)
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

    def _repays(self, gain: float, plan: Plan, ready: Plan, i: int, r: Request) -> bool:
        """Whether catching up costs less than it brings until the likely end of a request.

        gain: tokens per unit of time, over `ready`, the best plan in which nobody catches up.
        """
        seconds = plan.seconds * r.remaining / (1 + sum(r.gains[: plan.lengths[i]]))
        return gain * seconds > ready.goodput * self._costs.draft(r.draft).catchup(r.lag)

    def _may_change(self, r: Request) -> bool:
        return self._step - r.begun < _LEARNING_STEPS or self._step - r.changed >= self.options.hold_steps

    def _change(self, batch: Batch, requests: list[Request], lengths: dict[int, int]) -> None:
        for i, length in lengths.items():
            r = requests[i]
            if r.asked is None and r.length != length:
                r.length, r.changed = length, self._step
        self._plan = evaluate(batch, [r.paced() for r in requests])

    def _change_single(self, batch: Batch, requests: list[Request], best: Seq[int]) -> None:
        """Where the batch as a whole is well served: the requests whose own length is furthest off."""
        off = [
            (abs(k - r.paced()), i)
            for i, (r, k) in enumerate(zip(requests, best, strict=True))
            if r.asked is None and k != r.paced()
        ]
        for _, i in sorted(off, reverse=True)[:_SINGLE_CHANGES]:
            if len(requests) == 1 or not self._may_change(requests[i]):
                continue
            other = evaluate(batch, [best[i] if j == i else r.paced() for j, r in enumerate(requests)])
            if other.goodput > self._plan.goodput * (1 + self.options.margin / len(requests)):
                self._change(batch, requests, {i: best[i]})

    def _beside_prompts(self, requests: list[Request], granted: list[int]) -> list[int]:
        """Rows beside a prompt chunk cost as much as its own: keep those that are worth it at the usual speed."""
        least = self._plan.goodput * self._costs.passes.per_other_row()
        lengths = []
        for r, length in zip(requests, granted, strict=True):
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
    """What pacing itself takes: the drafting side of a step, without the drafters."""

    def __init__(self) -> None:
        self._own_s = self._step_s = 0.0

    def observe(self, report: StepReport) -> None:
        """The numbers of a step."""
        own_s = report.draft_s - sum([draft.seconds for draft in report.drafts.values()])
        self._own_s += 0.02 * (own_s - self._own_s)
        self._step_s += 0.02 * (report.draft_s + report.score_s + report.judge_s + report.commit_s - self._step_s)

    def spacing(self, num_steps: int) -> int:
        """Steps between looks, given those at present."""
        least, most = _OWN_SHARE
        if self._own_s > most * self._step_s:
            return min(num_steps + 1, _LOOK_STEPS[1])
        return max(num_steps - 1, _LOOK_STEPS[0]) if self._own_s < least * self._step_s else num_steps


def build(options: Options, spec_length: int | None) -> AutoPacing:
    """A policy that decides by itself. spec_length, where given, is the most that it grants."""
    return AutoPacing(options, min(options.max_spec_length, spec_length or options.max_spec_length))
