"""Estimates of how likely each drafted token is to be accepted: decaying averages, by request and by rank.

The rank of a node is its place in its sequence's draft, best first. In a chain the rank is the depth. In a tree it is
not, and this module does not assume a chain. The estimate for a request starts from its drafter's mean, and moves to
the request's own average with each round.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

Shares = list[float]  # [MAX_RANKS]

MAX_RANKS = 16
FIRST_GUESS = 0.6  # acceptance of a drafter before its first round


class Average:
    """Decaying counts of drafted and accepted nodes, per rank.

    memory: the number of rounds after which the weight of a round has fallen to 1/e.
    """

    def __init__(self, memory: float) -> None:
        self.keep = 1 - 1 / memory
        self.drafted, self.accepted = [0.0] * MAX_RANKS, [0.0] * MAX_RANKS

    def add(self, num_drafted: int, ranks: Seq[int]) -> None:
        """Add one round of `num_drafted` nodes. ranks: the ranks of the accepted nodes."""
        self.drafted = [self.keep * weight + (rank < num_drafted) for rank, weight in enumerate(self.drafted)]
        self.accepted = [self.keep * weight + (rank in ranks) for rank, weight in enumerate(self.accepted)]

    def shares(self, steps: Seq[float], weight: float) -> Shares:
        """Return P(the node of rank i is accepted), [MAX_RANKS], which never rises with i.

        steps [MAX_RANKS]: the expected ratio of P at rank i to P at rank i - 1. These expected ratios weigh as much as
        `weight` rounds.
        """
        shares, before = [], 1.0
        for drafted, accepted, step in zip(self.drafted, self.accepted, steps, strict=True):
            before = min(before, (accepted + weight * before * step) / (drafted + weight))
            shares.append(before)
        return shares


class Acceptance:
    """The averages of accepted nodes, for one drafter and for each request that it serves.

    found_share: the share of granted drafts that had at least one node.
    """

    def __init__(self) -> None:
        self.found_share = 1.0
        self._mean = Average(memory=100)
        self._requests: dict[int, Average] = {}

    def observe(self, request: int, num_drafted: int, ranks: Seq[int]) -> None:
        """Add one round of a request that was granted a draft. ranks: the ranks of the accepted nodes."""
        self.found_share += 0.02 * ((num_drafted > 0) - self.found_share)
        if num_drafted:
            self._mean.add(num_drafted, ranks)
            self._requests.setdefault(request, Average(memory=30)).add(num_drafted, ranks)

    def forget(self, request: int) -> None:
        """Forget the average of a request."""
        self._requests.pop(request, None)

    def drafter_shares(self) -> Shares:
        """Return P(the node of rank i is accepted) for a request that has had no round yet."""
        drafted, accepted = self._mean.drafted, self._mean.accepted
        tested = drafted[0] + sum(map(min, accepted, drafted[1:]))  # in a chain, nodes after an accepted node
        alpha = min(1.0, (sum(accepted) + 2 * FIRST_GUESS) / (tested + 2))
        return self._mean.shares([alpha] * MAX_RANKS, weight=16.0)

    def request_shares(self, request: int, drafter: Shares) -> Shares:
        """Return P(the node of rank i is accepted) for one request. drafter: the result of `drafter_shares`."""
        if request not in self._requests:
            return drafter
        steps = [share / max(before, 1e-9) for share, before in zip(drafter, (1.0, *drafter), strict=False)]
        return self._requests[request].shares(steps, weight=8.0)
