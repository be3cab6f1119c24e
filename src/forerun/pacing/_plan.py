"""How many nodes each request gets: the most expected tokens per second of the batch (goodput).

A node's gain is the probability that it becomes a token. Gains of one request never rise with depth, so adding the
nodes of all requests in the order of their gains keeps every prefix a legal plan, and the best prefix is the answer
(SmartSpec, Liu et al. 2024, arXiv 2406.14066). The first prefix has no node: plain decoding is one of the plans.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.pacing._costs import KNOTS, DraftTime, PassTime

_NUM_LOOKED_AT = 64  # plans, of as many as there are nodes


@dataclass(slots=True)
class Candidate:
    """One decoding request. gains: expected tokens of each node that it could have; found: how often there is a draft.

    fixed: its length is not for the plan to choose.
    """

    draft: str
    gains: list[float]
    found: float
    fixed: int | None = None


@dataclass
class Batch:
    """What a step would consist of: the requests, and the costs that they share.

    factor: by which a step that drafts takes longer than these costs say.
    """

    candidates: list[Candidate]
    passes: PassTime
    drafts: dict[str, DraftTime]
    factor: float = 1.0


@dataclass(slots=True)
class _Load:
    """One plan's expected tokens and time; grows node by node."""

    batch: Batch
    tokens: float = 0.0
    rows: float = 0.0
    variance: float = 0.0  # of the rows, because a drafter may find nothing
    third: float = 0.0  # third central moment
    work: dict[str, list[float]] = field(default_factory=dict)  # by drafter: depth, nodes
    seconds: float = 0.0

    def start(self) -> None:
        self.tokens = self.rows = float(len(self.batch.candidates))

    def add(self, c: Candidate, start: int, end: int) -> None:
        """Nodes start .. end - 1 of a request."""
        p = c.found
        self.tokens += sum(c.gains[start:end])
        self.rows += p * (end - start)
        if p < 0.999:
            spread = p * (1 - p)
            self.variance += spread * (end * end - start * start)
            self.third += spread * (1 - 2 * p) * (end**3 - start**3)
        work = self.work.get(c.draft)
        if work is None:
            work = self.work[c.draft] = [0.0, 0.0]
        if p * end > work[0]:
            work[0] = p * end
        work[1] += p * (end - start)

    def goodput(self) -> float:
        """Expected tokens per unit of time."""
        seconds = self._pass()
        for name, (depth, nodes) in self.work.items():
            if nodes:
                seconds += self.batch.drafts[name].of(depth, nodes)
        self.seconds = seconds * self.batch.factor if self.work else seconds
        seconds = self.seconds
        return self.tokens / seconds

    def _pass(self) -> float:
        """Mean time over the number of rows: two points with its first three moments, exact for one request."""
        rows = self.batch.passes.rows
        if self.variance < 1e-6:
            return rows(self.rows)
        deviation = math.sqrt(self.variance)
        half = self.third / (self.variance * deviation) / 2
        root = math.sqrt(1 + half * half)
        up, down = half + root, half - root
        share = -down / (up - down)
        least = len(self.batch.candidates)
        return share * rows(self.rows + deviation * up) + (1 - share) * rows(max(least, self.rows + deviation * down))


@dataclass(frozen=True)
class Plan:
    """Nodes of each request, and what is expected of it. seconds and goodput are relative to the unit of time."""

    lengths: list[int]
    goodput: float
    seconds: float
    rows: float


class Mark(NamedTuple):
    """The first `number` nodes, in order of their gains."""

    goodput: float
    number: int
    seconds: float
    rows: float


def evaluate(batch: Batch, lengths: Seq[int]) -> Plan:
    """What given lengths would do."""
    load = _Load(batch)
    load.start()
    for c, length in zip(batch.candidates, lengths, strict=True):
        if length:
            load.add(c, 0, length)
    goodput = load.goodput()
    return Plan(list(lengths), goodput, load.seconds, load.rows)


class Search:
    """The plan of most goodput, and the best one of each stretch of widths, for whoever wants to try another.

    max_rows: expected rows of the target pass beyond which no plan goes. Of many nodes, some are added at a time: one
    more or less of 32 requests makes no difference that could be measured.
    """

    def __init__(self, batch: Batch, max_rows: float) -> None:
        self._start = [c.fixed or 0 for c in batch.candidates]
        self._nodes = sorted(
            (-gain, j, r) for r, c in enumerate(batch.candidates) if c.fixed is None for j, gain in enumerate(c.gains)
        )
        load = _Load(batch)
        load.start()
        for c, fixed in zip(batch.candidates, self._start, strict=True):
            if fixed:
                load.add(c, 0, fixed)
        best = Mark(load.goodput(), 0, load.seconds, load.rows)
        marks, stretch = [best], 0
        stride = max(1, int(min(len(self._nodes), max_rows - load.rows)) // _NUM_LOOKED_AT)
        for number, (_, j, r) in enumerate(self._nodes, 1):
            load.add(batch.candidates[r], j, j + 1)
            if load.rows > max_rows:
                break
            if number % stride:
                continue
            mark = Mark(load.goodput(), number, load.seconds, load.rows)
            if number == 1 or KNOTS[stretch] < load.rows:
                stretch = min(bisect_left(KNOTS, load.rows), len(KNOTS) - 1)
                marks.append(mark)
            elif mark.goodput > marks[-1].goodput:
                marks[-1] = mark
            if mark.goodput > best.goodput:
                best = mark
        self.marks, self.best = marks, self.plan(best)

    def plan(self, mark: Mark) -> Plan:
        """The lengths that belong to a mark."""
        lengths = list(self._start)
        for _, j, r in self._nodes[: mark.number]:
            lengths[r] = j + 1
        return Plan(lengths, mark.goodput, mark.seconds, mark.rows)
