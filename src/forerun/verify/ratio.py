"""Token-wise rejection sampling, over chains and trees: the readable reference.

A chain: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2. With p the target's distribution and q the
one that the token x was drawn from:

    accept x with probability min(1, p(x) / q(x));  else go on with p <- norm(max(0, p - q)).

Then P(emit x) = min(p, q)(x) + (1 - beta) (p - min(p, q))(x) / (1 - beta) = p(x). At a node with several children each
is tried in turn against what the one before left of p (recursive rejection sampling; SpecInfer, Miao et al. 2023,
Algorithm 2; without replacement Jeon et al. 2024); where none is accepted a token of what is left is emitted. A chain
is a tree without siblings. Equal siblings are draws of their own: the second is tried, too, and is always
rejected, but subtracts its q. Greedy needs no case: p is a point then, and a token is accepted or not. Edge
cases: docs/exactness.md.
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
    """Rule on every sequence of the draft; shapes as in `forerun.verify.judge`."""
    return collected([rule(draft, b, target_probs[b], coins[b]) for b in range(draft.num_sequences)])


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, options: Options | None = None) -> Ruling:
    """One sequence: (accepted nodes, correction or bonus, acceptance tests)."""
    path: list[int] = []
    tests: list[AcceptanceTest] = []
    at, first = [-1], draft.node_starts[b]  # equal siblings that the path has reached
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
            # A token that its own distribution excludes came from underflow: rejected, and nothing is subtracted.
            p = residual(p, q) if draft_prob > 0 else p
        else:
            return path, coins.draw(p, depth), tests


def acceptance(target_prob: float, draft_prob: float) -> float:
    """min(1, p(x) / q(x)): exactly 1 where they are equal, exactly 0 where the target excludes the token."""
    return min(1.0, target_prob / draft_prob) if draft_prob > 0 else 0.0


def residual(p: Probs, q: Probs) -> Probs:
    """norm(max(0, p - q)), a distribution; p itself where nothing is left.

    The result has the form of p: a point, a list of the same ids, or a vector of the same length. Nothing is left only
    by rounding (p = q would have been accepted), so p is the right distribution then (docs/exactness.md).
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
    """p - q at the ids of p, in the wider of both types; a new tensor."""
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
    """Which of these ids have a place among the weights of p, bool [n], and the places of those that have."""
    if p.ids is None:
        known = ids < len(p.weights)
        return known, ids[known]
    places = torch.searchsorted(p.ids, ids).clamp_(max=len(p.ids) - 1)
    known = p.ids[places] == ids
    return known, places[known]
