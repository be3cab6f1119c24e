"""Randomness as an argument: a counter-based generator, and the coins of one round made from it.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). numpy's Philox is the 4x64
variant. Every number is a function of (seed, position, purpose, round, lane) and of nothing else, so no draw can
depend on the batch, on neighbours, or on how many numbers somebody else used:

    key      the two halves of the request's 64-bit seed, low word first
    counter  (absolute index of the token decided, purpose, round, lane or lane block)

For proofs there is a second source, `Branching`: it takes every outcome in turn and knows its probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.errors import InternalError
from forerun.types import Probs

Words = npt.NDArray[np.uint32]
Wide = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
T = TypeVar("T")

PURPOSE_DRAFT, PURPOSE_ACCEPT, PURPOSE_NEXT, PURPOSE_MATCH = 0, 1, 2, 3

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_EVERYONE = 1e30  # a reach that rules nobody out who could win, and no float32 overflows with it
_BLOCK = 512  # ids summed together by a draw
_FEW = 16  # counters up to which Python integers are faster than numpy
_CHUNK = 4096  # counters that are run together


# --------------------------------------------------------------------------------------------------------- generator


def philox4x32(counter: npt.ArrayLike, key: npt.ArrayLike, rounds: int = 10) -> Words:
    """counter [..., 4] and key [2] or [..., 2] of 32-bit words -> uint32 [..., 4]."""
    counters, keys = np.asarray(counter, dtype=np.uint64), np.asarray(key, dtype=np.uint64)
    flat = counters.reshape(-1, 4)
    flat_keys = keys[None] if keys.ndim == 1 else np.broadcast_to(keys, (*counters.shape[:-1], 2)).reshape(-1, 2)
    out = np.empty(flat.shape, dtype=np.uint32)
    for start in range(0, len(flat), _CHUNK):  # short arrays stay in the processor's cache
        part = slice(start, start + _CHUNK)
        part_keys = flat_keys if len(flat_keys) == 1 else flat_keys[part]
        _philox_rounds([c.copy() for c in flat[part].T], [k.copy() for k in part_keys.T], rounds, out[part])
    return out.reshape(counters.shape)


def _philox_rounds(c: list[Wide], k: list[Wide], rounds: int, out: Words) -> None:
    """Run the rounds in place on four counter and two key columns (32-bit values in 64-bit words)."""
    low, high = np.uint64(_MASK), np.uint64(32)
    product0, product1 = np.empty_like(c[0]), np.empty_like(c[0])
    for _ in range(rounds):
        np.multiply(c[0], np.uint64(_MULTIPLIERS[0]), out=product0)
        np.multiply(c[2], np.uint64(_MULTIPLIERS[1]), out=product1)
        for even, odd, product, key in ((0, 1, product1, k[0]), (2, 3, product0, k[1])):
            np.right_shift(product, high, out=c[even])
            c[even] ^= c[odd]
            c[even] ^= key
            np.bitwise_and(product, low, out=c[odd])
        for key, increment in zip(k, _INCREMENTS, strict=True):
            key += np.uint64(increment)
            key &= low
    for column, values in enumerate(c):
        out[:, column] = values


def philox_words(counter: Seq[int], key: tuple[int, int], rounds: int = 10) -> tuple[int, ...]:
    """The same for one counter, in Python integers: 20 times less than numpy takes for an array of one."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _INCREMENTS[0]) & _MASK, (k1 + _INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def key_of(seed: int) -> tuple[int, int]:
    """The Philox key of a 64-bit seed: low word, high word."""
    return seed & _MASK, (seed >> 32) & _MASK


def uniform53(word0: int, word1: int) -> float:
    """A uniform in [0, 1) with 53 bits from two 32-bit words."""
    return ((word0 >> 5) * 2**26 + (word1 >> 6)) * 2.0**-53


def gumbel(seed: int, position: int, ids: npt.ArrayLike) -> Floats:
    """Standard Gumbel noise of these ids at this absolute index, float64 [n]; lane = id."""
    lanes = np.asarray(ids, dtype=np.int64)
    blocks, index = np.unique(lanes >> 2, return_inverse=True)
    uniforms = _match_uniforms(seed, position, blocks)[index, lanes & 3]
    return np.asarray(-np.log(-np.log(uniforms)))


def _match_uniforms(seed: int, position: int, blocks: Ids) -> Floats:
    """(w + 0.5) * 2^-32 in (0, 1), float64 [n, 4]: block j of four words supplies the lanes 4j .. 4j+3."""
    counter = np.zeros((len(blocks), 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 3] = position & _MASK, PURPOSE_MATCH, blocks
    if len(blocks) <= _FEW:
        words = np.array([philox_words(row, key_of(seed)) for row in counter.tolist()]).reshape(-1, 4)
    else:
        words = philox4x32(counter, key_of(seed))
    return np.asarray((words + 0.5) * 2.0**-32)


# ------------------------------------------------------------------------------------------------------------- coins


class PhiloxCoins:
    """The production Coins of one sequence in one round.

    position: absolute index of the first token of the round (= tokens committed so far). round: decode steps of the
    sequence so far; it separates the draws of a round from those of an earlier round that looked at the same position
    and rejected. Match noise knows only the position: that is what makes `match` one text.
    """

    def __init__(self, seed: int, position: int, round: int) -> None:
        self._seed, self._key = seed, key_of(seed)
        self._position, self._round = position, round & _MASK

    def _uniform(self, purpose: int, depth: int, lane: int = 0) -> float:
        words = philox_words(((self._position + depth) & _MASK, purpose, self._round, lane), self._key)
        return uniform53(words[0], words[1])

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """U < prob: never for 0, always for 1."""
        return self._uniform(PURPOSE_ACCEPT, depth, lane) < prob

    def draw(self, probs: Probs, depth: int) -> int:
        """A correction or a bonus with the law `probs`."""
        return _draw(probs, self._uniform(PURPOSE_NEXT, depth)) if probs.point is None else probs.point

    def draft(self, probs: Probs, depth: int) -> int:
        """A drafter's own draw with the law `probs`."""
        return _draw(probs, self._uniform(PURPOSE_DRAFT, depth)) if probs.point is None else probs.point

    def pick(self, probs: Probs, depth: int) -> int:
        """argmax over the ids with probs > 0 of log probs + Gumbel noise (Gumbel-max); lowest id on ties."""
        if probs.point is not None:
            return probs.point
        return _pick(weights_of(probs), self._seed, self._position + depth)


def weights_of(probs: Probs) -> npt.NDArray[Any]:
    """The dense vector on the host. Raises InternalError where it is missing, negative, without mass, or no number."""
    if probs.dense is None:
        raise InternalError("a law needs a point or a dense vector")
    weights: npt.NDArray[Any] = probs.dense.detach().cpu().numpy()
    low, high = weights.min(initial=0.0), weights.max(initial=0.0)
    if not (low >= 0 and 0 < high < math.inf):  # NaN fails every comparison
        raise InternalError(
            f"a law with weights from {low} to {high} cannot be drawn from: negative, empty or no number"
        )
    return weights


def _draw(probs: Probs, uniform: float) -> int:
    """Inverse of the cumulative sum (float64) at `uniform`; an id of probability 0 is never returned.

    Summed in two levels: blocks of the vocabulary, then the ids of one block.
    """
    weights = weights_of(probs)
    starts = np.arange(0, len(weights), _BLOCK)
    mass = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    goal = uniform * mass[-1]
    b = min(int(np.searchsorted(mass, goal, side="right")), int(np.searchsorted(mass, mass[-1])))
    block = weights[starts[b] : starts[b] + _BLOCK]
    within = block.cumsum(dtype=np.float64)
    i = int(np.searchsorted(within, goal - (mass[b - 1] if b else 0.0), side="right"))
    # Where rounding carries the goal past the block's sum, the last id of its support stands there.
    return int(starts[b]) + min(i, int(np.flatnonzero(block)[-1]))


def _pick(weights: npt.NDArray[Any], seed: int, position: int) -> int:
    """argmax of log weight + Gumbel, evaluated in two strokes: the likely ids first, then whoever could still win.

    log p + G = -log(E / p) with E = -log u exponential. Once some id has reached the score s, another can win only if
    E / p <= exp(-s); since E >= 1 - u, those with 1 - u > p * exp(-s) are out without a logarithm.
    """
    padded = (np.pad(weights, (0, -len(weights) % 4)) if len(weights) % 4 else weights).reshape(-1, 4)
    best = np.maximum(np.maximum(padded[:, 0], padded[:, 1]), np.maximum(padded[:, 2], padded[:, 3]))
    likely = best >= best.max() / 16
    ids, scores = _contest(padded, np.flatnonzero(likely), seed, position, _EVERYONE)
    # The margin outweighs every rounding error here, so that pruning never changes the answer. 1 - u >= 2^-33.
    reach = math.exp(-float(scores.max())) * (1 + 1e-6)
    others = np.flatnonzero((best * reach >= 2.0**-33) & ~likely)
    if len(others):
        more_ids, more_scores = _contest(padded, others, seed, position, reach)
        ids, scores = np.concatenate((ids, more_ids)), np.concatenate((scores, more_scores))
    return int(ids[scores == scores.max()].min())


def _contest(padded: npt.NDArray[Any], blocks: Ids, seed: int, position: int, reach: float) -> tuple[Ids, Floats]:
    """Ids of these blocks that may win and their scores log p + G, float64. padded [V / 4, 4]."""
    weights, uniforms = padded[blocks], _match_uniforms(seed, position, blocks)
    able = (weights > 0) & (1 - uniforms <= weights * reach)
    flat = np.flatnonzero(able)
    scores = np.log(weights.reshape(-1)[flat].astype(np.float64)) - np.log(-np.log(uniforms.reshape(-1)[flat]))
    return blocks[flat >> 2] * 4 + (flat & 3), scores


# --------------------------------------------------------------------------------------------------- exact enumeration


@dataclass
class _Way:
    """One way through all branchings of a run."""

    script: list[int]  # outcomes to take first; behind them the first outcome is taken
    trail: list[tuple[int, int]] = field(default_factory=list)  # (outcome taken, number of outcomes)
    weight: float = 1.0
    noise: dict[int, Floats] = field(default_factory=dict)  # absolute index -> what the match noise may still be


class Branching:
    """Coins that take one outcome after another, depth first, and know the probability of the way (docs/exactness.md).

    Made by `enumerate_outcomes`; `at(position)` gives the Coins of a round whose first token has that absolute index.
    The match noise of one index is one random object however often it is looked at (a drafter and the verifier, or
    two rounds), so `pick` returns what is still possible after the earlier picks, with exact conditional probability.
    """

    def __init__(self, way: _Way, position: int = 0) -> None:
        self._way, self._position = way, position

    def at(self, position: int) -> Branching:
        """The same way, seen from a round that starts at this absolute index."""
        return Branching(self._way, position)

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Both outcomes, with weights prob and 1 - prob."""
        prob = min(1.0, max(0.0, prob))
        return self._branch(np.array([prob, 1.0 - prob])) == 0

    def draw(self, probs: Probs, depth: int) -> int:
        """Every id of the support, with its probability."""
        return self._branch(weights_of(probs)) if probs.point is None else probs.point

    def draft(self, probs: Probs, depth: int) -> int:
        """As draw."""
        return self.draw(probs, depth)

    def pick(self, probs: Probs, depth: int) -> int:
        """Every id of the support, with its probability given the earlier picks at this index."""
        if probs.point is not None:
            return probs.point
        weights, noise = weights_of(probs), self._way.noise
        position = self._position + depth
        cells = [_winning(noise.get(position, _SIMPLEX), weights, i) for i in range(len(weights))]
        i = self._branch(np.array([_area(cell) for cell in cells]), rounding=1e-14)
        noise[position] = cells[i]
        return i

    def _branch(self, weights: npt.NDArray[Any], rounding: float = 0.0) -> int:
        """Take one index whose share of the weights is above `rounding`; the weights need not be normalised."""
        law = weights.astype(np.float64) / weights.sum(dtype=np.float64)
        possible = np.flatnonzero(law > rounding)
        way = self._way
        if len(possible) == 1:
            return int(possible[0])
        taken = way.script[len(way.trail)] if len(way.trail) < len(way.script) else 0
        way.trail.append((taken, len(possible)))
        way.weight *= float(law[possible[taken]])
        return int(possible[taken])


def enumerate_outcomes(run: Callable[[Branching], T]) -> list[tuple[float, T]]:
    """(probability, result) of every way that `run` can go. `run` must be a function of its coins alone."""
    outcomes: list[tuple[float, T]] = []
    script: list[int] = []
    while True:
        way = _Way(script)
        result = run(Branching(way))
        outcomes.append((way.weight, result))
        while way.trail and way.trail[-1][0] + 1 == way.trail[-1][1]:
            way.trail.pop()
        if not way.trail:
            return outcomes
        script = [taken for taken, _ in way.trail[:-1]] + [way.trail[-1][0] + 1]


# Gumbel-max as an exponential race: id x wins where E_x / p_x is smallest. Only the direction of (E_0, E_1, E_2)
# matters, and it is uniform on the triangle E_0 + E_1 + E_2 = 1. So what is known of the noise is a convex polygon
# in that triangle, a pick cuts it by straight lines, and probabilities are areas. Two ids: the third has weight 0.

_SIMPLEX = np.eye(3)


def _winning(polygon: Floats, weights: npt.NDArray[Any], x: int) -> Floats:
    """The part of the polygon [n, 3] in which id x wins the race for these weights [2 or 3]."""
    if len(weights) > 3:
        raise InternalError(f"picks can be enumerated for at most 3 ids, not {len(weights)}")
    if weights[x] == 0:
        return np.empty((0, 3))
    for z in range(len(weights)):
        if z != x:
            polygon = _clip(polygon, polygon[:, x] * float(weights[z]) - polygon[:, z] * float(weights[x]))
    return polygon


def _clip(polygon: Floats, height: Floats) -> Floats:
    """The part of a convex polygon where a linear function, given at the corners, is <= 0 (Sutherland, Hodgman)."""
    corners: list[Floats] = []
    for i in range(len(polygon)):
        j = (i + 1) % len(polygon)
        if height[i] <= 0:
            corners.append(polygon[i])
        if height[i] * height[j] < 0:
            share = height[i] / (height[i] - height[j])
            corners.append(polygon[i] + share * (polygon[j] - polygon[i]))
    return np.array(corners).reshape(-1, 3)


def _area(polygon: Floats) -> float:
    """Area relative to the whole triangle, by the shoelace formula."""
    x, y = polygon[:, 0], polygon[:, 1]
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) if len(polygon) > 2 else 0.0
