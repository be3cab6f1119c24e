"""The noise of a perfect sampler: how far the shares of the drawn ids are from the ids' probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt


def l1_noise_deviation(probs: npt.ArrayLike, num_rounds: int) -> float:
    """Return the standard deviation of the L1 distance whose mean is `simulate.l1_noise`, by the normal approximation.

    The shares of two ids have the correlation r = -sqrt(p_x p_y / ((1 - p_x)(1 - p_y))). The absolute values of two
    normal variables with this correlation and the deviations s_x, s_y have the covariance
    s_x s_y (2 / pi) (sqrt(1 - r^2) + r asin(r) - 1). Raises ValueError for fewer than one round.
    """
    if num_rounds < 1:
        raise ValueError(f"num_rounds={num_rounds} must be at least 1")
    p = np.asarray(probs, dtype=np.float64)
    p = p[(p > 0) & (p < 1)]
    odds = np.sqrt(p / (1 - p))
    r = np.clip(-np.outer(odds, odds), -1, 1)
    np.fill_diagonal(r, 1)
    deviations = np.sqrt(p * (1 - p) / num_rounds)
    covariance = np.outer(deviations, deviations) * (2 / math.pi) * (np.sqrt(1 - r**2) + r * np.arcsin(r) - 1)
    return math.sqrt(max(0.0, float(covariance.sum())))


def chi_square(counts: Seq[float], probs: Seq[float]) -> float:
    """Return Pearson's statistic, sum (count - expected)^2 / expected; inf if an event of probability 0 occurred."""
    expected = np.asarray(probs, dtype=np.float64) * sum(counts)
    observed = np.asarray(counts, dtype=np.float64)
    if (observed[expected == 0] > 0).any():
        return math.inf
    kept = expected > 0
    return float(((observed - expected)[kept] ** 2 / expected[kept]).sum())


def chi_square_tail(value: float, num_free: int) -> float:
    """Return the probability that a chi-square variable with `num_free` degrees of freedom is at least `value`.

    The probability is the finite sum of Abramowitz and Stegun 26.4.4 and 26.4.5. Raises ValueError for num_free < 1 or
    a negative value.
    """
    if num_free < 1 or value < 0:
        raise ValueError(f"value={value}, num_free={num_free}: at least 0 and 1 are needed")
    if value == 0:
        return 1.0
    # The terms are added as exponentials of their logarithms: the first term underflows where later terms count.
    half = value / 2
    if num_free % 2:
        total = math.erfc(math.sqrt(half))
        log_term = math.log(half) / 2 - half - math.lgamma(1.5)
        k = 1.5
    else:
        total, log_term, k = 0.0, -half, 1.0
    while k <= num_free / 2:
        total, log_term, k = total + math.exp(log_term), log_term + math.log(half / k), k + 1
    return min(1.0, total)
