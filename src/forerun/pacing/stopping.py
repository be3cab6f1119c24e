"""The end of a draft, for drafters that tell how sure they are of each guess.

A guess is right about as often as the model's probability for it says, but not exactly, and not equally for every text.
So the share of accepted tokens is counted by the probability that the drafter gave the tokens, for the drafter and for
each request. The product of these shares over a path is the probability that the whole path is accepted. One more
token is worth drafting while its expected gain exceeds its cost. The gain is that product times the usual share.
The cost is the time of the token, times the current rate of tokens per second. This is optimal stopping for a ratio of
two sums: the rate in the optimal rule is the rate of the best policy itself.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from forerun.pacing.cost import Costs
from forerun.pacing.pass_time import Floats
from forerun.types import EDGES, Sequence, SequenceStep, StepReport, Stop

SEARCH = " search"  # suffix of a drafter's name, for the guesses that it finds in the text before it asks its model
# How often a guess is assumed to be right at first, by its probability: for a model made together with its target.
FIRST_SHARES = (0.38, 0.55, 0.75, 0.85, 0.9, 0.96, 0.99)
FIRST_SEEN = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0)  # how often such probabilities are assumed to come up, relatively
TOKENS_MEMORY = 300  # tested tokens of a drafter after which the weight of a token has fallen to 1/e
REQUEST_WEIGHT = 12.0  # weight, in tokens, of the drafter's shares in a request's estimate
ROUNDS_MEMORY = 20  # rounds of a request after which the weight of a round has fallen to 1/e


@dataclass
class Counts:
    """Decaying counts of tested, accepted and drafted tokens, in bins of the probability that the drafter gave them."""

    memory: float
    tested: list[float] = field(default_factory=lambda: [0.0] * len(FIRST_SHARES))
    accepted: list[float] = field(default_factory=lambda: [0.0] * len(FIRST_SHARES))
    drafted: list[float] = field(default_factory=lambda: [0.0] * len(FIRST_SHARES))

    def add(self, bins: Seq[int], parents: Seq[int], accepted: Collection[int]) -> None:
        """Add the drafted tokens of a round. A token was tested if its parent was accepted.

        bins: the bin of each token. parents: the index of each token's parent; -1 = the last committed token. accepted:
        the indices of the accepted tokens.
        """
        keep = (1 - 1 / self.memory) ** len(bins)
        for counts in (self.tested, self.accepted, self.drafted):
            counts[:] = [keep * count for count in counts]
        for i, (at, parent) in enumerate(zip(bins, parents, strict=True)):
            self.drafted[at] += 1
            self.tested[at] += parent < 0 or parent in accepted
            self.accepted[at] += i in accepted

    def shares(self, expected: Seq[float], weight: float) -> list[float]:
        """Return P(a token is accepted) for each bin of confidences.

        expected: the shares to expect before any token was tested. They count as much as `weight` tested tokens.
        """
        return [
            (accepted + weight * share) / (tested + weight)
            for accepted, tested, share in zip(self.accepted, self.tested, expected, strict=True)
        ]

    def mix(self, expected: Seq[float], weight: float) -> list[float]:
        """Return P(a drafted token's probability lies in the bin) for each bin.

        expected: the expected relative frequencies, which weigh as much as `weight` tokens.
        """
        total = sum(expected)
        counts = [count + weight * each / total for count, each in zip(self.drafted, expected, strict=True)]
        return [count / sum(counts) for count in counts]


@dataclass
class Round:
    """Decaying averages of a request's rounds: emitted tokens, nodes, and passes of the drafter."""

    tokens: float
    nodes: float
    passes: float

    def add(self, tokens: float, nodes: float, passes: float) -> None:
        """Add a round."""
        self.tokens += (tokens - self.tokens) / ROUNDS_MEMORY
        self.nodes += (nodes - self.nodes) / ROUNDS_MEMORY
        self.passes += (passes - self.passes) / ROUNDS_MEMORY


class Stopping:
    """Acceptance rates by confidence, and averages of rounds, for one drafter and for each of its requests."""

    def __init__(self) -> None:
        self._mean = Counts(TOKENS_MEMORY)
        self._requests: dict[int, Counts] = {}
        self.spare = 0.0  # how many tokens reading a text for a probe may cost while the model does not pay
        self._round = Round(2.5, 3.0, 3.0)
        self._rounds: dict[int, Round] = {}

    def observe(self, request: int, stop: Stop, accepted: Collection[int]) -> None:
        """Add a draft of a request. stop: the rule that ended the draft. accepted: the indices of accepted tokens."""
        bins = [bisect.bisect_right(EDGES, confidence) for confidence in stop.confidences]
        parents = stop.parents or range(-1, len(bins) - 1)
        self._mean.add(bins, parents, accepted)
        self._requests.setdefault(request, Counts(TOKENS_MEMORY)).add(bins, parents, accepted)

    def observe_round(self, request: int, tokens: int, nodes: int, passes: int) -> None:
        """Add a round that had a draft to the averages of its request and of the drafter."""
        self.round_of(request)
        self._rounds[request].add(tokens, nodes, passes)
        self._round.add(tokens, nodes, passes)

    def round_of(self, request: int) -> Round:
        """Return the average drafting round of a request; a new request begins with the drafter's average."""
        if request not in self._rounds:
            self._rounds[request] = Round(self._round.tokens, self._round.nodes, self._round.passes)
        return self._rounds[request]

    def shares(self, request: int) -> tuple[list[float], float]:
        """Return P(a request's token is accepted): by bin of its confidence, and for a token not drawn yet."""
        shares = self._mean.shares(FIRST_SHARES, 4.0)
        mix = self._mean.mix(FIRST_SEEN, 10.0)
        if (counts := self._requests.get(request)) is not None:
            shares = counts.shares(shares, REQUEST_WEIGHT / 2)
            mix = counts.mix(mix, REQUEST_WEIGHT)
        return shares, sum(share * part for share, part in zip(shares, mix, strict=True))

    def forget(self, request: int) -> None:
        """Forget the counts of a request."""
        self._requests.pop(request, None)
        self._rounds.pop(request, None)


@dataclass(frozen=True)
class Prices:
    """The quantities from which the cost of drafting in a step follows.

    rate: tokens per second of all requests. rows_s [spec_length]: the seconds that each further row adds to the
    target's pass. num_going [spec_length]: the expected number of requests that still draft at each depth; these
    requests share a pass of their drafter. worth: a cache of `Stop.worth`, by drafter.
    """

    rate: float
    rows_s: Floats
    num_going: Floats
    worth: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rows(self) -> Floats:
        """The price of each further row, in tokens, [spec_length]."""
        return self.rate * self.rows_s


class Stops:
    """The rules that end chains, for drafters that tell their confidence.

    spec_length: the number of nodes of the longest chain.
    """

    def __init__(self, spec_length: int, costs: Costs) -> None:
        self.spec_length, self.costs = spec_length, costs
        self.known: dict[str, Stopping] = {}  # by drafter, and by drafter and SEARCH

    def of(self, draft: str, what: str = "") -> Stopping:
        """Return the record of a drafter. The first call for a record makes it.

        what: SEARCH = the record of guesses from the text; "" = the record of the drafter's other guesses.
        """
        return self.known.setdefault(draft + what, Stopping())

    def prices(self, seqs: Seq[Sequence], are_drafting: Seq[bool], num_others: int, num_rows: int) -> Prices:
        """Return the prices of a step that runs the requests `seqs`.

        are_drafting: whether each request drafts. num_others: the number of other requests in the step. num_rows: the
        rows of the target's pass, without the draft nodes of `seqs`.
        """
        drafting = [seq for seq, drafts in zip(seqs, are_drafting, strict=True) if drafts]
        rounds = [self.of(seq.draft).round_of(seq.id) for seq in drafting]
        num_nodes, num_tokens = sum(each.nodes for each in rounds), sum(each.tokens for each in rounds)
        passes = dict[str, float]()
        for seq, round_ in zip(drafting, rounds, strict=True):
            passes[seq.draft] = max(passes.get(seq.draft, 0.0), round_.passes)
        draft_s = sum(num * float(self.costs.pass_s(name, len(rounds))) for name, num in passes.items())
        num_requests = num_others + len(seqs)
        step_s = float(self.costs.target_s(num_rows + num_nodes)) + draft_s
        plain = num_requests / float(self.costs.target_s(num_rows))
        rate = max((num_requests - len(rounds) + num_tokens) / step_s, plain)
        num_rows += round(num_nodes * (1 - 1 / max(1, len(rounds))))
        rows_s = np.diff(self.costs.target_s(num_rows + np.arange(self.spec_length + 1)))
        # Requests that go on at a depth share a pass of the drafter. Each is assumed to go on with equal probability.
        nodes = num_nodes / max(1, len(rounds))
        num_going = np.maximum(1.0, len(seqs) * (nodes / (1 + nodes)) ** np.arange(self.spec_length))
        return Prices(rate, rows_s, num_going)

    def stop(self, seq: Sequence, prices: Prices) -> Stop:
        """Return the Stop that ends a request's chain."""
        if (worth := prices.worth.get(seq.draft)) is None:
            pass_s = self.costs.pass_s(seq.draft, prices.num_going) / prices.num_going
            worth = np.minimum(prices.rate * (pass_s + prices.rows_s), 2.0).tolist()
            prices.worth[seq.draft] = worth
        shares, share = self.of(seq.draft).shares(seq.id)
        return Stop(shares, worth, share)

    def search(self, seq: Sequence, prices: Prices) -> Stop:
        """Return the Stop that ends the guess which the drafter finds in the text before it runs its model."""
        shares, _ = self.of(seq.draft, SEARCH).shares(seq.id)
        return Stop(shares, np.minimum(prices.rows, 2.0).tolist())

    def observe(self, seq: Sequence, stop: Stop, round_: SequenceStep, report: StepReport) -> None:
        """Learn from a request's round that had a draft. stop: the rule that the round used."""
        num_accepted = len(round_.accepted_ranks)
        step = report.drafts.get(seq.draft)
        what, ended = ("", stop) if stop.confidences or stop.search is None else (SEARCH, stop.search)
        if len(ended.confidences) == round_.num_drafted:  # else the draft was cut
            self.of(seq.draft, what).observe(seq.id, ended, round_.accepted_ranks)
        passes = step.passes if step is not None and stop.confidences else 0
        self.of(seq.draft).observe_round(seq.id, 1 + num_accepted, round_.num_drafted, passes)

    def forget(self, seq: Sequence) -> None:
        """Forget the counts of a request."""
        for name in (seq.draft, seq.draft + SEARCH):
            if name in self.known:
                self.known[name].forget(seq.id)


def promised(stop: Stop) -> tuple[float, float]:
    """Return the expected number of tokens of a round, and the gain of its draft less the draft's cost, in tokens.

    The draft ends where one more token of usual acceptance costs more than it gains.
    """
    survival, tokens, gain = stop.share, 1.0, 0.0
    for worth in stop.worth:
        if survival < worth:
            break
        tokens, gain, survival = tokens + survival, gain + survival - worth, survival * stop.share
    return tokens, gain
