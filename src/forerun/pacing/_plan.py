"""How many nodes each request gets: the most expected tokens per second of the batch (goodput).

A node's gain is the probability that it becomes a token. Gains of one request never rise with depth, so the first nodes
of all requests, in the order of their gains, are a legal plan for every number of nodes (SmartSpec, Liu et al. 2024,
arXiv 2406.14066). A drafter's passes follow one another, though, and the deepest request pays for all of its passes
alone: every such plan is looked at with its depth cut off, too. The first plan has no node: that is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from forerun.pacing._costs import KNOTS, Numbers, PassTime
from forerun.pacing._drafts import DraftTime

_NUMBERS = (*range(17), *(round(2 ** (i / 4)) for i in range(17, 65)))  # of nodes, that plans are looked at for
_DEPTHS = (1, 2, 3, 4, 6, 8, 12)  # at which plans are cut off, besides not at all

Lengths = NDArray[np.intp]


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
    """What a step would consist of: the requests, and the costs that they share."""

    candidates: list[Candidate]
    passes: PassTime
    drafts: dict[str, DraftTime]

    @cached_property
    def found(self) -> Numbers:
        """[B]."""
        return np.array([c.found for c in self.candidates])

    @cached_property
    def gains(self) -> Numbers:
        """[B, nodes of the longest], 0 behind the end of each."""
        longest = max(len(c.gains) for c in self.candidates)
        return np.array([c.gains + [0.0] * (longest - len(c.gains)) for c in self.candidates])

    @cached_property
    def tokens(self) -> Numbers:
        """[B, 1 + nodes of the longest]: expected tokens of each request by its nodes."""
        return np.cumsum(np.pad(self.gains, ((0, 0), (1, 0)), constant_values=1.0), axis=1)

    @cached_property
    def members(self) -> dict[str, Lengths]:
        """Places of the requests, by drafter."""
        names = [c.draft for c in self.candidates]
        return {name: np.array([i for i, own in enumerate(names) if own == name]) for name in set(names)}


@dataclass(frozen=True)
class Plan:
    """Nodes of each request, and what is expected of it. seconds and goodput are relative to the unit of time."""

    lengths: list[int]
    goodput: float
    seconds: float
    rows: float


def evaluate(batch: Batch, lengths: Seq[int]) -> Plan:
    """What given lengths would do."""
    goodput, seconds, rows = _value(batch, np.array([lengths], dtype=np.intp))
    return Plan(list(lengths), float(goodput[0]), float(seconds[0]), float(rows[0]))


def _value(batch: Batch, lengths: Lengths) -> tuple[Numbers, Numbers, Numbers]:
    """Expected tokens per unit of time, units of time, and mean rows of plans [P, B]: three times [P]."""
    num, found = lengths.shape[1], batch.found
    longest = batch.tokens.shape[1] - 1  # what lies behind hardly ever becomes a token
    tokens = batch.tokens[np.arange(num), np.minimum(lengths, longest)].sum(axis=1)
    rows = num + lengths @ found
    seconds = _passes(batch, lengths, rows)
    for name, places in batch.members.items():
        nodes = lengths[:, places] * found[places]
        total = nodes.sum(axis=1)
        if total.any():
            seconds = seconds + np.where(total > 0, batch.drafts[name].of_many(nodes.max(axis=1), total), 0.0)
    return tokens / seconds, seconds, rows


def _passes(batch: Batch, lengths: Lengths, rows: Numbers) -> Numbers:
    """Mean time over the number of rows, since a drafter may find nothing: [P].

    Two points with the first three moments of that number, which is exact for one request.
    """
    curve, found = batch.passes.rows_of, batch.found
    spread = np.where(found < 0.999, found * (1 - found), 0.0)
    if not spread.any():
        return curve(rows)
    variance = np.maximum(lengths**2 @ spread, 1e-9)
    half = (lengths**3 @ (spread * (1 - 2 * found))) / variance**1.5 / 2
    root, deviation = np.sqrt(1 + half * half), np.sqrt(variance)
    share = (root - half) / (2 * root)
    low = np.maximum(lengths.shape[1], rows + deviation * (half - root))
    seconds: Numbers = share * curve(rows + deviation * (half + root)) + (1 - share) * curve(low)
    return seconds


class Search:
    """The plan of most goodput, and the best one of each stretch of widths, for whoever wants to try another.

    max_rows: expected rows of the target pass beyond which no plan goes. Of many nodes, some are added at a time: one
    more or less of 32 requests makes no difference that could be measured. given: lengths that are valued, too, in the
    same stroke; they are not among what is searched.
    """

    def __init__(self, batch: Batch, max_rows: float, given: Seq[int] | None = None) -> None:
        lengths = _plans(batch)
        rows = lengths if given is None else np.vstack([lengths, np.array([given], dtype=np.intp)])
        values, num = _value(batch, rows), len(lengths)
        self.given = None if given is None else Plan(list(given), *[float(column[num]) for column in values])
        self._lengths, (self._goodput, self._seconds, self._rows) = lengths, [column[:num] for column in values]
        self._goodput[1:][self._rows[1:] > max_rows] = 0.0
        self.plain, self.best = self._plan(0), self._plan(int(self._goodput.argmax()))

    @property
    def drafting(self) -> Plan | None:
        """The best plan that has a node, if any has."""
        goodput = np.where(self._lengths.any(axis=1), self._goodput, 0.0)
        return self._plan(int(goodput.argmax())) if goodput.any() else None

    @cached_property
    def marks(self) -> list[Plan]:
        """The first plan, then the best one of each stretch between two knots, wider and wider."""
        stretches, goodput = np.searchsorted(KNOTS, self._rows).tolist(), self._goodput.tolist()
        found: dict[int, int] = {}
        for i in range(1, len(goodput)):
            if goodput[i] > (goodput[found[stretches[i]]] if stretches[i] in found else 0.0):
                found[stretches[i]] = i
        return [self.plain, *(self._plan(found[s]) for s in sorted(found))]

    def _plan(self, i: int) -> Plan:
        numbers = (float(values[i]) for values in (self._goodput, self._seconds, self._rows))
        return Plan(self._lengths[i].tolist(), *numbers)


def _plans(batch: Batch) -> Lengths:
    """[P, B]: the first nodes in order of their gains, for some numbers of nodes and all cuts; first of all, none."""
    free = np.array([c.fixed is None for c in batch.candidates])
    usable = (batch.gains > 0) & free[:, None]
    by_depth = np.where(usable, batch.gains, -1.0).T  # equal gains: the shallower node first
    order = np.argsort(-by_depth, axis=None, kind="stable")
    rank = np.empty(order.size, dtype=np.intp)
    rank[order] = np.arange(order.size)
    total, deepest = int(usable.sum()), int(usable.sum(axis=1).max(initial=0))
    numbers = np.array([number for number in _NUMBERS if number < total] + [total])
    nodes = (rank.reshape(by_depth.shape)[None] < numbers[:, None, None]).sum(axis=1)  # [numbers, B]
    depths = [deepest] if free.sum() == 1 else [*(depth for depth in _DEPTHS if depth < deepest), deepest]
    cut = np.minimum(nodes[None], np.array(depths)[:, None, None]).reshape(-1, len(free))
    plans: Lengths = cut + np.array([c.fixed or 0 for c in batch.candidates])
    return plans
