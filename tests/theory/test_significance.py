"""Statistics of certificates against scipy, and that they are honest where the sampler is known to be right."""

import math

import numpy as np
import pytest
from scipy import stats

from forerun.theory.noise import chi_square_tail
from forerun.theory.significance import (
    detectable_tv,
    g_test,
    holm,
    independence_test,
    largest_log_e,
    noncentrality,
    poisson_binomial_p,
    weissman,
)

P = np.array([0.3, 0.2, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03])


def test_the_tail_holds_for_many_cells_and_far_values() -> None:
    for value, num_free in ((1500.0, 1400), (2000.0, 1999), (900.0, 511), (3000.0, 63)):
        assert chi_square_tail(value, num_free) == pytest.approx(stats.chi2.sf(value, num_free), rel=1e-9, abs=1e-300)


def test_the_statistic_is_the_likelihood_ratio() -> None:
    counts = np.array([310, 190, 160, 118, 95, 60, 37, 30])
    found = g_test(counts, P)
    williams = 1 + ((1 / P).sum() - 1) / (6 * 1000 * 7)
    expected = stats.power_divergence(counts, 1000 * P, lambda_="log-likelihood")
    assert found.statistic == pytest.approx(expected.statistic / williams)
    assert found.num_free == 7
    assert found.p_value == pytest.approx(expected.pvalue, rel=0.01)


def test_rare_cells_are_pooled_and_impossible_ones_are_not_forgiven() -> None:
    assert g_test([50, 46, 2, 2], [0.5, 0.46, 0.02, 0.02]).num_free == 1  # two expect 4, with a third 50
    assert g_test([90, 9, 1], [0.9, 0.1, 0.0]).p_value == 0.0
    assert g_test([10], [1.0]) == g_test([10, 0], [1.0, 0.0])
    assert g_test([3, 4], [0.5, 0.5]).p_value == 1.0, "too few to compare"


def test_p_values_of_a_true_sampler_are_uniform() -> None:
    """20,000 samples of 500: so a test at 1e-3 is wrong once in a thousand, and not more often."""
    rng = np.random.default_rng(1)
    values = [g_test(counts, P).p_value for counts in rng.multinomial(500, P, size=4000)]
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert np.mean(np.array(values) < 0.01) < 0.01 + 4 * math.sqrt(0.01 / 4000)


def test_p_values_of_independent_neighbours_are_uniform() -> None:
    rng = np.random.default_rng(2)
    values = []
    for _ in range(600):
        series = rng.integers(8, size=2000)
        table = np.zeros((8, 8))
        np.add.at(table, (series[:-1], series[1:]), 1)
        values.append(independence_test(table).p_value)
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    copied = np.eye(8) * 50 + 100
    assert independence_test(copied).p_value < 1e-6


def test_the_e_process_raises_no_false_alarm_and_finds_a_deviation() -> None:
    rng = np.random.default_rng(3)
    cells = [0.25] * 4
    alarms = [largest_log_e(rng.integers(4, size=1000).tolist(), cells) >= math.log(100) for _ in range(500)]
    assert np.mean(alarms) <= 0.01
    tilted = rng.choice(4, size=10_000, p=[0.28, 0.25, 0.25, 0.22])
    assert largest_log_e(tilted.tolist(), cells) > math.log(1000)
    assert largest_log_e([0, 1], [1.0, 0.0]) == math.inf


def test_holm_is_stepwise() -> None:
    assert holm([0.01, 0.02, 0.03, 0.9], 0.05) == [True, False, False, False]
    assert holm([0.012, 0.014, 0.02, 0.9], 0.05) == [True, True, True, False]
    assert holm([], 0.05) == []


@pytest.mark.parametrize(
    ("num_free", "lam"), [(7, 45.4), (15, 55.2), (31, 68.5), (63, 87.0), (127, 112.8), (255, 149.1)]
)
def test_the_power_is_that_of_the_noncentral_distribution(num_free: int, lam: float) -> None:
    found = noncentrality(num_free, 1e-3, 0.99)
    assert found == pytest.approx(lam, abs=0.06)
    limit = stats.chi2.isf(1e-3, num_free)
    assert stats.ncx2.sf(limit, num_free, found) == pytest.approx(0.99, abs=1e-6)


def test_sample_sizes_for_a_deviation_and_for_a_bound() -> None:
    assert detectable_tv(113_456, 7, 1e-3) == pytest.approx(0.01, rel=1e-3)
    assert detectable_tv(24_167, 63, 1e-3) == pytest.approx(0.03, rel=1e-3)
    assert weissman(256_346, 64, 1e-3) == pytest.approx(0.01, rel=1e-3)
    assert detectable_tv(0, 7, 1e-3) == weissman(0, 7, 1e-3) == 1.0


def test_a_deviation_of_the_stated_size_is_found() -> None:
    """At power .99 about one of a hundred is missed."""
    rng, num = np.random.default_rng(4), 20_000
    shift = detectable_tv(num, 7, 1e-3)
    wrong = P + shift * np.array([1, -1, 0, 0, 0, 0, 0, 0])
    found = [g_test(counts, P).p_value < 1e-3 for counts in rng.multinomial(num, wrong, size=400)]
    assert np.mean(found) > 0.97


def test_poisson_binomial() -> None:
    rates = np.random.default_rng(5).random(400) * 0.05
    same = np.full(1000, 0.01)
    for count in (2, 10, 25):
        both = 2 * min(stats.binom.cdf(count, 1000, 0.01), stats.binom.sf(count - 1, 1000, 0.01))
        assert poisson_binomial_p(count, same) == pytest.approx(min(1.0, both), rel=1e-9)
    assert poisson_binomial_p(round(rates.sum()), rates) > 0.5
    assert poisson_binomial_p(round(rates.sum()) + 25, rates) < 1e-6
    assert poisson_binomial_p(1, [0.0, 0.0]) == 0.0
    assert poisson_binomial_p(0, []) == 1.0
