"""Sums, exp, log, sine and cosine that give the same bits on every processor and with every library.

The exp, log, sines and sums of numpy and torch differ in their last bits between builds and processors. This module
computes these functions with additions, multiplications and divisions, which IEEE 754 rounds the same way everywhere.
Masses (sums of weights) are sums of integers, so that the order does not matter. csrc/sampling also implements exp, log
and masses, with the same bits.
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

_LOWEST = np.float32(-87.0)  # below this x, e^x is taken as 0; down to it e^x is a normal float32
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # n * high is exact for n up to 2^15
_EXP_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)

_SQRT_HALF = math.sqrt(0.5)
_LOG_LN2_HIGH, _LOG_LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOG_EVEN = (1.531383769920937332e-01, 2.222219843214978396e-01, 3.999999999940941908e-01)
_LOG_ODD = (1.479819860511658591e-01, 1.818357216161805012e-01, 2.857142874366239149e-01, 6.666666666666735130e-01)

# Half of pi in three parts. The first two have 29 bits: their products with whole numbers up to 2^24 are exact.
_HALF_PI = (1.570796325802803, 9.920935774287987e-10, 2.2517417741562176e-18)
_SINE = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
_COSINE = (
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)


@cache
def native_sampler() -> Any:
    """Return the native sampler for float32 rows; None where numpy must be used. Both return the same bits."""
    isa = native.isa()
    return None if isa == "reference" else native.extension().Sampler(isa)


def exp(x: Row) -> Row:
    """Return e^x for x <= 0, elementwise, in the dtype of x.

    float32: within 1 unit in the last place, 0 below -87, the same bits everywhere (Cephes expf, Moshier 1989).
    float64: numpy's own exp. Only tests and toy models have float64 rows, and no native code computes them.
    """
    if x.dtype != np.float32:
        return np.asarray(np.exp(x))
    out = np.empty_like(x)
    for start in range(0, len(x), _CHUNK):
        _exp_singles(x[start : start + _CHUNK], out[start : start + _CHUNK])
    return out


def _exp_singles(x: Singles, out: Singles) -> None:
    """Write e^x to `out`, elementwise.

    With x = n ln 2 + r, a polynomial of degree 7 in r gives e^r, and n is added to the exponent bits of the float32.
    """
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
    """Return the natural log of positive numbers, float64, within 1 unit in the last place, the same bits everywhere.

    Uses the algorithm of FreeBSD's e_log.c (Sun Microsystems 1993), without its shortcuts.
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


def sine_cosine(x: Floats) -> tuple[Floats, Floats]:
    """Return sine and cosine of angles up to 2^24 in magnitude, elementwise, float64, within 2 units in the last place.

    Uses the polynomials of FreeBSD's k_sin.c and k_cos.c (Sun Microsystems 1993) at each angle's remainder from the
    nearest multiple of pi / 2.
    """
    quarters = np.rint(x * (2 / math.pi))
    rest = x - quarters * _HALF_PI[0]
    rest -= quarters * _HALF_PI[1]
    rest -= quarters * _HALF_PI[2]
    square = rest * rest
    sine = rest + rest * square * _polynomial(_SINE, square)
    cosine = 1.0 - (0.5 * square - square * square * _polynomial(_COSINE, square))
    turns = quarters.astype(np.int64)
    is_odd = turns & 1 == 1
    sines, cosines = np.where(is_odd, cosine, sine), np.where(is_odd, sine, cosine)
    return np.where(turns & 2, -sines, sines), np.where(turns + 1 & 2, -cosines, cosines)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """Return c0 + c1 x + c2 x^2 + ..."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result *= x
        result += coefficient
    return result


def tick_bits(num_values: int) -> int:
    """Return b: the largest of `num_values` weights counts as at most 2^b ticks.

    With this b, the sum of all `num_values` weights stays below 2^62 ticks.
    """
    return min(44, 62 - num_values.bit_length())


def ticks(weights: Row, num_values: int, largest: float) -> Ticks:
    """Return weights >= 0 as whole numbers of ticks, int64 [n]. Integers have the same sum in every order.

    A tick is a power of two. For fewer than 2^18 values, a tick is at most 2^-43 of `largest`, the largest weight.
    Rounding then changes each weight by at most 2^-44 of `largest`, which is less than the rounding error of float32.
    """
    scale = 2.0 ** (tick_bits(num_values) - math.frexp(largest)[1])
    return np.rint(np.multiply(weights, scale, dtype=np.float64)).astype(np.int64)


def mass(weights: Row) -> float:
    """Return the sum of weights >= 0; 0 where the largest weight is 0 or not finite.

    float64 weights are summed by numpy.
    """
    native = native_sampler() if weights.dtype == np.float32 else None
    return _mass(weights) if native is None else float(native.mass(np.ascontiguousarray(weights)))


def mass_of_logits(row: Row) -> float:
    """Return the sum of e^(logit - largest logit); 0 where the largest logit is not finite."""
    native = native_sampler() if row.dtype == np.float32 else None
    return _mass_of_logits(row) if native is None else float(native.mass_of_logits(np.ascontiguousarray(row)))


def _mass(weights: Row) -> float:
    largest = float(weights.max(initial=0.0))
    if not 0 < largest < math.inf:
        return 0.0
    return float(weights.sum()) if weights.dtype != np.float32 else _sum_of_ticks(weights, largest)


def _mass_of_logits(row: Row) -> float:
    if not np.isfinite(top := row.max()):
        return 0.0
    weights = exp(row - top)
    return float(weights.sum()) if weights.dtype != np.float32 else _sum_of_ticks(weights, 1.0)


def _sum_of_ticks(weights: Row, largest: float) -> float:
    unit = 2.0 ** (math.frexp(largest)[1] - tick_bits(len(weights)))
    return float(ticks(weights, len(weights), largest).sum()) * unit


def chance(row: Row, place: int) -> float:
    """Return softmax(row)[place], the probability of one id."""
    return float(exp(row[place : place + 1] - row.max())[0]) / mass_of_logits(row)


def entropy_of_logits(row: Row) -> float:
    """Return -sum p ln p of p = softmax(row), in nats.

    The entropy is the log of the mass plus the expected distance of a logit from the largest logit.
    """
    depths = row.max() - row
    weights = exp(-depths)
    products = np.multiply(weights, depths, out=np.zeros_like(weights), where=weights > 0)
    whole = mass_of_logits(row)
    return float(log(whole)) + mass(products) / whole


def entropy(weights: Row) -> float:
    """Return -sum p ln p of probabilities, in nats."""
    possible = weights[weights > 0].astype(np.float64)
    return -float((possible * log(possible)).sum())
