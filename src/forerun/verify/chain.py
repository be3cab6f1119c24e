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

from forerun.types import Coins, Draft, Probs, Trial, Verdict
from forerun.verify import Ruling, chain_nodes, collected

NAME = "ratio"


def verify(draft: Draft, target_probs: Seq[Seq[Probs]], coins: Seq[Coins]) -> Verdict:
    """Rule on every sequence of the draft; shapes as in `forerun.verify.judge`. Raises BadOption for a tree."""
    return collected([rule(draft, b, target_probs[b], coins[b]) for b in range(draft.num_sequences)])


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins) -> Ruling:
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

    The result has the form of p: a point, a list of the same ids, or a vector of the same length. Nothing is left only
    by rounding (p = q would have been accepted), so p is the right law then (docs/exactness.md).
    """
    if p.point is not None:
        return p
    rest = _minus(p, q).clamp_(min=0)
    if not bool(rest.max() > 0):
        return p
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
