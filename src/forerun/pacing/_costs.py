"""Seconds of a step, learned while it runs, in units of the time that one row takes the target at the moment.

A machine that others use, too, halves its speed from one minute to the next, so seconds are never compared across
steps. The logarithm of that unit is a state that drifts, and the shape of the curve over widths is filtered together
with it: an extended Kalman filter whose covariance knows that a width that was only seen in a slow minute says little
about the shape. What a drafter takes is divided by what the target took in the same step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq

# Widths (rows of a pass) at which the curve is kept; linear between them.
KNOTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)

_FLAT = 0.05  # hoped-for growth of a width that was never seen, as a share of growth in proportion to the rows
_SHAPE_SD = 0.6  # how far off that hope may be: standard deviation of the logarithm, likewise
_UNIT_DRIFT = 0.01  # per step, of the logarithm of the unit
_CURVE_DRIFT = 0.003  # per step, of the logarithm
_NOISE = (0.1, 0.02, 0.3)  # of one observation: first guess, least, most
_NEW_NOISE = 0.5  # of the first observation of a width: it allocates and warms up
_NEW_STEPS = 4  # observations of a width for which nothing counts as an outlier
_OUTLIER = 3.0  # standard deviations from which an observation loses weight
_JUMP_STEPS = 4  # so many outliers to one side are a new speed of the machine
_JUMP, _JUMP_DOUBT = 0.5, 0.05  # then: of the logarithms of the unit and of the curve
_SWITCH_DOUBT = 0.5  # an outlier right after a width e-fold away: of the logarithms of the unit and of both widths
_OTHER_BATCH = 0.2  # of the unit's, where the number of sequences has changed e-fold


class PassTime:
    """Relative time of a target pass, with all that follows it, by its rows.

    States: the logarithm of the unit, then those of the curve at the knots behind the first, where the curve is 1. What
    contexts and sequences add is in the unit, which is why that is less certain after their number has changed.
    """

    def __init__(self) -> None:
        self._state = [0.0]
        self._cov = [[100.0]]
        self._num_sequences = 1
        self._noise = _NOISE[0] ** 2
        self._num_seen = [0] * (len(KNOTS) + 1)
        self._outliers = 0
        self._used: list[tuple[int, float]] = []  # states and slopes of the pass before, and its rows
        self._rows_before = 0
        self.num_steps = 0
        self.widest = 0
        self._values, self._slopes = [1.0], [_FLAT]  # the curve at the knots, and behind each of them
        self._per_other_row, self._num_mixed = 0.0, 0

    # ------------------------------------------------------------------------------------------------- reading

    def rows(self, num_rows: float) -> float:
        """The curve: relative seconds of so many rows, one sequence's overhead and context not counted."""
        i = min(bisect_right(KNOTS, num_rows), len(self._values)) - 1
        return self._values[i] + self._slopes[i] * (num_rows - KNOTS[i])

    def spread(self, num_rows: float, other_rows: float, seconds: float, other_seconds: float) -> float:
        """Standard deviation of the logarithm of the ratio of two widths' times, given those relative seconds."""
        slopes: dict[int, float] = {}
        for rows, scale in ((num_rows, 1 / seconds), (other_rows, -1 / other_seconds)):
            for i, weight in self._weights(rows):
                slopes[i] = slopes.get(i, 0.0) + weight * scale
        end, variance = len(self._values), 0.0
        known = [(i, s * self._values[i]) for i, s in slopes.items() if 0 < i < end]
        for i, s in known:
            row = self._cov[i]
            for j, t in known:
                variance += s * t * row[j]
        for i, s in slopes.items():
            if i >= end:
                variance += (_SHAPE_SD * s * self._values[-1] * math.log(KNOTS[i] / KNOTS[end - 1])) ** 2
        return math.sqrt(max(0.0, variance))

    def num_seen(self, num_rows: int) -> int:
        """Passes of about this width that were observed."""
        return self._num_seen[bisect_right(KNOTS, num_rows)]

    @property
    def is_settled(self) -> bool:
        """False while the machine seems to change its speed."""
        return not self._outliers

    def per_other_row(self) -> float:
        """Relative seconds of a row of a prompt chunk beside decoding."""
        return max(0.0, self._per_other_row)

    def unit_s(self, seconds: float, num_other: int, num_rows: int) -> float:
        """Seconds of the unit in a step whose pass took `seconds`."""
        return max(seconds, 1e-9) / (self.rows(num_rows) + num_other * self.per_other_row())

    # ------------------------------------------------------------------------------------------------ learning

    def observe_mixed(self, seconds: float, num_other: int, num_rows: int) -> None:
        """A pass that ran `num_other` rows of prompts, too: only what those rows cost is learned."""
        if not self.num_steps:
            return
        extra = seconds / math.exp(self._state[0]) - self.rows(num_rows)
        self._num_mixed += 1
        old, new = self._per_other_row, max(0.0, extra / num_other)
        if self._num_mixed > 3:
            new = min(new, 2 * old)
        self._per_other_row += max(1 / self._num_mixed, 0.1) * (new - old)

    def observe(self, seconds: float, num_rows: int, num_sequences: int, num_passes: int = 1) -> None:
        """A pass of decoding sequences alone, or the median of several lately."""
        self._widen(num_rows)
        total = self.rows(num_rows)
        slope = [1.0, *[0.0] * (len(self._state) - 1)]
        for i, weight in self._weights(num_rows):
            if i:
                slope[i] = weight * self._values[i] / total
        place = bisect_right(KNOTS, num_rows)
        self._num_seen[place] += num_passes
        level = math.log(max(seconds, 1e-9) / total)
        if not self.num_steps:
            self._state[0] = level
        if num_sequences != self._num_sequences:
            self._cov[0][0] += (_OTHER_BATCH * math.log(num_sequences / self._num_sequences)) ** 2
            self._num_sequences = num_sequences
        doubt = _SWITCH_DOUBT * min(1.0, abs(math.log(num_rows / (self._rows_before or num_rows))))
        self._rows_before = num_rows
        self._correct(slope, level - self._state[0], self._num_seen[place], doubt, num_passes)
        self.num_steps += num_passes
        self.widest = max(self.widest, num_rows)
        self._smooth()

    def _weights(self, num_rows: float) -> list[tuple[int, float]]:
        """Knots that a width lies between, with their shares."""
        i = bisect_right(KNOTS, num_rows) - 1
        if i + 1 >= len(KNOTS) or num_rows == KNOTS[i]:
            return [(i, 1.0)]
        share = (num_rows - KNOTS[i]) / (KNOTS[i + 1] - KNOTS[i])
        return [(i, 1 - share), (i + 1, share)]

    def _correct(self, slope: list[float], error: float, num_seen: int, doubt: float, num_passes: int) -> None:
        """One step of the filter: less weight for outliers, a new speed after several of them.

        doubt: how much an outlier may be due to what was believed of this width and of the one before.
        """
        state, cov = self._state, self._cov
        cov[0][0] += num_passes * _UNIT_DRIFT**2
        for i in range(1, len(state)):
            cov[i][i] += num_passes * _CURVE_DRIFT**2
        used = [(i, s) for i, s in enumerate(slope) if s]
        noise = _NEW_NOISE**2 if num_seen == num_passes else self._noise / num_passes
        before, self._used = self._used, used
        cross, prior = self._spread_of(used)
        square, limit = error * error, _OUTLIER**2 * (prior + noise)
        if doubt and square > limit:
            for i in {i for i, _ in used} | {i for i, _ in before}:
                cov[i][i] += doubt * doubt
            cross, prior = self._spread_of(used)
        elif num_seen > _NEW_STEPS:
            learned = self._noise + 0.03 * num_passes * (num_passes * (min(square, limit / 2) - prior) - self._noise)
            self._noise = min(max(learned, _NOISE[1] ** 2), _NOISE[2] ** 2)
            if square > limit:
                if self._jumped(error, num_passes):
                    for i in range(len(state)):
                        cov[i][i] += (_JUMP_DOUBT if i else _JUMP) ** 2
                    return
                noise += (square / limit - 1) * (prior + noise)
            else:
                self._outliers = 0
        factor = 1 / (prior + noise)
        for i, c in enumerate(cross):
            if c:
                gain = c * factor
                state[i] += gain * error
                cov[i] = [p - gain * o for p, o in zip(cov[i], cross, strict=True)]

    def _spread_of(self, used: Seq[tuple[int, float]]) -> tuple[list[float], float]:
        """Covariance of every state with what a pass is expected to take, and the variance of that."""
        cross = [sum([row[i] * s for i, s in used]) for row in self._cov]
        return cross, sum([cross[i] * s for i, s in used])

    def _jumped(self, error: float, num_passes: int) -> bool:
        """Count outliers to one side."""
        sign = min(num_passes, _JUMP_STEPS // 2) * (1 if error > 0 else -1)
        self._outliers = self._outliers + sign if self._outliers * sign > 0 else sign
        if abs(self._outliers) < _JUMP_STEPS:
            return False
        self._outliers = 0
        return True

    def _widen(self, num_rows: int) -> None:
        """States up to the knot at or behind a width: as flat as hoped, as uncertain as the way from the last knot."""
        while len(self._values) < len(KNOTS) and KNOTS[len(self._values) - 1] < num_rows:
            last, state = len(self._values) - 1, self._state
            deviation = _SHAPE_SD * math.log(KNOTS[last + 1] / KNOTS[last])
            row = [*self._cov[last]] if last else [0.0] * len(state)
            own = row[last] if last else 0.0
            state.append(math.log(self._values[-1] + self._slopes[-1] * (KNOTS[last + 1] - KNOTS[last])))
            for other, value in zip(self._cov, row, strict=True):
                other.append(value)
            self._cov.append([*row, own + deviation * deviation])
            self._smooth()

    def _smooth(self) -> None:
        """The curve as it is read: never falling, and never steeper than in proportion to the rows."""
        state, up, top = self._state, [1.0], 0.0
        for i in range(1, len(state)):
            state[i] = min(max(state[i], -0.1), math.log(KNOTS[i]) + 0.1)
            top = max(top, state[i])
            up.append(top)
        bottom = state[-1]
        for i in range(len(up) - 1, 0, -1):
            bottom = min(bottom, state[i])
            up[i] = math.exp((up[i] + max(0.0, bottom)) / 2)
        self._values = up
        self._slopes = [(b - a) / (q - p) for a, b, p, q in zip(up, up[1:], KNOTS, KNOTS[1:], strict=False)]
        is_known = self._num_seen[len(up)] + self._num_seen[len(up) - 1] > _NEW_STEPS
        own, steepest = self._slopes[-1] if is_known and self._slopes else 0.0, up[-1] / KNOTS[len(up) - 1]
        self._slopes.append(min(max(own, _FLAT * steepest), steepest))


_DRAFT_DRIFT = 1e-7  # of the variance of a pass, per step


class DraftTime:
    """Relative time of one drafter: a share per call, per pass (one after another), and per node."""

    def __init__(self) -> None:
        self._state = [0.0, 0.1, 0.0]
        self._cov = [[2.5e-3, 0.0, 0.0], [0.0, 0.09, 0.0], [0.0, 0.0, 4e-4]]
        self._catchup_s = self._catchup_tokens = 0.0
        self._num_calls = 0

    def of(self, depth: float, num_nodes: float) -> float:
        """Relative seconds of a draft of so many passes and nodes."""
        call, per_pass, per_node = self._state
        return max(0.0, call + per_pass * depth + per_node * num_nodes)

    def catchup(self, num_tokens: int) -> float:
        """Relative seconds to run so many committed tokens."""
        if self._catchup_tokens:
            return num_tokens * self._catchup_s / self._catchup_tokens
        return num_tokens * max(0.0, self._state[1]) * 0.03

    def observe(self, relative: float, depth: int, num_nodes: int, num_calls: int = 1) -> None:
        """What one call took, without catching up, or the median of several lately."""
        slope = (1.0, float(depth), float(num_nodes))
        state, cov = self._state, self._cov
        cov[1][1] += num_calls * _DRAFT_DRIFT
        expected = sum(a * b for a, b in zip(state, slope, strict=True))
        noise = (0.003 + (0.15 if self._num_calls else 0.5) * max(relative, expected)) ** 2 / num_calls
        self._num_calls += num_calls
        cross = [sum(a * b for a, b in zip(row, slope, strict=True)) for row in cov]
        prior = sum(a * b for a, b in zip(cross, slope, strict=True))
        error = relative - expected
        noise *= max(1.0, error * error / (_OUTLIER**2 * (prior + noise)))
        for i, c in enumerate(cross):
            gain = c / (prior + noise)
            state[i] += gain * error
            cov[i] = [p - gain * o for p, o in zip(cov[i], cross, strict=True)]

    def observe_catchup(self, relative: float, num_tokens: int) -> None:
        """What running `num_tokens` committed tokens took."""
        self._catchup_s = self._catchup_s * 0.9 + relative
        self._catchup_tokens = self._catchup_tokens * 0.9 + num_tokens
