"""Lenience (appendix A.5 of Leviathan et al. 2023, arXiv 2211.17192): a rule accepts more than an exact rule may.

A drafted token x is accepted with probability min(1, p(x) / (l q(x))), where l is the lenience. After a rejection, a
token is drawn from norm((p - q)+). The paper does not say how to draw this token. This distribution is used here
because it keeps the emitted tokens closest to p.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.theory.formulas import acceptance


def lenient_acceptance(p: npt.ArrayLike, q: npt.ArrayLike, lenience: float) -> float:
    """Return alpha_l = sum_x min(q, p / l), the probability of acceptance at lenience l.

    Raises ValueError for l outside (0, 1].
    """
    _check(lenience)
    return acceptance(np.asarray(p, dtype=np.float64) / lenience, q)


def lenient_probs(p: npt.ArrayLike, q: npt.ArrayLike, lenience: float) -> npt.NDArray[np.float64]:
    """Return the distribution of the token that a tested position emits, [V].

    The distribution is min(q, p / l) + (1 - alpha_l) norm((p - q)+), with alpha_l from `lenient_acceptance`. No id has
    a probability above p / l. The total variation distance to p is alpha_l - alpha_1.
    """
    _check(lenience)
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    kept = np.minimum(q, p / lenience)
    residual = np.maximum(p - q, 0)
    missing = float(residual.sum())
    return np.asarray(kept if missing == 0 else kept + (1 - kept.sum()) * residual / missing)


def lenience_price(p: npt.ArrayLike, q: npt.ArrayLike, lenience: float) -> float:
    """Return the total variation distance between p and the output of lenient verification.

    The distance equals the acceptance rate with lenience minus the rate without lenience: alpha_l - alpha_1.
    """
    return lenient_acceptance(p, q, lenience) - acceptance(p, q)


def lenient_greedy(p: npt.ArrayLike, lenience: float) -> npt.NDArray[np.bool_]:
    """Return which drafted ids are accepted at temperature 0, [V]: the ids with p >= l max p, with p at temperature 1.

    The paper prints the condition p <= l max p. By that condition, every id would be accepted at l = 1, and fewer ids
    at a more lenient l.
    """
    _check(lenience)
    p = np.asarray(p, dtype=np.float64)
    return np.asarray(p >= lenience * p.max())


def _check(lenience: float) -> None:
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience={lenience} must be in (0, 1]: 1 is exact")
