"""The predictions of `forerun tune`: tokens per pass and speed-up at any draft length, from one run with long drafts.

A recorded run, with drafts of at most LONGEST nodes, shows which nodes the target accepted. A run with K nodes is
predicted by walking along the same text. A draft of K nodes is the first K nodes of the recorded draft, in which the
best nodes come first. If such a draft ends inside of an accepted path, the next draft begins at that node. It consists
of the recorded nodes below that node, in their order.

The mean of min(accepted, K) + 1 over the recorded rounds would be 10 to 20 % too low at small K. The reason is that an
easy stretch of text takes few long rounds, but many short rounds (docs/use/tuning.md).

    speed-up   plain / (steps * (pass * v(rows) + draft + rest)), all in seconds

plain: plain decoding of the same tokens. pass: the median of plain decoding's passes on the same prompt in the same
turn. v: the measured curve (pacing/measuring.py), corrected by the passes on these texts. draft and rest: recorded in
the run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from forerun.bench.results import Tally
from forerun.types import StepReport

LONGEST = 16  # nodes of the recorded drafts, and the longest length that is predicted
ROW_EDGES = (1, 2, 3, 4, 6, 9, 13, 17)  # rows for each sequence: passes between two edges share one median
FEWEST_PASSES = 6  # between two edges, for a median to be taken
FAR_OFF = 3.0  # times the median: a step that took longer was held up by another process


@dataclass(frozen=True)
class Round:
    """The draft of one sequence in one step.

    parents: the index of each node's parent, -1 = the last committed token. accepted: the nodes of the accepted path.
    """

    parents: Seq[int]
    accepted: Seq[int]

    @cached_property
    def depths(self) -> list[int]:
        """The depth of each node. A node that follows the last committed token has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def ranks(self, root: int) -> dict[int, int]:
        """Return the rank of each node below `root`: its index among the nodes below `root`, in drafting order."""
        ranks, below = dict[int, int](), {root}
        for node, parent in enumerate(self.parents):
            if parent in below:
                ranks[node] = len(ranks)
                below.add(node)
        return ranks

    @property
    def ends_open(self) -> bool:
        """Whether a path was accepted down to a leaf, so that a longer draft might have been accepted further."""
        return bool(self.parents) and (self.accepted[-1] if self.accepted else -1) not in self.parents


class _Token(NamedTuple):
    """A token that a round emitted. place: its index in `round.accepted`; len(accepted) for the target's own token."""

    round: Round
    place: int

    @property
    def node(self) -> int | None:
        return self.round.accepted[self.place] if self.place < len(self.round.accepted) else None

    @property
    def parent(self) -> int:
        return self.round.accepted[self.place - 1] if self.place else -1


@dataclass(frozen=True)
class Replayed:
    """The predicted counts of a run with one draft length.

    num_passes: the number of draft model passes; a round has one pass for each level of its draft. sizes: the number of
    rounds by the size of their draft.
    """

    num_tokens: int
    num_passes: int
    sizes: Mapping[int, int]

    @staticmethod
    def joined(parts: Seq[Replayed]) -> Replayed:
        """Return the sums of several runs' counts."""
        sizes = sum((Counter(part.sizes) for part in parts), Counter[int]())
        return Replayed(sum(p.num_tokens for p in parts), sum(p.num_passes for p in parts), sizes)

    @cached_property
    def num_rounds(self) -> int:
        """The number of rounds of all sequences, with or without a draft."""
        return sum(self.sizes.values())

    @cached_property
    def num_nodes(self) -> int:
        """The number of drafted nodes."""
        return sum(size * num for size, num in self.sizes.items())

    @property
    def tokens_per_pass(self) -> float:
        """The tokens that a round emits on average, the target's own token included."""
        return self.num_tokens / self.num_rounds


def deepest_of(texts: Iterable[Seq[Round]]) -> int:
    """Return the depth of the deepest draft."""
    return max((depth for text in texts for round_ in text for depth in round_.depths), default=0)


def replay(texts: Seq[Seq[Round]], spec_length: int, deepest: int | None = None) -> Replayed:
    """Count the rounds of a run with drafts of at most `spec_length` nodes. texts: the recorded rounds of each output.

    spec_length: at most the draft length of the recorded run; with exactly that length, the rounds are counted as they
    were recorded. deepest: the most levels of the drafter's drafts; None = the most levels of a draft in these texts.
    """
    deepest = deepest_of(texts) if deepest is None else deepest
    num_tokens, num_passes, sizes = 0, 0, Counter[int]()
    for text in texts:
        for stretch in _stretches(text):
            start = 0
            while start < len(stretch):
                depths = stretch[start].round.depths[:spec_length]
                sizes[len(depths)] += 1
                num_passes += max(depths, default=0)
                start += _num_accepted(stretch, start, spec_length, deepest) + 1
            num_tokens += len(stretch)
    return Replayed(num_tokens, num_passes, sizes)


def _stretches(text: Seq[Round]) -> list[list[_Token]]:
    """Split the emitted tokens of one text into stretches. A single longer draft could have covered a whole stretch.

    A stretch ends after a round with a rejection, and after a round without a draft. In each other round, a path was
    accepted down to a leaf, so a longer draft might have gone on into the next round.
    """
    stretches: list[list[_Token]] = [[]]
    for round_ in text:
        stretches[-1] += [_Token(round_, place) for place in range(len(round_.accepted) + 1)]
        if not round_.ends_open:
            stretches.append([])
    return stretches if stretches[-1] else stretches[:-1]


def _num_accepted(stretch: Seq[_Token], start: int, spec_length: int, deepest: int) -> int:
    """Return how many tokens from `start` on are accepted from a draft of `spec_length` nodes.

    A draft that begins where a recorded draft began has no more nodes than the recorded draft. Any other draft may go
    on from one recorded draft to the next. Between two recorded drafts lies one token of the target. The drafter is
    assumed to guess this token with its likeliest node, although the recorded run only shows that the drafter was right
    before and after the token.
    """
    is_recorded = stretch[start].place == 0
    num = used = 0  # used: nodes of the draft down to the last end of a recorded path
    ranks: dict[int, int] | None = None
    for token in stretch[start : start + deepest]:
        if token.node is None:
            need = used = used + 1
            ranks = None
            if is_recorded:
                break
        else:
            ranks = token.round.ranks(token.parent) if ranks is None else ranks
            need = used + ranks[token.node] + 1
            if token.place == len(token.round.accepted) - 1:
                used = need
        if need > spec_length:
            break
        num += 1
    return num


def alphas(texts: Seq[Seq[Round]]) -> list[float]:
    """Return, for each position of a draft, the share of tested tokens that were accepted.

    The list ends before the first position at which no token was tested.
    """
    shares = []
    rounds = [round_ for text in texts for round_ in text]
    for depth in range(LONGEST):
        num_accepted = sum(len(r.accepted) > depth for r in rounds)
        num_rejected = sum(len(r.accepted) == depth and bool(r.parents) and not r.ends_open for r in rounds)
        if not num_accepted + num_rejected:
            break
        shares.append(num_accepted / (num_accepted + num_rejected))
    return shares


# ------------------------------------------------------------------------------------------------------------- seconds


def full_steps(steps: Iterable[StepReport]) -> list[StepReport]:
    """Return the steps that only decode, with as many requests as the fullest of these steps.

    Steps with fewer requests come at the beginning and the end of a run.
    """
    decoding = [step for step in steps if step.num_decoding and not step.num_prefill_tokens]
    most = max((step.num_decoding for step in decoding), default=0)
    return [step for step in decoding if step.num_decoding == most]


@dataclass(frozen=True)
class Turn:
    """One group of prompts, run once by plain decoding and once by one drafter with drafts of LONGEST nodes."""

    plain: Tally
    drafted: Tally

    @cached_property
    def texts(self) -> list[list[Round]]:
        """The rounds of each output."""
        texts: dict[int, list[Round]] = {}
        for step in self.drafted.steps:
            for detail in step.rounds:
                texts.setdefault(detail.sequence_id, []).append(Round(detail.parents, detail.accepted))
        return list(texts.values())

    @cached_property
    def plain_pass_s(self) -> float:
        """The median seconds of a pass of plain decoding on these prompts."""
        return median(step.target_forward_s for step in full_steps(self.plain.steps))


def usual(values: Seq[float]) -> float:
    """Return the mean of values, each clipped at FAR_OFF times their median; 0 without values."""
    return fmean(min(value, FAR_OFF * median(values)) for value in values) if values else 0.0


def per_token_s(steps: Iterable[StepReport]) -> float:
    """Return the seconds per token over the full steps, which do nothing but decode."""
    full = full_steps(steps)
    return sum(step.seconds for step in full) / sum(step.num_committed for step in full)


def rest_s(step: StepReport) -> float:
    """Return the seconds of a step outside of the target's pass and outside of drafting."""
    return step.seconds - step.target_forward_s - step.draft_s


@dataclass(frozen=True)
class Prediction:
    """The prediction for one draft length.

    c: the time of a drafted token, divided by the time of a plain pass. v: the time of a target pass over a draft,
    divided by the time of a plain pass.
    """

    spec_length: int
    tokens_per_pass: float
    c: float
    v: float
    speedup: float


class Passes:
    """The time of a pass over a number of rows, divided by the time of a plain pass in the same turn.

    curve(rows): the calibrated curve, for passes without cached tokens. num_together: the mean number of requests in a
    step of plain decoding. `add` takes measured passes with cached tokens, which correct the curve. For the passes
    between two ROW_EDGES, the correction at their mean number of rows is their median error. Between these numbers of
    rows, the correction is interpolated linearly.
    """

    def __init__(self, curve: Callable[[float], float], num_together: float = 1.0) -> None:
        self.curve, self.num_together = curve, num_together
        self._found = list[tuple[int, float]]()  # rows, and seconds over a plain pass
        self._moved: list[tuple[float, float]] = []  # rows, and how far the curve is too low there; [] = not known yet

    def add(self, plain: Seq[StepReport], steps: Iterable[StepReport]) -> None:
        """Add the steps of one turn. plain: steps of plain decoding. steps: steps with drafts."""
        one_s = median(step.target_forward_s for step in full_steps(plain))
        more = [step for step in full_steps(steps) if step.num_rows > step.num_decoding]
        self._found += [(step.num_rows, step.target_forward_s / one_s) for step in more]
        self._moved = []

    def v(self, rows: float) -> float:
        """Return the time of a pass over `rows` rows, divided by the time of a plain pass; at least 1."""
        self._moved = self._moved or [(self.num_together, 0.0), *self._errors()]
        places, errors = zip(*self._moved, strict=True)
        return max(1.0, self._of_curve(rows) + float(np.interp(rows, places, errors)))

    def _of_curve(self, rows: float) -> float:
        return self.curve(rows) / self.curve(self.num_together)

    def _errors(self) -> Iterator[tuple[float, float]]:
        for least, most in itertools.pairwise(self.num_together * edge for edge in ROW_EDGES):
            between = [(rows, ratio) for rows, ratio in self._found if least < rows <= most]
            if len(between) >= FEWEST_PASSES:
                error = median(ratio - self._of_curve(rows) for rows, ratio in between)
                yield fmean(rows for rows, _ in between), error


@dataclass
class Predictor:
    """The predictions for one drafter, from its turns. runs_model: whether the drafter runs a draft model."""

    turns: Seq[Turn]
    passes: Passes
    runs_model: bool
    _replays: dict[int, list[tuple[Turn, Replayed]]] = field(default_factory=dict, repr=False)

    @cached_property
    def steps(self) -> list[StepReport]:
        """The drafter's steps that `full_steps` selects."""
        return [step for turn in self.turns for step in full_steps(turn.drafted.steps)]

    @cached_property
    def plain_rest_s(self) -> float:
        """The seconds of a plain decoding step outside of the target's pass."""
        return usual([rest_s(step) for turn in self.turns for step in full_steps(turn.plain.steps)])

    @cached_property
    def num_together(self) -> float:
        """The mean number of sequences in a step."""
        return fmean(step.num_decoding for step in self.steps)

    @cached_property
    def rest_per_token_s(self) -> float:
        """The seconds per further token that a step takes beyond a plain step, without the target's pass and drafting.

        Further tokens are the emitted tokens of a step beyond one for each sequence. 0 if there are none.
        """
        more = fmean(step.num_emitted for step in self.steps) - self.num_together
        return max(0.0, usual([rest_s(step) for step in self.steps]) - self.plain_rest_s) / more if more > 0 else 0.0

    @cached_property
    def draft_s(self) -> tuple[float, float, float]:
        """The seconds of drafting: for each step, for each pass of a draft model, and for each drafted node.

        For a drafter with a draft model, a fit by least squares gives the seconds for each pass and for each node. The
        fit needs drafts of different sizes. There are some, because the last drafts of a text are shorter.
        """
        if not self.runs_model:
            return usual([step.draft_s for step in self.steps]), 0.0, 0.0
        drafts = [d for step in self.steps for d in step.drafts.values() if d.depth and not d.num_catchup_tokens]
        if not drafts:
            return usual([step.draft_s for step in self.steps]), 0.0, 0.0
        of_pass = usual([draft.seconds / draft.depth for draft in drafts])
        sizes = np.array([(draft.depth, draft.num_nodes) for draft in drafts], dtype=float)
        most_s = FAR_OFF * median(draft.seconds for draft in drafts)
        seconds = np.minimum([draft.seconds for draft in drafts], most_s)
        (both, node), _, rank, _ = np.linalg.lstsq(sizes, seconds, rcond=1e-6)
        if rank < 2 or node <= 0:
            return 0.0, of_pass, 0.0
        return (0.0, float(both), float(node)) if both > 0 else (0.0, 0.0, float(seconds.sum() / sizes[:, 1].sum()))

    def at(self, spec_length: int) -> Prediction:
        """Predict one draft length. The speed-up is plain decoding's seconds divided by the drafter's seconds."""
        if spec_length not in self._replays:  # counts never change, while `passes` learns
            turns = [turn for turn in self.turns if turn.texts]
            deepest = deepest_of(text for turn in turns for text in turn.texts)
            self._replays[spec_length] = [(turn, replay(turn.texts, spec_length, deepest)) for turn in turns]
        both = self._replays[spec_length]
        total = Replayed.joined([replayed for _, replayed in both])
        plain_s = drafted_s = 0.0
        for turn, replayed in both:
            num_steps = replayed.num_rounds / self.num_together
            pass_s = turn.plain_pass_s * self._v(replayed)
            rest = self.plain_rest_s + self.rest_per_token_s * self.num_together * (replayed.tokens_per_pass - 1)
            plain_s += replayed.num_tokens / self.num_together * (turn.plain_pass_s + self.plain_rest_s)
            drafted_s += num_steps * (pass_s + self._draft_s(replayed) + rest)
        pass_s = fmean(turn.plain_pass_s for turn in self.turns)
        num_drafted = self.num_together * total.num_nodes / total.num_rounds
        c = self._draft_s(total) / pass_s / num_drafted if num_drafted else 0.0
        return Prediction(spec_length, total.tokens_per_pass, c, self._v(total), plain_s / drafted_s)

    def _v(self, replayed: Replayed) -> float:
        """Return the mean time of a pass, divided by the time of a plain pass.

        The mean is taken over the times of the rounds. The time at the mean number of rows would be wrong, because a
        further row costs little up to some number of rows, and much beyond this number.
        """
        mean = replayed.num_nodes / replayed.num_rounds
        others = (self.num_together - 1) * (1 + mean)  # rows of the other sequences of the step
        return sum(num * self.passes.v(others + 1 + size) for size, num in replayed.sizes.items()) / replayed.num_rounds

    def _draft_s(self, replayed: Replayed) -> float:
        """Return the seconds of drafting in a step."""
        step_s, pass_s, node_s = self.draft_s
        num_nodes = self.num_together * replayed.num_nodes
        return step_s + (pass_s * replayed.num_passes + node_s * num_nodes) / replayed.num_rounds

    def all(self) -> list[Prediction]:
        """Predict every draft length up to LONGEST."""
        return [self.at(spec_length) for spec_length in range(1, LONGEST + 1)]
