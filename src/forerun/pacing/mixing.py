"""The pass times of a mixture of experts: they depend on how many experts are chosen, and so on the text.

The router chooses the same experts for eight rows of the same token as for one row. For eight unlike rows it chooses
nearly eight times as many experts, and each expert has to be read from memory. So passes over equal rows and passes
over unlike rows are both calibrated, together with the number of chosen experts. Real rows lie between equal and unlike
rows. Their position is learned from the steps, because each step reports how many experts were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.theory.formulas import distinct_experts

Floats = npt.NDArray[np.float64]
MEMORY = 64  # passes after which the weight of a pass has fallen to 1/e
# Weight of the first guess, in passes for which unlike rows choose more experts than equal rows by one row's number.
FIRST_PASSES = 2.0
LEAST_SPREAD = 0.05  # a pass counts if unlike rows choose more experts than equal rows, by this share of one row's
DOUBLINGS = 12  # how often the largest number of rows is doubled, until every expert is chosen


@dataclass
class Mixture:
    """The position of real passes between passes over equal rows (of the same token) and passes over unlike rows.

    num: the number of experts of a layer, on average. widths [W]: numbers of rows, ascending from 1. alike, unlike [W]:
    for each width, the number of experts chosen for equal rows and for unlike rows, on average over layers. extra [W]:
    for each width, how much longer a pass over unlike rows takes than a pass over equal rows, in passes of one row,
    ascending.
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
        # Beyond the last width, each further row adds fewer new experts, and only new experts make a pass longer.
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
        """How many experts the rows of real passes choose, on a scale from 0 to 1.

        0 = as few as equal rows would choose, 1 = as many as rows that have nothing in common. The first value is 1.
        """
        return self._seen / self._possible

    def extra_passes(self, num_rows: npt.ArrayLike, num_experts: float | None = None) -> Floats:
        """Return how much longer a pass takes than a pass over the same number of equal rows, elementwise.

        The result is in units of a pass of one row. num_experts: the number of experts chosen for the rows; None = as
        many as are usually chosen for real rows.
        """
        rows = np.asarray(num_rows, dtype=np.float64)
        share: npt.ArrayLike = self.share
        if num_experts is not None:
            least, most = self._bounds(rows)
            seen = (num_experts - least) / np.maximum(most - least, 1e-9)
            share = np.where(self._is_told(least, most), np.maximum(seen, 0.0), share)
        return np.asarray(share * np.interp(rows, self._rows, self._extra))

    def observe(self, num_rows: int, num_experts: float) -> None:
        """Learn from a pass over real rows. num_experts: the number of experts chosen for these rows."""
        least, most = self._bounds(np.asarray(num_rows, dtype=np.float64))
        if self._is_told(least, most):
            keep = 1 - 1 / MEMORY
            self._seen = keep * self._seen + max(0.0, num_experts - float(least))
            self._possible = keep * self._possible + float(most - least)

    def _bounds(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return how many experts are chosen for `rows` equal rows, and how many for `rows` unlike rows."""
        return np.asarray(np.interp(rows, self._rows, self._alike)), np.asarray(
            np.interp(rows, self._rows, self._unlike)
        )

    def _is_told(self, least: Floats, most: Floats) -> npt.NDArray[np.bool_]:
        """Return whether `least` and `most` (from `_bounds`) differ enough to place real rows between them."""
        return np.asarray(most - least > LEAST_SPREAD * self.unlike[0])


def expected(num: int, chosen: int, part: float, widths: Seq[float]) -> Mixture:
    """Return the mixture that is assumed before anything is measured.

    The assumptions are that the experts of unlike rows are chosen independently, and that all the time of a pass goes
    into reading weights. num: the number of experts of a layer. chosen: the number of experts for each row. part: the
    experts' share of the bytes that a pass of one row reads.
    """
    unlike = distinct_experts(num, chosen, widths)
    return Mixture(num, widths, [float(chosen)] * len(widths), unlike.tolist(), (part * (unlike / chosen - 1)).tolist())
