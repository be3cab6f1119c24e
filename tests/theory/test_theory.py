"""Formulas against known answers; test_simulation.py compares them with simulation."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from forerun.theory import formulas, lenience, simulate
from forerun.theory.landscape import landscape
from refusals import refusal

# Best (gamma, speed-up) by alpha, for c = .02, .1, .333. At alpha = .7, c = .333 it is 2.19 / 1.666 = 1.31.
BEST = {
    0.6: [(6, 2.17), (3, 1.67), (1, 1.20)],
    0.7: [(8, 2.76), (4, 1.98), (2, 1.31)],
    0.8: [(11, 3.82), (6, 2.47), (3, 1.48)],
    0.9: [(19, 6.37), (10, 3.43), (5, 1.76)],
}
PAIRS = np.random.default_rng(0).dirichlet(np.full(5, 0.5), size=(50, 2))


def test_k9():
    assert formulas.expected_tokens(0.7, 5) == pytest.approx(2.94117, abs=5e-6)
    assert formulas.expected_accepted(0.7, 5) == pytest.approx(1.94117, abs=5e-6)
    assert formulas.expected_accepted(0.7, 5) / 5 == pytest.approx(0.388, abs=5e-4)
    assert formulas.speedup(0.7, 5, 0.2) == pytest.approx(1.4706, abs=5e-5)
    assert formulas.optimal_gamma(0.7, 0.2) == 3
    assert formulas.speedup(0.7, 3, 0.2) == pytest.approx(1.5831, abs=5e-5)


@pytest.mark.parametrize("alpha", BEST)
def test_table_of_the_best_gamma(alpha):
    for c, (gamma, factor) in zip((0.02, 0.1, 0.333), BEST[alpha], strict=True):
        assert formulas.optimal_gamma(alpha, c) == gamma
        assert formulas.speedup(alpha, gamma, c) == pytest.approx(factor, abs=5e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.61, 0.85, 0.97, 1.0])
@pytest.mark.parametrize("c", [0.01, 0.1, 0.3, 0.9])
def test_optimal_gamma_is_the_argmax(alpha, c):
    factors = [formulas.speedup(alpha, gamma, c) for gamma in range(401)]
    assert formulas.optimal_gamma(alpha, c, 400) == int(np.argmax(factors))
    assert (formulas.optimal_gamma(alpha, c) == 0) == (alpha <= c), "Corollary 3.9"


def test_ends():
    """The formula that counts one token twice gives 2 at alpha = 0, where a rejected first token leaves one."""
    assert formulas.expected_tokens(0.0, 5) == 1
    assert formulas.expected_tokens(1.0, 5) == 6
    assert formulas.expected_tokens(0.999999, 5) == pytest.approx(6, abs=1e-4)
    assert formulas.expected_tokens(0.5, 0) == 1
    assert formulas.expected_tokens_varying([]) == 1
    assert formulas.expected_tokens_varying([0.7] * 5) == pytest.approx(formulas.expected_tokens(0.7, 5))
    assert formulas.expected_tokens_varying([0.5, 0.2]) == pytest.approx(1.6)


def test_costs():
    """Verification that costs more, and overhead, divide the same tokens by more seconds."""
    assert formulas.speedup(0.8, 4, 0.1, verify_ratio=1.3, overhead=0.1) == pytest.approx(
        formulas.expected_tokens(0.8, 4) / 1.8
    )
    assert formulas.operations_factor(0.8, 4, 0.1) == pytest.approx(5.4 / formulas.expected_tokens(0.8, 4))
    assert formulas.operations_factor(0.5, 0, 0.1) == 1
    assert formulas.oracle_speedup(0.8, 0.0) == pytest.approx(5)
    assert formulas.oracle_speedup(1.0, 0.0) == float("inf")


def test_the_oracle_gains_about_sixty_percent():
    """Largest ratio of the oracle length to the best fixed one, over alpha (docs/exactness.md)."""
    for c, expected in ((0.01, 1.58), (0.1, 1.55), (0.3, 1.47)):
        alphas = np.linspace(c, 0.995, 300)
        ratios = [formulas.oracle_speedup(a, c) / formulas.speedup(a, formulas.optimal_gamma(a, c), c) for a in alphas]
        assert max(ratios) == pytest.approx(expected, abs=0.012)


def test_acceptance_of_two_distributions():
    p, q = (0.5, 0.3, 0.2), (0.2, 0.6, 0.2)
    assert formulas.acceptance(p, q) == pytest.approx(0.7)  # K1
    for p, q in PAIRS:
        tv = 1 - formulas.acceptance(p, q)
        assert (1 - tv) / (1 + tv) - 1e-12 <= formulas.match_acceptance(p, q) <= 1 - tv + 1e-12
    assert formulas.match_acceptance([1, 0], [0, 1]) == 0
    assert formulas.match_acceptance([0.25, 0.75], [0.25, 0.75]) == pytest.approx(1)


def test_a_point_mass_is_accepted_alike_by_both_rules():
    """A deterministic guess d passes with probability p(d) whether it is judged by ratio or by match."""
    p, d = (0.5, 0.3, 0.2), (0, 1, 0)
    assert formulas.match_acceptance(p, d) == pytest.approx(0.3)
    assert formulas.acceptance(p, d) == pytest.approx(0.3)


def test_k11_mean_over_a_beta_distribution():
    """alpha ~ Beta(8, 2): mean of eq. (1) over it by its moments .8 and .654545."""
    alphas = np.random.default_rng(2).beta(8, 2, 400_000)
    assert alphas.mean() == pytest.approx(0.8, abs=1e-3)
    assert (alphas**2).mean() == pytest.approx(0.654545, abs=1e-3)
    mean = np.mean([formulas.expected_tokens(a, 2) for a in alphas[:20_000]])
    assert mean == pytest.approx(1 + 0.8 + 0.654545, abs=0.01)


def test_alpha_hat():
    assert formulas.alpha_hat(0, 0) is None
    assert formulas.alpha_hat(3, 4) == 0.75
    assert "impossible" in refusal(ValueError, formulas.alpha_hat, 5, 4)


@pytest.mark.parametrize("call", [lambda: formulas.expected_tokens(1.1, 2), lambda: formulas.expected_tokens(0.5, -1)])
def test_impossible_arguments(call):
    assert "alpha must be in" in refusal(ValueError, call)
    assert "cannot be" in refusal(ValueError, formulas.speedup, 0.5, 2, -0.1)
    assert "cannot be" in refusal(ValueError, simulate.rounds, 0.5, 2, 1, seed=0)


def test_theory_needs_numpy_alone():
    code = """
import sys, pkgutil, importlib, forerun.theory
for module in pkgutil.iter_modules(forerun.theory.__path__):
    importlib.import_module(f"forerun.theory.{module.name}")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_expected_tokens_of_counts_are_the_posterior_mean():
    """Beta(8, 2) gives 2.4545 at two tokens, where its mean of 0.8 would give 2.44."""
    assert formulas.expected_tokens_beta(8, 2, 2) == pytest.approx(1 + 0.8 + 0.8 * 9 / 11)
    assert round(formulas.expected_tokens_beta(8, 2, 2), 4) == 2.4545
    assert formulas.expected_tokens_beta(8, 2, 0) == 1
    draws = np.random.default_rng(1).beta(3.0, 2.0, 400_000)
    assert formulas.expected_tokens_beta(3, 2, 5) == pytest.approx(sum((draws**i).mean() for i in range(6)), abs=0.01)
    assert "impossible" in refusal(ValueError, formulas.expected_tokens_beta, -1, 2, 2)


def test_divergence():
    """Corollary 3.4: symmetric, in [0, 1], with both ends reached; Lemma 3.3 ties it to the acceptance."""
    for p, q in PAIRS:
        found = formulas.lk_divergence(p, q)
        assert 0 <= found <= 1
        assert found == pytest.approx(formulas.lk_divergence(q, p), abs=1e-15)
        assert found == pytest.approx(1 - formulas.acceptance(p, q), abs=1e-15)
        assert formulas.rejection_acceptance(p, q) <= formulas.acceptance(p, q)
    assert formulas.lk_divergence([0.25, 0.75], [0.25, 0.75]) == 0
    assert formulas.lk_divergence([1, 0], [0, 1]) == 1


def test_appendix_a2():
    assert formulas.rejection_acceptance((0.5, 0.3, 0.2), (0.2, 0.6, 0.2)) == pytest.approx(0.4)
    assert formulas.rejection_acceptance((0.5, 0.5), (1.0, 0.0)) == 0


def test_mean_acceptance_is_corollary_3_6():
    pairs = [((0.5, 0.3, 0.2), (0.2, 0.6, 0.2)), ((1, 0, 0), (0.25, 0.5, 0.25))]
    assert formulas.mean_acceptance(pairs) == pytest.approx((0.7 + 0.25) / 2)
    assert "no contexts" in refusal(ValueError, formulas.mean_acceptance, [])


def test_the_formula_that_counts_a_token_twice():
    assert formulas.double_counted_tokens(0.7, 5) == pytest.approx(3.7731, abs=5e-5)
    assert formulas.double_counted_tokens(0.7, 5) / 2 == pytest.approx(1.89, abs=5e-3)
    for alpha, gamma in ((0.0, 3), (0.4, 2), (0.9, 7), (1.0, 4), (0.6, 0)):
        more = formulas.double_counted_tokens(alpha, gamma) - formulas.expected_tokens(alpha, gamma)
        assert more == pytest.approx(1 - alpha**gamma if gamma else 0, abs=1e-12)


def test_corollary_3_9():
    assert formulas.least_speedup(0.8, 0.2) == pytest.approx(1.5)
    assert formulas.least_speedup(0.2, 0.2) == 1
    assert formulas.least_speedup(0.1, 0.2) == 1


def test_oracle_without_verification():
    """Where rows are free it gains nothing beyond the bound; where they cost, it does (footnote 4)."""
    assert formulas.oracle_speedup(0.8, 0.1, 0.0, is_verified=False) == formulas.oracle_speedup(0.8, 0.1)
    assert formulas.oracle_speedup(0.8, 0.1, 0.5, is_verified=False) > formulas.oracle_speedup(0.8, 0.1, 0.5)
    assert formulas.oracle_operations(0.8, 0.1) == pytest.approx(1.08)
    assert formulas.oracle_operations(0.8, 0.1, is_verified=False) == pytest.approx(0.28)
    assert formulas.oracle_tokens(1.0) == float("inf")
    assert formulas.oracle_gain(0.93, 0.01) < 1.6


def test_known_answers_of_several_draws():
    p, q = (0.7, 0.3), (0.3, 0.7)
    assert formulas.recursive_acceptance(p, q, 2) == pytest.approx(0.72)  # K4
    assert formulas.kseq_rho(p, q, 2) == pytest.approx(1.5)
    assert formulas.kseq_acceptance(p, q, 2) == pytest.approx(0.75)
    assert formulas.recursive_acceptance((0.2, 0.5, 0.3), (0.8, 0.1, 0.1), 2) == pytest.approx(0.52)  # K5
    assert formulas.recursive_acceptance(p, p, 3) == 1
    assert formulas.kseq_rho(p, q, 1) == 1


def test_k2_lenience():
    p, q = (0.5, 0.3, 0.2), (0.2, 0.6, 0.2)
    assert lenience.lenient_probs(p, q, 0.8) == pytest.approx([0.425, 0.375, 0.2])
    assert lenience.lenience_price(p, q, 0.8) == pytest.approx(0.075)
    assert lenience.lenient_probs(p, q, 1.0) == pytest.approx(p)
    assert lenience.lenient_acceptance(p, q, 1.0) == pytest.approx(0.7)
    for p, q in PAIRS:
        found = lenience.lenient_probs(p, q, 0.4)
        assert found.sum() == pytest.approx(1)
        assert (found <= p / 0.4 + 1e-12).all(), "no id has more than p / l"
        assert np.abs(found - p).sum() / 2 == pytest.approx(lenience.lenience_price(p, q, 0.4), abs=1e-12)
    assert "must be in" in refusal(ValueError, lenience.lenient_probs, p, q, 0)


def test_lenience_at_temperature_zero():
    """At l = 1 the largest alone, and more the more lenient: the opposite of the printed inequality."""
    p = (0.5, 0.3, 0.2)
    assert list(lenience.lenient_greedy(p, 1.0)) == [True, False, False]
    assert list(lenience.lenient_greedy(p, 0.5)) == [True, True, False]
    assert list(lenience.lenient_greedy(p, 0.1)) == [True, True, True]


def test_impossible_lengths():
    assert "at least one token" in refusal(ValueError, formulas.speedup_of_length, 0.5, 2, 0.1, 0)
    assert "must hold" in refusal(ValueError, landscape, [1.2], 3, 0.1)


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(4, 1), (4, 2), (5, 3), (3, 3)])
def test_distinct_experts_are_those_of_all_choices(num_experts, num_chosen):
    """The mean over everything that up to three rows can choose."""
    choices = [set(found) for found in itertools.combinations(range(num_experts), num_chosen)]
    means = []
    for num_rows in (1, 2, 3):
        counts = [len(set().union(*rows)) for rows in itertools.product(choices, repeat=num_rows)]
        found = formulas.distinct_experts(num_experts, num_chosen, num_rows)
        assert float(found) == pytest.approx(np.mean(counts), rel=1e-12)
        means.append(np.mean(counts))
    assert formulas.distinct_experts(num_experts, num_chosen, [1, 2, 3]).tolist() == pytest.approx(means, rel=1e-12)


def test_distinct_experts_of_rows_that_share_them():
    """128 experts, 8 chosen: 8 independent rows read 6.45 times what one does, rows that choose alike as much."""
    rows = np.arange(1, 9)
    independent = formulas.distinct_experts(128, 8, rows)
    assert independent[[0, 7]] == pytest.approx([8, 51.62], abs=0.01)
    assert formulas.distinct_experts(128, 8, rows, 1.0) == pytest.approx(8)
    assert formulas.distinct_experts(128, 8, rows, 0.5) == pytest.approx((independent + 8) / 2)
    for given in ((8, 9, 1), (8, 0, 1), (8, 2, 0), (8, 2, 1, 1.1)):
        assert "chooses at least one" in refusal(ValueError, formulas.distinct_experts, *given)
