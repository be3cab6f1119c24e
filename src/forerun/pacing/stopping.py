"""When a chain of guesses ends, by how sure the drafter is of each: what is known of one drafter that says so.

A model's guess is right about as often as the model says, but not exactly, and not equally for every text. So the share
of accepted tokens is counted by the probability that the drafter gave them, for the drafter and for each request; the
product of these shares is how likely a whole chain is accepted so far. One more token is worth drafting while what it
gains, that product times the usual share, is worth more than the time that it takes at the present rate of tokens per
second. That is optimal stopping for the ratio of two sums, whose optimal rate is the rate of the best policy itself.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.types import EDGES

# How often a guess is right, by its probability, before any was seen: of a model that was made beside its target.
FIRST_SHARES = (0.38, 0.55, 0.75, 0.85, 0.9, 0.96, 0.99)
# The same of what a search has found: of the pair's six kinds of work.
FOUND_SHARES = (0.2, 0.2, 0.35, 0.7, 0.9, 0.95, 0.98)
FIRST_SEEN = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0)  # how often such probabilities come up, in weights of a token
TOKENS_MEMORY = 300  # tested tokens until the weight of one is 1/e, of a drafter
REQUEST_WEIGHT = 12.0  # tokens that the drafter's own shares are worth beside a request's
ROUNDS_MEMORY = 20  # rounds until the weight of one is 1/e, of a request


@dataclass
class Counts:
    """Decaying counts of tested and accepted tokens, by their probability; and of drafted ones."""

    memory: float
    tested: list[float] = field(default_factory=lambda: [0.0] * len(FIRST_SHARES))
    accepted: list[float] = field(default_factory=lambda: [0.0] * len(FIRST_SHARES))
    drafted: list[float] = field(default_factory=lambda: [0.0] * len(FIRST_SHARES))

    def add(self, bins: Seq[int], num_accepted: int) -> None:
        """Add a chain of drafted tokens, of which the first ones were accepted."""
        keep = (1 - 1 / self.memory) ** len(bins)
        for counts in (self.tested, self.accepted, self.drafted):
            counts[:] = [keep * count for count in counts]
        for i, at in enumerate(bins):
            self.drafted[at] += 1
            self.tested[at] += i <= num_accepted
            self.accepted[at] += i < num_accepted

    def shares(self, expected: Seq[float], weight: float) -> list[float]:
        """Return P(a token is accepted) by its probability, where the expected ones have so much weight."""
        return [
            (accepted + weight * share) / (tested + weight)
            for accepted, tested, share in zip(self.accepted, self.tested, expected, strict=True)
        ]

    def mix(self, expected: Seq[float], weight: float) -> list[float]:
        """Return P(a drafted token has such a probability)."""
        total = sum(expected)
        counts = [count + weight * each / total for count, each in zip(self.drafted, expected, strict=True)]
        return [count / sum(counts) for count in counts]


@dataclass
class Round:
    """Decaying averages of a request's rounds: tokens that they emitted, nodes, and passes of the drafter."""

    tokens: float
    nodes: float
    passes: float

    def add(self, tokens: float, nodes: float, passes: float) -> None:
        """Add a round."""
        self.tokens += (tokens - self.tokens) / ROUNDS_MEMORY
        self.nodes += (nodes - self.nodes) / ROUNDS_MEMORY
        self.passes += (passes - self.passes) / ROUNDS_MEMORY


class Stopping:
    """What is known of one drafter and of the requests that it serves. first_shares: before anything was seen."""

    def __init__(self, first_shares: Seq[float] = FIRST_SHARES) -> None:
        self._first_shares = first_shares
        self._mean = Counts(TOKENS_MEMORY)
        self._requests: dict[int, Counts] = {}
        self._round = Round(2.5, 3.0, 3.0)
        self.model_round = Round(2.5, 3.0, 3.0)  # of those in which its model drafted
        self._rounds: dict[int, Round] = {}

    def observe(self, request: int, confidences: Seq[float], num_accepted: int) -> None:
        """Add a chain of a request: the probabilities of its tokens, of which the first ones were accepted."""
        bins = [bisect.bisect_right(EDGES, confidence) for confidence in confidences]
        self._mean.add(bins, num_accepted)
        self._requests.setdefault(request, Counts(TOKENS_MEMORY)).add(bins, num_accepted)

    def observe_round(self, request: int, tokens: int, nodes: int, passes: int) -> None:
        """Add a round of a request for which something was drafted."""
        self.round_of(request)
        self._rounds[request].add(tokens, nodes, passes)
        self._round.add(tokens, nodes, passes)
        if passes:
            self.model_round.add(tokens, nodes, passes)

    def round_of(self, request: int) -> Round:
        """Return what rounds of a request that drafts are like; one that has none begins as the drafter's others."""
        if request not in self._rounds:
            self._rounds[request] = Round(self._round.tokens, self._round.nodes, self._round.passes)
        return self._rounds[request]

    def shares(self, request: int) -> tuple[list[float], float]:
        """Return P(a token is accepted) by its probability, for a request, and of a token not drawn yet."""
        shares, mix = self._mean.shares(self._first_shares, 4.0), self._mean.mix(FIRST_SEEN, 10.0)
        if (own := self._requests.get(request)) is not None:
            shares, mix = own.shares(shares, REQUEST_WEIGHT / 2), own.mix(mix, REQUEST_WEIGHT)
        return shares, sum(share * part for share, part in zip(shares, mix, strict=True))

    def forget(self, request: int) -> None:
        """Forget what a request has shown."""
        self._requests.pop(request, None)
        self._rounds.pop(request, None)
