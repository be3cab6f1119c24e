"""The one step: plain decoding, prefill, chunked prefill and verification are one ragged pass.

Each sequence contributes a run of new tokens: a prompt chunk wants no logits, plain decoding is a run of one,
verification is the last committed token plus the draft.

    propose   the drafter guesses within the budget that the pacing policy set per sequence
    score     one target pass over every run
    judge     verify the draft: pure, no model, no cache, no clock
    commit    append what was verified, cut at stop conditions, keep the accepted rows of the cache
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from forerun import sampling, verify
from forerun.drafters import Seen
from forerun.engine import beams
from forerun.engine.beams import BeamSearch
from forerun.engine.catchup import CatchUp
from forerun.engine.request import Request
from forerun.engine.router import Router
from forerun.engine.scheduler import Plan
from forerun.errors import ForerunError, InternalError
from forerun.kv import Held
from forerun.models.runner import NO_NUMBERS, Run, Runner, Scores
from forerun.pacing import Pacing, overrides
from forerun.sampling.random import WatchedCoins
from forerun.types import (
    NO_TOKEN,
    Budget,
    Coins,
    Draft,
    Next,
    Origin,
    Packed,
    Probs,
    RoundDetail,
    Sequence,
    SequenceStep,
    StepReport,
    TokenLogprob,
    Toss,
    Verdict,
)


class RequestFailed(Exception):
    """One sequence cannot go on; the step was not committed and can be repeated without it."""

    def __init__(self, seq: Sequence, error: Exception) -> None:
        super().__init__(str(error))
        self.seq, self.error = seq, error


@dataclass
class Stepper:
    """What a step works with. coins(seq) makes the randomness of one sequence's next round.

    packs_siblings: whether equal siblings of a draft share a row; off, each node has one, which the tests compare.
    """

    runner: Runner
    drafter: Router
    pacing: Pacing
    coins: Callable[[Sequence], Coins]
    catchup: CatchUp
    wants_detail: bool = False
    packs_siblings: bool = True

    def step(self, plan: Plan, schedule_s: float = 0.0) -> StepReport:
        """Run one step; every decoding request gets at least one token. schedule_s: what the plan took, for the report.

        Raises RequestFailed, with nothing committed, where a sequence has no token that it may emit.
        """
        with self.runner.model.ops.alone():
            return self._step(plan, schedule_s)

    def _step(self, plan: Plan, schedule_s: float) -> StepReport:
        self.drafter.take_steps()  # what an interrupted step left
        clock = [time.perf_counter()]
        seqs = [request.seq for request in plan.decode]
        coins = [self.coins(seq) for seq in seqs]

        draft, granted = self._propose(plan, seqs, coins)
        clock.append(time.perf_counter())
        packed = [_packed(draft, b) if self.packs_siblings else None for b in range(len(seqs))]
        scores = self._score(plan, draft, packed)
        clock.append(time.perf_counter())
        target_probs = _target_probs(plan.decode, draft, scores, packed)
        watched = list(map(WatchedCoins, coins)) if self.wants_detail else []
        try:
            judges = [request.search or request.seq.acceptance for request in plan.decode]
            verdict = verify.judge(draft, target_probs, watched or coins, judges)
        except verify.RulingFailed as failure:
            raise RequestFailed(seqs[failure.b], failure.error) from failure
        for seq, token in zip(seqs, verdict.next_tokens, strict=True):
            if token == NO_NUMBERS:  # behind its last committed token
                raise RequestFailed(seq, InternalError("the model returned logits that are no numbers"))
        clock.append(time.perf_counter())
        rounds = [
            _detail(seqs[b], draft, target_probs[b], verdict, b, granted[b], own.tosses, self.pacing.facts(seqs[b]))
            for b, own in enumerate(watched)
        ]
        report = self._commit(plan, draft, packed, scores, verdict)
        report.rounds = rounds
        clock.append(time.perf_counter())

        report.schedule_s = schedule_s
        report.draft_s, report.score_s, report.judge_s, report.commit_s = map(operator.sub, clock[1:], clock)
        report.target_forward_s = scores.forward_s
        if shares_s := self.drafter.shares_s:
            for request in (*plan.decode, *(request for request, _ in plan.prefill)):
                request.report.draft_prefill_s += shares_s.get(request.seq.id, 0.0)
        report.drafts = self.drafter.take_steps()
        self.catchup.observe(report)
        self.pacing.observe(report)
        return report

    def _propose(self, plan: Plan, seqs: Seq[Sequence], coins: Seq[Coins]) -> tuple[Draft, list[int]]:
        """A draft within the limits of the plan, and what was granted.

        The drafters of running prompts run them, too, where it may pay.
        """
        prompts = [(request.seq, take) for request, take in plan.prefill if self.pacing.prepares(request.seq)]
        if prompts:
            # No more than the target reads, which takes longer for each of them: the step is not doubled either.
            most = min(self.catchup.most_tokens, sum(take for _, take in prompts))
            self.drafter.catch_up([seq for seq, _ in prompts], most)
        limits = plan.draft_limits
        searches = {b: request.search for b, request in enumerate(plan.decode) if request.search is not None}
        if searches:
            limits = [0 if b in searches else limit for b, limit in enumerate(limits)]
        granted = self._granted(seqs, limits, searches)
        draft = self._drafted(seqs, granted, coins) if any(granted) else Draft.empty(len(seqs))
        return (self._with_searches(draft, searches, plan.draft_limits) if searches else draft), granted

    def _granted(self, seqs: Seq[Sequence], limits: Seq[int], searches: Collection[int]) -> list[int]:
        """The nodes that each sequence may have; a beam search, which is paced by its levels, none."""
        members = [b for b in range(len(seqs)) if b not in searches]
        paced = self.pacing.budget([seqs[b] for b in members], [limits[b] for b in members])
        granted = [0] * len(seqs)
        for b, wanted in zip(members, paced, strict=True):
            granted[b] = max(0, min(wanted, limits[b]))
        return granted

    def _with_searches(self, draft: Draft, searches: Mapping[int, BeamSearch], limits: Seq[int]) -> Draft:
        """The draft with the trees of beam searches put in. limits [B]: rows that each may have."""
        seqs, num_rows = [search.seq for search in searches.values()], len(draft.tokens) + draft.num_sequences
        num_levels = beams.num_levels(seqs, self.pacing, num_rows - len(searches))
        for b, search in searches.items():
            search.begin(limits[b], num_levels[search.seq.id])
        drafts = {seq.draft for seq in seqs}
        catchup_tokens = self.catchup.tokens(drafts, self.drafter.num_caught_up)

        def branch(seqs: Seq[Sequence], levels: Seq[Seq[int]]) -> list[list[Next | None]]:
            return self.drafter.branch(seqs, levels, catchup_tokens)

        trees = beams.propose(list(searches.values()), branch)
        parts = dict(zip(searches, trees, strict=True))
        return Draft.joined([parts[b] if b in parts else draft.only(b) for b in range(draft.num_sequences)])

    def _drafted(self, seqs: Seq[Sequence], granted: Seq[int], coins: Seq[Coins]) -> Draft:
        """What the drafters guess within what was granted."""
        catchup_tokens = self.catchup.tokens({seq.draft for seq in seqs}, self.drafter.num_caught_up)
        budget = Budget(list(granted), catchup_tokens)  # the drafter's own
        budget.reads_logits = self.pacing.reads_logits
        if overrides(self.pacing, "go_on"):
            budget.go_on = lambda b, *at: self.pacing.go_on(seqs[b], *at)
        if overrides(self.pacing, "go_behind"):
            budget.go_behind = lambda b, *at: self.pacing.go_behind(seqs[b], *at)
        return self.drafter.propose(seqs, budget, coins)

    def _score(self, plan: Plan, draft: Draft, packed: Seq[Packed | None]) -> Scores:
        """One pass over [last committed token, draft nodes] of every decoding sequence and over the prompt chunks."""
        best = self.runner.finds_best
        runs = []
        for b, request in enumerate(plan.decode):
            if request.search is not None:
                runs.append(request.search.run())
                continue
            only_best = best and request.takes_the_best and not self.drafter.of(request.seq).top_logits
            runs.append(_run(request, draft, b, packed[b], only_best))
        for request, take in plan.prefill:
            done = self.runner.cache.length(request.seq.id)
            runs.append(Run(request.seq.id, request.seq.tokens[done : done + take], "none"))
        return self.runner.forward(runs)

    def _commit(
        self,
        plan: Plan,
        draft: Draft,
        packed: Seq[Packed | None],
        scores: Scores,
        verdict: Verdict,
    ) -> StepReport:
        report = StepReport(num_decoding=len(plan.decode), num_drafted=draft.num_guesses)
        report.num_prefill_tokens = sum(take for _, take in plan.prefill)
        report.num_rows = scores.rows[-1].stop if scores.rows else 0
        report.num_context_tokens = sum([len(request.seq.tokens) for request in plan.decode]) - report.num_decoding
        kept: dict[int, Seq[int]] = {request.seq.id: range(take) for request, take in plan.prefill}
        held: dict[int, Held] = {}
        for b, request in enumerate(plan.decode):
            if request.search is not None:
                step, kept[request.seq.id], held[request.seq.id] = _commit_search(request, draft, verdict, b)
            else:
                step, kept[request.seq.id] = self._commit_one(request, draft, packed[b], scores.logits[b], verdict, b)
            report.sequences.append(step)
        report.num_tested = sum([step.num_tested for step in report.sequences])
        report.num_accepted = sum([step.num_accepted for step in report.sequences])
        report.num_emitted = report.num_accepted + sum(
            [request.search is None or request.search.num_steps > 0 for request in plan.decode]
        )
        report.num_committed = sum([step.num_committed for step in report.sequences])
        seqs = [request.seq for request in plan.decode] + [request.seq for request, _ in plan.prefill]
        self._keep(seqs, kept, held)
        shown = {slot: rows for slot, rows in kept.items() if slot not in held}
        self.drafter.observe(
            seqs, [self._seen(seq, shown.get(seq.id, ()), scores, run) for run, seq in enumerate(seqs)]
        )
        return report

    def _seen(self, seq: Sequence, kept: Seq[int], scores: Scores, run: int) -> Seen:
        """What the pass showed of a sequence, behind the commit."""
        rows = scores.rows[run]
        start = self.runner.cache.length(seq.id) - len(kept)
        return Seen(start, [rows.start + i for i in kept], rows, run, scores)

    def _commit_one(
        self, request: Request, draft: Draft, packed: Packed | None, logits: Tensor, verdict: Verdict, b: int
    ) -> tuple[SequenceStep, list[int]]:
        """Count and commit; and the cache rows of the tokens that are no longer last: root and accepted nodes."""
        seq, start, path, num_tested = request.seq, draft.node_starts[b], verdict.paths[b], verdict.num_tested(b)
        num_nodes, emitted = draft.node_starts[b + 1] - start, verdict.emitted(draft, b)
        num_rows = 1 + (num_nodes if packed is None else len(packed.tokens))
        request.report.count(num_nodes, draft.depth(b) if num_nodes else 0, len(path), num_tested, num_rows)
        request.report.prices += [test.price for test in verdict.tests[b] if test.price is not None]
        rows = [0, *[_row(packed, n - start) for n in path]] if path else [0]  # row i decided emitted token i
        logprobs: Seq[TokenLogprob] = ()
        if (most := seq.params.logprobs) is not None:
            logprobs = [sampling.logprobs_of(logits[r], t, most) for r, t in zip(rows, emitted, strict=True)]
        committed = request.commit(emitted, _origins(num_nodes, len(path), num_tested), logprobs)
        seq.round += 1
        step = SequenceStep(seq.id, seq.draft, num_nodes, num_tested, tuple([n - start for n in path]), committed)
        return step, rows[:committed]

    def _keep(self, seqs: Seq[Sequence], kept: Mapping[int, Seq[int]], held: Mapping[int, Held]) -> None:
        """Keep the cache rows of committed tokens, and let others find what they fill. held: rows of beam searches."""
        full = set(self.runner.cache.keep(kept, held) if held else self.runner.cache.keep(kept))
        for seq in seqs:
            if seq.id in full:
                self.runner.cache.publish(seq.id, seq.tokens)


class _LazyRows(Seq[Probs]):
    """target_probs of one sequence, computed when a rule asks for them: rows behind a rejection cost nothing.

    Row 0 is the distribution after the last committed token, row 1 + i the one after node i of the sequence. Behind a
    node a row may have none, as where a bad word would follow an end token: that fails nothing unless it is reached.
    """

    def __init__(self, seq: Sequence, draft: Draft, b: int, packed: Packed | None, logits: Tensor) -> None:
        self._seq, self._draft, self._first, self._logits = seq, draft, draft.node_starts[b], logits
        self._packed = packed
        self._soft = verify.find(seq.acceptance).reads_soft_rows
        self.known: list[Probs | None] = [None] * (1 + len(draft.nodes(b)))  # extra rows are not judged

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        probs = self.known[row]
        if probs is None:
            path = self._draft.path(self._first + row - 1) if row > 0 else []
            history = sampling.History.of(self._seq, [self._draft.tokens[n] for n in path])
            logits = self._logits[_row(self._packed, row - 1) if row > 0 else 0]
            try:
                probs = sampling.probs(logits, self._seq.params, history, self._soft)
            except ForerunError:
                if row == 0:
                    raise
                probs = Probs.of_point(NO_TOKEN)
            self.known[row] = probs
        return probs


Rows = list[Probs] | _LazyRows  # target_probs of one sequence


def _target_probs(requests: Seq[Request], draft: Draft, scores: Scores, packed: Seq[Packed | None]) -> list[Rows]:
    """Of each sequence; points where only the largest logits were asked for. A beam search makes its own of logits."""
    found = list[Rows]()
    for b, request in enumerate(requests):
        seq = request.seq
        if request.search is not None:
            request.search.scored(scores.logits[b])
            found.append([])
        elif best := scores.best[b]:
            points = list(map(Probs.of_point, best))
            own = packed[b]
            found.append(points if own is None else [points[0], *(points[1 + place] for place in own.places)])
        else:
            found.append(_LazyRows(seq, draft, b, packed[b], scores.logits[b]))
    return found


def _commit_search(request: Request, draft: Draft, verdict: Verdict, b: int) -> tuple[SequenceStep, list[int], Held]:
    """Count the steps of a beam search, and commit what its texts share; as `_commit_one`, and rows that stay."""
    search, emitted = request.search, verdict.emitted(draft, b)
    assert search is not None
    step, kept, held = search.settle()
    num_rows = len(search.fed) + step.num_drafted
    request.report.count(
        step.num_drafted, search.num_levels, step.num_accepted, step.num_tested, num_rows, search.num_steps
    )
    request.commit(emitted, ["plain"] * len(emitted), ())
    request.seq.round += 1
    if search.is_over:
        search.conclude()
    return step, kept, held


def _packed(draft: Draft, b: int) -> Packed | None:
    """How sequence b's nodes share rows; None where each has a row of its own, as in chains.

    A draft with extra rows, which hang from rows of nodes, is not packed.
    """
    nodes = draft.nodes(b)
    if (
        len(nodes) < 2
        or b in draft.extra
        or b in draft.known
        or draft.parents[nodes.start + 1 : nodes.stop] == list(nodes[:-1])
    ):
        return None
    packed = draft.packed(b)
    return packed if len(packed.tokens) < len(nodes) else None


def _row(packed: Packed | None, node: int) -> int:
    """Return the row of a run that scores a node of its sequence; row 0 is the last committed token's."""
    return 1 + (node if packed is None else packed.places[node])


def _run(request: Request, draft: Draft, b: int, packed: Packed | None, best_only: bool) -> Run:
    """The last committed token of a request, then its draft, then its extra rows."""
    seq, start, stop, extra = request.seq, draft.node_starts[b], draft.node_starts[b + 1], draft.extra.get(b)
    if start == stop and extra is None:
        return Run(seq.id, (seq.tokens[-1],), "all", None, best_only)
    if packed is not None:
        tokens, parents = [seq.tokens[-1], *packed.tokens], [-1, *(p + 1 for p in packed.parents)]
        return Run(seq.id, tokens, "all", parents, best_only)
    tokens = [seq.tokens[-1], *draft.tokens[start:stop]]
    parents = [-1, *[0 if p < 0 else p - start + 1 for p in draft.parents[start:stop]]]
    if extra is None:
        return Run(seq.id, tokens, "all", parents, best_only)
    vectors = {len(tokens) + i: vector for i, vector in extra.vectors.items()}
    parents += [p + 1 for p in extra.parents]
    return Run(seq.id, [*tokens, *extra.tokens], "all", parents, best_only, vectors=vectors or None)


def _origins(num_nodes: int, num_accepted: int, num_tested: int) -> list[Origin]:
    """Of each token that a round emits. A path that ended at a leaf, not at a rejection, emits a bonus token."""
    last: Origin = "plain" if not num_nodes else "bonus" if num_accepted == num_tested else "correction"
    return [*["accepted"] * num_accepted, last]  # type: ignore[list-item]


def _detail(
    seq: Sequence,
    draft: Draft,
    rows: Rows,
    verdict: Verdict,
    b: int,
    granted: int,
    tosses: Seq[Toss],
    facts: Mapping[str, float],
) -> RoundDetail:
    nodes, tests, next_token = draft.nodes(b), verdict.tests[b], verdict.next_tokens[b]
    if next_token == NO_TOKEN:  # of a beam search: the end of its best text
        next_token = (
            seq.hypotheses.tokens[tips[0]] if seq.hypotheses and (tips := seq.hypotheses.tips) else seq.tokens[-1]
        )
    if start := nodes.start:
        tests = [dataclasses.replace(test, node=test.node - start) for test in tests]
    parents = [p - start if p >= 0 else -1 for p in draft.parents[start : nodes.stop]]
    known = rows if isinstance(rows, list) else rows.known  # watching must not compute more
    judging = [known[parent + 1] if known else None for parent in parents]
    return RoundDetail(
        sequence_id=seq.id,
        position=len(seq.tokens),
        tokens=[draft.tokens[n] for n in nodes],
        parents=parents,
        draft_probs=[draft.probs[n].at(draft.tokens[n]) for n in nodes],
        target_probs=[None if p is None else p.at(draft.tokens[n]) for n, p in zip(nodes, judging, strict=True)],
        tests=tests,
        accepted=[n - start for n in verdict.paths[b]],
        next_token=next_token,
        granted=granted,
        tosses=tosses,
        pacing=facts,
    )
