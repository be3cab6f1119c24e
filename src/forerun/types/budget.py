"""How far a step may draft, and when a chain of guesses ends."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

ROUND_TOKENS = 2  # committed tokens that a round leaves a draft model to run: one, or two after a fully accepted draft
MODEL_SHARE, FOUND_SHARE = 0.85, 0.5  # accepted guesses of a model and of a text search under a grammar, if not counted
# The price of a further row, in saved passes: on a CPU it takes 0.13 to 0.19 of a one-row pass, and not each such row
# saves a pass.
ROW_PRICE = 0.25
EDGES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # between bins of a guess's probability by the model that made it


def _may(*_: Any) -> bool:
    """Return True: the answer of a policy that leaves a drafter its whole budget."""
    return True


@dataclass
class Stop:
    """Ends one sequence's chain of guesses where it is too unlikely that all of it is accepted.

    shares [len(EDGES) + 1]: how often a token is accepted whose probability, by the model that guessed it, lies below
    the first edge, between two edges, or above the last. worth: by depth, how likely the whole chain must be for one
    more token to be worth drafting; behind the last depth none is. share: how often a token is accepted that is not
    drawn yet. confidences: the probabilities of the drafted tokens, which the drafter adds. A token that ends a chain
    stays in it, so that the decision looks only at tokens that are drawn already (docs/exactness.md); a drafter that
    draws nothing may look at a token first (`takes`).
    is_shut: whether the model must not draft at all. num_unread: committed tokens that it has not run, set by a drafter
    that searches. search: the stop of a guess that a text search makes before the model is asked; the guess is drafted
    where its tokens promise at least `bar` more than they cost.
    """

    shares: Seq[float]
    worth: Seq[float]
    share: float = 1.0
    is_shut: bool = False
    num_unread: int | None = None
    search: Stop | None = None
    bar: float = 0.0
    confidences: list[float] = field(default_factory=list)
    gain: float = 0.0  # what the taken tokens promise, less their cost
    _survival: float = 1.0

    @staticmethod
    def never(length: int) -> Stop:
        """Return a stop that ends no chain of at most `length` tokens early."""
        return Stop((1.0,) * (len(EDGES) + 1), (0.0,) * (length + 1))

    @property
    def least(self) -> list[float]:
        """By depth, the product of the shares of all tokens so far, below which no further token follows.

        The first entry is for the place behind the first token; behind the last entry none follows.
        """
        return [worth / max(self.share, 1e-6) for worth in self.worth[1:]]

    @property
    def survival(self) -> float:
        """The probability that all drafted tokens, by the model or by the search, are accepted."""
        is_found = self.search is not None and self.search.confidences and not self.confidences
        return self.search._survival if self.search is not None and is_found else self._survival

    @property
    def pays(self) -> bool:
        """Whether a first token is worth drafting."""
        return self.worth[0] / max(self.share, 1e-6) <= 1

    def takes(self, confidence: float) -> bool:
        """Return whether a token is worth its row, and add it if it is. Only for tokens drafted as point masses."""
        depth, survival = len(self.confidences), self._survival * self.share_of(confidence)
        if depth >= len(self.worth) or survival < self.worth[depth]:
            return False
        self.confidences.append(confidence)
        self.gain += survival - self.worth[depth]
        self._survival = survival
        return True

    def share_of(self, confidence: float) -> float:
        """Return how often a token with this confidence of its drafter is accepted."""
        return self.shares[bisect.bisect_right(EDGES, confidence)]

    def goes_on(self, confidence: float) -> bool:
        """Add a token, and return whether another may follow."""
        depth = len(self.confidences)
        self.confidences.append(confidence)
        self._survival *= self.share_of(confidence)
        least = self.least
        return depth < len(least) and self._survival >= least[depth]


@dataclass
class Budget:
    """How far this step may draft. The pacing policy makes it, and the drafter reads it.

    num_tokens [B]: most draft nodes of each sequence. catchup_tokens: most committed tokens that the drafter may run
    through its model before drafting, beside the tokens that the previous round left.
    go_on(b, depth, draft_probs[, logits]): the drafter asks it before each draw; it may look at the distribution, never
    at the drawn token (docs/exactness.md). go_behind(b, depth, token, draft_probs[, logits]): a drafter with a model
    asks it after each draw whether another token may follow; the drawn one stays in the draft whatever the answer.
    limits [B]: nodes that each sequence could have by its own end and the free room, whatever is granted. Tokens that a
    grammar forces may use them; 0 = they are not to be drafted; empty = so for every sequence.
    logits [V]: the model's raw ones, before bias, temperature and filters. A drafter without a model leaves them out,
    and a drafter with a model need not compute them unless `reads_logits`. stops: by sequence, a further rule that ends
    its chain; only for drafters that `tells_confidence`.
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
        """Whether a draft may end before its budget; if not, a drafter may make a whole draft at once."""
        return self.go_on is not _may or self.go_behind is not _may

    def carries(self, b: int, num_guessed: int, num_forced: int, share: float = MODEL_SHARE) -> bool:
        """Return whether tokens that a grammar forces are worth their rows behind `num_guessed` guesses of sequence b.

        They save a pass if all guesses are accepted, and are lost otherwise. share: how often a guess is accepted,
        where pacing does not know it.
        """
        stop = self.stops.get(b)
        survival = share**num_guessed if stop is None else stop.survival
        return survival >= (1 - survival) * ROW_PRICE * num_forced

    def only(self, members: Seq[int], catchup_tokens: int) -> Budget:
        """Return the budget of some of the sequences, renumbered from 0.

        members: their indices in this budget. catchup_tokens: what other drafters of the step left over.
        """
        own = Budget([self.num_tokens[b] for b in members], catchup_tokens, reads_logits=self.reads_logits)
        own.limits = [self.limits[b] for b in members] if self.limits else []
        own.stops = {i: self.stops[b] for i, b in enumerate(members) if b in self.stops}
        if self.go_on is not _may:
            own.go_on = lambda i, *at: self.go_on(members[i], *at)
        if self.go_behind is not _may:
            own.go_behind = lambda i, *at: self.go_behind(members[i], *at)
        return own
