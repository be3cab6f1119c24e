"""Lenience (appendix A.5 of Leviathan et al. 2023, arXiv 2211.17192): accepting more than an exact rule may.

A drafted x passes with probability min(1, p(x) / (l q(x))), and a rejection draws from norm((p - q)+), which the paper
leaves open and which is the choice closest to p.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.theory.formulas import acceptance


def lenient_acceptance(p: npt.ArrayLike, q: npt.ArrayLike, lenience: float) -> float:
    """Return alpha_l = sum_x min(q, p / l). Raises ValueError for l outside (0, 1]."""
    _check(lenience)
    return acceptance(np.asarray(p, dtype=np.float64) / lenience, q)


def lenient_probs(p: npt.ArrayLike, q: npt.ArrayLike, lenience: float) -> npt.NDArray[np.float64]:
    """Return [V] the distribution of one tested position: min(q, p / l) + (1 - alpha_l) norm((p - q)+).

    No id has more than p / l, and the total variation distance to p is alpha_l - alpha_1.
    """
    _check(lenience)
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    kept, residual = np.minimum(q, p / lenience), np.maximum(p - q, 0)
    missing = float(residual.sum())
    return np.asarray(kept if missing == 0 else kept + (1 - kept.sum()) * residual / missing)


def lenience_price(p: npt.ArrayLike, q: npt.ArrayLike, lenience: float) -> float:
    """Return the total variation distance between `lenient_probs` and p: alpha_l - alpha_1."""
    return lenient_acceptance(p, q, lenience) - acceptance(p, q)


def lenient_greedy(p: npt.ArrayLike, lenience: float) -> npt.NDArray[np.bool_]:
    """Return [V] whether each drafted id is kept at temperature 0: p >= l max p, with p at temperature 1.

    The paper prints p <= l max p, which would keep every id at l = 1 and fewer the more lenient it is.
    """
    _check(lenience)
    p = np.asarray(p, dtype=np.float64)
    return np.asarray(p >= lenience * p.max())


def _check(lenience: float) -> None:
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience={lenience} must be in (0, 1]: 1 is exact")
