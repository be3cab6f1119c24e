"""Sums, exp and log whose bits are the same everywhere, so that what a seed says does not depend on a library.

numpy's exp, log and sums differ in their last bits between builds and processors. Here exp and log are spelled out in
additions, multiplications and divisions, which IEEE 754 rounds alike everywhere, and masses are summed as integers,
which have no order. csrc/sampling holds the same definitions a second time, bit for bit.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun import native

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Row = npt.NDArray[np.floating[Any]]
Ticks = npt.NDArray[np.int64]

_CHUNK = 4096  # elements that are run together: they stay in the processor's first cache

_LOWEST = np.float32(-87.0)  # below, e^x is taken as 0; down to here it is a normal float32
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # n * high is exact for n up to 2^15
_EXP_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)

_SQRT_HALF = math.sqrt(0.5)
_LOG_LN2_HIGH, _LOG_LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOG_EVEN = (1.531383769920937332e-01, 2.222219843214978396e-01, 3.999999999940941908e-01)
_LOG_ODD = (
    1.479819860511658591e-01,
    1.818357216161805012e-01,
    2.857142874366239149e-01,
    6.666666666666735130e-01,
)


@cache
def native_sampler() -> Any:
    """The native implementation of what this room does to float32 rows: same names, same bits. None = numpy does it."""
    isa = native.isa()
    return None if isa == "reference" else native.extension().Sampler(isa)


def exp(x: Row) -> Row:
    """e^x for x <= 0, elementwise, in the width of x.

    float32: within 1 unit in the last place, 0 below -87, the same bits everywhere (Cephes expf, Moshier 1989).
    float64: numpy's own, for rows of tests and toys, which nothing native computes.
    """
    if x.dtype != np.float32:
        return np.asarray(np.exp(x))
    out = np.empty_like(x)
    for start in range(0, len(x), _CHUNK):
        _exp_singles(x[start : start + _CHUNK], out[start : start + _CHUNK])
    return out


def _exp_singles(x: Singles, out: Singles) -> None:
    """x = n ln 2 + r; a polynomial of degree 6 in r; n goes into the exponent."""
    clipped = np.maximum(x, _LOWEST)
    n = np.rint(clipped * _LOG2_E)
    r = clipped - n * _LN2_HIGH
    r -= n * _LN2_LOW
    out[:] = _EXP_POLYNOMIAL[0]
    for coefficient in _EXP_POLYNOMIAL[1:]:
        out *= r
        out += coefficient
    out *= r * r
    out += r
    out += np.float32(1)
    power = (n.astype(np.int32) + np.int32(127)) << np.int32(23)
    out *= power.view(np.float32)
    out[x < _LOWEST] = 0


def log(x: npt.ArrayLike) -> Floats:
    """Natural logarithm of positive numbers, float64, within 1 unit in the last place, the same bits everywhere.

    The algorithm of FreeBSD's e_log.c (Sun Microsystems 1993) without its shortcuts.
    """
    fraction, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    low = fraction < _SQRT_HALF
    f = np.where(low, fraction + fraction, fraction) - 1.0
    k = (exponent - low).astype(np.float64)
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (_LOG_EVEN[2] + w * (_LOG_EVEN[1] + w * _LOG_EVEN[0]))
    odd = z * (_LOG_ODD[3] + w * (_LOG_ODD[2] + w * (_LOG_ODD[1] + w * _LOG_ODD[0])))
    half_square = 0.5 * f * f
    tail = s * (half_square + (even + odd)) + k * _LOG_LN2_LOW
    return np.asarray(k * _LOG_LN2_HIGH - ((half_square - tail) - f))


def tick_bits(num_values: int) -> int:
    """The largest of `num_values` weights counts as up to 2^bits ticks: so that a sum of all stays below 2^62."""
    return min(44, 62 - num_values.bit_length())


def ticks(weights: Row, num_values: int, largest: float) -> Ticks:
    """Weights >= 0 as whole numbers, int64 [n]: multiples of a power of two that is at most 2^-43 of the largest.

    Integers add up to the same sum in every order. What rounds away is below 2^-44 of the largest weight for each id,
    less than float32 itself rounds away.
    """
    scale = 2.0 ** (tick_bits(num_values) - math.frexp(largest)[1])
    return np.rint(np.multiply(weights, scale, dtype=np.float64)).astype(np.int64)
