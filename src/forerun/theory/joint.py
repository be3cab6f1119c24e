"""Block verification in closed form: the mean number of tokens of a round if a drafted chain is judged as a whole."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MOST_VALUES = 1 << 22


def block_tokens(p: npt.ArrayLike, q: npt.ArrayLike, gamma: int) -> float:
    """Return the mean number of tokens that a round of the rule `block` emits, with the same p and q at all positions.

    The mean is 1 + sum_i E[P_i] over gamma positions, where P_i = min(1, P_(i-1) p(x_i) / q(x_i)) and x_i is drawn from
    q (Sun et al. 2024, arXiv 2403.10444). P_i takes at most V^i values, and equal values are merged.
    `formulas.chain_tokens` returns this mean for one given chain. Raises ValueError for a negative gamma, and for too
    many values.
    """
    if gamma < 0:
        raise ValueError(f"gamma={gamma} must be at least 0")
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    ratios, weights = p[q > 0] / q[q > 0], q[q > 0]
    values: Floats = np.ones(1)
    probs: Floats = np.ones(1)
    total = 1.0
    for _ in range(gamma):
        if len(values) * len(ratios) > MOST_VALUES:
            raise ValueError(f"{len(ratios)} ids and gamma={gamma} have too many values of P: take fewer")
        reached = np.minimum(1.0, np.outer(values, ratios)).ravel()
        shares = np.outer(probs, weights).ravel()
        total += float(reached @ shares)
        values, places = np.unique(reached.round(12), return_inverse=True)
        probs = np.asarray(np.bincount(places, weights=shares), dtype=np.float64)
    return total
