"""Draft as far as it pays: choose the plan with the most expected tokens per second, which may be plain decoding.

Every few steps the nodes of all requests are sorted by their expected gain, and the first n are drafted. n is chosen
for the most tokens per second of the whole batch. This rate follows from the time of a pass by its rows (pass_time.py)
and from how likely each node is to be accepted (acceptance.py). It is the goodput of SmartSpec (Liu et al. 2024, arXiv
2406.14066) with measured curves in place of a fitted line. A request whose drafts fail gets no drafts, and is probed
with one node after pauses that double in length. Where a drafter tells its confidence in each token, this confidence
ends the chain of a request instead (stopping.py).

A safety net does not depend on these estimates. Now and then a few plain steps are timed and compared with the drafting
steps around them. If drafting was slower twice in a row, drafting pauses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.config import AUTO_SPEC_LENGTH
from forerun.pacing import Pacing
from forerun.pacing.acceptance import MAX_RANKS, Acceptance
from forerun.pacing.cost import Costs
from forerun.pacing.levels import Levels
from forerun.pacing.measuring import NOW, Pause
from forerun.pacing.pass_time import Floats
from forerun.pacing.reading import USUAL_ANSWER, Reading
from forerun.pacing.searching import Searching
from forerun.pacing.stopping import Prices, Stops, promised
from forerun.types import Sequence, SequenceStep, StepReport, Stop

CUTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # longest draft of a plan
REPLAN_STEPS, RARELY_STEPS = 8, 64  # steps between two plans; and between two decisions where nothing pays for long
HYSTERESIS = 1.01  # a new plan must promise more tokens per second than the old one, times this
FIRST_PAUSE, LONGEST_PAUSE = 8, 512  # steps between two probes of a request
SHORTEST_WAIT, LONGEST_WAIT = 32, 1024  # steps between two comparisons with plain decoding, and of a pause
PLAIN_STEPS = 4  # plain steps of a comparison
PROBE_SHARE = 0.03  # reading a request's text for probes may cost at most this share of the tokens that it writes
LEAST_SHARE = 0.1  # of first guesses that are accepted; below it a drafter reads no prompt before its first round
PLAIN_MARGIN = 1.03  # plain decoding is faster where it makes more tokens per second than drafting, times this

Ints = npt.NDArray[np.intp]


def _num_left(seq: Sequence) -> int:
    """Return how many more tokens a text is expected to get."""
    return min(seq.max_len - len(seq.tokens), USUAL_ANSWER)


@dataclass(frozen=True)
class Options:
    """No options: the time of passes is measured."""


@dataclass
class _Request:
    """A request that decodes.

    length: the number of nodes that the plan gives the request in each step. probe_at: the step of the next probe.
    pause: the number of steps between two probes. granted: the number of nodes granted in this step. pays: whether
    drafting pays, where the request's drafter tells its confidence. reading: the decision whether the draft model
    should read the text. stop: the rule that ends the request's chain in this step; the drafter adds its confidences to
    the rule. is_decided: whether a first decision about the request was made.
    """

    seq: Sequence
    length: int
    probe_at: int
    pause: int
    granted: int = 0
    pays: bool = True
    reading: Reading = field(default_factory=Reading)
    stop: Stop | None = None
    is_decided: bool = False


class _SafetyNet:
    """A comparison of a few plain steps with the drafting steps around them. Two losses in a row pause drafting.

    num_left: the number of plain steps that the comparison still needs; a negative number counts the drafting steps
    after the plain steps. num_lost: the number of comparisons in a row that drafting has lost. plain, drafting [2]: the
    tokens and the seconds of the plain steps, and of the drafting steps.
    """

    def __init__(self) -> None:
        self.compare_at = SHORTEST_WAIT
        self.pause = SHORTEST_WAIT
        self.paused_until = 0
        self.num_left, self.num_lost = -PLAIN_STEPS, 0
        self.plain, self.drafting = np.zeros(2), np.zeros(2)

    def allows(self, step: int) -> bool:
        """Return whether a step may run the drafts of its plan."""
        if step >= self.compare_at:
            self.compare_at = step + LONGEST_WAIT
            self.num_left = PLAIN_STEPS
            self.plain[:] = 0
        self.num_left -= 1
        return self.num_left < 0 and step >= self.paused_until

    def observe(self, step: int, tokens: int, seconds: float) -> None:
        """Count a step whose plan had drafts: its tokens and its seconds.

        PLAIN_STEPS drafting steps after the plain steps of a comparison, compare both kinds of steps.
        """
        if self.num_left >= 0:
            self.plain += (tokens, seconds)
        elif step >= self.paused_until:
            self.drafting = self.drafting * (1 - 1 / SHORTEST_WAIT) + (tokens, seconds)
        if self.num_left == -PLAIN_STEPS and self.plain[1]:
            is_lost = self.plain[0] * self.drafting[1] > PLAIN_MARGIN * self.drafting[0] * self.plain[1]
            self.num_lost = self.num_lost + 1 if is_lost else 0
            self.pause = SHORTEST_WAIT if self.num_lost == 1 else min(2 * self.pause, LONGEST_WAIT)
            self.paused_until = step + self.pause if self.num_lost > 1 else 0
            self.compare_at = max(step, self.paused_until) + (SHORTEST_WAIT if is_lost else self.pause)


class AutoPacing(Pacing):
    """The policy that grants the drafts with the most expected tokens per second.

    spec_length: the largest number of nodes that one request is granted.
    """

    def __init__(self, spec_length: int, costs: Costs) -> None:
        self.spec_length = min(spec_length, MAX_RANKS)
        self.costs = costs
        self._known: dict[str, Acceptance] = {}  # by drafter
        self._stops = Stops(self.spec_length, costs)
        self._requests: dict[int, _Request] = {}
        self._searching: dict[str, Searching] = {}  # by drafter
        self._levels = Levels(costs)
        self._net = _SafetyNet()
        self._step, self._replan_at = 0, 0
        # When the decision to draft is made again for all requests: in step _choose_at, then after a pause of
        # _choose_pause steps; or as soon as no more than _choose_below requests are left.
        self._choose_at = 0
        self._choose_pause = REPLAN_STEPS
        self._choose_below = 0
        self._drafts = False  # whether the plan drafts for some request in this step

    def budget(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        self._step += 1
        if not any(limits):
            self._drafts = False
            for request in self._requests.values():
                request.granted = 0  # else the grant of an earlier step would be counted again
            return [0] * len(seqs)
        requests = [self._requests.get(seq.id) or self._meet(seq) for seq in seqs]
        had_drafts = self._drafts
        may_draft = not had_drafts or self._net.allows(self._step)
        # For many requests the decision takes a good part of a small model's pass, so it is rare while none drafts.
        is_wanted = may_draft and (had_drafts or self._may_probe_search(requests))
        is_wanted |= not all(request.is_decided for request in requests)
        if len(requests) <= self._choose_below:  # passes have become cheaper
            self._choose_at = 0
        if is_wanted or self._step >= min([self._choose_at, *[r.probe_at for r in requests if not r.pays]]):
            self._choose_stops(requests, limits)
        if self._step >= self._replan_at:
            self._replan(requests, limits)
        self._drafts = any(request.length for request in requests)
        if self._drafts and not had_drafts:
            may_draft = self._net.allows(self._step)
        for request, most in zip(requests, limits, strict=True):
            wanted = request.seq.params.spec_length
            if wanted is None:
                wanted = self._wanted(request) if may_draft else 0
            request.granted = min(most, wanted)
        return [request.granted for request in requests]

    def stops(self, seqs: Seq[Sequence], granted: Seq[int]) -> Mapping[int, Stop]:
        stops = dict[int, Stop]()
        for b, (seq, most) in enumerate(zip(seqs, granted, strict=True)):
            request = self._requests.get(seq.id)
            if request is not None and request.stop is not None and most > 0:
                stops[b] = request.stop
        return stops

    def levels(self, seqs: Seq[Sequence], num_rows: int) -> int:
        return min(self.spec_length, self._levels.wanted(seqs, num_rows))

    def prepares(self, seq: Sequence) -> bool:
        if not self.costs.traits_of(seq.draft).searches:
            return self._of(seq).drafter_shares()[0] > LEAST_SHARE
        decoding = [request.seq for request in self._requests.values()]
        prices = self._stops.prices([*decoding, seq], [True] * (1 + len(decoding)), 0, 1 + len(decoding))
        stop = self._stops.stop(seq, prices)
        tokens, gain = promised(stop)
        return stop.pays and Reading(gain=gain).is_due(self._price(seq, prices), _num_left(seq) / tokens)

    def _price(self, seq: Sequence, prices: Prices, num_unread: int | None = None) -> float:
        """Return what reading a text costs, in tokens. num_unread: the tokens to read; None = the whole text."""
        num_tokens = len(seq.tokens) if num_unread is None else num_unread
        return prices.rate * num_tokens * self.costs.read_s(seq.draft)

    def measure(self, pause: Pause = NOW) -> None:
        self.costs.measure(pause)

    def observe(self, report: StepReport) -> None:
        self.costs.observe(report)
        self._levels.observe(report.sequences)
        for round_ in report.sequences:
            request = self._requests.get(round_.sequence_id)
            if request is None:
                continue
            known = self._of(request.seq)
            stop = request.stop
            request.stop = None
            # An accepted guess of the text search says nothing about the model, so the model's probes become rarer.
            is_found = stop is not None and stop.search is not None and not stop.confidences
            if round_.accepted_ranks and not is_found:
                request.pause = FIRST_PAUSE
                if request.length == 0:  # a probe was accepted although the averages are low: begin new averages
                    known.forget(request.seq.id)
                    self._replan_at = 0
            if request.granted:
                known.observe(request.seq.id, round_.num_drafted, round_.accepted_ranks)
            if not request.pays and self.costs.traits_of(request.seq.draft).searches:
                self._stops.of(request.seq.draft).spare += PROBE_SHARE * (1 + len(round_.accepted_ranks))
            if stop is not None and request.granted:
                self._observe_search(request, stop, round_)
                request.reading.observe(stop, round_.num_drafted, len(round_.accepted_ranks))
                if round_.num_drafted:
                    self._stops.observe(request.seq, stop, round_, report)
        deciding_s = report.draft_s - sum([step.seconds for step in report.drafts.values()])
        for name, searching in self._searching.items():
            searching.observe_step(report.seconds, report.drafts.get(name), deciding_s / max(1, report.num_decoding))
        if self._drafts and report.num_decoding and not report.num_prefill_tokens:
            self._net.observe(self._step, report.num_emitted, report.seconds)

    def end(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)
        self._levels.end(seq)
        self._of(seq).forget(seq.id)
        self._stops.forget(seq)
        if (searching := self._searching.get(seq.draft)) is not None:
            searching.forget(seq.id)

    def _choose_stops(self, requests: Seq[_Request], limits: Seq[int]) -> None:
        """Decide for each request whose drafter tells its confidence whether it drafts, and where its chain ends."""
        confident = [request for request in requests if self._is_told(request)]
        for request in requests:
            request.is_decided |= not self._is_told(request)
        if not confident:
            return
        others = [(r, most) for r, most in zip(requests, limits, strict=True) if not self._is_told(r)]
        lengths = [r.length if (named := r.seq.params.spec_length) is None else named for r, _ in others]
        num_rows = len(requests) + sum(min(length, most) for length, (_, most) in zip(lengths, others, strict=True))
        seqs, are_drafting = [r.seq for r in confident], [r.length > 0 for r in confident]
        prices = self._stops.prices(seqs, are_drafting, len(others), num_rows)
        may_search = [r for r, most in zip(requests, limits, strict=True) if most > 0 and self._is_told(r)]
        searched, probed = self._searched(may_search, prices.rate)
        is_time = self._step >= self._choose_at
        does_pay = bool(searched)
        for request in confident:
            is_searched = request.seq.id in searched or request.seq.id in probed
            is_probe = not request.pays and self._step >= request.probe_at
            if request.is_decided and not (request.length or is_searched or is_time or is_probe):
                continue
            request.is_decided = True
            stop = self._stops.stop(request.seq, prices)
            traits = self.costs.traits_of(request.seq.draft)
            pays = is_searched if traits.is_free else stop.pays
            if request.pays and not pays:
                request.probe_at = self._step + request.pause
            request.pays, request.stop = pays, stop
            request.length = self.spec_length if pays else 0
            does_pay |= pays and not traits.is_free
            if traits.searches:
                self._add_search(request, stop, prices, is_searched)
        if is_time:
            self._choose_pause = REPLAN_STEPS if does_pay else min(2 * self._choose_pause, RARELY_STEPS)
            self._choose_at, self._choose_below = self._step + self._choose_pause, len(requests) // 2

    def _searched(self, requests: Seq[_Request], rate: float) -> tuple[set[int], set[int]]:
        """Return the ids of the sequences whose texts are searched: a set for which searches pay, and a set of probes.

        rate: the tokens per second of all requests.
        """
        paying = set[int]()
        probed = set[int]()
        others = dict[str, list[int]]()
        for request in requests:
            seq, traits = request.seq, self.costs.traits_of(request.seq.draft)
            if not (traits.is_free or traits.searches):
                continue
            if self._searching.setdefault(seq.draft, Searching()).pays(seq.id, rate):
                paying.add(seq.id)
            else:
                others.setdefault(seq.draft, []).append(seq.id)
        for name, ids in others.items():
            probed |= self._searching[name].probes(ids, self._step)
        return paying, probed

    def _may_probe_search(self, requests: Seq[_Request]) -> bool:
        drafters = {request.seq.draft for request in requests} & self._searching.keys()
        return any(self._searching[name].may_probe() for name in drafters)

    def _observe_search(self, request: _Request, stop: Stop, round_: SequenceStep) -> None:
        """Record the gain of a round's text search, in tokens, less the gain that the draft model would have had."""
        searched = stop if self.costs.traits_of(request.seq.draft).is_free else stop.search
        if searched is None:
            return
        gain = 0.0
        is_found = bool(searched.confidences) and (searched is stop or not stop.confidences)
        if is_found and round_.num_drafted:
            gain = (
                len(round_.accepted_ranks)
                - sum(searched.worth[: round_.num_drafted])
                - (0.0 if searched is stop else stop.bar)
            )
        self._searching[request.seq.draft].observe(request.seq.id, gain)

    def _add_search(self, request: _Request, stop: Stop, prices: Prices, is_searched: bool) -> None:
        """Complete `stop` for a request whose drafter searches the text before it runs its model.

        Afterwards `stop` tells whether the drafter searches this text, and whether the drafter's model drafts.
        """
        seq, reading = request.seq, request.reading
        stop.search = self._stops.search(seq, prices) if is_searched else None
        tokens, gain = promised(stop)
        reading.gain = gain if request.pays else 0.0
        price = self._price(seq, prices, reading.num_unread)
        stop.is_shut = not request.pays or not reading.is_due(price, _num_left(seq) / tokens)
        known = self._stops.of(seq.draft)
        owed = 0.0 if reading.is_read else price
        # A probe of one token, to see whether the model has become better.
        if not request.pays and self._step >= request.probe_at:
            if owed <= known.spare:
                self._delay_probe(request)
                known.spare -= owed
                stop.is_shut, stop.worth = False, stop.worth[:1]
            else:
                request.probe_at = max(self._choose_at, self._step + REPLAN_STEPS)
        stop.bar = 0.0 if stop.is_shut else reading.gain
        # A model that pays but has not read the text gets a length, too: `Reading` counts what rounds without it lose.
        request.length = self.spec_length if is_searched or request.pays or not stop.is_shut else 0

    def _is_told(self, request: _Request) -> bool:
        """Return whether the request's drafter tells its confidence, and the request sets no length itself."""
        return self.costs.traits_of(request.seq.draft).tells_confidence and request.seq.params.spec_length is None

    def _of(self, seq: Sequence) -> Acceptance:
        return self._known.setdefault(seq.draft, Acceptance())

    def _meet(self, seq: Sequence) -> _Request:
        """Record a request. Until the next plan, its draft length is the largest among its drafter's other requests."""
        others = [request for request in self._requests.values() if request.seq.draft == seq.draft]
        length, pause = max([(r.length, r.pause) for r in others], default=(0, FIRST_PAUSE))
        newcomer = self._requests[seq.id] = _Request(seq, length, self._step + pause, pause)
        if self._is_told(newcomer) and not others:
            newcomer.length = self.spec_length
            self._choose_at = 0
            self._choose_pause = REPLAN_STEPS
        self._replan_at = self._replan_at if others else 0
        return newcomer

    def _wanted(self, request: _Request) -> int:
        """Return how many nodes the plan gives a request, or 1 where the request is probed."""
        if request.length > 0 or self._step < request.probe_at or (request.stop and request.stop.is_shut):
            return request.length
        self._delay_probe(request)
        others = [r for r in self._requests.values() if r.seq.draft == request.seq.draft]
        if not any(r.length for r in others):  # where a drafter fails for all requests, only one of them is probed
            for other in others:
                other.pause, other.probe_at = max(other.pause, request.pause), max(other.probe_at, request.probe_at)
        return 1

    def _delay_probe(self, request: _Request) -> None:
        """Double the pause before the next probe of a request that is probed now."""
        request.pause = min(2 * request.pause, LONGEST_PAUSE)
        request.probe_at = self._step + request.pause

    def _replan(self, requests: Seq[_Request], limits: Seq[int]) -> None:
        """Choose a draft length for each request that sets no length itself."""
        # Plans are made more often at first, when each step still changes the estimates.
        self._replan_at = self._step + min(REPLAN_STEPS, 1 + self._step // 4)
        named = [request.seq.params.spec_length for request in requests]
        num_rows = len(requests) + sum(min(k, most) for k, most in zip(named, limits, strict=True) if k is not None)
        confident = [request.seq for request in requests if request.stop and request.length]
        num_rows += round(sum(self._stops.of(seq.draft).round_of(seq.id).nodes for seq in confident))
        by_drafter: dict[str, list[int]] = {}
        for b, request in enumerate(requests):
            if named[b] is None and limits[b] > 0 and not self._is_told(request):
                by_drafter.setdefault(request.seq.draft, []).append(b)
        nodes = [self._nodes(requests, limits, members) for members in by_drafter.values()]
        if not nodes:
            return
        old = np.array([request.length for request in requests])
        new = self._best(old, num_rows, np.concatenate(nodes, axis=1))
        for request, length in zip(requests, new.tolist(), strict=True):
            if request.length and not length:
                request.probe_at = self._step + request.pause
            request.length = length

    def _nodes(self, requests: Seq[_Request], limits: Seq[int], members: Seq[int]) -> Floats:
        """Return every node that one drafter could draft, [5, nodes]: tokens gained, request, rank, rows and seconds.

        members: the indices of the drafter's requests. Nodes of one rank share a pass of the drafter. The first node of
        a rank takes the seconds of a pass of one row, and each further node only the seconds of one more row.
        """
        seq = requests[members[0]].seq
        known, cost = self._of(seq), self.costs.draft(seq.draft)
        mean = known.drafter_shares()
        gains = np.array([known.request_shares(requests[b].seq.id, mean) for b in members])
        most = np.array([min(limits[b], self.spec_length) for b in members])
        gains[np.arange(MAX_RANKS) >= most[:, None]] = 0.0
        order = np.argsort(-gains, axis=0, kind="stable")  # [members, ranks]
        passes = np.concatenate(([0.0], cost.ratio(np.arange(1, len(members) + 1))))
        seconds = np.diff(passes)[:, None] * (cost.one_row_s or 0.0)
        gains = np.take_along_axis(gains, order, axis=0)
        found_share = known.found_share
        columns = (gains * found_share, np.array(members)[order], np.arange(MAX_RANKS), found_share, seconds)
        return np.stack([np.broadcast_to(column, order.shape).ravel() for column in columns])

    def _best(self, old: Ints, num_rows: int, nodes: Floats) -> Ints:
        """Return the draft lengths [B] of the plan with the most tokens per second.

        If that plan is not clearly faster than the old lengths, the old lengths are returned. nodes: the nodes of all
        drafters, as `_nodes` returns them. num_rows: the number of rows of the pass without these nodes.
        """
        gains, owners, ranks, rows, seconds = nodes[:, np.argsort(-nodes[0], kind="stable")]
        owners = owners.astype(int)
        one_row_s = self.costs.target.one_row_s or 1.0
        cuts = np.repeat(CUTS, len(ranks)).reshape(-1, len(ranks))
        wanted = ranks < np.concatenate(([old[owners]], cuts))  # [1 + cuts, nodes]: by the old plan, then by each cut
        wanted[1:] &= gains > 0
        # Column n is the plan with the wanted nodes among the first n + 1; the cut at 0 is plain decoding.
        tokens, rows, draft_s = (np.cumsum(wanted * column, axis=1) for column in (gains, rows, seconds))
        rates = (len(old) + tokens) / (one_row_s * self.costs.target.ratio(num_rows + rows) + draft_s)
        cut, last = np.unravel_index(int(rates[1:].argmax()), cuts.shape)
        if rates[1 + cut, last] <= HYSTERESIS * rates[0, -1]:
            return old
        return np.bincount(owners[: last + 1][wanted[1 + cut, : last + 1]], minlength=len(old))


def build(options: Options, spec_length: int | None, costs: Costs) -> Pacing:
    """Return a policy that grants as many tokens as pay: at most spec_length, or 16 where it is None."""
    return AutoPacing(spec_length or AUTO_SPEC_LENGTH, costs)
