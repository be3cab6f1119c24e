"""A counter-based random generator, and the coins (random decisions) of a round, which callers pass as an argument.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011); numpy's Philox
is the 4x64 variant. Every number is a function of only (seed, position, purpose, round, lane). So no draw can depend on
the batch, on other rows, or on how many numbers other requests used:

    key      the two halves of the request's 64-bit seed, low word first
    counter  (absolute index of the token that is decided, purpose, round, lane or lane block)

For float32 distributions, `_place` and `_race` exist twice: here, and as native code (csrc/sampling_race.cpp). Both
return the same ids. Where the native code was built, it is used. For proofs by enumeration, forerun/testing/coins.py
has other coins, which take every outcome in turn and know the probability of each outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.errors import InternalError
from forerun.sampling import arithmetic
from forerun.types import Coins, Draw, Probs, Toss

Words = npt.NDArray[np.uint32]
Wide = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Row = npt.NDArray[Any]
T = TypeVar("T")

PURPOSE_DRAFT, PURPOSE_ACCEPT, PURPOSE_NEXT, PURPOSE_MATCH = 0, 1, 2, 3
PURPOSE_SEED = 6  # 4 and 5 are reserved for tree order and exploration (docs/exactness.md)

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_BLOCK = 512  # ids summed together by a draw
_FEW = 16  # counters up to which Python integers are faster than numpy
_CHUNK = 4096  # counters that are run together


# --------------------------------------------------------------------------------------------------------- generator


def philox4x32(counter: npt.ArrayLike, key: npt.ArrayLike, rounds: int = 10) -> Words:
    """Return the Philox4x32 output, uint32 [..., 4], of counter [..., 4] and key [2] or [..., 2] of 32-bit words."""
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
    """Run the Philox rounds on the four columns `c` of counters and the two columns `k` of keys, and write to `out`.

    The columns hold 32-bit values in 64-bit words, and are overwritten. out [n, 4].
    """
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
    """Return the four Philox4x32 output words of one counter, computed with Python integers.

    For a single counter, numpy (`philox4x32`) takes twenty times as long.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _INCREMENTS[0]) & _MASK, (k1 + _INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def key_of(seed: int) -> tuple[int, int]:
    """Return the Philox key of a 64-bit seed: low word, high word."""
    return seed & _MASK, (seed >> 32) & _MASK


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of output `index` of a request: `seed` for the first output, unrelated seeds for the others."""
    if index == 0:
        return seed
    low, high, *_ = philox_words((index & _MASK, PURPOSE_SEED, 0, 0), key_of(seed))
    return low | high << 32


def uniform53(word0: int, word1: int) -> float:
    """Return a uniform number in [0, 1) with 53 bits from two 32-bit words."""
    return ((word0 >> 5) * 2**26 + (word1 >> 6)) * 2.0**-53


def _words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    native = arithmetic.native_sampler()
    words: tuple[int, ...] = philox_words(counter, key) if native is None else native.philox(*counter, *key)
    return words


def gumbel(seed: int, position: int, ids: npt.ArrayLike) -> Floats:
    """Return standard Gumbel noise for token ids at the absolute index `position`, float64 [n].

    The lane of each random number is the token id.
    """
    lanes = np.asarray(ids, dtype=np.int64)
    blocks, index = np.unique(lanes >> 2, return_inverse=True)
    uniforms = _match_uniforms(seed, position, blocks)[index, lanes & 3]
    return -arithmetic.log(-arithmetic.log(uniforms))


def _match_uniforms(seed: int, position: int, blocks: Ids) -> Floats:
    """Return a uniform number in (0, 1) for each lane of the lane blocks `blocks` [n], float64 [n, 4].

    The number is (word + 0.5) * 2^-32. Lane block j has the lanes 4j .. 4j+3.
    """
    counter = np.zeros((len(blocks), 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 3] = position & _MASK, PURPOSE_MATCH, blocks
    if len(blocks) <= _FEW:
        words = np.array([philox_words(row, key_of(seed)) for row in counter.tolist()]).reshape(-1, 4)
    else:
        words = philox4x32(counter, key_of(seed))
    return np.asarray((words + 0.5) * 2.0**-32)


# ------------------------------------------------------------------------------------------------------------- coins


class PhiloxCoins:
    """Implements Coins with Philox for one sequence in one round. Production code uses these coins.

    position: the absolute index of the first token of the round (= the number of tokens committed so far). round: the
    number of decode steps of the sequence so far. The round makes the draws differ from the draws of an earlier round
    that rejected a token at the same position. The Gumbel noise of `pick` depends on seed and position, not on the
    round. So the rule `match` gives the same text, however the output is split into rounds.
    """

    __slots__ = ("_position", "_round", "_seed")

    def __init__(self, seed: int, position: int, round: int) -> None:
        self._seed = seed
        self._position = position
        self._round = round & _MASK

    def ahead(self, filters: tuple[float, int, float, float, int], shares_noise: bool) -> Draw:
        """Return the settings with which a draft model draws a chain of tokens without calling these coins.

        At each depth the model draws the id that `pick` (if shares_noise) or `draft` (otherwise) would return.
        """
        return Draw(filters, shares_noise, self._seed, self._position, self._round)

    def behind(self, filters: tuple[float, int, float, float, int], shares_noise: bool, depth: int) -> Draw:
        """Return the settings with which the target draws one id at `depth` without calling these coins.

        The target draws the id that `pick` (if shares_noise) or `draw` (otherwise) would return at this depth.
        """
        return Draw(filters, shares_noise, self._seed, self._position + depth, self._round, PURPOSE_NEXT)

    def _known(self, probs: Probs, depth: int, *, shares_noise: bool, purpose: int) -> int | None:
        """Return the id that the device holding `probs` has already drawn with these coins at `depth`; else None.

        shares_noise: whether the draw uses the noise of `pick`. purpose: the purpose of a draw that does not.
        """
        if probs.afar is None or probs.afar.token < 0:
            return None
        draw = probs.afar.draw
        is_this = draw.shares_noise == shares_noise and (draw.seed, draw.position) == (
            self._seed,
            self._position + depth,
        )
        is_coin = shares_noise or (draw.purpose, draw.round) == (purpose, self._round)
        return probs.afar.token if is_this and is_coin else None

    def _uniform(self, purpose: int, depth: int, lane: int = 0) -> float:
        words = _words(((self._position + depth) & _MASK, purpose, self._round, lane), key_of(self._seed))
        return uniform53(words[0], words[1])

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Return whether a uniform number is below `prob`. Where `prob` is 0 or 1, no number is generated."""
        return prob >= 1 or (prob > 0 and self.coin(depth, lane) < prob)

    def coin(self, depth: int, lane: int = 0) -> float:
        """Return the uniform number U in [0, 1) that `accept` compares with a probability."""
        return self._uniform(PURPOSE_ACCEPT, depth, lane)

    def draw(self, probs: Probs, depth: int) -> int:
        """Draw a correction token or a bonus token from `probs`."""
        known = self._known(probs, depth, shares_noise=False, purpose=PURPOSE_NEXT)
        if known is not None:
            return known
        return _draw(probs, self._uniform(PURPOSE_NEXT, depth)) if probs.point is None else probs.point

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        """Draw a drafter's token from `probs`."""
        return _draw(probs, self._uniform(PURPOSE_DRAFT, depth, lane)) if probs.point is None else probs.point

    def pick(self, probs: Probs, depth: int) -> int:
        """Return the argmax of log probs + Gumbel noise over ids with probs > 0 (Gumbel-max); lowest id on ties."""
        if (known := self._known(probs, depth, shares_noise=True, purpose=PURPOSE_MATCH)) is not None:
            return known
        return _pick(probs, self._seed, self._position + depth) if probs.point is None else probs.point

    def picks(self, probs: Probs, depth: int, num: int) -> list[int]:
        """Return the `num` ids with the largest log probs + Gumbel noise, best first. `pick` returns the first of them.

        There are fewer ids where fewer have a probability above 0.
        """
        if probs.point is not None:
            return [probs.point]
        weights, ids = probs.weights.copy(), probs.ids
        drawn: list[int] = []
        while len(drawn) < num and weights.any():
            left = Probs(dense=weights) if ids is None else Probs(ids=ids, listed=weights)
            drawn.append(_pick(left, self._seed, self._position + depth))
            weights[drawn[-1] if ids is None else ids.searchsorted(drawn[-1])] = 0
        return drawn


class LaterCoins:
    """Shifts the coins of a round for a draft that begins after `num` forced tokens: depth d becomes num + d."""

    def __init__(self, coins: Coins, num: int) -> None:
        self._coins, self._num = coins, num

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Return the decision of the coins at `depth` after the forced tokens."""
        return self._coins.accept(prob, self._num + depth, lane)

    def draw(self, probs: Probs, depth: int) -> int:
        """Draw a correction token or a bonus token at `depth` after the forced tokens."""
        return self._coins.draw(probs, self._num + depth)

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        """Draw a drafter's token at `depth` after the forced tokens."""
        return self._coins.draft(probs, self._num + depth, lane)

    def pick(self, probs: Probs, depth: int) -> int:
        """Return the id that `Coins.pick` returns at `depth` after the forced tokens."""
        return self._coins.pick(probs, self._num + depth)

    def picks(self, probs: Probs, depth: int, num: int) -> list[int]:
        """Return the `num` ids that `Coins.picks` returns at `depth` after the forced tokens."""
        return self._coins.picks(probs, self._num + depth, num)


class WatchedCoins:
    """Wraps the coins of a round, and records each call of `accept` in `tosses`, in order."""

    def __init__(self, coins: Coins) -> None:
        self.draw, self.draft, self.pick, self.picks = coins.draw, coins.draft, coins.pick, coins.picks
        self._coins = coins
        self.tosses: list[Toss] = []

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Return the decision of the wrapped coins, and record the toss."""
        is_accepted = self._coins.accept(prob, depth, lane)
        is_tossed = 0 < prob < 1
        coin = self._coins.coin(depth, lane) if is_tossed and isinstance(self._coins, PhiloxCoins) else None
        self.tosses.append(Toss(depth, lane, min(1.0, prob), coin, is_accepted))
        return is_accepted


def weights_of(probs: Probs) -> tuple[Row, Ids | None]:
    """Return a distribution's weights [n] and their ids [n]; ids None = 0 to n - 1.

    Raises InternalError where the weights are negative, all zero, infinite or NaN.
    """
    if error := _no_probs(probs.weights):
        raise error
    return probs.weights, probs.ids


def _no_probs(weights: Row) -> InternalError | None:
    """Return the error for weights that are negative, all zero, infinite or NaN; None for valid weights."""
    low, high = weights.min(initial=0.0), weights.max(initial=0.0)
    if low >= 0 and 0 < high < math.inf:  # NaN fails every comparison
        return None
    return InternalError(
        f"a distribution with weights from {low} to {high} cannot be drawn from: negative, empty or no number"
    )


def _draw(probs: Probs, uniform: float) -> int:
    """Return the id at which the cumulative probability exceeds `uniform`; never an id of probability 0."""
    weights, ids = probs.weights, probs.ids
    native = arithmetic.native_sampler() if weights.dtype == np.float32 else None
    place = _place(weights, int(uniform * 2**53)) if native is None else native.place(weights, int(uniform * 2**53))
    if place is None:
        raise _no_probs(weights) or InternalError("numpy and native code disagree on what a distribution is")
    return int(place if ids is None else ids[place])


def _place(weights: Row, uniform: int) -> int | None:
    """Return the first index where the cumulative ticks exceed uniform * 2^-53 of all ticks; None for invalid weights.

    uniform: an integer in [0, 2^53). Ticks are summed in two levels: blocks of the vocabulary, then the entries of one
    block. Ticks are whole numbers, so sums are not rounded, and the weight at the returned index is above 0.
    """
    if _no_probs(weights):
        return None
    counts = arithmetic.ticks(weights, len(weights), float(weights.max()))
    starts = np.arange(0, len(weights), _BLOCK)
    mass = np.add.reduceat(counts, starts).cumsum()
    goal = uniform * int(mass[-1]) >> 53
    b = int(np.searchsorted(mass, goal, side="right"))
    within = counts[starts[b] : starts[b] + _BLOCK].cumsum()
    return int(starts[b] + np.searchsorted(within, goal - (mass[b - 1] if b else 0), side="right"))


def _pick(probs: Probs, seed: int, position: int) -> int:
    """Return the id with the largest log weight + Gumbel noise.

    It is computed as an exponential race: the id with the smallest -log u / weight, where u is uniform.
    """
    weights, ids = probs.weights, probs.ids
    native = arithmetic.native_sampler() if weights.dtype == np.float32 else None
    winner: int | None = (
        _race(weights, ids, seed, position) if native is None else native.race(weights, ids, seed, position)
    )
    if winner is None:
        raise _no_probs(weights) or InternalError("numpy and native code disagree on what a distribution is")
    return winner


def _race(weights: Row, ids: Ids | None, seed: int, position: int) -> int | None:
    """Return the id with the smallest time -log u / weight (float64), the lowest id on ties; None for invalid weights.

    The times of likely ids are computed first. Let t be the smallest of these times. Another id has no larger time only
    if -log u <= weight * t. Since -log u >= 1 - u, an id with 1 - u > weight * t has a larger time, and its logarithm
    is not computed.
    """
    if _no_probs(weights):
        return None
    padded, blocks = _in_blocks(weights, ids)
    best = np.maximum(np.maximum(padded[:, 0], padded[:, 1]), np.maximum(padded[:, 2], padded[:, 3])).astype(np.float64)
    likely = (best >= best.max() / 16) | (len(best) <= _FEW)
    entrants, times = _finish(padded[likely], blocks[likely], seed, position, math.inf)
    # The margin outweighs every rounding error here, so that pruning never changes the answer. 1 - u >= 2^-33.
    reach = float(times.min()) * (1 + 1e-6)
    others = (best * reach >= 2.0**-33) & ~likely
    if others.any():
        more_entrants, more_times = _finish(padded[others], blocks[others], seed, position, reach)
        entrants, times = np.concatenate((entrants, more_entrants)), np.concatenate((times, more_times))
    return int(entrants[times == times.min()].min())


def _in_blocks(weights: Row, ids: Ids | None) -> tuple[Row, Ids]:
    """Group the weights by lane block: four ids that share one Philox counter.

    Returns the weights [n, 4] of n lane blocks, and the indices [n] of these blocks.
    """
    if ids is None:
        padded = np.pad(weights, (0, -len(weights) % 4)) if len(weights) % 4 else weights
        return padded.reshape(-1, 4), np.arange(len(padded) // 4)
    blocks, index = np.unique(ids >> 2, return_inverse=True)
    spread = np.zeros((len(blocks), 4), dtype=weights.dtype)
    spread[index, ids & 3] = weights
    return spread, blocks


def _finish(weights: Row, blocks: Ids, seed: int, position: int, reach: float) -> tuple[Ids, Floats]:
    """Return the ids in the lane blocks `blocks` [n] that may have a time up to `reach`, and their times.

    The time of an id is -log u / weight. weights [n, 4]: the weights of the ids in each block.
    """
    uniforms = _match_uniforms(seed, position, blocks)
    wide = weights.astype(np.float64)
    able = (weights > 0) & (1 - uniforms <= (wide * reach if reach < math.inf else math.inf))
    flat = np.flatnonzero(able)
    times = -arithmetic.log(uniforms.reshape(-1)[flat]) / wide.reshape(-1)[flat]
    return blocks[flat >> 2] * 4 + (flat & 3), times
