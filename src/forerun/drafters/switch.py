"""In every round, the member that is expected to give the most tokens per second drafts for a request.

Leviathan et al. 2023 (section 6) leave a varying approximation model to later work. Here the members can be any
drafters. The expected rate of a member is (1 + the expected number of accepted tokens) / (seconds of the target's pass
and of the draft), at the granted length. Plain decoding competes, too. Seconds are measured. The expected numbers are
learned from past rounds, by request and rank, starting from the member's average over all requests. Only the pacing
policy decides how long drafts are. In a trial where this drafter shortened drafts as well, the policy saw no later
ranks, and granted fewer and fewer tokens. Members that are free (`is_free`) are asked in every round, which costs no
rows. Their guesses are compared with the committed tokens, whichever member drafted. Other members are measured only in
rounds in which they draft. So a member with a low expected rate is tried again after pauses that double in length.

A choice looks at the tokens of past rounds and at point masses, and at no other tokens, so drafts stay exact
(docs/exactness.md). A choice depends on measured seconds, so it may differ from run to run. The texts of greedy
requests and of `match` requests are the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass

from forerun.drafters import Drafter, Known, Needs, Seen, Target
from forerun.drafters.shared.compound import Compound, made, specs
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Sequence

MOST_NODES = 16  # most nodes of a guess that are scored
FIRST_GUESS = 0.6  # acceptance of a member before its first round
FIRST_PAUSE, LONGEST_PAUSE = 8, 512  # rounds between two probes of a member
MEMORY = 30  # rounds until the weight of a round is 1/e
PROBE_NODES = 4
FIRST_SLOPE = 0.05  # growth of the target's pass per row, in passes of one row, until different widths were timed


@dataclass(frozen=True)
class Options:
    """The options: the member drafters, and how much better another member must be before the drafter changes to it."""

    of: str = option("lookup+model", "specs of drafters with + between, as in (lookup:max_n=8)+model")
    hysteresis: float = option(
        0.02, "by which share another member must promise more than the present one", min=0, max=1
    )

    def __post_init__(self) -> None:
        specs("switch", self.of)


class _Gains:
    """Decaying counts of guessed and accepted nodes, by rank. The rank of a node is its index in its draft.

    prior: the same drafter's counts over all requests, to start from; None = start from FIRST_GUESS.
    """

    def __init__(self, prior: _Gains | None = None) -> None:
        self.prior, self.num_rounds = prior, 0
        self.guessed, self.accepted = [0.0] * MOST_NODES, [0.0] * MOST_NODES

    def add(self, num_nodes: int, ranks: Seq[int]) -> None:
        """Add a round with `num_nodes` guessed nodes to these and the prior's counts. ranks: of the accepted nodes."""
        keep, self.num_rounds = 1 - 1 / MEMORY, self.num_rounds + 1
        self.guessed = [keep * weight + (rank < num_nodes) for rank, weight in enumerate(self.guessed)]
        self.accepted = [keep * weight + (rank in ranks) for rank, weight in enumerate(self.accepted)]
        if self.prior is not None:
            self.prior.add(num_nodes, ranks)

    @property
    def is_known(self) -> bool:
        return self.num_rounds > 0 or (self.prior is not None and self.prior.num_rounds > 0)

    def shares(self) -> list[float]:
        """Return, by rank, the probability that a node is accepted, [MOST_NODES].

        The prior's probabilities count as much as four rounds.
        """
        first = [FIRST_GUESS ** (rank + 1) for rank in range(MOST_NODES)]
        prior = first if self.prior is None else self.prior.shares()
        counts = zip(self.accepted, self.guessed, prior, strict=True)
        return [(accepted + 4 * share) / (guessed + 4) for accepted, guessed, share in counts]


class _Line:
    """Predicts seconds from a number x by a straight line, fitted by least squares with decaying weights.

    first_slope: the slope until different values of x were measured, in units of the seconds at x = 0.
    """

    def __init__(self, first_slope: float) -> None:
        self.first_slope, self.weight = first_slope, 0.0
        self.x = self.y = self.xx = self.xy = 0.0

    def add(self, x: float, seconds: float) -> None:
        """Add a measurement. Measured seconds are cut to at most three times the line's present value at x."""
        if self.weight:
            seconds = min(seconds, 3 * self.at(x))
        keep = 1 - 1 / MEMORY
        self.weight, self.x, self.y = keep * self.weight + 1, keep * self.x + x, keep * self.y + seconds
        self.xx, self.xy = keep * self.xx + x * x, keep * self.xy + x * seconds

    def at(self, x: float) -> float:
        """Return the predicted seconds at x; 0 before the first measurement."""
        if not self.weight:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance, covariance = self.xx / self.weight - mean_x**2, self.xy / self.weight - mean_x * mean_y
        usual = mean_y * self.first_slope / (1 + self.first_slope * mean_x)  # a line through the mean point
        slope = min(max(0.0, (covariance + usual) / (variance + 1)), mean_y / mean_x if mean_x else 0.0)
        return max(0.0, mean_y + slope * (x - mean_x))


@dataclass
class _Rate:
    """A decaying average of the seconds per drafted node, over the nodes of all sequences; 0 before a measurement."""

    nodes: float = 0.0
    seconds: float = 0.0

    def add(self, num_nodes: int, seconds: float) -> None:
        """Add the drafted nodes and the seconds of one call of a member."""
        keep = 1 - 1 / MEMORY
        self.nodes, self.seconds = keep * self.nodes + num_nodes, keep * self.seconds + seconds

    @property
    def per_node(self) -> float:
        return self.seconds / self.nodes if self.nodes else 0.0


@dataclass
class _Known:
    """The record of one member for one request.

    guess: the guess to score next, as (number of tokens before it, draft); None = no guess waits. A probe is a round in
    which the member drafts only to be measured. pause: the number of rounds between two probes. probe_at: the round of
    the next probe, counted from the request's first round.
    """

    gains: _Gains
    guess: tuple[int, Draft] | None = None
    pause: int = FIRST_PAUSE
    probe_at: int = FIRST_PAUSE


@dataclass
class _Request:
    """The state of one request.

    known: the record of each member. num_rounds: the number of the request's rounds so far. now: the index of the
    member that drafts for the request; None = plain decoding.
    """

    known: list[_Known]
    num_rounds: int = 0
    now: int | None = None


class SwitchDrafter(Compound):
    """A drafter that chooses one of its members for each request in each round."""

    def __init__(self, members: Seq[Drafter], hysteresis: float) -> None:
        super().__init__(members)
        self.hysteresis = hysteresis
        self._mean = [_Gains() for _ in members]
        self._draft_s = [_Rate() for _ in members]
        self._pass_s = _Line(FIRST_SLOPE)  # seconds of the rest of a step, by its rows
        self._ready_at: float | None = None  # when the drafts of this step were ready
        self._requests: dict[int, _Request] = {}

    def begin(self, seq: Sequence) -> None:
        super().begin(seq)
        self._requests[seq.id] = _Request([_Known(_Gains(mean)) for mean in self._mean])

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self._requests.pop(seq.id, None)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.start()
        budget.limits = []  # forced tokens say nothing about a member
        asked = [b for b, granted in enumerate(budget.num_tokens) if granted > 0]
        drafts = [Draft.empty(1)] * len(seqs)
        guesses = self._free_guesses(asked, seqs, budget, coins)
        groups: dict[int, list[int]] = {}
        for b in asked:
            member, length = self._choose(self._requests[seqs[b].id], guesses[b], budget.num_tokens[b], len(seqs))
            if member in guesses[b]:
                drafts[b] = guesses[b][member]
            elif member is not None:
                budget.num_tokens[b] = length
                groups.setdefault(member, []).append(b)
        for member, chosen in groups.items():
            for b, draft in zip(chosen, self._timed(member, chosen, seqs, budget, coins), strict=True):
                others = guesses[b].values() if not draft.tokens else ()  # a model that must catch up draws nothing
                drafts[b] = next((_first(guess, budget.num_tokens[b]) for guess in others), draft)
        self._ready_at = self.clock()
        return Draft.joined(drafts)

    def _free_guesses(
        self, asked: list[int], seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]
    ) -> dict[int, dict[int, Draft]]:
        """Ask the members with `is_free`, and return their guesses by sequence and member, without empty guesses.

        asked: the indices of the sequences for which members are asked.
        """
        guesses: dict[int, dict[int, Draft]] = {b: {} for b in asked}
        for i, member in enumerate(self.members):
            if member.is_free:
                for b, draft in zip(asked, self.ask(member, asked, seqs, budget, coins), strict=True):
                    known = self._requests[seqs[b].id].known[i]
                    if draft.tokens:
                        guesses[b][i] = draft
                        known.guess = known.guess or (len(seqs[b].tokens), _first(draft, MOST_NODES))
        return guesses

    def _timed(
        self, member: int, chosen: list[int], seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]
    ) -> list[Draft]:
        """Return the drafts of a member whose drafting costs time, and record the drafts and the drafting time.

        member: the member's index. chosen: the indices of the sequences for which the member drafts.
        """
        drafter = self.members[member]
        begun = self.clock()
        had = self.catchup_s
        drafts = self.ask(drafter, chosen, seqs, budget, coins)
        self._draft_s[member].add(sum(len(d.tokens) for d in drafts), self.clock() - begun - self.catchup_s + had)
        for b, draft in zip(chosen, drafts, strict=True):
            known = self._requests[seqs[b].id].known[member]
            if draft.tokens:
                known.guess = (len(seqs[b].tokens), _first(draft, MOST_NODES))
            elif seqs[b].id in drafter.caught_up:
                known.probe_at = 0  # the member has not caught up, and is asked again in the next round
            else:
                known.gains.add(1, ())
        return drafts

    def _choose(
        self, request: _Request, guesses: Mapping[int, Draft], most: int, num_sequences: int
    ) -> tuple[int | None, int]:
        """Return the member that drafts for a request (None = plain decoding), and how many nodes it may draft.

        guesses: the guesses of the members with `is_free`, by member. most: the number of granted nodes. num_sequences:
        see `_promise`.
        """
        request.num_rounds += 1
        rates: dict[int | None, float] = {None: 1 / self._seconds(0, 0.0, num_sequences)}
        lengths: dict[int | None, int] = {None: 0}
        for i, known in enumerate(request.known):
            longest = len(guesses[i].tokens) if i in guesses else 0 if self.members[i].is_free else most
            if longest:
                lengths[i] = longest
                rates[i] = self._promise(known, longest, self._draft_s[i].per_node, num_sequences)
        best = max(rates, key=rates.__getitem__)
        if rates[best] <= (1 + self.hysteresis) * rates.get(request.now, 0.0):
            best = request.now
        for i, known in enumerate(request.known):
            if i not in lengths or self.members[i].is_free:
                continue
            if i == best:
                known.pause = FIRST_PAUSE
                known.probe_at = request.num_rounds + FIRST_PAUSE
            elif not known.gains.is_known or request.num_rounds >= known.probe_at:
                known.pause = min(2 * known.pause, LONGEST_PAUSE)
                known.probe_at = request.num_rounds + known.pause
                return i, min(most, PROBE_NODES)
        request.now = best
        return best, lengths[best]

    def _promise(self, known: _Known, num_nodes: int, node_s: float, num_sequences: int) -> float:
        """Return the expected tokens per second if a member drafts `num_nodes` nodes, each in `node_s` seconds.

        num_sequences: the number of sequences in the round.
        """
        return (1.0 + sum(known.gains.shares()[:num_nodes])) / self._seconds(num_nodes, node_s, num_sequences)

    def _seconds(self, num_nodes: int, node_s: float, num_sequences: int) -> float:
        """Return the seconds that one sequence takes in a round with `num_sequences` sequences.

        The seconds are the sum of three times: the sequence's share of a pass without drafts, the time of its drafted
        rows, and its drafting time (`node_s` for each node). Before the first measurement, the unit is a pass over one
        row.
        """
        plain = self._pass_s.at(num_sequences)
        if plain <= 0:
            return 1 + FIRST_SLOPE * num_nodes
        return plain / num_sequences + self._pass_s.at(num_sequences + num_nodes) - plain + node_s * num_nodes

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        if self._ready_at is not None and seen:
            scores = seen[0].scores
            if all(len(logits) or best for logits, best in zip(scores.logits, scores.best, strict=True)):  # no prompts
                self._pass_s.add(scores.rows[-1].stop, self.clock() - self._ready_at)
            self._ready_at = None
        super().observe(seqs, seen)
        for seq in seqs:
            for known in self._requests[seq.id].known:
                _score(known, seq.tokens)


def _first(draft: Draft, num_nodes: int) -> Draft:
    """Return the first `num_nodes` nodes of one sequence's draft.

    If at least one node is removed, all extra rows of the draft are removed as well.
    """
    if num_nodes >= len(draft.tokens):
        return draft
    return Draft(draft.tokens[:num_nodes], draft.parents[:num_nodes], [0, num_nodes], draft.probs[:num_nodes])


def _score(known: _Known, text: Seq[int]) -> None:
    """Add the waiting guess to the counts, once the committed tokens show which nodes of the guess are right."""
    if known.guess is None:
        return
    start, draft = known.guess
    path = list[int]()
    for at in range(start, len(text)):
        children = [n for n, parent in enumerate(draft.parents) if parent == (path[-1] if path else -1)]
        node = next((n for n in children if draft.tokens[n] == text[at]), None)
        if node is None:
            known.gains.add(len(draft.tokens), path)
            known.guess = None
            return
        path.append(node)


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the specs of the members."""
    return Needs(parts=tuple(specs("switch", options.of)))


def build(options: Options, target: Target) -> Drafter:
    """Build all members. A member with a draft model loads the model."""
    return SwitchDrafter(made(specs("switch", options.of), target), options.hysteresis)
