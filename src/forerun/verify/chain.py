"""Token-wise rejection sampling over a chain: the readable reference (Leviathan et al. 2023, Algorithm 1; Chen et al.

2023, Algorithm 2). With p the target's law and q the law that the token x was drawn from:

    accept x with probability min(1, p(x) / q(x));  else emit a token of the law norm(max(0, p - q)) and stop.

Then P(emit x) = min(p, q)(x) + (1 - beta) (p - min(p, q))(x) / (1 - beta) = p(x). Greedy needs no case of its own: p is
a point mass then, and a token is accepted with probability 1 or 0. Edge cases: docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from forerun.errors import InternalError
from forerun.types import Coins, Draft, Probs, Trial, Verdict
from forerun.verify import add, chain_nodes

NAME = "ratio"


def verify(draft: Draft, target_probs: Seq[Seq[Probs]], coins: Seq[Coins]) -> Verdict:
    """Rule on every sequence of the draft; shapes as in `forerun.verify.judge`. Raises BadOption for a tree."""
    verdict = Verdict([], [], [])
    for b in range(draft.num_sequences):
        add(verdict, rule(draft, b, target_probs[b], coins[b]))
    return verdict


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins) -> tuple[list[int], int, list[Trial]]:
    """One sequence: (accepted nodes, correction or bonus, trials)."""
    path: list[int] = []
    trials: list[Trial] = []
    for depth, node in enumerate(chain_nodes(draft, b, NAME)):
        token, p, q = draft.tokens[node], target_probs[depth], draft.probs[node]
        target_prob, draft_prob = p.at(token), q.at(token)
        accepted = coins.accept(acceptance(target_prob, draft_prob), depth)
        trials.append(Trial(node, target_prob, draft_prob, accepted))
        if not accepted:
            # A token that its own law excludes came from underflow: rejected, and the correction is plain.
            return path, coins.draw(residual(p, q) if draft_prob > 0 else p, depth), trials
        path.append(node)
    return path, coins.draw(target_probs[len(path)], len(path)), trials


def acceptance(target_prob: float, draft_prob: float) -> float:
    """min(1, p(x) / q(x)): exactly 1 where they are equal, exactly 0 where the target excludes the token."""
    return min(1.0, target_prob / draft_prob) if draft_prob > 0 else 0.0


def residual(p: Probs, q: Probs) -> Probs:
    """norm(max(0, p - q)), left unnormalised: whoever draws divides by the mass. Where nothing is left, p.

    p and q may be points or vectors of different lengths; ids beyond a vector have probability 0 there. Nothing is
    left only by rounding (p = q would have been accepted), so p is the right law then (docs/exactness.md).
    """
    if p.point is not None:
        return p
    if p.dense is None:
        raise InternalError("a law needs a point or a dense vector")
    rest = p.dense.clone()
    if q.dense is not None:
        rest = _minus(rest, q.dense)
    elif q.point is not None and q.point < len(rest):
        rest[q.point] = 0
    return Probs(dense=rest) if bool((rest > 0).any()) else p


def _minus(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q) [V of p] in the wider of both types."""
    width = min(len(p), len(q))
    rest = p.to(torch.promote_types(p.dtype, q.dtype))
    rest[:width] -= q[:width].to(rest.device)
    return rest.clamp_(min=0)
