"""The time of a pass as a function of its rows: a curve, and its correction by the times that passes of steps take."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.pacing.mixing import Mixture

Floats = npt.NDArray[np.float64]
WIDTHS = (1, 2, 4, 8, 16, 32)  # rows
FRESH = 0.02  # weight of a new measurement in the slow average
WIDE = 1.1  # a pass is wide if it takes longer than so many passes of one row: only such a pass tests the curve
NUM_PASSES = 64  # so many narrow passes and so many wide ones are needed to contradict the curve
MUCH = 1.5  # the factor by which wide passes must be slower or faster than the curve says
TRUST = 0.5  # weight of the default curve's steepness, in passes over 4 rows
LEAST_STEEP = 1.01  # the steepness can be fitted if a pass over 4 rows takes at least so many passes of one row
HELD_UP = 1.5  # a pass longer than expected by this factor was held up by another process: a fit counts no more of it
STEEPEST = 8.0  # a curve is at most so many times as steep as the default curve, or as flat


class Fit:
    """The time of one row and the steepness of a curve, fitted to the passes of steps by least squares.

    Where the curve gives a pass the time of r passes of one row, the pass is expected to take one_row_s (1 + steepness
    (r - 1)) seconds. Errors are relative to the duration of the pass, and later passes weigh more. The steepness is
    drawn towards 1 with the weight of half a pass over 4 rows. Narrow passes lose weight only with each further narrow
    pass, and wide passes only with each further wide pass, because a thousand plain steps tell nothing about the
    steepness.
    """

    def __init__(self, curve: PassTime) -> None:
        self.steepness = 1.0
        steep = max(float(curve.ratio(4)), LEAST_STEEP)  # for a flat curve, `observe` would divide by 0
        self._trust = TRUST * (1 - 1 / steep) ** 2
        self._sums = {False: np.zeros(5), True: np.zeros(5)}

    def observe(self, seconds: float, num_ratios: float) -> float:
        """Add a pass that took `seconds`. Returns the fitted seconds of a pass of one row.

        num_ratios: the time that the curve gives the pass at steepness 1, in passes of one row.
        """
        x, weight = num_ratios - 1, num_ratios**-2
        sums = self._sums[x > 0]
        sums *= 1 - FRESH
        sums += weight * np.array([1, x, x * x, seconds, x * seconds])
        n, x1, x2, t, xt = map(float, self._sums[False] + self._sums[True])
        trust = self._trust
        determinant = (n + trust) * (x2 + trust) - (x1 - trust) ** 2
        flat = ((x2 + trust) * t - (x1 - trust) * xt) / determinant
        steep = ((n + trust) * xt - (x1 - trust) * t) / determinant
        best = steep / flat if flat > 0 else math.inf
        self.steepness = min(max(best, 1 / STEEPEST), STEEPEST)
        if self.steepness == best:
            return flat
        fitted = n + 2 * self.steepness * x1 + self.steepness**2 * x2  # at the largest or least steepness allowed
        return (t + self.steepness * xt) / fitted


@dataclass
class PassTime:
    """The time of a pass by its rows. A pass over `widths[i]` rows takes as long as `ratios[i]` passes of one row.

    The time is linear between the widths, and beyond the last width. one_row_s: the seconds of a pass of one row, None
    until such a pass was measured; `observe` updates it. is_steady: whether the rounds of the calibration agreed, so
    that the curve also holds at other times. mixture: the time that is added to the ratios where rows have different
    experts, because the ratios hold for rows that all have the same experts; None = the model has no experts. fit:
    corrects the steepness by the passes of steps, for a default curve and for a curve that is not steady; None = the
    curve needs no correction.
    """

    widths: Seq[float] = WIDTHS
    ratios: Seq[float] = (1.0, 1.02, 1.06, 1.3, 2.2, 4.2)  # between an AVX2 and an AVX-512 server, bfloat16
    one_row_s: float | None = None
    is_steady: bool = True
    mixture: Mixture | None = None
    fit: Fit | None = None
    _num_seen: int = 0

    def __post_init__(self) -> None:
        far, last = 1e6, self.widths[-1]  # where the last slope leads
        slope = (self.ratios[-1] - self.ratios[-2]) / (last - self.widths[-2])
        self._rows = np.array([*self.widths, far])
        self._passes = np.array([*self.ratios, self.ratios[-1] + slope * (far - last)])

    def ratio(self, num_rows: npt.ArrayLike, num_experts: float | None = None) -> Floats:
        """Return the time of a pass over `num_rows` rows, in passes of one row, elementwise.

        num_experts: the number of experts chosen for the rows, on average over layers; None = as many as usual.
        """
        passes = np.asarray(np.interp(np.asarray(num_rows), self._rows, self._passes))
        if self.mixture is not None:
            passes = passes + self.mixture.extra_passes(num_rows, num_experts)
        return passes if self.fit is None else 1 + self.fit.steepness * (passes - 1)

    def observe(self, seconds: float, num_ratios: float) -> None:
        """Update `one_row_s` from a pass that took `seconds`.

        num_ratios: how long the pass was expected to take, in passes of one row.
        """
        self._num_seen += 1
        had = self.one_row_s or seconds / num_ratios
        row_s = min(seconds / num_ratios, 3 * had)  # another process may have held the pass up
        if self.fit is not None and self._num_seen > 1:  # the first pass waits for memory
            seconds = min(seconds, HELD_UP * had * num_ratios)
            self.one_row_s = self.fit.observe(seconds, 1 + (num_ratios - 1) / self.fit.steepness)
            return
        self.one_row_s = had + max(FRESH, 1 / (self._num_seen + 1)) * (row_s - had)

    @staticmethod
    def together(curves: Seq[PassTime]) -> PassTime:
        """Return the curve of a pass of several models, run one after the other.

        If a model was not measured yet, the result is the first model's curve, with `one_row_s` None.
        """
        known = [(curve, curve.one_row_s) for curve in curves if curve.one_row_s is not None]
        if len(curves) == 1:
            return curves[0]
        if len(known) < len(curves):
            return replace(curves[0], one_row_s=None)
        widths = max((curve.widths for curve in curves), key=len)
        seconds = np.sum([curve.ratio(widths) * one_row_s for curve, one_row_s in known], axis=0)
        return PassTime(widths, (seconds / seconds[0]).tolist(), float(seconds[0]))


class Doubt:
    """Checks a curve by the passes of steps: wide and narrow passes must give the same time of one row."""

    def __init__(self) -> None:
        self._counts = {False: 0, True: 0}
        self._logs = {False: 0.0, True: 0.0}  # decaying mean of the logarithm of the seconds of one row

    def observe(self, seconds: float, ratio: float) -> bool:
        """Add a pass that took `seconds`. Returns whether the passes so far contradict the curve.

        ratio: the pass's expected time, in passes of one row.
        """
        is_wide = ratio > WIDE
        self._counts[is_wide] += 1
        weight = 1 / min(self._counts[is_wide], NUM_PASSES)
        self._logs[is_wide] += weight * (math.log(seconds / ratio) - self._logs[is_wide])
        is_enough = min(self._counts.values()) >= NUM_PASSES
        return is_enough and abs(self._logs[True] - self._logs[False]) > math.log(MUCH)
