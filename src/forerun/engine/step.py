"""Runs one step of the engine. Plain decoding, prefill and verification run together in one ragged pass.

Each sequence contributes a run of new tokens. A prompt chunk is a run that wants no logits, plain decoding is a run of
one token, and verification is a run of the last committed token and the draft.

    propose   the drafter guesses within the budget that the pacing policy set for each sequence
    score     one target pass over every run
    judge     verify the draft, without using a model, a cache or a clock
    commit    append the verified tokens, cut at stop conditions, and keep their rows in the cache

The methods of `Request` run, judge and commit a round (engine/sampled.py, engine/beams.py). `forerun.types.Draft`
defines three numberings that a step uses: nodes, rows of a run, and rows of the pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace

from forerun import verify
from forerun.drafters import Seen
from forerun.engine import beams
from forerun.engine.catchup import CatchUp
from forerun.engine.request import Committed
from forerun.engine.router import Router
from forerun.engine.scheduler import Plan
from forerun.errors import InternalError
from forerun.kv import Held
from forerun.models.runner import NO_NUMBERS, Run, Runner, Scores
from forerun.pacing import Pacing, overrides
from forerun.sampling.random import WatchedCoins
from forerun.types import Budget, Coins, Draft, Next, RoundDetail, Sequence, StepReport, Verdict


class RequestFailed(Exception):
    """Raised if one sequence cannot go on. Nothing was committed, so the step can be repeated without this sequence."""

    def __init__(self, seq: Sequence, error: Exception) -> None:
        super().__init__(str(error))
        self.seq, self.error = seq, error


class _Laps:
    """Measures the times of the consecutive parts of a step."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last call, or since the object was made."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before


@dataclass
class Stepper:
    """Runs the steps of an engine.

    coins(seq): returns the random numbers of the next round of a sequence. wants_detail: whether reports need `rounds`,
    the details of each round.
    """

    runner: Runner
    drafter: Router
    pacing: Pacing
    coins: Callable[[Sequence], Coins]
    catchup: CatchUp
    wants_detail: bool = False

    def step(self, plan: Plan, schedule_s: float = 0.0) -> StepReport:
        """Run one step and return its report. Each decoding request gets at least one token, except beam searches.

        schedule_s: the seconds that planning and listeners have taken since the last step; the report contains them.
        Raises RequestFailed if a request cannot go on, for example because masks forbid every token. Then no tokens
        are committed.
        """
        with self.runner.model.ops.alone():
            return self._step(plan, schedule_s)

    def _step(self, plan: Plan, schedule_s: float) -> StepReport:
        self.drafter.take_steps()  # drops the counts of an interrupted step
        for request in plan.decode:
            if request.seq.grammar is not None and (failure := request.seq.grammar.failure) is not None:
                raise RequestFailed(request.seq, failure)  # before the pass, which would be wasted
        laps = _Laps()
        coins = [self.coins(request.seq) for request in plan.decode]

        draft, granted = self._propose(plan, coins)
        draft_s = laps.lap()
        scores = self._score(plan, draft, coins)
        score_s = laps.lap()
        watched = [WatchedCoins(each) for each in coins] if self.wants_detail else []
        verdict = self._judge(plan, draft, scores, watched or coins)
        judge_s = laps.lap()
        # The details count from the sequences as they are now, so they are taken before the commit.
        rounds = self._rounds(plan, draft, verdict, granted, watched)
        report = self._commit(plan, draft, scores, verdict)
        commit_s = laps.lap()

        report.rounds = rounds
        report.schedule_s, report.draft_s, report.score_s = schedule_s, draft_s, score_s
        report.judge_s, report.commit_s, report.target_forward_s = judge_s, commit_s, scores.forward_s
        self._conclude(plan, report)
        return report

    # -------------------------------------------------------------------------------------------------------- propose

    def _propose(self, plan: Plan, coins: Seq[Coins]) -> tuple[Draft, list[int]]:
        """Return a draft within the limits of the plan, and the number of nodes that pacing granted to each request.

        Before drafting, drafters run the prompt chunks of this step, if the pacing policy wants this (`_catch_up`).
        coins: for each decoding request, the random numbers with which its drafter draws tokens.
        """
        self._catch_up(plan)
        seqs = [request.seq for request in plan.decode]
        granted = self._granted(plan)
        catchup_tokens = self.catchup.tokens({seq.draft for seq in seqs}, self.drafter.num_caught_up)
        draft = Draft.empty(len(seqs))
        # A grammar may force tokens, which are drafted even where pacing granted nothing.
        if any(granted) or any(seq.grammar is not None for seq in seqs):
            draft = self.drafter.propose(seqs, self._budget(plan, seqs, granted, catchup_tokens), coins)

        searching = {request.seq.draft for request in plan.decode if not request.is_paced}
        left = self.catchup.tokens(searching, self.drafter.num_caught_up)

        def branch(seqs: Seq[Sequence], levels: Seq[Seq[int]]) -> list[list[Next | None]]:
            return self.drafter.branch(seqs, levels, left)

        return beams.with_trees(draft, plan.decode, plan.draft_limits, self.pacing, branch), granted

    def _catch_up(self, plan: Plan) -> None:
        """Let drafters run the prompts that the target runs in this step, if the pacing policy wants this."""
        prompts = [(request.seq, take) for request, take in plan.prefill if self.pacing.prepares(request.seq)]
        if prompts:
            # No more tokens than the target runs. The target takes longer for each, so the step does not even double.
            most = min(self.catchup.most_tokens, sum(take for _, take in prompts))
            self.drafter.catch_up([seq for seq, _ in prompts], most)

    def _granted(self, plan: Plan) -> list[int]:
        """Return the number of nodes that the pacing policy grants to each decoding request.

        The number is 0 for a request that the policy does not pace (a beam search), and for a request whose grammar has
        failed or takes too much time for drafts.
        """
        paced = [b for b, request in enumerate(plan.decode) if request.is_paced]
        limits = [plan.draft_limits[b] for b in paced]
        granted = [0] * len(plan.decode)
        wanted = self.pacing.budget([plan.decode[b].seq for b in paced], limits)
        for b, most, limit in zip(paced, wanted, limits, strict=True):
            grammar = plan.decode[b].seq.grammar
            if grammar is None or grammar.may_draft:
                granted[b] = max(0, min(most, limit))
        return granted

    def _budget(self, plan: Plan, seqs: Seq[Sequence], granted: Seq[int], catchup_tokens: int) -> Budget:
        """Return the drafters' budget. The policy's `go_on` and `go_behind` are used only if the policy overrides them.

        granted: the result of `_granted`. catchup_tokens: how many committed tokens the drafters may run to catch up.
        """
        budget = Budget(list(granted), catchup_tokens)  # a copy, because drafters may count it down
        budget.limits = list(plan.draft_limits)
        budget.reads_logits = self.pacing.reads_logits
        budget.stops = self.pacing.stops(seqs, granted)
        if overrides(self.pacing, "go_on"):
            budget.go_on = lambda b, *at: self.pacing.go_on(seqs[b], *at)
        if overrides(self.pacing, "go_behind"):
            budget.go_behind = lambda b, *at: self.pacing.go_behind(seqs[b], *at)
        return budget

    # ---------------------------------------------------------------------------------------------------------- score

    def _score(self, plan: Plan, draft: Draft, coins: Seq[Coins]) -> Scores:
        """Run one target pass. Its runs are the decoding requests, in the order of the plan, then the prompt chunks.

        In an encoder-decoder, the encoder first runs `plan.sources`. The logits are copied to the host if a listener
        wants details or a drafter reads the likeliest tokens. Otherwise the device draws the tokens, if it can. coins:
        the random numbers of each decoding request, with which the device draws.
        """
        draws_rows = self.runner.draws_rows and not self.wants_detail
        if plan.sources and self.runner.sources is not None:
            self.runner.sources.run([request.seq.id for request in plan.sources])
        runs = []
        for b, request in enumerate(plan.decode):
            reads_top = self.drafter.of(request.seq).top_logits
            device_coins = coins[b] if draws_rows and not reads_top else None
            runs.append(request.run(draft, b, self.runner.finds_best and not reads_top, device_coins))
        for request, take in plan.prefill:
            done = self.runner.cache.length(request.seq.id)
            wanted = "all" if request.scores_prompt else "none"
            runs.append(Run(request.seq.id, request.seq.tokens[done : done + take], wanted))
        return self.runner.forward(runs)

    # ---------------------------------------------------------------------------------------------------------- judge

    def _judge(self, plan: Plan, draft: Draft, scores: Scores, coins: Seq[Coins]) -> Verdict:
        """Return the verdict on the decoding requests. Raises RequestFailed for a request that cannot be judged.

        coins: the random numbers of each decoding request, with which its verification rule decides.
        """
        rulings = []
        for b, request in enumerate(plan.decode):
            try:
                ruling = request.judge(draft, b, scores, coins[b])
            except AssertionError:  # a bug of the program, not a fault of the request
                raise
            except Exception as error:
                raise RequestFailed(request.seq, error) from error
            if ruling[1] == NO_NUMBERS:  # behind its last committed token
                raise RequestFailed(request.seq, InternalError("the model returned logits that are no numbers"))
            rulings.append(ruling)
        return verify.collected(rulings)

    def _rounds(
        self, plan: Plan, draft: Draft, verdict: Verdict, granted: Seq[int], watched: Seq[WatchedCoins]
    ) -> list[RoundDetail]:
        """Return the details of each round if listeners asked for details, else []. Call this before the commit.

        granted: the result of `_granted`. watched: the coins that recorded each request's random decisions; [] if no
        listener asked for details.
        """
        return [
            request.detail(draft, b, verdict, granted[b], coins.tosses, self.pacing.facts(request.seq))
            for b, (request, coins) in enumerate(zip(plan.decode, watched, strict=False))
        ]

    # --------------------------------------------------------------------------------------------------------- commit

    def _commit(self, plan: Plan, draft: Draft, scores: Scores, verdict: Verdict) -> StepReport:
        """Append the decided tokens, keep their cache rows, let the drafters observe the pass, and return a report."""
        num_context_tokens = sum([len(request.seq.tokens) - 1 for request in plan.decode])
        done = [request.commit(draft, b, scores, verdict) for b, request in enumerate(plan.decode)]
        for i, (request, _) in enumerate(plan.prefill, len(plan.decode)):
            if request.scores_prompt:
                request.score_prompt(self.runner.cache.length(request.seq.id), scores.logits[i])
        kept = [committed.kept for committed in done] + [range(take) for _, take in plan.prefill]
        seqs = [request.seq for request in plan.decode] + [request.seq for request, _ in plan.prefill]
        held = {
            seq.id: committed.held for seq, committed in zip(seqs, done, strict=False) if committed.held is not None
        }
        # Stop conditions may have cut the output, so the rows to keep are known only now, after `commit`.
        self._keep(seqs, kept, held)
        seen = [self._seen(seq, () if seq.id in held else kept[run], scores, run) for run, seq in enumerate(seqs)]
        self.drafter.observe(seqs, seen)
        report = _report(done)
        report.num_prefill_tokens = sum(take for _, take in plan.prefill)
        report.num_prefill_tokens += sum([len(request.seq.source_ids) for request in plan.sources])
        for request, take in plan.prefill:
            report.num_prefill_keys += take * self.runner.cache.length(request.seq.id) - take * (take - 1) // 2
        report.num_rows = scores.rows[-1].stop if scores.rows else 0
        report.num_experts = scores.num_experts
        report.num_context_tokens = num_context_tokens
        return report

    def _keep(self, seqs: Seq[Sequence], kept: Seq[Seq[int]], held: Mapping[int, Held]) -> None:
        """Keep the cache rows of committed tokens, and publish full blocks of these rows to the prefix cache.

        kept: the rows to keep of each sequence. held: by sequence id, the rows of a beam search that stay pending.
        """
        rows = {seq.id: kept_rows for seq, kept_rows in zip(seqs, kept, strict=True)}
        full = set(self.runner.cache.keep(rows, held) if held else self.runner.cache.keep(rows))
        for seq in seqs:
            if seq.id in full:
                self.runner.cache.publish(seq.id, seq.tokens)

    def _seen(self, seq: Sequence, kept: Seq[int], scores: Scores, run: int) -> Seen:
        """Return the Seen of a sequence: its rows in this pass, numbered within the pass, for its drafter.

        run: the index of the sequence's run in the pass. kept: the kept rows, numbered within this run.
        """
        rows = scores.rows[run]
        start = self.runner.cache.length(seq.id) - len(kept)
        return Seen(start, [rows.start + row for row in kept], rows, run, scores)

    def _conclude(self, plan: Plan, report: StepReport) -> None:
        """Add the drafters' records to the report, and let the catch-up limit and the pacing policy observe it."""
        if shares_s := self.drafter.shares_s:
            for request in (*plan.decode, *(request for request, _ in plan.prefill)):
                request.report.draft_prefill_s += shares_s.get(request.seq.id, 0.0)
        report.drafts = self.drafter.take_steps()
        self.catchup.observe(report)
        self.pacing.observe(self._of_drafters(report))

    def _of_drafters(self, report: StepReport) -> StepReport:
        """Return the report without tokens that grammars force, and without sequences whose drafter was not called."""
        asked = [step.without_forced for step in report.sequences if step.sequence_id not in self.drafter.unasked]
        num_forced = sum([step.num_accepted - step.without_forced.num_accepted for step in report.sequences])
        if not num_forced and len(asked) == len(report.sequences):
            return report
        return replace(report, sequences=asked, num_emitted=report.num_emitted - num_forced)


def _report(done: Seq[Committed]) -> StepReport:
    """Return a report with the counts of all decoding requests."""
    steps = [committed.step for committed in done]
    return StepReport(
        num_decoding=len(steps),
        num_drafted=sum([step.num_drafted for step in steps]),
        num_tested=sum([step.num_tested for step in steps]),
        num_accepted=sum([step.num_accepted for step in steps]),
        num_emitted=sum([committed.num_emitted for committed in done]),
        num_committed=sum([step.num_committed for step in steps]),
        sequences=steps,
    )
