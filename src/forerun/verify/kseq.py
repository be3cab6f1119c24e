"""K-SEQ: several independent draws from one distribution are judged with one ratio (SpecTr; Sun et al. 2310.15141).

At a node, K tokens are drawn from q. Let beta(rho) = sum_x min(q(x), p(x) / rho), and let rho* be the smallest rho in
[1, K] with 1 - (1 - beta)^K <= rho beta (found by bisection). With rho = rho* and a uniform number U for each draw:

    accept the first draw x with U rho q(x) < p(x)
    no draw is accepted: go on with  norm(p - min(q, p / rho) (1 - (1 - beta)^K) / beta)

The token x is accepted with probability min(q, p / rho)(x) (1 - (1 - beta)^K) / beta, and the residual adds the part of
p(x) that is missing. A smaller rho would make the residual negative (mutant m14). With one draw this is the ratio rule.
Siblings that were drawn from different distributions are judged in groups with equal distributions. Each group is
judged with the residual of p after the groups before it, as `ratio` judges sibling by sibling. Once a token is
accepted, the children of all draws of this token are judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun.sampling.arithmetic import mass
from forerun.types import AcceptanceTest, Coins, Draft, Probs
from forerun.verify import Ruling, children_of, equal_siblings
from forerun.verify.arithmetic import acceptance, aligned, normalised, residual

LOSSLESS = True
SHAPES = ("chain", "tree")
DRAWS = ("point", "independent")
NEEDS_ALL_ROWS = False

_BISECTIONS = 50


@dataclass(frozen=True)
class Options:
    """No options."""


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, options: Options | None = None) -> Ruling:
    """Judge one sequence. Returns (accepted nodes, correction or bonus, acceptance tests)."""
    path: list[int] = []
    tests: list[AcceptanceTest] = []
    at, first = [-1], draft.node_starts[b]  # at: the last node of the path, with its equal siblings
    while True:
        siblings = children_of(draft, b, at)
        p = target_probs[path[-1] - first + 1 if path else 0]
        accepted, p = _try(draft, siblings, p, coins, len(path), tests)
        if accepted is None:
            return path, coins.draw(p, len(path)), tests
        path.append(accepted)
        at = equal_siblings(draft, siblings, accepted)


def _try(
    draft: Draft, siblings: Seq[int], p: Probs, coins: Coins, depth: int, tests: list[AcceptanceTest]
) -> tuple[int | None, Probs]:
    """Test the children of a node, and append the tests to `tests`.

    Returns the accepted child, or None if all children are rejected, and the distribution p after the rejections.
    """
    lanes = itertools.count()
    for q, group in _groups(draft, siblings):
        num_draws = sum(q.at(draft.tokens[node]) > 0 for node in group)  # q(x) = 0 comes from underflow alone
        rho = ratio_of(p, q, num_draws)
        for node in group:
            token = draft.tokens[node]
            target_prob, draft_prob = p.at(token), q.at(token)
            is_accepted = coins.accept(acceptance(target_prob, rho * draft_prob), depth, next(lanes))
            tests.append(AcceptanceTest(node, target_prob, draft_prob, is_accepted))
            if is_accepted:
                return node, p
        p = left_by(p, q, num_draws, rho) if num_draws else p
    return None, p


def _groups(draft: Draft, siblings: Seq[int]) -> list[tuple[Probs, list[int]]]:
    """Group consecutive siblings that were drawn from equal distributions. Returns each distribution and its nodes."""
    groups: list[tuple[Probs, list[int]]] = []
    for node in siblings:
        if groups and _equal(groups[-1][0], draft.probs[node]):
            groups[-1][1].append(node)
        else:
            groups.append((draft.probs[node], [node]))
    return groups


def _equal(a: Probs, b: Probs) -> bool:
    if a is b or a.point is not None or b.point is not None:
        return a.point == b.point
    if (a.ids is None) != (b.ids is None) or not np.array_equal(a.weights, b.weights):
        return False
    return a.ids is None or b.ids is None or np.array_equal(a.ids, b.ids)


def ratio_of(p: Probs, q: Probs, num_draws: int) -> float:
    """Return rho* in [1, num_draws], rounded up; 1 if p is a point, because only this id can be emitted then."""
    low, high = 1.0, float(num_draws)
    if num_draws <= 1 or p.point is not None:
        return low
    target_probs, draft_probs = p.weights.astype(np.float64, copy=False), aligned(q, p).astype(np.float64, copy=False)

    def is_enough(rho: float) -> bool:
        beta = mass(np.minimum(draft_probs, target_probs / rho))
        return 1 - (1 - beta) ** num_draws <= rho * beta

    if is_enough(low):
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def left_by(p: Probs, q: Probs, num_draws: int, rho: float) -> Probs:
    """Return the distribution of the emitted token if none of `num_draws` draws from q was accepted."""
    if num_draws == 1 or p.point is not None:
        return residual(p, q)
    target_probs = p.weights.astype(np.float64, copy=False)
    kept = np.minimum(aligned(q, p), target_probs / rho)
    beta = min(1.0, mass(kept))
    scale = (1 - (1 - beta) ** num_draws) / beta if beta > 0 else 0.0
    rest, _ = normalised(p, target_probs - kept * scale)
    return rest
