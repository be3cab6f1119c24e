"""What passes of a mixture of experts take: as long as the experts that their rows choose, and those go by the text.

Eight rows of one token choose the experts of one row, eight unlike rows nearly eight times as many, and each of them
has to be read. So passes over rows of both kinds are calibrated, with the experts that they chose. Real rows lie
between: where, is learned from the steps, because each step reports how many experts its rows chose.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.theory.formulas import distinct_experts

Floats = npt.NDArray[np.float64]
MEMORY = 64  # passes until the weight of one is 1/e
FIRST_PASSES = (
    2.0  # of unlike rows that the first guess is worth: each of them could have chosen one row's experts more
)
LEAST_SPREAD = 0.05  # of a row's experts, by which unlike rows must choose more for a pass to say something
DOUBLINGS = 12  # of the widest rows, up to where every expert is chosen


@dataclass
class Mixture:
    """Where passes lie between those over rows that are all alike and those over unlike ones.

    num: experts of a layer, on average. widths [W]: rows, ascending from 1. alike, unlike [W]: experts that so many
    rows choose, on average over layers. extra [W]: what unlike ones take longer, in passes of one row, ascending.
    """

    num: float
    widths: Seq[float]
    alike: Seq[float]
    unlike: Seq[float]
    extra: Seq[float]
    _seen: float = field(init=False)
    _possible: float = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self._possible = FIRST_PASSES * self.unlike[0]
        # Further rows leave fewer and fewer experts unchosen, and take longer by those alone.
        last = self.widths[-1]
        far = last * 2.0 ** np.arange(1, DOUBLINGS)
        chosen = min(self.unlike[0], self.num)
        left = (self.num - self.unlike[-1]) * (1 - chosen / self.num) ** (far - last)
        spread = max(self.unlike[-1] - self.alike[-1], 1e-9)
        self._rows = np.array([*self.widths, *far])
        self._alike = np.array([*self.alike, *np.full(far.shape, self.alike[-1])])
        self._unlike = np.maximum(self._alike, [*self.unlike, *(self.num - left)])
        more = self.extra[-1] * np.maximum(1.0, (self.num - left - self.alike[-1]) / spread)
        self._extra = np.array([*self.extra, *more])

    @property
    def share(self) -> float:
        """Where real rows lie: 0 = they choose as rows that are alike, 1 = as unlike ones; 1 before any were seen."""
        return self._seen / self._possible

    def extra_passes(self, num_rows: npt.ArrayLike, num_experts: float | None = None) -> Floats:
        """Return what these rows take longer than rows that are alike, in passes of one row, elementwise.

        num_experts: that they have chosen; None = as many as real rows do.
        """
        rows = np.asarray(num_rows, dtype=np.float64)
        share: npt.ArrayLike = self.share
        if num_experts is not None:
            least, most = self._bounds(rows)
            seen = (num_experts - least) / np.maximum(most - least, 1e-9)
            share = np.where(self._is_told(least, most), np.maximum(seen, 0.0), share)
        return np.asarray(share * np.interp(rows, self._rows, self._extra))

    def observe(self, num_rows: int, num_experts: float) -> None:
        """Learn from a pass over real rows, and the experts that they chose."""
        least, most = self._bounds(np.asarray(num_rows, dtype=np.float64))
        if self._is_told(least, most):
            keep = 1 - 1 / MEMORY
            self._seen = keep * self._seen + max(0.0, num_experts - float(least))
            self._possible = keep * self._possible + float(most - least)

    def _bounds(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return the experts that so many rows choose which are alike, and which are unlike."""
        return np.asarray(np.interp(rows, self._rows, self._alike)), np.asarray(
            np.interp(rows, self._rows, self._unlike)
        )

    def _is_told(self, least: Floats, most: Floats) -> npt.NDArray[np.bool_]:
        """Return whether rows of the two kinds differ by so much that real rows can be placed between them."""
        return np.asarray(most - least > LEAST_SPREAD * self.unlike[0])


def expected(num: int, chosen: int, part: float, widths: Seq[float]) -> Mixture:
    """Return the expectation where nothing was measured: unlike rows choose independently, and reading takes the time.

    part: the experts' share of the bytes that a pass of one row reads.
    """
    unlike = distinct_experts(num, chosen, widths)
    return Mixture(num, widths, [float(chosen)] * len(widths), unlike.tolist(), (part * (unlike / chosen - 1)).tolist())
