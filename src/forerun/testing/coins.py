"""Coins for exact enumeration: they take every outcome in turn, for any code that draws with coins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.errors import InternalError
from forerun.sampling.random import weights_of
from forerun.types import Probs

T = TypeVar("T")
Polygon = list[tuple[float, float, float]]  # its corners in order; for three numbers, lists take less time than arrays


@dataclass
class _Way:
    """One sequence of outcomes: one outcome for each coin that a call of the enumerated code asks for."""

    script: list[int]  # outcomes to take first; after them the first outcome is taken
    trail: list[tuple[int, int]] = field(default_factory=list)  # (outcome taken, number of outcomes)
    weight: float = 1.0
    noise: dict[int, Polygon] = field(default_factory=dict)  # absolute index -> polygon of the possible match noise
    uniforms: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict)  # of `Reused`


class Branching:
    """Coins that take every outcome in turn, depth first, and multiply the probabilities (docs/exactness.md).

    `enumerate_outcomes` makes these coins. `at(position)` returns the coins of a round that begins at that absolute
    index. A production coin is a function of (purpose, depth, lane), so a rule that asks for the same coin twice in a
    round gets the same random number twice. Branching raises an AssertionError instead, because enumeration would count
    the two uses as independent.

    The noise of the rule "match" at one index is one random object, however often it is used (by a drafter and the
    verifier, or in two rounds). So `pick` takes each outcome that is possible after the earlier picks at that index,
    with its exact conditional probability.
    """

    def __init__(self, way: _Way, position: int = 0) -> None:
        self._way, self._position = way, position
        self._asked: set[tuple[str, int, int]] = set()

    def at(self, position: int) -> Branching:
        """Return the coins of the round that begins at this absolute index, in the same run of the enumerated code."""
        return Branching(self._way, position)

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Take acceptance and rejection in turn, with the weights prob and 1 - prob."""
        prob = min(1.0, max(0.0, prob))
        if 0 < prob < 1:  # production uses no random number for 0 and 1
            self._ask("accept", depth, lane)
        return self._branch(np.array([prob, 1.0 - prob])) == 0

    def draw(self, probs: Probs, depth: int) -> int:
        """Take every id of the support in turn, with its probability."""
        return self._draw(probs, "next", depth, 0)

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        """Take every id of the support in turn, like `draw`, but with the drafter's own random number."""
        return self._draw(probs, "draft", depth, lane)

    def _draw(self, probs: Probs, purpose: str, depth: int, lane: int) -> int:
        if probs.point is not None:
            return probs.point
        self._ask(purpose, depth, lane)
        return self._branch(spelled_out(probs))

    def _ask(self, purpose: str, depth: int, lane: int) -> None:
        if (purpose, depth, lane) in self._asked:
            raise AssertionError(  # the engine passes an AssertionError on, whichever part of the engine asked
                f"the coin ({purpose}, depth {depth}, lane {lane}) is used twice in a round: it is one random number; "
                "give each draw and each test at a depth a lane of its own"
            )
        self._asked.add((purpose, depth, lane))

    def pick(self, probs: Probs, depth: int) -> int:
        """Take every id of the support in turn, with its probability given the earlier picks at this index."""
        return self.picks(probs, depth, 1)[0]

    def picks(self, probs: Probs, depth: int, num: int) -> list[int]:
        """Take every order of `num` ids of the support in turn, with its probability given the earlier picks."""
        if probs.point is not None:
            return [probs.point]
        weights, noise = spelled_out(probs).tolist(), self._way.noise
        position = self._position + depth
        support = [x for x, weight in enumerate(weights) if weight]
        orders = list(itertools.permutations(support, min(num, len(support))))
        cells = [_ordered(noise.get(position, _SIMPLEX), weights, order) for order in orders]
        i = self._branch(np.array([_area(cell) for cell in cells]), rounding=1e-14)
        noise[position] = cells[i]
        return list(orders[i])

    def _branch(self, weights: npt.NDArray[Any], rounding: float = 0.0) -> int:
        """Take each index of `weights` with a share above `rounding` in turn. The weights need not be normalised."""
        shares = weights.astype(np.float64) / weights.sum(dtype=np.float64)
        possible = np.flatnonzero(shares > rounding)
        way = self._way
        if len(possible) == 1:
            return int(possible[0])
        taken = way.script[len(way.trail)] if len(way.trail) < len(way.script) else 0
        way.trail.append((taken, len(possible)))
        way.weight *= float(shares[possible[taken]])
        return int(possible[taken])


class Reused(Branching):
    """Coins that ignore the round number: a purpose, position and lane have the same uniform number in all rounds.

    After each use, the number is known to lie in an interval, which later rounds cut further. Such coins bias a rule
    that looks at coins of positions and then discards these positions (mutant m13).
    """

    def __init__(self, coins: Branching) -> None:
        super().__init__(coins._way, coins._position)
        self._left = coins._way.uniforms

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Take acceptance and rejection in turn. Skip an outcome that the uniform number's interval excludes."""
        return prob >= 1 or (prob > 0 and self._cut("accept", depth, lane, np.array([prob, 1 - prob])) == 0)

    def _draw(self, probs: Probs, purpose: str, depth: int, lane: int) -> int:
        return probs.point if probs.point is not None else self._cut(purpose, depth, lane, spelled_out(probs))

    def _cut(self, purpose: str, depth: int, lane: int, weights: npt.NDArray[Any]) -> int:
        """Return the index of the weight that the uniform number falls into. All possible indices are taken in turn."""
        key = (purpose, self._position + depth, lane)
        low, high = self._left.get(key, (0.0, 1.0))
        ends = np.append(0.0, weights.cumsum() / weights.sum())
        cuts = ends.clip(low, high)
        i = self._branch(np.diff(cuts), rounding=1e-14)
        self._left[key] = (float(cuts[i]), float(cuts[i + 1]))
        return i


def spelled_out(probs: Probs) -> npt.NDArray[Any]:
    """Return the weights of all token ids up to the last id in `probs`, with 0 for ids that `probs` does not list.

    Raises InternalError if `probs` is no distribution.
    """
    if probs.point is not None:
        return np.asarray(np.eye(1, probs.point + 1, probs.point)[0])
    weights, ids = weights_of(probs)
    if ids is None:
        return weights
    spelled = np.zeros(ids[-1] + 1, dtype=weights.dtype)
    spelled[ids] = weights
    return spelled


def enumerate_outcomes(run: Callable[[Branching], T]) -> list[tuple[float, T]]:
    """Return (probability, result) of `run` for all outcomes of its coins. `run` must depend on its coins alone."""
    outcomes: list[tuple[float, T]] = []
    script: list[int] = []
    while True:
        way = _Way(script)
        result = run(Branching(way))
        outcomes.append((way.weight, result))  # `run` has grown the way, so its weight is known only now
        while way.trail and way.trail[-1][0] + 1 == way.trail[-1][1]:
            way.trail.pop()
        if not way.trail:
            return outcomes
        script = [taken for taken, _ in way.trail[:-1]] + [way.trail[-1][0] + 1]


# Gumbel-max is an exponential race: id x wins where E_x / p_x is smallest. Only the direction of (E_0, E_1, E_2)
# matters, and it is uniform on the triangle E_0 + E_1 + E_2 = 1. So the noise that is still possible after some picks
# is a convex polygon in that triangle, a pick cuts it by straight lines, and probabilities are areas. With two ids the
# third has weight 0.

_SIMPLEX: Polygon = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]


def _winning(polygon: Polygon, weights: Seq[float], x: int) -> Polygon:
    """Return the part of the polygon in which id x wins the exponential race with these weights [2 or 3]."""
    if len(weights) > 3:
        raise InternalError(f"picks can be enumerated for at most 3 ids, not {len(weights)}")
    if weights[x] == 0:
        return []
    for z in range(len(weights)):
        if z != x:
            polygon = _clip(polygon, [corner[x] * weights[z] - corner[z] * weights[x] for corner in polygon])
    return polygon


def _ordered(polygon: Polygon, weights: Seq[float], order: Seq[int]) -> Polygon:
    """Return the part of the polygon in which these ids come first in the exponential race, in this order."""
    left = list(weights)
    for x in order:
        polygon = _winning(polygon, left, x)
        left[x] = 0.0
    return polygon


def _clip(polygon: Polygon, height: Seq[float]) -> Polygon:
    """Cut a convex polygon to the part where a linear function is <= 0 (Sutherland, Hodgman 1974).

    height: the value of the function at each corner.
    """
    corners: Polygon = []
    for i, corner in enumerate(polygon):
        j = (i + 1) % len(polygon)
        if height[i] <= 0:
            corners.append(corner)
        if height[i] * height[j] < 0:
            share = height[i] / (height[i] - height[j])
            u, v, w = (a + share * (b - a) for a, b in zip(corner, polygon[j], strict=True))
            corners.append((u, v, w))
    return corners


def _area(polygon: Polygon) -> float:
    """Return the area of a polygon relative to the whole triangle, by the shoelace formula."""
    ends = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return abs(math.fsum(a[0] * b[1] - a[1] * b[0] for a, b in ends)) if len(polygon) > 2 else 0.0
