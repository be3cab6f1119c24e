"""Simulation of rounds of speculative decoding, to compare with the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Simulated:
    """Counts of simulated rounds, and the standard error of the mean."""

    num_rounds: int
    num_drafted: int
    num_tested: int
    num_accepted: int
    tokens_per_round: float
    tokens_per_round_error: float  # one standard error


def rounds(alpha: float, gamma: int, num_rounds: int, seed: int) -> Simulated:
    """Simulate rounds that draft gamma tokens and accept each with probability alpha up to the first rejection.

    Raises ValueError for alpha outside [0, 1], a negative gamma, and fewer than 2 rounds.
    """
    if not (0 <= alpha <= 1 and gamma >= 0 and num_rounds >= 2):
        raise ValueError(f"alpha={alpha}, gamma={gamma}, num_rounds={num_rounds} cannot be simulated")
    coins = np.random.default_rng(seed).random((num_rounds, gamma)) < alpha
    accepted = np.cumprod(coins, axis=1).sum(axis=1) if gamma else np.zeros(num_rounds, dtype=np.int64)
    tested = np.minimum(accepted + 1, gamma)
    return Simulated(
        num_rounds=num_rounds,
        num_drafted=num_rounds * gamma,
        num_tested=int(tested.sum()),
        num_accepted=int(accepted.sum()),
        tokens_per_round=float(accepted.mean()) + 1,
        tokens_per_round_error=float(accepted.std(ddof=1)) / math.sqrt(num_rounds),
    )
