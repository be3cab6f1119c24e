"""How far a step may draft, and when a chain of guesses ends."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

ROUND_TOKENS = 2  # committed tokens that a round leaves a draft model to run: one, or two after a fully accepted draft
MODEL_SHARE, FOUND_SHARE = 0.85, 0.5  # of guesses that are accepted under a grammar, where nobody counts them
# Of a further row, in passes that are spared: on a processor it takes 0.13 to 0.19 of a pass of one row, and not each
# pass with such a row behind it spares one.
ROW_PRICE = 0.25
EDGES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # of a guess's probability: how sure a model is of it


def _may(*_: Any) -> bool:
    """Say yes: the answer of a policy that leaves a drafter the whole of its budget."""
    return True


@dataclass
class Stop:
    """When one sequence's chain of guesses ends: where it is no longer likely enough that all of it is accepted.

    shares [len(EDGES) + 1]: how often a token is accepted whose probability, by the model that guessed it, lies below
    the first edge, between two of them, or above the last. worth: the least probability, of all tokens up to it, at
    which each is worth drafting; behind the last none is. share: how often a token is accepted that is not known yet.
    confidences: the probabilities of the tokens that were drafted, which the drafter adds. A token that ends a chain
    stays in it, so that the decision looks only at what is drawn already (docs/exactness.md); a drafter that draws
    nothing may look at a token first (`takes`).
    is_shut: whether a model is not to draft at all. num_unread: committed tokens that it has not run, which a drafter
    says that searches. search: of a guess that a search in the text makes before the model is asked; it is drafted
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
    gain: float = 0.0  # what the tokens that were taken promise, less what they cost
    _survival: float = 1.0

    @staticmethod
    def never(length: int) -> Stop:
        """Return a stop that ends no chain of at most `length` tokens early."""
        return Stop((1.0,) * (len(EDGES) + 1), (0.0,) * (length + 1))

    @property
    def least(self) -> list[float]:
        """The product of the shares of all tokens so far, below which no other one follows.

        Behind the first token, the second and so on; behind the last of them none does.
        """
        return [worth / max(self.share, 1e-6) for worth in self.worth[1:]]

    @property
    def survival(self) -> float:
        """How likely all tokens are accepted that were drafted, by the model or by the search."""
        is_found = self.search is not None and self.search.confidences and not self.confidences
        return self.search._survival if self.search is not None and is_found else self._survival

    @property
    def pays(self) -> bool:
        """Whether a first token is worth drafting."""
        return self.worth[0] / max(self.share, 1e-6) <= 1

    def takes(self, confidence: float) -> bool:
        """Return whether a token is worth its row, and add it if it is; only of a point mass."""
        depth, survival = len(self.confidences), self._survival * self.share_of(confidence)
        if depth >= len(self.worth) or survival < self.worth[depth]:
            return False
        self.confidences.append(confidence)
        self.gain += survival - self.worth[depth]
        self._survival = survival
        return True

    def share_of(self, confidence: float) -> float:
        """Return how often a token is accepted of which its drafter is so sure."""
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

    num_tokens [B]: most draft nodes of each sequence. catchup_tokens: most committed tokens the drafter may run
    through its own model before drafting, beside those that the previous round left.
    go_on(b, depth, draft_probs[, logits]): the drafter asks it before each draw; it may look at the distribution, never
    at the drawn token (docs/exactness.md). go_behind(b, depth, token, draft_probs[, logits]): a drafter with a model
    asks it after each draw, whether another token may follow; the drawn one stays in the draft whatever the answer.
    limits [B]: nodes that each could have by its own end and the room there is, whatever is granted. What a grammar
    forces may take them; 0 = it is not to be drafted; empty = of no sequence.
    logits [V]: a model's own, before bias, temperature and filters. A drafter without a model leaves them out, and one
    with a model need not compute them unless `reads_logits`. stops: by sequence, when a chain of guesses of which a
    model tells the probabilities ends besides; only of drafters that `tells_confidence`.
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
        """Whether a draft may end before its budget; where it cannot, a drafter may make a whole draft at once."""
        return self.go_on is not _may or self.go_behind is not _may

    def carries(self, b: int, num_guessed: int, num_forced: int, share: float = MODEL_SHARE) -> bool:
        """Whether tokens that a grammar forces are worth their rows behind so many guesses of sequence b.

        They spare a pass if all guesses are accepted, and are lost otherwise. share: of guesses that are accepted,
        where pacing does not know it.
        """
        stop = self.stops.get(b)
        survival = share**num_guessed if stop is None else stop.survival
        return survival >= (1 - survival) * ROW_PRICE * num_forced

    def only(self, members: Seq[int], catchup_tokens: int) -> Budget:
        """Return the budget of some of the sequences, which are numbered anew.

        members: their indices in this budget. catchup_tokens: what the other drafters of the step left to them.
        """
        own = Budget([self.num_tokens[b] for b in members], catchup_tokens, reads_logits=self.reads_logits)
        own.limits = [self.limits[b] for b in members] if self.limits else []
        own.stops = {i: self.stops[b] for i, b in enumerate(members) if b in self.stops}
        if self.go_on is not _may:
            own.go_on = lambda i, *at: self.go_on(members[i], *at)
        if self.go_behind is not _may:
            own.go_behind = lambda i, *at: self.go_behind(members[i], *at)
        return own
