"""Every formula against a simulation that throws its coins: within 4 standard errors at a million rounds."""

import itertools
import math

import numpy as np
import pytest

from forerun.theory import formulas, lenience, simulate, trees
from forerun.theory.landscape import landscape

MILLION = 1_000_000
P, Q = (0.5, 0.3, 0.2), (0.2, 0.6, 0.2)
# Eight ids, in opposite orders.
WIDE_P = (0.32, 0.22, 0.15, 0.11, 0.08, 0.06, 0.04, 0.02)
WIDE_Q = (0.10, 0.15, 0.22, 0.20, 0.13, 0.05, 0.09, 0.06)


def agrees(estimate: simulate.Estimate, value: float) -> None:
    assert estimate.agrees(value), f"{estimate} is not {value}"
    assert estimate.error < 0.01, "the simulation could not tell it from another value"


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 3), (0.3, 1), (0.7, 5), (0.9, 8), (1.0, 4), (0.5, 0)])
def test_rounds(alpha, gamma):
    """Equation (1), the distribution of the length, Theorems 3.8 and 3.11, memory accesses, and alpha-hat."""
    done = simulate.rounds(alpha, gamma, MILLION, seed=gamma)
    agrees(done.tokens, formulas.expected_tokens(alpha, gamma))
    shares = done.num_rounds_by_accepted / MILLION
    probs = formulas.accepted_length_probs(alpha, gamma)
    assert probs.sum() == pytest.approx(1)
    assert np.all(np.abs(shares - probs) <= 4 * np.sqrt(probs * (1 - probs) / MILLION) + 1e-12)
    agrees(done.speedup(gamma, 0.1, 1.3, 0.05), formulas.speedup(alpha, gamma, 0.1, verify_ratio=1.3, overhead=0.05))
    rows = (gamma + 1 + 0.1 * gamma) / done.tokens_per_round
    relative_error = done.tokens_per_round_error / done.tokens_per_round
    assert rows == pytest.approx(formulas.operations_factor(alpha, gamma, 0.1), rel=4 * relative_error + 1e-12)
    reads = (1 + 0.02 * gamma) / done.tokens_per_round
    assert reads == pytest.approx(formulas.memory_access_factor(alpha, gamma, 0.02), rel=4 * relative_error + 1e-12)
    if done.num_tested:
        estimate = formulas.alpha_hat(done.num_accepted, done.num_tested)
        assert estimate == pytest.approx(alpha, abs=4 * (alpha * (1 - alpha) / done.num_tested) ** 0.5 + 1e-12)
    if (alpha, gamma) == (0.7, 5):
        assert done.num_accepted / done.num_drafted == pytest.approx(0.388, abs=2e-3), "accepted / drafted is not alpha"
        assert not done.tokens.agrees(formulas.double_counted_tokens(alpha, gamma), 100)


def test_rounds_whose_positions_differ():
    alphas = (0.9, 0.5, 0.8)
    agrees(simulate.rounds(alphas, 3, MILLION, seed=1).tokens, formulas.expected_tokens_varying(alphas))


@pytest.mark.parametrize(("c", "row_cost"), [(0.1, 0.0), (0.05, 0.2)])
def test_oracle(c, row_cost):
    """Verified, each drafted token is a row of the target, too; unverified it is not (section 3.5, footnote 4)."""
    agrees(simulate.oracle(0.7, c, MILLION, 1, row_cost), formulas.oracle_speedup(0.7, c, row_cost))
    agrees(simulate.oracle(0.7, c, MILLION, 2, 0.0), formulas.oracle_speedup(0.7, c, row_cost, is_verified=False))
    agrees(simulate.oracle(0.7, 0.0, MILLION, 3), formulas.oracle_tokens(0.7))


@pytest.mark.parametrize("knows_end", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
def test_finite_texts(num_tokens, knows_end):
    found = formulas.speedup_of_length(0.8, 5, 0.1, num_tokens, 1.2, knows_end=knows_end)
    agrees(simulate.texts(0.8, 5, 0.1, num_tokens, MILLION // num_tokens, 3, 1.2, knows_end=knows_end), found)
    assert formulas.speedup_of_length(1.0, 9, 0.0, num_tokens, knows_end=knows_end) <= num_tokens


def test_an_end_that_is_not_known_costs_whole_rounds():
    """A text of one token is one round, and a half of two-token texts at alpha = 1/2 takes a second one."""
    assert formulas.speedup_of_length(0.5, 3, 0.1, 1, knows_end=False) == pytest.approx(1 / 1.3)
    assert formulas.speedup_of_length(0.5, 3, 0.1, 2, 1.2, 0.5, knows_end=False) == pytest.approx(2 / (2.0 * 1.5))


def test_long_texts_reach_theorem_3_8():
    assert formulas.speedup_of_length(0.8, 5, 0.1, 4000) == pytest.approx(formulas.speedup(0.8, 5, 0.1), rel=1e-3)


ACCEPTANCE = {
    "ratio": formulas.acceptance,
    "rejection": formulas.rejection_acceptance,
    "match": formulas.match_acceptance,
}


@pytest.mark.parametrize("rule", simulate.POSITION_RULES)
@pytest.mark.parametrize(("p", "q"), [(P, Q), (WIDE_P, WIDE_Q)], ids=["K1", "eight ids"])
def test_position(rule, p, q):
    done = simulate.position(p, q, MILLION, 4, rule)
    agrees(done.acceptance, ACCEPTANCE[rule](p, q))
    assert done.errors(p).max() < 4
    assert done.errors(q).max() > 100


@pytest.mark.parametrize("leniency", [0.6, 0.8])
@pytest.mark.parametrize(("p", "q"), [(P, Q), (WIDE_P, WIDE_Q)], ids=["K1", "eight ids"])
def test_lenient_position(leniency, p, q):
    done = simulate.position(p, q, MILLION, 4, lenience=leniency)
    agrees(done.acceptance, lenience.lenient_acceptance(p, q, leniency))
    assert done.errors(lenience.lenient_probs(p, q, leniency)).max() < 4
    assert done.errors(p).max() > 20


def test_l1_of_a_perfect_sampler():
    """About .030 at 5000 rounds and eight equal ids: it never reaches 0."""
    even = np.full(8, 1 / 8)
    assert simulate.l1_noise(even, 5000) == pytest.approx(0.030, abs=5e-4)
    found = [simulate.position(even, WIDE_Q, 5000, seed).l1(even) for seed in range(200)]
    assert np.mean(found) == pytest.approx(simulate.l1_noise(even, 5000), abs=4 * np.std(found) / 200**0.5)


@pytest.mark.parametrize("num_draws", [1, 2, 4])
@pytest.mark.parametrize(("p", "q"), [((0.7, 0.3), (0.3, 0.7)), (WIDE_P, WIDE_Q)], ids=["K4", "eight ids"])
def test_several_draws(p, q, num_draws):
    agrees(simulate.several(p, q, num_draws, MILLION, 5), formulas.recursive_acceptance(p, q, num_draws))
    rho = formulas.kseq_rho(p, q, num_draws)
    agrees(simulate.several(p, q, num_draws, MILLION, 6, rho), formulas.kseq_acceptance(p, q, num_draws))
    best = formulas.optimal_acceptance(p, q, num_draws)
    assert formulas.kseq_acceptance(p, q, num_draws) <= best + 1e-9
    assert formulas.recursive_acceptance(p, q, num_draws) <= best + 1e-9


@pytest.mark.parametrize("block", [False, True], ids=["ratio", "block"])
def test_chains(block):
    """K3: 1 + 10/9 and 1 + 11/9 tokens; and the mean of what chain_tokens says of all drafted chains."""
    p, q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    agrees(simulate.chains(p, q, 2, MILLION, 7, block=block), 20 / 9 if block else 19 / 9)
    mean = 0.0
    for chain in itertools.product(range(8), repeat=3):
        tokens = formulas.chain_tokens([WIDE_P[x] / WIDE_Q[x] for x in chain])
        mean += math.prod(WIDE_Q[x] for x in chain) * (tokens.block if block else tokens.ratio)
    agrees(simulate.chains(WIDE_P, WIDE_Q, 3, MILLION, 8, block=block), mean)


@pytest.mark.parametrize("widths", [None, (3, 2), (1, 1, 1, 1)], ids=["best", "wide", "chain"])
def test_trees(widths):
    nodes = trees.best_first((0.6, 0.2, 0.1), 8, widths)
    agrees(simulate.trees(nodes, (0.6, 0.2, 0.1), MILLION, 9), trees.expected_tokens(nodes))


def test_landscape_is_the_formulas_and_the_simulation():
    found = landscape([0.0, 0.6, 0.9, 1.0], 6, 0.1, verify_ratios=[1, 1, 1.1, 1.2, 1.3, 1.4, 1.5], overhead=0.05)
    for i, alpha in enumerate(found.alphas):
        for gamma in range(7):
            wanted = formulas.speedup(alpha, gamma, 0.1, [1, 1, 1.1, 1.2, 1.3, 1.4, 1.5][gamma], 0.05)
            assert found.speedups[i, gamma] == pytest.approx(wanted, abs=1e-12)
    agrees(simulate.rounds(0.9, 6, MILLION, 10).speedup(6, 0.1, 1.5, 0.05), found.speedups[2, 6])
    even = landscape(np.linspace(0, 1, 41), 60, 0.1)
    assert [formulas.optimal_gamma(a, 0.1, 60) for a in even.alphas] == list(even.best_gammas)
    assert np.all(even.best_speedups >= [formulas.least_speedup(a, 0.1) - 1e-12 for a in even.alphas])
