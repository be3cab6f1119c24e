"""The speed-up of Theorem 3.8 (Leviathan et al. 2023, arXiv 2211.17192) over a grid of alpha and gamma."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Landscape:
    """The speed-ups for A values of alpha and for G = max_gamma + 1 values of gamma: 0 .. max_gamma."""

    alphas: Floats  # [A]
    tokens: Floats  # [A, G] emitted per round, equation (1)
    costs: Floats  # [G] of a round, in target passes over one row
    speedups: Floats  # [A, G]

    @property
    def best_gammas(self) -> npt.NDArray[np.int64]:
        """The best gamma for each alpha, [A]: the least of equally good gammas; 0 if drafting does not pay."""
        return np.asarray(self.speedups.argmax(axis=1), dtype=np.int64)

    @property
    def best_speedups(self) -> Floats:
        """The largest speed-up for each alpha, [A]."""
        return np.asarray(self.speedups.max(axis=1))


def landscape(
    alphas: npt.ArrayLike, max_gamma: int, c: float, verify_ratios: npt.ArrayLike = 1.0, overhead: float = 0.0
) -> Landscape:
    """Return the speed-ups tokens / (c gamma + v(gamma) + o) for all alphas and gammas.

    v, verify_ratios: seconds of a target pass over gamma + 1 rows / seconds of a pass over one row, as an array for
    gamma = 0 .. max_gamma, or as one number for all gammas. o, overhead: seconds of a round outside the models /
    seconds of a target pass over one row. Raises ValueError for an alpha outside [0, 1] and for impossible costs.
    """
    a = np.atleast_1d(np.asarray(alphas, dtype=np.float64))
    gammas = np.arange(max_gamma + 1, dtype=np.float64)
    v = np.broadcast_to(np.asarray(verify_ratios, dtype=np.float64), gammas.shape)
    if not (((a >= 0) & (a <= 1)).all() and max_gamma >= 0 and c >= 0 and (v > 0).all() and overhead >= 0):
        raise ValueError(f"alphas in [0, 1], max_gamma={max_gamma}, c={c}, overhead={overhead} and v > 0 must hold")
    tokens = np.cumsum(a[:, None] ** gammas, axis=1)
    costs = c * gammas + v + overhead
    return Landscape(a, tokens, costs, tokens / costs)
