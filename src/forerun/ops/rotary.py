"""Position encodings in numpy: rotations for each kind of rope, sinusoids, and buckets of distances.

All backends take these numbers from here. They are computed in steps that IEEE 754 rounds in the same way on
every machine, so that a model's output does not depend on any library's cosine or power. Only the powers of theta come
from the C library, in float64; rounding them to float32 removes the differences between libraries.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt

from forerun.blocks import Buckets, Rope
from forerun.sampling import arithmetic

Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Rotations:
    """A table of cos and sin by position, which grows by whole blocks when higher positions are needed."""

    BLOCK = 256

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope = rope
        self.inv_freq = inverse_frequencies(rope, head_dim)
        self._factor = attention_factor(rope)
        self._table = np.empty((0, 2, 1, 2 * len(self.inv_freq)), np.float32)
        self.num_positions = 0  # in the table

    def table(self, end: int) -> Singles:
        """Return cos and sin of at least every position below `end`: [positions, 2, 1, turned dimensions]."""
        if end > self.num_positions:
            firsts = range(self.num_positions, end, self.BLOCK)
            blocks = [rotations(self.inv_freq, self._factor, range(first, first + self.BLOCK)) for first in firsts]
            self._table = np.concatenate((self._table, *(block[:, :, None] for block in blocks)))
            self.num_positions = len(self._table)
        return self._table


def rotations(inv_freq: Singles, factor: float, positions: range) -> Singles:
    """Return cos and sin at these positions, [positions, 2, 2 * pairs].

    Pair i turns dimensions i and pairs + i of a head. factor: multiplies cos and sin. Angles are products in float32,
    as in published code. cos and sin are rounded once, and the first half of sin is negated.
    """
    angles = np.arange(positions.start, positions.stop, dtype=np.float32)[:, None] * inv_freq
    both = arithmetic.sine_cosine(angles.astype(np.float64))
    sin, cos = ((part * factor).astype(np.float32) for part in both)
    return np.stack((np.concatenate((cos, cos), -1), np.concatenate((-sin, sin), -1)), 1)


def sinusoids(num: int, width: int) -> Singles:
    """Return the sinusoids of positions [num, width]: sines of position times frequency, then cosines.

    Frequencies fall along a row (Vaswani et al. 2017, 3.5). The numbers are float64 until the last step, as in
    published code.
    """
    frequencies = np.array([10000.0 ** (-i / width) for i in range(0, width, 2)])
    sin, cos = arithmetic.sine_cosine(np.arange(num, dtype=np.float64)[:, None] * frequencies)
    return np.concatenate((sin, cos[:, : width // 2]), -1).astype(np.float32)


def turned(rope: Rope, head_dim: int) -> int:
    """Return how many of a head's dimensions have entries in a table of rotations. Some entries may rotate by 0."""
    return head_dim if rope.kind == "proportional" else rope.dims or head_dim


def inverse_frequencies(rope: Rope, head_dim: int) -> Singles:
    """Return the angle in radians by which each rotated pair of dimensions turns per position, float32 [pairs].

    "llama3" blends scaled and unscaled frequencies by wavelength (Llama 3.1 release), and "yarn" by dimension (Peng et
    al. 2023, section 3.2). "longrope" divides frequencies by one set of factors for sequences within the training
    length, and by another for longer sequences (Ding et al. 2024). "proportional" gives the first dims / 2 pairs of a
    head the angles for a rotation of the whole head, and the other pairs the angle 0. The steps are in float32, as in
    published code, and each is rounded correctly.
    """
    dims = rope.dims or head_dim
    whole = head_dim if rope.kind == "proportional" else dims
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(whole)
    powers = np.array([rope.theta ** float(exponent) for exponent in exponents], dtype=np.float32)
    inv_freq: Singles = np.float32(1) / powers
    if rope.kind == "default":
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / np.float32(rope.factor)
    if rope.kind == "proportional":
        rest = np.zeros(head_dim // 2 - dims // 2, dtype=np.float32)
        return np.concatenate((inv_freq, rest)) / np.float32(rope.factor)
    if rope.kind == "longrope":
        factors: Singles = np.array(rope.long_factor if rope.far else rope.short_factor, dtype=np.float32)
        return np.float32(1) / (factors * powers)
    return _yarn(rope, dims, inv_freq) if rope.kind == "yarn" else _llama3(rope, inv_freq)


def _llama3(rope: Rope, inv_freq: Singles) -> Singles:
    wavelength = np.float32(2 * math.pi) / inv_freq
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    spread = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    turns = np.float32(rope.original_max_positions) / wavelength
    smooth = (turns - np.float32(rope.low_freq_factor)) / spread
    blended = (1 - smooth) * inv_freq / np.float32(rope.factor) + smooth * inv_freq
    scaled = np.where(wavelength > low, inv_freq / np.float32(rope.factor), inv_freq)
    return np.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def _yarn(rope: Rope, dims: int, inv_freq: Singles) -> Singles:
    def dimension(num_turns: float) -> float:
        turns = math.log(rope.original_max_positions / (num_turns * 2 * math.pi))
        return dims * turns / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, dims - 1)
    ramp = (np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low or 0.001)
    kept: Singles = np.float32(1) - ramp.clip(0, 1)
    blended: Singles = inv_freq / np.float32(rope.factor) * (np.float32(1) - kept) + inv_freq * kept
    return blended


def attention_factor(rope: Rope) -> float:
    """Return the factor that multiplies cos and sin. Through it, yarn and longrope rescale attention scores."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    if rope.kind != "yarn" or rope.factor <= 1:
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


@cache
def buckets_of_distances(buckets: Buckets) -> Ints:
    """Return the bucket of each distance from a row back to a key, from -max_distance to max_distance.

    The buckets follow Raffel et al. 2020. A caller clamps a larger distance to max_distance. In each direction, half of
    the buckets hold one distance each. The other half hold ranges that grow by a constant factor up to max_distance.
    The computation is in float32, as in published code.
    """
    num = buckets.num
    distances = np.arange(-buckets.max_distance, buckets.max_distance + 1)
    offset = np.zeros_like(distances)
    if buckets.both_ways:
        num //= 2
        offset = (distances < 0) * num
        distances = np.abs(distances)
    distances = distances.clip(0)
    exact = num // 2
    shares = arithmetic.log(distances.clip(1).astype(np.float32) / np.float32(exact)).astype(np.float32)
    shares /= np.float32(math.log(buckets.max_distance / exact))
    far = (exact + (shares * np.float32(num - exact)).astype(np.int64)).clip(max=num - 1)
    return np.asarray(offset + np.where(distances < exact, distances, far))
