"""Simulations of speculative decoding, to check the formulas. They draw random numbers, and use none of the formulas.

All rounds of a simulation run at once, as numpy arrays. A million rounds take at most about one second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.theory.trees import Node

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float

    def agrees(self, value: float, num_errors: float = 4.0) -> bool:
        """Return whether a value is at most `num_errors` standard errors away from the mean."""
        return abs(self.mean - value) <= num_errors * self.error + 1e-12


@dataclass(frozen=True)
class Simulated:
    """Counts over simulated rounds, and the mean number of tokens per round with its standard error."""

    num_rounds: int
    num_drafted: int
    num_tested: int
    num_accepted: int
    tokens_per_round: float
    tokens_per_round_error: float  # one standard error
    num_rounds_by_accepted: Ints  # [gamma + 1] how many accepted 0, 1, ... gamma tokens

    @property
    def tokens(self) -> Estimate:
        """The mean number of tokens that a round emits."""
        return Estimate(self.tokens_per_round, self.tokens_per_round_error)

    def speedup(self, gamma: int, c: float, verify_ratio: float = 1.0, overhead: float = 0.0) -> Estimate:
        """Return the speed-up over plain decoding, if a round takes the time of c gamma + v + o plain target passes.

        v is `verify_ratio`, o is `overhead`; see `formulas.speedup`.
        """
        cost = c * gamma + verify_ratio + overhead
        return Estimate(self.tokens_per_round / cost, self.tokens_per_round_error / cost)


def rounds(alpha: float | Seq[float], gamma: int, num_rounds: int, seed: int) -> Simulated:
    """Simulate rounds of gamma drafted tokens. Tokens are accepted with probability alpha each, until one is rejected.

    alpha: one number for all positions, or one number for each position. Raises ValueError for alpha outside [0, 1], a
    negative gamma, or fewer than 2 rounds.
    """
    alphas = np.asarray(alpha, dtype=np.float64)
    if not (((alphas >= 0) & (alphas <= 1)).all() and gamma >= 0 and num_rounds >= 2):
        raise ValueError(f"alpha={alpha}, gamma={gamma}, num_rounds={num_rounds} cannot be simulated")
    generator = np.random.default_rng(seed)
    accepted = np.zeros(num_rounds, dtype=np.int64)
    going = np.ones(num_rounds, dtype=np.bool_)
    for a in np.broadcast_to(alphas, (gamma,)):
        going &= generator.random(num_rounds) < a
        accepted += going
    mean = _estimate(accepted)
    return Simulated(
        num_rounds=num_rounds,
        num_drafted=num_rounds * gamma,
        num_tested=int(np.minimum(accepted + 1, gamma).sum()),
        num_accepted=int(accepted.sum()),
        tokens_per_round=mean.mean + 1,
        tokens_per_round_error=mean.error,
        num_rounds_by_accepted=np.bincount(accepted, minlength=gamma + 1),
    )


def oracle(alpha: float, c: float, num_rounds: int, seed: int, row_cost: float = 0.0) -> Estimate:
    """Simulate a drafter that drafts exactly the tokens that will be accepted, and return the speed-up.

    alpha must be below 1. row_cost: the further time of a target pass for one more drafted token, in multiples of the
    time of a pass over one token.
    """
    lengths = np.random.default_rng(seed).geometric(1 - alpha, num_rounds) - 1
    return _ratio(lengths + 1.0, 1 + (c + row_cost) * lengths)


def texts(
    alpha: float,
    gamma: int,
    c: float,
    num_tokens: int,
    num_texts: int,
    seed: int,
    verify_ratio: float = 1.0,
    *,
    knows_end: bool = True,
) -> Estimate:
    """Simulate texts of `num_tokens` tokens and return the speed-up.

    knows_end: whether a round with n tokens still missing drafts at most n - 1 tokens, because the target adds one
    token. False = every round drafts gamma tokens.
    """
    generator = np.random.default_rng(seed)
    left = np.full(num_texts, num_tokens)
    cost = np.zeros(num_texts)
    while (left > 0).any():
        drafted = np.minimum(gamma, np.maximum(left - 1, 0)) if knows_end else np.full(num_texts, gamma)
        accepted = np.zeros(num_texts, dtype=np.int64)
        going = left > 0
        cost += going * (c * drafted + np.where(drafted > 0, verify_ratio, 1.0))
        for position in range(gamma):
            going = going & (position < drafted) & (generator.random(num_texts) < alpha)
            accepted += going
        left = np.maximum(left - accepted - 1, 0)
    return _ratio(np.full(num_texts, float(num_tokens)), cost)


# ---------------------------------------------------------------------------------------- one position: p and q


@dataclass(frozen=True)
class Emitted:
    """The tokens emitted at `num_rounds` tested positions that all have the same p and q."""

    num_rounds: int
    num_accepted: int
    counts: Ints  # [V] how often each id was emitted

    @property
    def acceptance(self) -> Estimate:
        """The share of drafted tokens that were accepted."""
        share = self.num_accepted / self.num_rounds
        return Estimate(share, math.sqrt(share * (1 - share) / self.num_rounds))

    def l1(self, probs: npt.ArrayLike) -> float:
        """Return the L1 distance between the shares of the emitted ids and `probs`.

        Even for a perfect sampler this distance is above 0 by chance, see `l1_noise`.
        """
        return float(np.abs(self.counts / self.num_rounds - np.asarray(probs)).sum())

    def errors(self, probs: npt.ArrayLike) -> Floats:
        """Return how far each id's share is from the probability in `probs`, in standard errors, [V]."""
        p = np.asarray(probs, dtype=np.float64)
        sigma = np.sqrt(np.maximum(p * (1 - p), 0) / self.num_rounds)
        return np.abs(self.counts / self.num_rounds - p) / np.maximum(sigma, 1e-12)


def l1_noise(probs: npt.ArrayLike, num_rounds: int) -> float:
    """Return the mean L1 distance between `probs` and the shares of the ids that a perfect sampler draws.

    By the normal approximation the mean is sum_x sqrt(2 p (1 - p) / (pi num_rounds)). At V = 8 and 5000 rounds it is
    about .030.
    """
    p = np.asarray(probs, dtype=np.float64)
    return float(np.sqrt(2 * p * (1 - p) / (math.pi * num_rounds)).sum())


def position(
    p: npt.ArrayLike, q: npt.ArrayLike, num_rounds: int, seed: int, rule: str = "ratio", lenience: float = 1.0
) -> Emitted:
    """Simulate the draft and the verification of one token, `num_rounds` times, by one of POSITION_RULES. p, q: [V].

    rule: ratio = speculative sampling, which is lenient if `lenience` is below 1. rejection = one try of rejection
    sampling and, if the try rejects, a draw from p (appendix A.2 of Leviathan et al. 2023). match = compare Gumbel-max
    draws from q and p with shared noise. Raises ValueError for another rule.
    """
    if rule not in POSITION_RULES:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(POSITION_RULES)}")
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    accepted, tokens = POSITION_RULES[rule](p, q, num_rounds, np.random.default_rng(seed), lenience)
    return Emitted(num_rounds, int(accepted.sum()), np.bincount(tokens, minlength=len(p)))


def _by_ratio(p: Floats, q: Floats, num: int, generator: np.random.Generator, lenience: float) -> tuple[Bools, Ints]:
    drafted = _draw(q, num, generator)
    accepted = generator.random(num) * lenience * q[drafted] < p[drafted]
    residual = np.maximum(p - q, 0)
    return accepted, np.where(accepted, drafted, _draw(residual if residual.any() else p, num, generator))


def _by_rejection(p: Floats, q: Floats, num: int, generator: np.random.Generator, _: float) -> tuple[Bools, Ints]:
    drafted = _draw(q, num, generator)
    largest = (p[q > 0] / q[q > 0]).max() if (q[p > 0] > 0).all() else math.inf
    accepted = generator.random(num) * largest * q[drafted] < p[drafted]
    return accepted, np.where(accepted, drafted, _draw(p, num, generator))


def _by_match(p: Floats, q: Floats, num: int, generator: np.random.Generator, _: float) -> tuple[Bools, Ints]:
    # argmax of log p + Gumbel noise = argmin of exponential noise / p
    noise = generator.standard_exponential((num, len(p)))
    with np.errstate(divide="ignore"):
        drafted, tokens = ((noise / probs).argmin(axis=1) for probs in (q, p))
    return drafted == tokens, tokens


POSITION_RULES: dict[str, Callable[[Floats, Floats, int, np.random.Generator, float], tuple[Bools, Ints]]] = {
    "ratio": _by_ratio,
    "rejection": _by_rejection,
    "match": _by_match,
}


# -------------------------------------------------------------------------------- several draws, chains and trees


def several(
    p: npt.ArrayLike, q: npt.ArrayLike, num_draws: int, num_rounds: int, seed: int, rho: float = 0.0
) -> Estimate:
    """Simulate one position with several independent draws from q. Returns the share of rounds that accept a draw.

    rho > 0: K-SEQ, which tests every draw against p / rho. rho = 0: recursive rejection sampling, which tests each draw
    against the residual of p after the earlier draws.
    """
    left, probs = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    generator = np.random.default_rng(seed)
    accepted = np.zeros(num_rounds, dtype=np.bool_)
    for _ in range(num_draws):
        drafted = _draw(probs, num_rounds, generator)
        accepted |= generator.random(num_rounds) * (rho or 1.0) * probs[drafted] < left[drafted]
        residual = np.maximum(left - probs, 0)
        if rho == 0 and residual.any():
            left = residual / residual.sum()
    return _estimate(accepted)


def chains(
    p: npt.ArrayLike, q: npt.ArrayLike, gamma: int, num_rounds: int, seed: int, *, block: bool = False
) -> Estimate:
    """Simulate rounds that draft a chain of gamma tokens, and return the mean number of tokens that a round emits.

    p and q are the same at every position. block: True = block verification (Sun et al. 2024, arXiv 2403.10444),
    False = verification token by token.
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    generator = np.random.default_rng(seed)
    accepted = np.zeros(num_rounds, dtype=np.int64)
    kept = np.ones(num_rounds)
    going = np.ones(num_rounds, dtype=np.bool_)
    for length in range(1, gamma + 1):
        drafted = _draw(q, num_rounds, generator)
        coins = generator.random(num_rounds)
        ratios = p[drafted] / q[drafted]
        if not block:
            going &= coins < ratios
            accepted += going
            continue
        kept = np.minimum(1.0, kept * ratios)
        room = np.maximum(kept[:, None] * p - q, 0).sum(axis=1)
        below = room + 1 - kept
        chance = np.divide(room, below, out=np.ones(num_rounds), where=below > 1e-15)
        accepted[coins < (kept if length == gamma else chance)] = length
    tokens = _estimate(accepted)
    return Estimate(tokens.mean + 1, tokens.error)


def trees(nodes: Seq[Node], a: Seq[float], num_rounds: int, seed: int) -> Estimate:
    """Simulate rounds that draft a tree, and return the mean number of tokens that a round emits.

    a[k]: the probability that child k of an accepted node is the accepted child. A round ends if the accepted child is
    not in the tree, or if no child is accepted.
    """
    children = np.full((len(nodes) + 1, len(a) + 1), -1, dtype=np.int64)  # row: parent + 1; last column: no child
    for i, node in enumerate(nodes):
        children[node.parent + 1, node.rank] = i
    generator, bounds = np.random.default_rng(seed), np.cumsum(a)
    at = np.full(num_rounds, -1, dtype=np.int64)
    accepted = np.zeros(num_rounds, dtype=np.int64)
    going = np.ones(num_rounds, dtype=np.bool_)
    while going.any():
        child = children[at + 1, np.searchsorted(bounds, generator.random(num_rounds), side="right")]
        going &= child >= 0
        at = np.where(going, child, at)
        accepted += going
    tokens = _estimate(accepted)
    return Estimate(tokens.mean + 1, tokens.error)


# ------------------------------------------------------------------------------------------------------- helpers


def _draw(weights: Floats, num: int, generator: np.random.Generator) -> Ints:
    """Draw `num` ids with probabilities in proportion to `weights`. An id of weight 0 is never drawn."""
    bounds = np.cumsum(weights)
    ids = np.searchsorted(bounds, generator.random(num) * bounds[-1], side="right")
    return np.asarray(np.minimum(ids, np.flatnonzero(weights)[-1]), dtype=np.int64)


def _estimate(values: npt.NDArray[np.generic]) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)))


def _ratio(tokens: npt.NDArray[np.floating], costs: npt.NDArray[np.floating]) -> Estimate:
    """Return the sum of `tokens` divided by the sum of `costs`, with the standard error by the delta method."""
    mean = float(tokens.sum() / costs.sum())
    return Estimate(mean, float((tokens - mean * costs).std(ddof=1)) / (float(costs.mean()) * math.sqrt(len(costs))))
