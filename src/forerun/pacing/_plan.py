"""How many nodes each request gets: the most expected tokens per second of the batch (goodput).

A node's gain is the probability that it becomes a token. Gains of one request never rise with depth, so the first nodes
of all requests, in the order of their gains, are a legal plan for every number of nodes (SmartSpec, Liu et al. 2024,
arXiv 2406.14066). A drafter's passes follow one another, though, and the deepest request pays for all of its passes
alone: every such plan is looked at with its depth cut off, too. The first plan has no node: that is plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from forerun import native
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
    drafts: Mapping[str, DraftTime]


@dataclass(frozen=True)
class Plan:
    """Nodes of each request, and what is expected of it. seconds and goodput are relative to the unit of time."""

    lengths: list[int]
    goodput: float
    seconds: float
    rows: float


class Search:
    """The plan of most goodput, and the best one of each stretch of widths, for whoever wants to try another.

    max_rows: expected rows of the target pass beyond which no plan goes. Of many nodes, some are added at a time: one
    more or less of 32 requests makes no difference that could be measured.
    """

    def __init__(self, batch: Batch, max_rows: float) -> None:
        self._plans = _plans(batch)
        self._plans.search(max_rows)
        self.plain = Plan(*self._plans.plan(0))
        self.best = Plan(*self._plans.plan(self._plans.best()))

    def value(self, lengths: Seq[int]) -> Plan:
        """What given lengths would do."""
        return Plan(list(lengths), *self._plans.value(list(lengths)))

    @property
    def drafting(self) -> Plan | None:
        """The best plan that has a node, if any has."""
        found = self._plans.drafting()
        return None if found < 0 else Plan(*self._plans.plan(found))

    @cached_property
    def marks(self) -> list[Plan]:
        """The first plan, then the best one of each stretch between two knots, wider and wider."""
        return [self.plain, *(Plan(*self._plans.plan(i)) for i in self._plans.marks()[1:])]


def _plans(batch: Batch) -> Plans:
    """For costs that are native, native plans, which read them."""
    names = [c.draft for c in batch.candidates]
    which = {name: place for place, name in enumerate(dict.fromkeys(names))}
    make = Plans if isinstance(batch.passes, PassTime) else native.extension().Plans
    return make(
        [c.gains for c in batch.candidates],
        [c.found for c in batch.candidates],
        [which[name] for name in names],
        [-1 if c.fixed is None else c.fixed for c in batch.candidates],
        batch.passes,
        [batch.drafts[name] for name in which],
    )


class Plans:
    """The plans that are looked at, for B requests: the first nodes in order of their gains, for some numbers of nodes.

    gains, found, fixed: as a Candidate has them, -1 = not fixed. drafters: place of each one's among `drafts`.
    csrc/pacing_plans.cpp has its twin.
    """

    def __init__(
        self,
        gains: Seq[list[float]],
        found: Seq[float],
        drafters: Seq[int],
        fixed: Seq[int],
        passes: PassTime,
        drafts: Seq[DraftTime],
    ) -> None:
        longest = max(map(len, gains))
        self._gains = np.array([own + [0.0] * (longest - len(own)) for own in gains])  # [B, nodes of the longest]
        # [B, 1 + nodes of the longest]: expected tokens of each request by its nodes
        self._tokens = np.cumsum(np.pad(self._gains, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
        self._found, self._fixed = np.array(found), np.array(fixed)
        self._passes, self._drafts = passes, drafts
        self._members = [np.array([b for b, own in enumerate(drafters) if own == d], int) for d in range(len(drafts))]
        self._lengths: Lengths = np.zeros((0, len(gains)), int)
        self._goodput, self._seconds, self._rows = (np.zeros(0) for _ in range(3))

    def search(self, max_rows: float) -> None:
        """Look at all plans; the first one has no node. Those of more rows are worth nothing."""
        self._lengths = self._all()
        self._goodput, self._seconds, self._rows = self._values(self._lengths)
        self._goodput[1:][self._rows[1:] > max_rows] = 0.0

    def value(self, lengths: list[int]) -> tuple[float, float, float]:
        """Goodput, seconds and rows of given lengths."""
        goodput, seconds, rows = self._values(np.array([lengths]))
        return float(goodput[0]), float(seconds[0]), float(rows[0])

    def plan(self, i: int) -> tuple[list[int], float, float, float]:
        """Lengths, goodput, seconds and rows of the i-th plan."""
        numbers = (float(values[i]) for values in (self._goodput, self._seconds, self._rows))
        return (self._lengths[i].tolist(), *numbers)

    def best(self) -> int:
        """The plan of most goodput."""
        return int(self._goodput.argmax())

    def drafting(self) -> int:
        """The best one that has a node, -1 = none has."""
        goodput = np.where(self._lengths.any(axis=1), self._goodput, 0.0)
        return int(goodput.argmax()) if goodput.any() else -1

    def marks(self) -> list[int]:
        """The first plan, then the best one of each stretch between two knots, wider and wider."""
        stretches, goodput = np.searchsorted(KNOTS, self._rows).tolist(), self._goodput.tolist()
        found: dict[int, int] = {}
        for i in range(1, len(goodput)):
            if goodput[i] > (goodput[found[stretches[i]]] if stretches[i] in found else 0.0):
                found[stretches[i]] = i
        return [0, *(found[stretch] for stretch in sorted(found))]

    def _all(self) -> Lengths:
        """[P, B]: the first nodes in order of their gains, for some numbers and all cuts; first of all, none."""
        free = self._fixed < 0
        usable = (self._gains > 0) & free[:, None]
        by_depth = np.where(usable, self._gains, -1.0).T  # equal gains: the shallower node first
        order = np.argsort(-by_depth, axis=None, kind="stable")
        rank = np.empty(order.size, dtype=np.intp)
        rank[order] = np.arange(order.size)
        total, deepest = int(usable.sum()), int(usable.sum(axis=1).max(initial=0))
        numbers = np.array([number for number in _NUMBERS if number < total] + [total])
        nodes = (rank.reshape(by_depth.shape)[None] < numbers[:, None, None]).sum(axis=1)  # [numbers, B]
        depths = [deepest] if free.sum() == 1 else [*(depth for depth in _DEPTHS if depth < deepest), deepest]
        cut = np.minimum(nodes[None], np.array(depths)[:, None, None]).reshape(-1, len(free))
        plans: Lengths = cut + np.maximum(self._fixed, 0)
        return plans

    def _values(self, lengths: Lengths) -> tuple[Numbers, Numbers, Numbers]:
        """Expected tokens per unit of time, units of time, and mean rows of plans [P, B]: three times [P]."""
        num, found = lengths.shape[1], self._found
        longest = self._tokens.shape[1] - 1  # what lies behind hardly ever becomes a token
        tokens = self._tokens[np.arange(num), np.minimum(lengths, longest)].sum(axis=1)
        rows = num + lengths @ found
        seconds = self._passes_s(lengths, rows)
        for drafts, places in zip(self._drafts, self._members, strict=True):
            nodes = lengths[:, places] * found[places]
            total = nodes.sum(axis=1)
            if total.any():
                seconds = seconds + np.where(total > 0, drafts.of_many(nodes.max(axis=1), total), 0.0)
        return tokens / seconds, seconds, rows

    def _passes_s(self, lengths: Lengths, rows: Numbers) -> Numbers:
        """Mean time over the number of rows, since a drafter may find nothing: [P].

        Two points with the first three moments of that number, which is exact for one request.
        """
        curve, found, others = self._passes.rows_of, self._found, self._passes.sequences(lengths.shape[1])
        spread = np.where(found < 0.999, found * (1 - found), 0.0)
        if not spread.any():
            return curve(rows) + others
        variance = np.maximum(lengths**2 @ spread, 1e-9)
        half = (lengths**3 @ (spread * (1 - 2 * found))) / variance**1.5 / 2
        root, deviation = np.sqrt(1 + half * half), np.sqrt(variance)
        share = (root - half) / (2 * root)
        low = np.maximum(lengths.shape[1], rows + deviation * (half - root))
        seconds: Numbers = share * curve(rows + deviation * (half + root)) + (1 - share) * curve(low) + others
        return seconds
