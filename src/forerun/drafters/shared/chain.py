"""The draft of one sequence as a chain, which a model drafts token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from forerun.errors import BadOption
from forerun.models.runner import NO_NUMBERS
from forerun.sampling import History, arithmetic, probs
from forerun.sampling.arithmetic import Row as Logits
from forerun.types import Budget, Coins, Draft, Probs, Sequence

Row = Logits | int  # logits [V] of a sequence's next token, or the id of the largest logit


@dataclass(slots=True)
class Chain:
    """The draft of one sequence while it grows: its tokens, and the distribution from which each token was drawn.

    forced: the indices of tokens that a grammar forces.
    """

    tokens: list[int] = field(default_factory=list)
    probs: list[Probs] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)

    def force(self, run: Seq[int]) -> None:
        """Append the tokens `run`, which the grammar forces after the tokens drafted so far."""
        self.forced += range(len(self.tokens), len(self.tokens) + len(run))
        self.tokens += run
        self.probs += map(Probs.of_point, run)

    def draft(self) -> Draft:
        """Return the chain as a draft of one sequence."""
        return dataclasses.replace(Draft.chains([self.tokens], [self.probs]), forced=frozenset(self.forced))

    def grow(
        self, draft_probs: Probs, logits: Logits | None, seq: Sequence, b: int, budget: Budget, coins: Coins
    ) -> bool:
        """Draw one more token, unless the pacing policy stops here. Returns whether another token may follow.

        draft_probs: the distribution of the token. logits: the logits that pacing reads; None = none were computed. b:
        the index of `seq` in `budget`. coins: the random numbers of `seq` (see `Coins`).
        """
        depth = len(self.tokens)
        if not budget.go_on(b, depth, draft_probs, logits):
            return False
        # Match verification accepts most when drafter and target share the noise (docs/exactness.md).
        token = (coins.pick if seq.acceptance == "match" else coins.draft)(draft_probs, depth)
        self.tokens.append(token)
        self.probs.append(draft_probs)
        if (stop := budget.stops.get(b)) is not None and not stop.goes_on(_confidence(token, draft_probs, logits)):
            return False
        return budget.go_behind(b, depth, token, draft_probs, logits)


def _confidence(token: int, draft_probs: Probs, logits: Logits | None) -> float:
    """Return the probability of a drawn token.

    If `draft_probs` is a point mass and logits [V] are given, return the token's probability by softmax(logits).
    """
    if draft_probs.point is None or logits is None:
        return draft_probs.at(token)
    return arithmetic.chance(logits, token)


def next_of(
    row: Row,
    seq: Sequence,
    drafted: Seq[int],
    ids: Seq[int] | None = None,
    spread: Callable[[Logits], Logits] | None = None,
) -> tuple[Probs, Logits | None] | None:
    """Return the distribution from which to draw the token after the tokens `drafted`, and the drafter's logits [V].

    The distribution follows the sampling parameters and masks of `seq`; the logits do not. row: the drafter's output
    for the token: logits, or the id of the largest logit. With an id, the distribution is a point mass, and None
    replaces the logits. ids: maps the drafter's ids to the target's ids; None = both are equal. spread: turns the
    drafter's logits into logits of all the target's ids; None = `row` has these logits. Returns None if the largest
    logit is not finite (as with NaN), or if masks leave no token. This raises no error, because the target raises one
    if masks leave it no token.
    """
    if isinstance(row, int):
        return None if row == NO_NUMBERS else (Probs.of_point(row if ids is None else ids[row]), None)
    if not np.isfinite(row.max()):
        return None
    logits = row if spread is None else spread(row)
    try:
        return probs(logits, dataclasses.replace(seq.params, logprobs=None), History.of(seq, drafted)), logits
    except BadOption:
        return None
