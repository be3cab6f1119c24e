"""Tests of samples against known probabilities, the power of these tests, and bounds on the deviations they miss.

G-tests and chi-square tests compare counts with probabilities. `holm` judges several tests together. `largest_log_e`
computes an e-process, which may be evaluated after every sample. `detectable_tv` returns the deviation that a test
finds with a given number of samples. `weissman` bounds the deviation that a test may have missed. No test proves that
there is no deviation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.theory.noise import chi_square_tail

Floats = npt.NDArray[np.float64]
LEAST_EXPECTED = 5.0  # samples in a cell; with fewer, the statistic is not distributed as chi-square


@dataclass(frozen=True)
class Fit:
    """The result of a test. num_free: degrees of freedom; 0 if there is only one cell, and so nothing to compare."""

    statistic: float
    num_free: int
    p_value: float
    num_samples: int


def g_test(counts: npt.ArrayLike, probs: npt.ArrayLike, least: float = LEAST_EXPECTED) -> Fit:
    """Compare counts [cells] with known probabilities [cells], by the likelihood ratio 2 sum O ln(O / E).

    O and E are the observed and the expected count of a cell. Cells are pooled, the rarest first, until each has an
    expected count of at least `least`. The statistic is divided by Williams' factor
    1 + (sum 1/p - 1) / (6 N (cells - 1)), which makes its distribution closer to chi-square (Williams 1976). N is the
    number of samples. The p-value is 0 if a cell of probability 0 has a count.
    """
    observed, wanted = np.asarray(counts, dtype=np.float64), np.asarray(probs, dtype=np.float64)
    num = int(observed.sum())
    if (observed[wanted == 0] > 0).any():
        return Fit(math.inf, max(1, len(wanted) - 1), 0.0, num)
    observed, wanted = _pooled(observed[wanted > 0], wanted[wanted > 0], least / max(1, num))
    if len(wanted) < 2:
        return Fit(0.0, 0, 1.0, num)
    seen = observed > 0
    statistic = 2 * float((observed[seen] * np.log(observed[seen] / (wanted[seen] * num))).sum())
    statistic = max(0.0, statistic) / (1 + (float((1 / wanted).sum()) - 1) / (6 * num * (len(wanted) - 1)))
    return Fit(statistic, len(wanted) - 1, chi_square_tail(statistic, len(wanted) - 1), num)


def _pooled(counts: Floats, probs: Floats, least: float) -> tuple[Floats, Floats]:
    """Merge the rarest cells until each cell has a probability of at least `least`."""
    order = np.argsort(probs, kind="stable")
    groups, mass = list[list[int]](), math.inf
    for i in order.tolist():
        if mass >= least:
            groups.append([])
            mass = 0.0
        groups[-1].append(i)
        mass += float(probs[i])
    if len(groups) > 1 and mass < least:
        groups[-2] += groups.pop()
    return np.array([counts[g].sum() for g in groups]), np.array([probs[g].sum() for g in groups])


def independence_test(table: npt.ArrayLike) -> Fit:
    """Test whether the rows and columns of counts [R, C] are independent, by the likelihood ratio.

    The statistic has (R - 1)(C - 1) degrees of freedom. The test also holds for counts of overlapping pairs of
    neighbours in a series (Bartlett 1951).
    """
    counts = np.asarray(table, dtype=np.float64)
    counts = counts[counts.sum(axis=1) > 0][:, counts.sum(axis=0) > 0]
    num = int(counts.sum())
    free = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    if free < 1:
        return Fit(0.0, 0, 1.0, num)
    wanted = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0, keepdims=True) / num
    seen = counts > 0
    statistic = max(0.0, 2 * float((counts[seen] * np.log(counts[seen] / wanted[seen])).sum()))
    return Fit(statistic, free, chi_square_tail(statistic, free), num)


def holm(p_values: Seq[float], level: float) -> list[bool]:
    """Return which hypotheses are rejected. The probability that any true hypothesis is rejected is at most `level`.

    The method is Holm's (1979): the i-th smallest of m p-values is compared with level / (m - i + 1). Hypotheses are
    rejected in this order, until a p-value is larger than its bound.
    """
    rejected = [False] * len(p_values)
    for i, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[at] > level / (len(p_values) - i):
            break
        rejected[at] = True
    return rejected


# ------------------------------------------------------------------------------------------------- what would be seen


def detectable_tv(num_samples: int, num_free: int, level: float, power: float = 0.99) -> float:
    """Return the least total variation distance that a test at level `level` detects with probability `power`.

    The result holds for deviations in every direction, because the non-centrality of the statistic is
    N sum (s - p)^2 / p, which is at least 4 N TV^2 for all distributions s and p. N is `num_samples`.
    """
    if num_samples < 1 or num_free < 1:
        return 1.0
    return min(1.0, math.sqrt(noncentrality(num_free, level, power) / (4 * num_samples)))


@functools.lru_cache
def noncentrality(num_free: int, level: float, power: float) -> float:
    """Return the non-centrality at which a chi-square test with `num_free` degrees of freedom has the given power."""
    limit = _root(lambda x: level - chi_square_tail(x, num_free))
    return _root(lambda x: _noncentral_tail(limit, num_free, x) - power)


def _root(rising: Callable[[float], float], most_steps: int = 60) -> float:
    """Return the root of a rising function over [0, inf), by bisection."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(most_steps):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def _noncentral_tail(value: float, num_free: int, noncentral: float) -> float:
    """Return the probability that a non-central chi-square variable is at least `value`.

    The probability is a Poisson mixture of central tails. Each tail has two more degrees of freedom than the one
    before.
    """
    half, mean = value / 2, noncentral / 2
    tail = chi_square_tail(value, num_free)
    log_term = num_free / 2 * math.log(half) - half
    log_term -= math.lgamma(num_free / 2 + 1)
    total, log_weight, j = 0.0, -mean, 0
    while j < mean or log_weight > -50:
        total += math.exp(log_weight) * tail
        tail, j = tail + math.exp(log_term), j + 1
        log_weight += math.log(mean / j) if mean > 0 else -math.inf
        log_term += math.log(half / (num_free / 2 + j))
    return total


def weissman(num_samples: int, num_cells: int, eta: float) -> float:
    """Return a bound on the total variation distance between a sample's shares and the distribution that was sampled.

    The bound holds with probability 1 - eta. It is the bound of Weissman et al. 2003, in the simpler form
    sqrt((cells ln 2 + ln(1 / eta)) / (2 N)), where N is the number of samples.
    """
    if num_samples < 1:
        return 1.0
    return min(1.0, math.sqrt((num_cells * math.log(2) + math.log(1 / eta)) / (2 * num_samples)))


# --------------------------------------------------------------------------------------------------- other statistics


def largest_log_e(bins: Seq[int], probs: npt.ArrayLike, prior: float = 0.5) -> float:
    """Return the largest logarithm that an e-process reaches over a series of samples. bins: the bin of each sample.

    The process is the likelihood ratio of a Dirichlet mixture to the null hypothesis `probs`. Under the null hypothesis
    its mean is 1 at any time, so the probability that it ever reaches 1 / level is at most `level` (Ville 1939). Hence
    exp(-largest) is a p-value, however often the process is evaluated. prior: the Dirichlet parameter of each bin.
    """
    wanted = np.asarray(probs, dtype=np.float64)
    counts, total = [prior] * len(wanted), prior * len(wanted)
    log_e = largest = 0.0
    for i in bins:
        if wanted[i] == 0:
            return math.inf
        log_e += math.log(counts[i] / (total * wanted[i]))
        counts[i] += 1
        total += 1
        largest = max(largest, log_e)
    return largest


def poisson_binomial_p(count: int, probs: npt.ArrayLike) -> float:
    """Return the two-sided p-value of `count` successes in independent trials with the success probabilities `probs`.

    The distribution is computed exactly, trial by trial. Only counts more than 12 standard deviations above the mean
    are left out.
    """
    rates = np.asarray(probs, dtype=np.float64)
    rates = rates[rates > 0]
    mean = float(rates.sum())
    spread = math.sqrt(float((rates * (1 - rates)).sum()))
    most = min(len(rates), max(count, math.ceil(mean + 12 * spread + 20)))
    if count > most:
        return 0.0
    dist = np.zeros(most + 1)
    dist[0] = 1.0
    for rate in rates.tolist():
        moved = dist[:-1] * rate
        dist *= 1 - rate
        dist[1:] += moved
    at_most, at_least = float(dist[: count + 1].sum()), float(dist[count:].sum())
    return min(1.0, 2 * min(at_most, at_least))
