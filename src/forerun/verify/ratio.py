"""Ratio verification: rejection sampling, token by token, over chains and trees.

Chains are judged as in Leviathan et al. 2023, Algorithm 1, and Chen et al. 2023, Algorithm 2. With p the target's
distribution and q the one that the token x was drawn from:

    accept x with probability min(1, p(x) / q(x));  else go on with p <- norm(max(0, p - q)).

Then P(emit x) = min(p, q)(x) + (1 - beta) (p - min(p, q))(x) / (1 - beta) = p(x), where beta = sum_x min(p, q)(x).
Several children of a node are tested in turn, each with the p that the test before it left (recursive rejection
sampling; SpecInfer, Miao et al. 2023, Algorithm 2; without replacement Jeon et al. 2024). Where none is accepted, the
emitted token is drawn from the p that the last test left. A chain is a tree without siblings. Equal siblings are
separate draws: the second is tested, too, and is always rejected, but its q is subtracted. Greedy decoding needs no
case of its own: p is a point mass then. docs/exactness.md has the edge cases.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.types import AcceptanceTest, Coins, Draft, Probs, Verdict
from forerun.verify import Ruling, children_of, collected, equal_siblings

LOSSLESS = True
SHAPES = ("chain", "tree")
DRAWS = ("point", "independent", "distinct")
NEEDS_ALL_ROWS = False


@dataclass(frozen=True)
class Options:
    """No options."""


def verify(draft: Draft, target_probs: Seq[Seq[Probs]], coins: Seq[Coins]) -> Verdict:
    """Judge every sequence of the draft; shapes as in `forerun.verify.judge`."""
    return collected([rule(draft, b, target_probs[b], coins[b]) for b in range(draft.num_sequences)])


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, options: Options | None = None) -> Ruling:
    """Judge one sequence: (accepted nodes, correction or bonus, acceptance tests)."""
    path: list[int] = []
    tests: list[AcceptanceTest] = []
    at, first = [-1], draft.node_starts[b]  # at: the last node of the path, with its equal siblings
    while True:
        depth, siblings = len(path), children_of(draft, b, at)
        p = target_probs[path[-1] - first + 1 if path else 0]
        for lane, node in enumerate(siblings):
            token, q = draft.tokens[node], draft.probs[node]
            target_prob, draft_prob = p.at(token), q.at(token)
            is_accepted = coins.accept(acceptance(target_prob, draft_prob), depth, lane)
            tests.append(AcceptanceTest(node, target_prob, draft_prob, is_accepted))
            if is_accepted:
                path.append(node)
                at = equal_siblings(draft, siblings, node)
                break
            # A token with q(x) = 0 can only come from underflow: it is rejected, and its q is not subtracted.
            p = residual(p, q) if draft_prob > 0 else p
        else:
            return path, coins.draw(p, depth), tests


def acceptance(target_prob: float, draft_prob: float) -> float:
    """Return min(1, p(x) / q(x)): exactly 1 where both are equal, exactly 0 where the target excludes the token."""
    return min(1.0, target_prob / draft_prob) if draft_prob > 0 else 0.0


def residual(p: Probs, q: Probs) -> Probs:
    """Return the distribution norm(max(0, p - q)); p itself where max(0, p - q) is all zero.

    The result has the form of p: a point, a list of the same ids, or a vector of the same length. All zero occurs by
    rounding alone, because a token of q = p is always accepted; p is the right distribution then (docs/exactness.md).
    """
    if p.point is not None:
        return p
    rest = _minus(p, q).clamp_(min=0)
    mass = rest.sum(dtype=torch.float64)
    if not bool(mass > 0):
        return p
    rest = (rest / mass).to(rest.dtype)
    return Probs(dense=rest) if p.ids is None else Probs(ids=p.ids, listed=rest)


def _minus(p: Probs, q: Probs) -> Tensor:
    """Return p - q at the ids of p as a new tensor, in the wider of both types."""
    if q.point is not None:
        rest = p.weights.clone()
        rest[_places(p, torch.tensor([q.point]))[1]] -= 1
        return rest
    theirs = q.weights.to(p.weights.device)
    rest = p.weights.to(torch.promote_types(p.weights.dtype, theirs.dtype), copy=True)
    if q.ids is not None:
        known, places = _places(p, q.ids)
        rest[places] -= theirs[known]
    elif p.ids is not None:
        ids = p.ids[p.ids < len(theirs)]
        rest[: len(ids)] -= theirs[ids]
    else:
        rest[: len(theirs)] -= theirs[: len(rest)]
    return rest


def _places(p: Probs, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of these ids p has a weight for, bool [n], and the indices of those weights."""
    if p.ids is None:
        known = ids < len(p.weights)
        return known, ids[known]
    places = torch.searchsorted(p.ids, ids).clamp_(max=len(p.ids) - 1)
    known = p.ids[places] == ids
    return known, places[known]
