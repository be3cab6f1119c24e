"""Runs, judges and commits the rounds of a request with one text.

Each row of the request's run decides the token after the row's token. Row 0 is the row of the last committed token, and
`Draft.row` gives the row of each node. The distribution of a row is computed only if the verification rule reads the
row. So no distributions are computed for rows after a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun import sampling, verify
from forerun.engine.request import Committed, Request
from forerun.errors import ForerunError
from forerun.models.runner import Run, Scores
from forerun.sampling.largest import Rows
from forerun.sampling.random import PhiloxCoins
from forerun.types import FORCED, NO_TOKEN, Coins, Draft, Origin, Probs, Sequence, SequenceStep, TokenLogprob, Verdict
from forerun.verify import Ruling


class _LazyRows(Seq[Probs]):
    """Computes the target's distributions for one sequence, each when a verification rule first reads it.

    Item 0 is the distribution after the last committed token, item 1 + i the distribution after node i of the sequence.
    If masks forbid every token after a node, the node's item is the point mass of NO_TOKEN. This is an error only if a
    ruling accepts the node. logits: the logits of the run's rows.
    """

    def __init__(self, seq: Sequence, draft: Draft, b: int, logits: Rows) -> None:
        self._seq, self._draft, self._b, self._logits = seq, draft, b, logits
        self._soft = verify.find(seq.acceptance).reads_soft_rows
        self.known: list[Probs | None] = [None] * (1 + len(draft.nodes(b)))  # extra rows are not judged

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        probs = self.known[row]
        if probs is None:
            probs = self.known[row] = self._after(None if row == 0 else self._draft.nodes(self._b)[row - 1])
        return probs

    def _after(self, node: int | None) -> Probs:
        """Return the target's distribution after a node. node None: the distribution after the last committed token."""
        draft = self._draft
        path = [] if node is None else draft.path(node)
        history = sampling.History.of(self._seq, [draft.tokens[n] for n in path])
        logits = self._logits[0 if node is None else draft.row(self._b, node)]
        try:
            return sampling.probs(logits, self._seq.params, history, self._soft)
        except ForerunError:
            if node is None:
                raise
            return Probs.of_point(NO_TOKEN)


class SampledRequest(Request):
    """A request that decodes one text token by token, by sampling or greedily."""

    _rows: list[Probs] | _LazyRows = []  # noqa: RUF012 - replaced by each ruling

    @property
    def num_unrun(self) -> int:  # type: ignore[override]
        return 0 if self.seq.is_only_read else 1

    def run(self, draft: Draft, b: int, best_only: bool, coins: Coins | None = None) -> Run:
        run = self._run(draft, b, best_only)
        is_plain = self.only_filters and self.seq.grammar is None
        if not (is_plain and isinstance(coins, PhiloxCoins)) or b in draft.extra:
            return run
        if self._may_end_by_force(len(draft.nodes(b))):
            return run
        return self._drawn(run, coins)

    def _drawn(self, run: Run, coins: PhiloxCoins) -> Run:
        """Return a copy of `run` that lets the device draw the tokens.

        The copy has, for each row, the settings of the draw, and the token ids whose probabilities the verification
        rule will read. coins: the random numbers of the round, from which the settings take the seed and the position.
        """
        shares_noise = len(run.tokens) == 1 or verify.find(self.seq.acceptance).name == "match"
        filters = sampling.filters_of(self.seq.params, 0)
        depths = [0] * len(run.tokens)
        asked = [list[int]() for _ in run.tokens]
        for row, parent in enumerate(run.parents or ()):
            if parent >= 0:
                depths[row] = depths[parent] + 1
                asked[parent].append(run.tokens[row])
        draws = [coins.behind(filters, shares_noise, depth) for depth in depths]
        return run._replace(best_only=False, draws=draws, asked=asked)

    def _run(self, draft: Draft, b: int, best_only: bool) -> Run:
        seq = self.seq
        nodes = draft.nodes(b)
        extra = draft.extra.get(b)
        shared = draft.shared.get(b)
        only = best_only and self.takes_the_best and not self._may_end_by_force(len(nodes))
        if not nodes and extra is None:
            return Run(seq.id, (seq.tokens[-1],), "all", None, only)
        if shared is not None:
            parents = [-1, *(p + 1 for p in shared.parents)]
            return Run(seq.id, [seq.tokens[-1], *shared.tokens], "all", parents, only)
        tokens = [seq.tokens[-1], *draft.tokens[nodes.start : nodes.stop]]
        parents = [-1, *[0 if p < 0 else p - nodes.start + 1 for p in draft.parents[nodes.start : nodes.stop]]]
        if extra is None:
            return Run(seq.id, tokens, "all", parents, only)
        vectors = {len(tokens) + i: vector for i, vector in extra.vectors.items()}
        parents += [p + 1 for p in extra.parents]
        return Run(seq.id, [*tokens, *extra.tokens], "all", parents, only, vectors=vectors or None)

    def _may_end_by_force(self, num_nodes: int) -> bool:
        """Return whether forced_eos_token_id is set and the next pass may reach the last position of the output."""
        left = self.seq.max_len - len(self.seq.tokens)
        return left <= num_nodes + 1 and self.seq.params.forced_eos_token_id is not None

    def judge(self, draft: Draft, b: int, scores: Scores, coins: Coins) -> Ruling:
        if scores.drawn and (drawn := scores.drawn[b]):
            self._rows = [drawn[0], *(drawn[draft.row(b, node)] for node in draft.nodes(b))]
        elif best := scores.best[b]:  # where only the largest logits were asked for
            points = [Probs.of_point(token) for token in best]
            self._rows = [points[0], *(points[draft.row(b, node)] for node in draft.nodes(b))]
        else:
            self._rows = _LazyRows(self.seq, draft, b, scores.logits[b])
        return verify.ruling(draft, b, self._rows, coins, self.seq.acceptance)

    def judged_rows(self) -> Seq[Probs | None]:
        rows = self._rows
        return rows if isinstance(rows, list) else rows.known  # watching must not compute more

    def commit(self, draft: Draft, b: int, scores: Scores, verdict: Verdict) -> Committed:
        seq = self.seq
        nodes = draft.nodes(b)
        path = verdict.paths[b]
        num_tested = verdict.num_tested(b)
        num_nodes, emitted = len(nodes), verdict.emitted(draft, b)
        self.report.count(num_nodes, draft.depth(b) if nodes else 0, len(path), num_tested, 1 + draft.num_rows(b))
        self.report.prices += [test.price for test in verdict.tests[b] if test.price is not None]
        rows = [0, *[draft.row(b, node) for node in path]] if path else [0]  # rows[i] decided emitted[i]
        logprobs: Seq[TokenLogprob] = ()
        if (most := seq.params.logprobs) is not None:
            logits = scores.logits[b]
            logprobs = [sampling.logprobs_of(logits[r], t, most) for r, t in zip(rows, emitted, strict=True)]
        num = self.append(emitted, _origins(num_nodes, len(path), num_tested), logprobs)
        seq.round += 1
        ranks = tuple([node - nodes.start for node in path])
        forced = frozenset([node - nodes.start for node in draft.forced if node in nodes])
        name = FORCED if forced and len(forced) == num_nodes else seq.draft
        step = SequenceStep(seq.id, name, num_nodes, num_tested, ranks, num, forced)
        return Committed(step, rows[:num], len(emitted))


def _origins(num_nodes: int, num_accepted: int, num_tested: int) -> list[Origin]:
    """Return the origin of each token that a round emits: the accepted tokens, then the next token.

    The next token is plain without a draft, a bonus if no test was rejected, and otherwise a correction.
    """
    last: Origin = "plain" if not num_nodes else "bonus" if num_accepted == num_tested else "correction"
    return [*["accepted"] * num_accepted, last]  # type: ignore[list-item]
