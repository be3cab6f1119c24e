"""Closed forms of speculative decoding.

Theorems and equations are numbered as in Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via
Speculative Decoding", arXiv 2211.17192. Notation: alpha = probability that a tested token is accepted, gamma = drafted
tokens per round, c = seconds of one draft token / seconds of one target token. Acceptances are taken as independent
with one alpha; where they are not, see `expected_tokens_varying`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


def acceptance(p: npt.ArrayLike, q: npt.ArrayLike) -> float:
    """Return beta = sum_x min(p, q) = 1 - TV(p, q), at which the ratio rule accepts a token of q (Theorem 3.5)."""
    return float(np.minimum(np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)).sum())


def match_acceptance(p: npt.ArrayLike, q: npt.ArrayLike) -> float:
    """Return P(both Gumbel-max draws agree) under shared noise = sum_x 1 / sum_z max(p(z)/p(x), q(z)/q(x)).

    x runs over ids with p(x) q(x) > 0. It lies in [(1 - TV) / (1 + TV), 1 - TV] (Daliri, Musco, Suresh 2024, arXiv
    2408.07978).
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1.0 / np.maximum(p / p[x], q / q[x]).sum() for x in both))


def expected_accepted(alpha: float, gamma: int) -> float:
    """Return the mean accepted tokens of a round: sum_{i=1..gamma} alpha^i = alpha (1 - alpha^gamma) / (1 - alpha)."""
    _check(alpha, gamma)
    return float(gamma) if alpha == 1 else alpha * (1 - alpha**gamma) / (1 - alpha)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the mean emitted tokens of a round: (1 - alpha^(gamma+1)) / (1 - alpha), equation (1).

    The correction or bonus is counted. Some texts say (1 - alpha^gamma) / (1 - alpha) + 1, which counts one token
    twice: at alpha = 0 it gives 2, but a round whose first token is rejected emits exactly one.
    """
    return 1 + expected_accepted(alpha, gamma)


def expected_tokens_varying(alphas: Seq[float]) -> float:
    """Return the mean emitted tokens where position i, once it is tested, is accepted with probability alphas[i]."""
    return 1 + float(np.cumprod(alphas).sum()) if len(alphas) else 1.0


def expected_tokens_beta(num_accepted: float, num_rejected: float, gamma: int) -> float:
    """Return the mean emitted tokens where alpha is only known from counts: over Beta(num_accepted, num_rejected).

    The counts include the priors. E[alpha^i] = prod_{j<i} (a + j) / (a + b + j), which is more than the i-th power of
    the mean: Beta(8, 2) gives 2.4545 tokens at gamma = 2, its mean of 0.8 only 2.44.
    """
    if not (num_accepted >= 0 and num_rejected >= 0 and num_accepted + num_rejected > 0 and gamma >= 0):
        raise ValueError(f"Beta({num_accepted}, {num_rejected}) with gamma={gamma} is impossible")
    total = num_accepted + num_rejected
    return expected_tokens_varying([(num_accepted + j) / (total + j) for j in range(gamma)])


def speedup(alpha: float, gamma: int, c: float, verify_ratio: float = 1.0, overhead: float = 0.0) -> float:
    """Return the factor on tokens per second over plain decoding (Theorem 3.8): expected_tokens / (c gamma + v + o).

    verify_ratio v: seconds of a target pass over gamma + 1 tokens / over one (the paper has 1). overhead o: seconds
    outside the models per round / seconds of a target token.
    """
    cost = c * gamma + verify_ratio + overhead
    if not (c >= 0 and verify_ratio > 0 and overhead >= 0):
        raise ValueError(f"c={c}, verify_ratio={verify_ratio}, overhead={overhead} cannot be a cost")
    return expected_tokens(alpha, gamma) / cost


def optimal_gamma(alpha: float, c: float, max_gamma: int = 1024) -> int:
    """Return the gamma in 0 .. max_gamma of largest speed-up by Theorem 3.8; 0 where drafting does not pay.

    gamma + 1 beats gamma iff alpha^(gamma+1) (1 + c gamma) > c expected_tokens(alpha, gamma). Left minus right falls
    strictly with gamma, so the first gamma that is not beaten is the best. It is 0 iff alpha <= c
    (Corollary 3.9).
    """
    _check(alpha, max_gamma)
    for gamma in range(max_gamma):
        if alpha ** (gamma + 1) * (1 + c * gamma) <= c * expected_tokens(alpha, gamma):
            return gamma
    return max_gamma


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Return the factor on arithmetic operations per token (Theorem 3.11): (c_hat gamma + gamma + 1) / expected_tokens.

    c_hat: operations of one draft token / of one target token.
    """
    return (c_hat * gamma + gamma + 1) / expected_tokens(alpha, gamma)


def oracle_speedup(alpha: float, c: float) -> float:
    """Return the speed-up of a drafter that drafts exactly the tokens that are accepted: 1 / (1 - alpha + c alpha).

    It is infinite at alpha = 1, c = 0.
    """
    _check(alpha, 0)
    cost = 1 - alpha + c * alpha
    return float("inf") if cost == 0 else 1 / cost


def alpha_hat(num_accepted: int, num_tested: int) -> float | None:
    """Return the estimate accepted / tested of alpha; None without a test.

    It is the maximum likelihood of a truncated geometric distribution. accepted / drafted is another number, because
    tokens behind a rejection were drafted and never tested.
    """
    if not 0 <= num_accepted <= num_tested:
        raise ValueError(f"{num_accepted} accepted of {num_tested} tested tokens is impossible")
    return num_accepted / num_tested if num_tested else None


def _check(alpha: float, gamma: int) -> None:
    if not (0 <= alpha <= 1 and gamma >= 0):
        raise ValueError(f"alpha={alpha}, gamma={gamma}: alpha must be in [0, 1] and gamma at least 0")


class ChainTokens(NamedTuple):
    """Emitted tokens of a round that drafted one chain, the correction or bonus included, by rule."""

    ratio: float
    block: float
    bound: float  # of any rule that knows all distributions beforehand


def chain_tokens(ratios: Seq[float]) -> ChainTokens:
    """Return the mean emitted tokens, over the coins, of a chain with these p_i(x_i) / q_i(x_i).

    All drafted positions count, those behind a rejection, too. Averages over drafted chains are unbiased for the mean
    emitted tokens of each rule, whichever rule is running: 1 + sum_i prod_{j<=i} min(1, r_j) for `ratio`, 1 + sum_i P_i
    with P_i = min(1, P_{i-1} r_i) for `block` (Sun et al. 2024, arXiv 2403.10444), and with full information
    1 + sum_i min(1, prod_{j<=i} r_j).
    """
    kept = share = product = 1.0
    by_ratio = by_block = bound = 1.0
    for r in ratios:
        kept, share, product = kept * min(1.0, r), min(1.0, share * r), product * r
        by_ratio, by_block, bound = by_ratio + kept, by_block + share, bound + min(1.0, product)
    return ChainTokens(by_ratio, by_block, bound)


def optimal_acceptance(p: npt.ArrayLike, q: npt.ArrayLike, num_draws: int) -> float:
    """Return the largest probability that one of `num_draws` independent draws from q is accepted by an exact rule.

    It is 1 + min_H [p(H) - q(H)^num_draws], where H runs over the prefixes of the ids in ascending order of p / q (Hu
    et al. 2025, arXiv 2502.18779). With one draw it is `acceptance`.
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    order = np.argsort(np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0), kind="stable")
    missing = np.cumsum(p[order]) - np.cumsum(q[order]) ** num_draws
    return 1 + float(min(0.0, missing.min()))
