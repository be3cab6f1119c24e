"""Closed forms of speculative decoding: acceptance of a position, emitted tokens of a round, and the speed-up.

Notation: alpha = probability that a tested token is accepted, gamma = drafted tokens per round, c = seconds of one
draft token / seconds of one target token, p and q = the target's and the draft's distribution at a position. The
formulas assume that acceptances are independent and have the same alpha at every position. Only
`expected_tokens_varying` takes an alpha for each position.

Theorems and equations are numbered as in Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via
Speculative Decoding", arXiv 2211.17192. The formula for mixtures of experts is not in that paper. It follows from
counting the experts that rows choose.

Lossy rules are in lenience.py, grids of speed-ups in landscape.py, trees in trees.py, and the costs of drafts and wider
passes on a machine in roofline.py. simulate.py has simulations to check the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# ----------------------------------------------------------------------------------------- one position: p and q


def acceptance(p: npt.ArrayLike, q: npt.ArrayLike) -> float:
    """Return beta, the probability that the ratio rule accepts a token drawn from q (Theorem 3.5).

    beta = sum_x min(p, q) = 1 - TV(p, q), TV being the total variation distance.
    """
    return float(np.minimum(np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)).sum())


def lk_divergence(p: npt.ArrayLike, q: npt.ArrayLike) -> float:
    """Return D_LK(p, q) = sum_x |p(x) - (p(x) + q(x)) / 2| = 1 - `acceptance` (Definition 3.2, Lemma 3.3).

    D_LK is the total variation distance. It is symmetric and in [0, 1]. It is 0 only for p = q, and 1 only if no id has
    a positive probability in both p and q (Corollary 3.4).
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    return float(np.abs(p - (p + q) / 2).sum())


def mean_acceptance(pairs: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]]) -> float:
    """Return alpha, the mean of `acceptance` over the pairs (p, q) of several contexts (Corollary 3.6).

    Raises ValueError if `pairs` is empty.
    """
    betas = [acceptance(p, q) for p, q in pairs]
    if not betas:
        raise ValueError("alpha of no contexts is undefined: give at least one pair of distributions")
    return float(np.mean(betas))


def rejection_acceptance(p: npt.ArrayLike, q: npt.ArrayLike) -> float:
    """Return the probability that one try of rejection sampling accepts: min q(x) / p(x) over p(x) > 0 (appendix A.2).

    The rule makes one try of classical rejection sampling, and draws from p if the try rejects. The rule is exact, but
    it accepts less often than the ratio rule: .40 against .70 for p = (.5, .3, .2), q = (.2, .6, .2).
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    return float((q[p > 0] / p[p > 0]).min())


def match_acceptance(p: npt.ArrayLike, q: npt.ArrayLike) -> float:
    """Return the probability that Gumbel-max draws from p and from q agree, if both use the same noise.

    The probability is sum_x 1 / sum_z max(p(z)/p(x), q(z)/q(x)), where x runs over the ids with p(x) q(x) > 0. It lies
    in [(1 - TV) / (1 + TV), 1 - TV] (Daliri, Musco, Suresh 2024, arXiv 2408.07978).
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1.0 / np.maximum(p / p[x], q / q[x]).sum() for x in both))


def optimal_acceptance(p: npt.ArrayLike, q: npt.ArrayLike, num_draws: int) -> float:
    """Return the largest probability with which an exact rule can accept one of `num_draws` independent draws from q.

    The probability is 1 + min_H [p(H) - q(H)^num_draws]. The sets H are the prefixes of the list of ids in ascending
    order of p / q (Hu et al. 2025, arXiv 2502.18779). With one draw the probability is `acceptance`.
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    order = np.argsort(np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0), kind="stable")
    missing = np.cumsum(p[order]) - np.cumsum(q[order]) ** num_draws
    return 1 + float(min(0.0, missing.min()))


def recursive_acceptance(p: npt.ArrayLike, q: npt.ArrayLike, num_draws: int) -> float:
    """Return the probability that recursive rejection sampling accepts one of `num_draws` independent draws from q.

    After each rejection, the residual norm((p - q)+) replaces p for the next draw. The probability is
    1 - prod_k (1 - beta_k), where beta_k is the acceptance of draw k (Miao et al. 2023, arXiv 2305.09781).
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    rejected = 1.0
    for _ in range(num_draws):
        residual = np.maximum(p - q, 0)
        missing = float(residual.sum())
        if missing == 0:
            return 1.0
        rejected *= missing
        p = residual / missing
    return 1 - rejected


def kseq_acceptance(p: npt.ArrayLike, q: npt.ArrayLike, num_draws: int) -> float:
    """Return the probability that K-SEQ accepts one of `num_draws` independent draws from q: 1 - (1 - beta)^num_draws.

    beta = sum_x min(q, p / rho). rho is the least number in [1, num_draws] with 1 - (1 - beta)^num_draws <= rho beta,
    because no residual distribution exists for a smaller rho (Sun et al. 2023, arXiv 2310.15141).
    """
    return 1 - (1 - _beta(p, q, kseq_rho(p, q, num_draws))) ** num_draws


def kseq_rho(p: npt.ArrayLike, q: npt.ArrayLike, num_draws: int) -> float:
    """Return the number rho of `kseq_acceptance`, found by bisection."""

    def has_residual(rho: float) -> bool:
        beta = _beta(p, q, rho)
        return 1 - (1 - beta) ** num_draws <= rho * beta

    low, high = 1.0, float(num_draws)
    if has_residual(low):
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if has_residual(middle) else (middle, high)
    return high


def _beta(p: npt.ArrayLike, q: npt.ArrayLike, rho: float) -> float:
    """Return the acceptance of one draw by K-SEQ: sum_x min(q, p / rho)."""
    return acceptance(np.asarray(p, dtype=np.float64) / rho, q)


# ------------------------------------------------------------------------------------------ one round: its tokens


def accepted_length_probs(alpha: float, gamma: int) -> npt.NDArray[np.float64]:
    """Return the probability that a round accepts n tokens, for n = 0 .. gamma, [gamma + 1].

    The probability is alpha^n (1 - alpha) for n < gamma, and alpha^gamma for n = gamma. The round emits n + 1 tokens, a
    capped geometric variable (section 3.1).
    """
    _check(alpha, gamma)
    reached = alpha ** np.arange(gamma + 1, dtype=np.float64)
    return np.append(reached[:-1] * (1 - alpha), reached[-1])


def expected_accepted(alpha: float, gamma: int) -> float:
    """Return the mean number of tokens that a round accepts.

    The mean is sum_{i=1..gamma} alpha^i = alpha (1 - alpha^gamma) / (1 - alpha).
    """
    _check(alpha, gamma)
    return float(gamma) if alpha == 1 else alpha * (1 - alpha**gamma) / (1 - alpha)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the mean number of tokens that a round emits: (1 - alpha^(gamma+1)) / (1 - alpha), equation (1).

    The correction or bonus token is counted. Some texts give (1 - alpha^gamma) / (1 - alpha) + 1, which counts one
    token twice: at alpha = 0 it gives 2, but a round whose first token is rejected emits exactly one token.
    """
    return 1 + expected_accepted(alpha, gamma)


def double_counted_tokens(alpha: float, gamma: int) -> float:
    """Return (1 - alpha^gamma) / (1 - alpha) + 1, which some texts give in place of `expected_tokens`.

    This is larger than equation (1) by 1 - alpha^gamma, the probability of a rejection. Its sum of accepted tokens,
    alpha^0 + ... + alpha^(gamma-1), begins one term too early.
    """
    return 2 + expected_accepted(alpha, gamma - 1) if gamma else 1.0


def expected_tokens_varying(alphas: Seq[float]) -> float:
    """Return the mean number of tokens that a round emits, if each position has its own probability of acceptance.

    alphas[i]: the probability that the token at position i is accepted if it is tested.
    """
    return 1 + float(np.cumprod(alphas).sum()) if len(alphas) else 1.0


def expected_tokens_beta(num_accepted: float, num_rejected: float, gamma: int) -> float:
    """Return the mean number of tokens that a round emits if alpha is only estimated from counts.

    alpha then has the distribution Beta(a, b), with a = num_accepted and b = num_rejected. Both include the counts of
    the prior. E[alpha^i] = prod_{j<i} (a + j) / (a + b + j) is more than the i-th power of the mean of alpha. So
    Beta(8, 2) gives 2.4545 tokens at gamma = 2, but its mean, alpha = 0.8, gives only 2.44. Raises ValueError for
    impossible counts.
    """
    if not (num_accepted >= 0 and num_rejected >= 0 and num_accepted + num_rejected > 0 and gamma >= 0):
        raise ValueError(f"Beta({num_accepted}, {num_rejected}) with gamma={gamma} is impossible")
    total = num_accepted + num_rejected
    return expected_tokens_varying([(num_accepted + j) / (total + j) for j in range(gamma)])


class ChainTokens(NamedTuple):
    """The mean number of tokens that a round with one drafted chain emits, by two rules and by the best possible rule.

    The correction or bonus token is counted.
    """

    ratio: float
    block: float
    bound: float  # the most for any rule that knows all distributions beforehand


def chain_tokens(ratios: Seq[float]) -> ChainTokens:
    """Return the mean number of emitted tokens for one given drafted chain, by each rule, over the rule's random draws.

    ratios: r_i = p_i(x_i) / q_i(x_i) of all drafted positions, including positions after a rejection. So the averages
    of these results over drafted chains are unbiased for every rule, whichever rule verified the chains.

    The field ratio is 1 + sum_i prod_{j<=i} min(1, r_j). The field block is 1 + sum_i P_i with
    P_i = min(1, P_{i-1} r_i) (Sun et al. 2024, arXiv 2403.10444). The field bound is 1 + sum_i min(1, prod_{j<=i} r_j),
    the most that a rule can reach that knows all distributions beforehand.
    """
    kept = share = product = 1.0
    by_ratio = by_block = bound = 1.0
    for r in ratios:
        kept *= min(1.0, r)
        share = min(1.0, share * r)
        product *= r
        by_ratio, by_block, bound = by_ratio + kept, by_block + share, bound + min(1.0, product)
    return ChainTokens(by_ratio, by_block, bound)


# ------------------------------------------------------------------------------------------ what a round gains


def speedup(alpha: float, gamma: int, c: float, verify_ratio: float = 1.0, overhead: float = 0.0) -> float:
    """Return the speed-up over plain decoding (Theorem 3.8): expected_tokens / (c gamma + v + o).

    v, verify_ratio: seconds of a target pass over gamma + 1 tokens / seconds of a pass over one token; 1 in the paper.
    o, overhead: seconds of a round outside the models / seconds of a target token. Raises ValueError for impossible
    costs.
    """
    cost = c * gamma + verify_ratio + overhead
    if not (c >= 0 and verify_ratio > 0 and overhead >= 0):
        raise ValueError(f"c={c}, verify_ratio={verify_ratio}, overhead={overhead} cannot be a cost")
    return expected_tokens(alpha, gamma) / cost


def least_speedup(alpha: float, c: float) -> float:
    """Return a lower bound on the best gamma's speed-up: (1 + alpha) / (1 + c) if alpha > c, else 1 (Corollary 3.9).

    The bound is Theorem 3.8 at gamma = 1. If alpha <= c, no gamma gives a speed-up above 1.
    """
    return max(1.0, speedup(alpha, 1, c))


def speedup_of_length(
    alpha: float,
    gamma: int,
    c: float,
    num_tokens: int,
    verify_ratio: float = 1.0,
    overhead: float = 0.0,
    *,
    knows_end: bool = True,
) -> float:
    """Return the speed-up for a text of `num_tokens` tokens. The speed-up is at most `num_tokens`.

    Theorem 3.8 is the limit for long texts. If n tokens are still missing, a round drafts g tokens. The time for the n
    tokens is cost(n) = c g + v + o + the mean of cost(n - k - 1) over the number k of accepted tokens. A round that
    drafts nothing has v = 1. Raises ValueError for num_tokens < 1 or c < 0.

    knows_end: True = a limit on the number of tokens ends the text. Then g = min(gamma, n - 1), since the target adds
    one token. False = the model ends the text. Then g = gamma in every round, and tokens after the end are wasted.
    """
    _check(alpha, gamma)
    if num_tokens < 1 or c < 0:
        raise ValueError(f"num_tokens={num_tokens}, c={c}: a text has at least one token, and c is at least 0")
    cost = np.zeros(num_tokens + 1)
    for left in range(1, num_tokens + 1):
        drafted = min(gamma, left - 1) if knows_end else gamma
        after = cost[np.maximum(0, left - 1 - np.arange(drafted + 1))]
        round_cost = c * drafted + (verify_ratio if drafted else 1.0) + overhead
        cost[left] = round_cost + accepted_length_probs(alpha, drafted) @ after
    return num_tokens / float(cost[num_tokens])


def break_even_alpha(gamma: int, c: float, verify_ratio: float = 1.0, overhead: float = 0.0) -> float | None:
    """Return the alpha at which `speedup` is 1, by bisection; None if the speed-up is below 1 even at alpha = 1."""
    low, high = 0.0, 1.0
    if speedup(high, gamma, c, verify_ratio, overhead) < 1:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        pays = speedup(middle, gamma, c, verify_ratio, overhead) >= 1
        low, high = (low, middle) if pays else (middle, high)
    return high


def optimal_gamma(alpha: float, c: float, max_gamma: int = 1024) -> int:
    """Return the gamma in 0 .. max_gamma with the largest speed-up by Theorem 3.8; 0 if drafting does not pay.

    gamma + 1 is better than gamma iff alpha^(gamma+1) (1 + c gamma) > c expected_tokens(alpha, gamma). The left side
    minus the right side falls strictly with gamma. So the best gamma is the first gamma for which gamma + 1 is not
    better. The best gamma is 0 iff alpha <= c (Corollary 3.9).
    """
    _check(alpha, max_gamma)
    for gamma in range(max_gamma):
        if alpha ** (gamma + 1) * (1 + c * gamma) <= c * expected_tokens(alpha, gamma):
            return gamma
    return max_gamma


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Return the operations per token, in multiples of plain decoding: (c_hat gamma + gamma + 1) / expected_tokens.

    This is Theorem 3.11. c_hat: operations of one draft token / operations of one target token.
    """
    return (c_hat * gamma + gamma + 1) / expected_tokens(alpha, gamma)


def memory_access_factor(alpha: float, gamma: int, draft_bytes_ratio: float = 0.0) -> float:
    """Return the bytes read per token, in multiples of plain decoding: (1 + ratio gamma) / expected_tokens.

    The bytes of weights and KV cache are counted. ratio, draft_bytes_ratio: bytes read for a draft token / bytes read
    for a target token. The paper leaves the draft model's reads out (ratio 0). Then only the target's reads count, and
    they are divided by the tokens of equation (1) (section 3.4).
    """
    return (1 + draft_bytes_ratio * gamma) / expected_tokens(alpha, gamma)


def oracle_tokens(alpha: float) -> float:
    """Return the mean number of tokens that a round emits if it drafts exactly the tokens that will be accepted.

    The mean is 1 / (1 - alpha) (section 3.5), which is infinite at alpha = 1.
    """
    _check(alpha, 0)
    return float("inf") if alpha == 1 else 1 / (1 - alpha)


def oracle_speedup(alpha: float, c: float, row_cost: float = 0.0, *, is_verified: bool = True) -> float:
    """Return the speed-up of drafting exactly the tokens that will be accepted: 1 / (1 - alpha + (c + s) alpha).

    s, row_cost: cost of a further row in a target pass / cost of a pass over one row; 0 in the paper (section 3.5). The
    speed-up is infinite at alpha = 1, c = s = 0.

    is_verified: False = without verification (footnote 4). Then the target runs only if the draft is wrong, and s drops
    out. This saves rows, which cost nothing in the paper's cost model. It saves no passes, because each wrong guess
    takes one pass in both cases.
    """
    _check(alpha, 0)
    cost = 1 - alpha + (c + (row_cost if is_verified else 0.0)) * alpha
    return float("inf") if cost == 0 else 1 / cost


def oracle_operations(alpha: float, c_hat: float, *, is_verified: bool = True) -> float:
    """Return the operations per token of `oracle_speedup`, in multiples of plain decoding: 1 + c_hat alpha.

    Without verification the result is 1 - alpha + c_hat alpha. c_hat: operations of one draft token / operations of one
    target token.
    """
    _check(alpha, 0)
    return (1.0 if is_verified else 1 - alpha) + c_hat * alpha


def oracle_gain(alpha: float, c: float) -> float:
    """Return `oracle_speedup` divided by the speed-up at the best fixed gamma, at most about 1.6 (section 3.5)."""
    return oracle_speedup(alpha, c) / speedup(alpha, optimal_gamma(alpha, c), c)


def alpha_hat(num_accepted: int, num_tested: int) -> float | None:
    """Return the share of tested tokens that were accepted, an estimate of alpha; None if no token was tested.

    This is the maximum likelihood estimate for a truncated geometric distribution. The share of drafted tokens that
    were accepted can be lower, because tokens after a rejection were drafted but never tested.
    """
    if not 0 <= num_accepted <= num_tested:
        raise ValueError(f"{num_accepted} accepted of {num_tested} tested tokens is impossible")
    return num_accepted / num_tested if num_tested else None


# ------------------------------------------------------------------------------------- mixtures of experts: a pass


def distinct_experts(
    num_experts: int, num_chosen: int, num_rows: npt.ArrayLike, overlap: float = 0.0
) -> npt.NDArray[np.float64]:
    """Return how many distinct experts n rows choose on average, if each row chooses k of E experts; elementwise in n.

    n is `num_rows`, k `num_chosen`, E `num_experts`. The result is k + (1 - overlap) (D - k), where
    D = E (1 - (1 - k / E)^n). D is the number for n independent rows that choose every expert with the same
    probability: a row leaves an expert out with probability 1 - k / E. overlap: from 0 (independent rows) to 1 (all
    rows choose the same experts). Raises ValueError for an impossible mixture, number of rows, or overlap.
    """
    rows = np.asarray(num_rows, dtype=np.float64)
    if not (1 <= num_chosen <= num_experts and (rows >= 1).all() and 0 <= overlap <= 1):
        raise ValueError(
            f"{num_chosen} of {num_experts} experts, {rows} rows, overlap={overlap}: a row chooses at least one "
            "and at most all, there is at least one row, and overlap is in [0, 1]"
        )
    alone = num_experts * (1 - (1 - num_chosen / num_experts) ** rows)
    return np.asarray(num_chosen + (1 - overlap) * (alone - num_chosen))


def _check(alpha: float, gamma: int) -> None:
    if not (0 <= alpha <= 1 and gamma >= 0):
        raise ValueError(f"alpha={alpha}, gamma={gamma}: alpha must be in [0, 1] and gamma at least 0")
