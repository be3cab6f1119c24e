"""What a perfect sampler shows, and block verification in closed form, against simulation, scipy and enumeration."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from forerun.theory.formulas import acceptance, chain_tokens, expected_tokens
from forerun.theory.joint import block_tokens
from forerun.theory.noise import chi_square, chi_square_tail, l1_noise_deviation
from forerun.theory.simulate import l1_noise

P = (0.3, 0.2, 0.15, 0.12, 0.09, 0.07, 0.04, 0.03)
Q = (0.14, 0.28, 0.1, 0.2, 0.06, 0.12, 0.06, 0.04)


SOME = {"falling": P, "even": (0.125,) * 8, "coin": (0.5, 0.5), "zero": (0.7, 0.3, 0.0)}


@pytest.mark.parametrize("name", SOME)
def test_l1_noise(name: str) -> None:
    """Mean and deviation of a multinomial sample's distance, within 4 standard errors of 20,000 samples, or 1 %."""
    probs = SOME[name]
    shares = np.random.default_rng(1).multinomial(5000, probs, size=20_000) / 5000
    found = np.abs(shares - probs).sum(axis=1)
    assert l1_noise(probs, 5000) == pytest.approx(found.mean(), rel=0.01)
    assert l1_noise_deviation(probs, 5000) == pytest.approx(found.std(), rel=4 / math.sqrt(2 * 20_000) + 0.01)


@pytest.mark.parametrize("num_free", [1, 2, 3, 6, 7, 8, 31])
@pytest.mark.parametrize("value", [0.0, 0.3, 4.0, 20.0, 150.0])
def test_chi_square_tail(value: float, num_free: int) -> None:
    assert chi_square_tail(value, num_free) == pytest.approx(stats.chi2.sf(value, num_free), rel=1e-9, abs=1e-300)


def test_chi_square() -> None:
    counts = [30, 25, 45]
    expected = stats.chisquare(counts, [40, 30, 30]).statistic
    assert chi_square(counts, [0.4, 0.3, 0.3]) == pytest.approx(expected)
    assert chi_square([1, 2], [0.0, 1.0]) == math.inf
    assert chi_square([0, 2], [0.0, 1.0]) == 0


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_block_tokens_are_those_of_all_chains(gamma: int) -> None:
    """The mean of `chain_tokens` over every chain that the draft can make."""
    found = sum(
        math.prod(Q[x] for x in chain) * chain_tokens([P[x] / Q[x] for x in chain]).block
        for chain in itertools.product(range(8), repeat=gamma)
    )
    assert block_tokens(P, Q, gamma) == pytest.approx(found, rel=1e-10)


def test_block_tokens_are_more_than_those_of_ratio() -> None:
    alpha = acceptance(P, Q)
    assert block_tokens(P, Q, 1) == pytest.approx(expected_tokens(alpha, 1))
    assert block_tokens(P, Q, 6) > expected_tokens(alpha, 6) + 0.5
    with pytest.raises(ValueError, match="at least 0"):
        block_tokens(P, Q, -1)
