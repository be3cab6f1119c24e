"""The arithmetic of rules on distributions of any form (point, vector, list of ids): aligned weights, residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.sampling import arithmetic
from forerun.types import Probs

Row = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]


def acceptance(target_prob: float, draft_prob: float) -> float:
    """Return min(1, p(x) / q(x)): exactly 1 where both are equal, exactly 0 where the target excludes the token."""
    return min(1.0, target_prob / draft_prob) if draft_prob > 0 else 0.0


def residual(p: Probs, q: Probs) -> Probs:
    """Return the distribution norm(max(0, p - q)), or p if max(0, p - q) is 0 for every token."""
    return excess(p, q)[0]


def excess(p: Probs, q: Probs, share: float = 1.0) -> tuple[Probs, float]:
    """Return the distribution norm(max(0, share p - q)), and the mass sum max(0, share p - q). share: in [0, 1].

    If the mass is 0, the returned distribution is p. With a share of 1, no rule needs the residual of q = p, because a
    token drawn from q = p is always accepted. Only rounding can make the mass 0 then, and p is the right distribution
    (docs/exactness.md).
    """
    if p.point is not None:
        return p, max(0.0, share - q.at(p.point))
    weights, theirs = p.weights, aligned(q, p)
    return normalised(p, (weights if share == 1 else weights * share) - theirs)


def normalised(p: Probs, rest: Row) -> tuple[Probs, float]:
    """Return norm(max(0, rest)) in the form of p, or p if max(0, rest) has mass 0. Also return this mass.

    p must not be a point. rest [n]: weights of the ids of p; changed in place.
    """
    np.maximum(rest, 0, out=rest)
    mass = arithmetic.mass(rest)
    return (reweighted(p, rest / mass), mass) if mass > 0 else (p, 0.0)


def reweighted(p: Probs, weights: Row) -> Probs:
    """Return a distribution over the ids of p with other weights [n]. p must not be a point."""
    return Probs(dense=weights) if p.ids is None else Probs(ids=p.ids, listed=weights)


def aligned(q: Probs, p: Probs) -> Row:
    """Return the probabilities that q gives to the ids of p, [n] like p.weights. p must not be a point."""
    size = len(p.weights)
    if q.point is not None:
        weights = np.ones(1, p.weights.dtype)
        ids = np.array([q.point])
    else:
        weights = q.weights
        if q.ids is None and p.ids is None and len(weights) >= size:
            return weights[:size]
        ids = np.arange(len(weights)) if q.ids is None else q.ids
    row = np.zeros(size, weights.dtype)
    known, places = _places(p, ids)
    row[places] = weights[known]
    return row


def _places(p: Probs, ids: Ids) -> tuple[npt.NDArray[np.bool_], Ids]:
    """Return a mask [n], true for the ids that p gives a weight, and the indices of those weights in p.weights."""
    if p.ids is None:
        known = ids < len(p.weights)
        return known, ids[known]
    places = np.minimum(p.ids.searchsorted(ids), len(p.ids) - 1)
    known = p.ids[places] == ids
    return known, places[known]
