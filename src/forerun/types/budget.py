"""How many tokens a step may draft, and when a draft ends."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

# Committed tokens that a round leaves for a draft model to run: one, or two after a fully accepted draft.
ROUND_TOKENS = 2
# The share of guesses that is accepted under a grammar, where nobody has counted it: a model's, and a text search's.
MODEL_SHARE, FOUND_SHARE = 0.85, 0.5
# The price of a further row, in saved passes: on a CPU a row takes 0.13 to 0.19 of a one-row pass, and not every row
# saves a pass.
ROW_PRICE = 0.25
EDGES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # of the bins of a guess's probability by the model that guessed it


def _may(*_: Any) -> bool:
    """Return True. As `go_on` or `go_behind` of a budget, this lets a drafter use the whole budget."""
    return True


@dataclass
class Stop:
    """A rule that ends one sequence's draft where one more token is too unlikely to be accepted.

    The confidence of a token is the probability that the token has by the model that guessed it. EDGES separate bins of
    confidences. shares [len(EDGES) + 1]: the share of tokens that are accepted, by bin. worth: by the number of tokens
    drafted so far, the least probability of acceptance at which one more token is worth drafting. A token is accepted
    if the whole path down to it is. After the last number no token is worth drafting. share: how often a token is
    accepted, as estimated before the token is drawn. confidences: the confidences of the drafted tokens, which the
    drafter adds. parents: by token, the index of its parent; -1 = the last committed token, [] = the draft is a chain.
    is_shut: whether the model must not draft at all. num_unread: the number of committed tokens that the model has not
    run, set by a drafter that also searches the text. search: the stop for the guess of this search, which comes before
    the model's guess. The guess of the search is drafted if the expected number of accepted tokens, less their cost, is
    at least `bar`.
    A token that ends a chain stays in the chain, so that the decision looks only at tokens that are drawn already
    (docs/exactness.md). A drafter that draws nothing may look at a token first (`takes`).
    """

    shares: Seq[float]
    worth: Seq[float]
    share: float = 1.0
    is_shut: bool = False
    num_unread: int | None = None
    search: Stop | None = None
    bar: float = 0.0
    confidences: list[float] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    gain: float = 0.0  # accepted tokens that the taken tokens promise, less their cost
    _survival: float = 1.0  # the probability that the best path is accepted: the first token, its first child, ...
    _tip: int = -1  # the last token of the best path, where `takes` added the tokens
    _survivals: list[float] = field(default_factory=list)  # of each token that `takes` added

    @staticmethod
    def never(length: int) -> Stop:
        """Return a stop that ends no chain of at most `length` tokens early."""
        return Stop((1.0,) * (len(EDGES) + 1), (0.0,) * (length + 1))

    @property
    def least(self) -> list[float]:
        """For each depth, the smallest chance of a whole chain at which one more token may still be drafted.

        The chance is that all tokens of the chain so far are accepted, the product of their shares (`share`). The first
        entry applies after the first token. After the depth of the last entry, no token is drafted.
        """
        return [worth / max(self.share, 1e-6) for worth in self.worth[1:]]

    @property
    def survival(self) -> float:
        """The probability that the draft's best path is accepted, whether the model or the search drafted it."""
        is_found = self.search is not None and self.search.confidences and not self.confidences
        return self.search._survival if self.search is not None and is_found else self._survival

    @property
    def pays(self) -> bool:
        """Whether a first token is worth drafting."""
        return self.worth[0] / max(self.share, 1e-6) <= 1

    def takes(self, confidence: float, parent: int) -> bool:
        """Return whether a token is worth drafting, and if so add it. Only for tokens drafted as point masses.

        parent: the index of the token's parent among the tokens added so far; -1 = the last committed token.
        """
        num = len(self.confidences)
        survival = (1.0 if parent < 0 else self._survivals[parent]) * self.share_of(confidence)
        if num >= len(self.worth) or survival < self.worth[num]:
            return False
        self.confidences.append(confidence)
        self.parents.append(parent)
        self.gain += survival - self.worth[num]
        self._survivals.append(survival)
        if parent == self._tip:
            self._tip, self._survival = num, survival
        return True

    def share_of(self, confidence: float) -> float:
        """Return the share of tokens with this confidence that are accepted."""
        return self.shares[bisect.bisect_right(EDGES, confidence)]

    def goes_on(self, confidence: float) -> bool:
        """Add a token, and return whether another token may follow."""
        depth = len(self.confidences)
        self.confidences.append(confidence)
        self._survival *= self.share_of(confidence)
        least = self.least
        return depth < len(least) and self._survival >= least[depth]


@dataclass
class Budget:
    """The number of tokens that this step may draft. The pacing policy makes the budget, and the drafter reads it.

    num_tokens [B]: the largest number of draft nodes of each sequence. catchup_tokens: the largest number of committed
    tokens that the drafter may run through its model before drafting. Tokens that the previous round left to the
    drafter do not count.
    go_on(b, depth, draft_probs[, logits]): whether to draw a token. The drafter calls it before each draw. The answer
    may depend on the distribution, never on the drawn token (docs/exactness.md). go_behind(b, depth, token,
    draft_probs[, logits]): whether another token may follow. A drafter with a model calls it after each draw. The drawn
    token stays in the draft in either case.
    limits [B]: the number of nodes for which each sequence has room before its own end and in the cache, even where
    `num_tokens` is lower. Tokens that a grammar forces may fill this room. 0 = such tokens are not to be drafted; an
    empty list means 0 for every sequence.
    logits [V]: the model's raw logits, before bias, temperature and filters. A drafter without a model leaves them out,
    and a drafter with a model need not compute them unless `reads_logits`. stops: by sequence, a further rule that ends
    the sequence's chain; only for drafters with `tells_confidence`.
    """

    num_tokens: list[int]
    catchup_tokens: int
    go_on: Callable[..., bool] = _may
    go_behind: Callable[..., bool] = _may
    reads_logits: bool = False
    stops: Mapping[int, Stop] = field(default_factory=dict)
    limits: list[int] = field(default_factory=list)

    @property
    def stops_early(self) -> bool:
        """Whether a draft may end before its budget is used. If not, a drafter may make a whole draft at once."""
        return self.go_on is not _may or self.go_behind is not _may

    def carries(self, b: int, num_guessed: int, num_forced: int, share: float = MODEL_SHARE) -> bool:
        """Return whether forced tokens are worth drafting after `num_guessed` guesses of sequence b.

        Tokens that a grammar forces save a pass if all the guesses are accepted; otherwise their rows are wasted.
        share: how often a guess is accepted; used where pacing has set no stop for the sequence.
        """
        stop = self.stops.get(b)
        survival = share**num_guessed if stop is None else stop.survival
        return survival >= (1 - survival) * ROW_PRICE * num_forced

    def only(self, members: Seq[int], catchup_tokens: int) -> Budget:
        """Return the budget of some of the sequences, renumbered from 0.

        members: the indices of these sequences in this budget. catchup_tokens: the catch-up tokens that other drafters
        of the step have left over; the new budget gets this number.
        """
        budget = Budget([self.num_tokens[b] for b in members], catchup_tokens, reads_logits=self.reads_logits)
        budget.limits = [self.limits[b] for b in members] if self.limits else []
        budget.stops = {i: self.stops[b] for i, b in enumerate(members) if b in self.stops}
        if self.go_on is not _may:
            budget.go_on = lambda i, *at: self.go_on(members[i], *at)
        if self.go_behind is not _may:
            budget.go_behind = lambda i, *at: self.go_behind(members[i], *at)
        return budget
