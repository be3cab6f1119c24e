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
from statistics import median

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

# Widths (rows of a pass) at which the curve is kept; linear between them.
KNOTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)

_FLAT = 0.2  # hoped-for growth of a width that was never seen, as a share of growth in proportion to the rows
_STEEP = 0.75  # and the most that prompts may say of it: the first one may have waited for the machine
_SHAPE_SD = 0.6  # how far off that hope may be: standard deviation of the logarithm, likewise
_CURVE_DRIFT = 0.002  # per step, of the logarithm
_PER_SEQUENCE = (0.02, 0.7, 0.01)  # what each further sequence adds: first guess; of its logarithm: deviation, drift
_PER_SEQUENCE_LIMITS = (1e-4, 0.5)
_NOISE = (0.05, 0.02, 0.3)  # of one observation: first guess, least, most
_UNIT_DRIFT = (0.02, 0.003, 0.03)  # per step, of the logarithm of the unit, likewise; jumps are not drift
_PROMPT_ROWS = 32  # of a prompt from which on it is mostly rows, not weights
_NEW_NOISE = 0.15  # of the first observation of a width, which allocates and warms up
_NEW_STEPS = 4  # observations of a width for which nothing counts as an outlier, and
_COLD_STEPS = 16  # for which nothing does that is faster than thought: the first ones may have been of a cold machine
_OUTLIER = 3.0  # standard deviations from which an observation loses weight
_JUMP_STEPS = 4  # so many outliers to one side are a new speed of the machine
_JUMP = 0.5  # then: of the logarithm of the unit
_ORDER_NOISE = 0.01  # of knowing that a wider pass takes no less
_FAR = 3  # steps over which drift is told from noise
_OTHER_BATCH = 0.05  # of the unit's, where the number of sequences has changed e-fold


class PassTime:
    """Relative time of a target pass, with all that follows it: by its rows, and by the sequences that decode in it.

    States, all logarithms: the unit, what each sequence adds beyond the first, then the curve at the knots behind the
    first, where the curve is 1. Rows cost the same whoever they belong to, so batches of all sizes
    teach one curve. What contexts add drifts along with the first two.
    """

    def __init__(self) -> None:
        self._state = [0.0, math.log(_PER_SEQUENCE[0])]
        self._cov = [[100.0, 0.0], [0.0, _PER_SEQUENCE[1] ** 2]]
        self._num_sequences = 1
        self._roughness = _Roughness()
        self._num_seen = [0] * (len(KNOTS) + 1)
        self._astray = [0] * (len(KNOTS) + 1)  # side to which a width was off when it ran last, 0 = it was not
        self._outliers = 0
        self.num_steps = 0
        self.widest = 0
        self._values, self._slopes = [1.0], [_FLAT]  # the curve at the knots, and behind each of them
        self._per_prompt_row, self._num_prompts = 0.0, 0.0
        self._first_prompt = (0.0, 0)  # seconds and rows of the last one before the unit was known

    # ------------------------------------------------------------------------------------------------- reading

    def of(self, num_rows: float, num_sequences: float) -> float:
        """Relative seconds of a pass of so many rows, of so many sequences."""
        return self.rows(num_rows) + self.sequences(num_sequences)

    def sequences(self, num_sequences: float) -> float:
        """Relative seconds that so many sequences add to the rows of one."""
        return math.exp(self._state[1]) * (num_sequences - 1)

    def rows(self, num_rows: float) -> float:
        """The curve: relative seconds of so many rows of one sequence."""
        i = max(1, min(bisect_right(KNOTS, num_rows), len(self._values))) - 1
        return self._values[i] + self._slopes[i] * (num_rows - KNOTS[i])

    def rows_of(self, widths: Numbers) -> Numbers:
        """The curve at many widths."""
        values, knots = np.array(self._values), np.array(KNOTS[: len(self._values)])
        i = np.searchsorted(knots, widths, side="right") - 1
        seconds: Numbers = values[i] + np.array(self._slopes)[i] * (widths - knots[i])
        return seconds

    def spread(
        self, num_rows: float, other_rows: float, seconds: float, other_seconds: float, num_sequences: float
    ) -> float:
        """Standard deviation of the logarithm of the ratio of two widths' times, given those relative seconds."""
        slopes: dict[int, float] = {}
        for rows, scale in ((num_rows, 1 / seconds), (other_rows, -1 / other_seconds)):
            for i, weight in self._weights(rows):
                slopes[i] = slopes.get(i, 0.0) + weight * scale
        end, variance = len(self._values), 0.0
        known = [(_state_of(i), s * self._values[i]) for i, s in slopes.items() if 0 < i < end]
        known.append((1, self.sequences(num_sequences) * (1 / seconds - 1 / other_seconds)))
        for i, s in known:
            row = self._cov[i]
            for j, t in known:
                variance += s * t * row[j]
        for i, s in slopes.items():
            if i >= end:
                variance += (_SHAPE_SD * s * self._values[-1] * math.log(KNOTS[i] / KNOTS[end - 1])) ** 2
        return math.sqrt(max(0.0, variance))

    @property
    def is_settled(self) -> bool:
        """False while the machine seems to change its speed."""
        return not self._outliers

    def per_prompt_row(self) -> float:
        """Relative seconds of a row of a prompt, beside decoding or not."""
        return max(0.0, self._per_prompt_row)

    def unit_s(self, seconds: float, num_other: int, num_rows: int, num_sequences: int) -> float:
        """Seconds of the unit in a step whose pass took `seconds`."""
        return max(seconds, 1e-9) / (self.of(num_rows, num_sequences) + num_other * self.per_prompt_row())

    # ------------------------------------------------------------------------------------------------ learning

    def observe_prompts(self, seconds: float, num_other: int, num_rows: int, num_sequences: int) -> None:
        """A pass of `num_other` rows of prompts beside others, or of nothing else: what a row of a prompt costs.

        Widths that were never seen are hoped to cost no less, which is how a new engine knows where rows are dear.
        """
        if not self.num_steps:
            if not num_rows and num_other >= max(_PROMPT_ROWS, self._first_prompt[1]):
                self._first_prompt = seconds, num_other
            return
        if self._per_prompt_row and not self._num_prompts:
            self._num_prompts = 1.0  # what was heard of the first
        alone = self.of(num_rows, num_sequences) if num_rows else 1.0  # the weights have to be read for prompts, too
        extra = seconds / math.exp(self._state[0]) - alone
        share = min(1.0, num_other / _PROMPT_ROWS) ** 2  # the noise of a pass is divided by its rows
        self._num_prompts += share
        old, new = self._per_prompt_row, max(0.0, extra / num_other)
        if self._num_prompts > 3 and old:
            new = min(new, 2 * old)
        weight = max(1 / self._num_prompts, 0.5 if new < old else 0.1)  # what held a prompt up is soon forgotten
        self._per_prompt_row += share * weight * (new - old)
        self._smooth()

    def observe(self, run_s: Seq[float], num_rows: int, num_sequences: int, *, disturbance: float = 0.0) -> None:
        """Passes of decoding sequences alone that followed one another, all alike: the first and the last ones count.

        What lies in between says something of the machine's speed then, which the last ones know better.
        disturbance: what ran before has left other data in the caches; deviation of the logarithm that this adds.
        """
        self._roughness.observe(run_s)
        self._hear_of_prompts(median(run_s), num_rows)
        self._widen(num_rows)
        if num_sequences != self._num_sequences:
            self._cov[0][0] += (_OTHER_BATCH * math.log(num_sequences / self._num_sequences)) ** 2
            self._num_sequences = num_sequences
        most = self._roughness.memory_steps
        parts = [run_s] if len(run_s) < 2 * most else [run_s[:most], run_s[-most:]]
        num_idle = (len(run_s) - sum(map(len, parts))) / len(parts)
        for part in parts:
            self._observe_few(median(part), num_rows, len(part), num_idle, disturbance)
        self.num_steps += len(run_s)
        self.widest = max(self.widest, num_rows)
        self._smooth()

    def rest(self, num_steps: int) -> None:
        """Steps of which nothing was learned: the machine may have changed its speed meanwhile."""
        self._cov[0][0] += num_steps * self._roughness.drift

    def _observe_few(self, seconds: float, num_rows: int, num_passes: int, num_idle: float, disturbance: float) -> None:
        """The median of a few passes, before or after `num_idle` others."""
        total = self.of(num_rows, self._num_sequences)
        slope = [1.0, self.sequences(self._num_sequences) / total, *[0.0] * (len(self._state) - 2)]
        for i, weight in self._weights(num_rows):
            if i:
                slope[_state_of(i)] = weight * self._values[i] / total
        place = bisect_right(KNOTS, num_rows)
        is_new = not self._num_seen[place]
        self._num_seen[place] += num_passes
        level = math.log(max(seconds, 1e-9) / total)
        if not self.num_steps:
            self._state[0] = level
        for i in range(len(self._state)):
            drift = self._roughness.drift if i == 0 else _PER_SEQUENCE[2] ** 2 if i == 1 else _CURVE_DRIFT**2
            self._cov[i][i] += (num_passes + num_idle) * drift
        noise = max(self._roughness.noise_of(num_passes), (_NEW_NOISE * is_new) ** 2) + disturbance**2
        self._correct(slope, level - self._state[0], noise, None if disturbance else place, num_passes)

    def _hear_of_prompts(self, seconds: float, num_rows: int) -> None:
        """What a prompt before the first pass says, now that one of `num_rows` has shown what the unit may be."""
        prompt_s, num_prompt = self._first_prompt
        if self._num_prompts or num_prompt < 2 * num_rows or self.num_steps > _NEW_STEPS:  # the unit moves on
            return
        row_s = max(0.0, prompt_s - seconds) / (num_prompt - num_rows)
        if not self.num_steps:
            self._state[0] = math.log(max(seconds - (num_rows - 1) * row_s, seconds / num_rows, 1e-9))
        self._per_prompt_row = row_s / math.exp(self._state[0])
        self._smooth()

    def _weights(self, num_rows: float) -> list[tuple[int, float]]:
        """Knots that a width lies between, with their shares."""
        i = bisect_right(KNOTS, num_rows) - 1
        if i + 1 >= len(KNOTS) or num_rows == KNOTS[i]:
            return [(i, 1.0)]
        share = (num_rows - KNOTS[i]) / (KNOTS[i + 1] - KNOTS[i])
        return [(i, 1 - share), (i + 1, share)]

    def _correct(self, slope: list[float], error: float, noise: float, place: int | None, num_passes: int) -> None:
        """One step of the filter: less weight for outliers; after several of them a new speed, or a new width.

        place: of the width among the knots, None = what is off may be due to prompts.
        """
        used = [(i, s) for i, s in enumerate(slope) if s]
        cross = [sum([row[i] * s for i, s in used]) for row in self._cov]
        prior = sum([cross[i] * s for i, s in used])
        square, limit = error * error, _OUTLIER**2 * (prior + noise)
        if place is not None and self._num_seen[place] > _NEW_STEPS:
            if square <= limit:
                self._outliers = self._astray[place] = 0
            elif error > 0 or self._num_seen[place] > _COLD_STEPS:
                is_again = self._is_astray(error, place, num_passes)
                if self._jumped(error, num_passes):
                    self._cov[0][0] += _JUMP**2
                    self._astray = [0] * len(self._astray)
                    return
                if is_again:
                    away, along = self._doubt(slope, place)
                    cross = [c + along * own for c, own in zip(cross, away, strict=True)]
                    prior += along * along
                else:  # a single pass that the machine held up moves its width the less, the further off it is
                    excess = square / limit
                    noise += (excess * (excess if num_passes == 1 else 1.0) - 1) * (prior + noise)
        factor, state, cov = 1 / (prior + noise), self._state, self._cov
        for i, c in enumerate(cross):
            if c:
                gain = c * factor
                state[i] += gain * error
                cov[i] = [p - gain * o for p, o in zip(cov[i], cross, strict=True)]

    def _is_astray(self, error: float, place: int, num_passes: int) -> bool:
        """Whether a width is off for the second time, to the same side, where all others agree: not known any more."""
        if error > 0 and num_passes == 1:  # held up, which happens more than once
            return False
        side = 1 if error > 0 else -1
        is_again = not self._outliers and self._astray[place] == side
        self._astray[place] = side
        return is_again

    def _doubt(self, slope: list[float], place: int) -> tuple[list[float], float]:
        """Let a width differ from what was believed: how each state may move, and what an observation sees of that."""
        is_unit = place == 1  # then everything else keeps its seconds
        away = [_JUMP, *[-_JUMP] * (len(slope) - 1)] if is_unit else [0.0, 0.0, *[_JUMP * s for s in slope[2:]]]
        for row, a in zip(self._cov, away, strict=True):
            row[:] = [p + a * b for p, b in zip(row, away, strict=True)]
        return away, sum([a * s for a, s in zip(away, slope, strict=True)])

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
            row = [*self._cov[_state_of(last)]] if last else [0.0] * len(state)
            own = row[_state_of(last)] if last else 0.0
            state.append(math.log(self._values[-1] + self._slopes[-1] * (KNOTS[last + 1] - KNOTS[last])))
            for other, value in zip(self._cov, row, strict=True):
                other.append(value)
            self._cov.append([*row, own + deviation * deviation])
            self._smooth()

    def _order(self) -> None:
        """No pass is faster than a narrower one: where one seems to be, all that is less known gives way.

        One of two rows may seem faster than one of one: they are so alike that noise would be taken for a difference.
        """
        state, cov = self._state, self._cov
        pairs = range(2, len(state) - 1)
        for i in (*pairs, *reversed(pairs)):
            excess = state[i] - state[i + 1]
            if excess > 0:
                apart = [row[i] - row[i + 1] for row in cov]
                factor = excess / (apart[i] - apart[i + 1] + _ORDER_NOISE**2)
                self._state = state = [own - factor * move for own, move in zip(state, apart, strict=True)]

    def _smooth(self) -> None:
        """The curve as it is read: never falling, and never steeper than in proportion to the rows."""
        self._order()
        state, up, top = self._state, [1.0], 0.0
        least, most = _PER_SEQUENCE_LIMITS
        state[1] = min(max(state[1], math.log(least)), math.log(most))
        for i in range(2, len(state)):
            state[i] = min(max(state[i], -0.1), math.log(KNOTS[i - 1]) + 0.1)
            top = max(top, state[i])
            up.append(math.exp(top))
        self._values = up
        self._slopes = [(b - a) / (q - p) for a, b, p, q in zip(up, up[1:], KNOTS, KNOTS[1:], strict=False)]
        is_known = self._num_seen[len(up)] + self._num_seen[len(up) - 1] > _NEW_STEPS
        own, steepest = self._slopes[-1] if is_known and self._slopes else 0.0, up[-1] / KNOTS[len(up) - 1]
        told = min(self._per_prompt_row, _STEEP * steepest)
        self._slopes.append(min(max(own, _FLAT * steepest, told), steepest))


def _state_of(knot: int) -> int:
    """The place of a knot, other than the first, among the states."""
    return knot + 1


class _Roughness:
    """How far one pass differs from the next, and how much of that lasts: variances of logarithms.

    Noise makes neighbours differ as much as passes further apart do, drift makes these differ more.
    """

    def __init__(self) -> None:
        noise, self.drift = _NOISE[0] ** 2, _UNIT_DRIFT[0] ** 2
        self._near, self._far = 2 * noise + self.drift, 2 * noise + _FAR * self.drift

    def observe(self, run_s: Seq[float]) -> None:
        """Seconds of like passes that followed one another."""
        logs = [math.log(max(seconds, 1e-9)) for seconds in run_s]
        for i in range(_FAR, len(logs)):
            near, far = (logs[i] - logs[i - 1]) ** 2, (logs[i] - logs[i - _FAR]) ** 2
            self._near += 0.02 * (min(near, _OUTLIER**2 * self._near) - self._near)
            self._far += 0.02 * (min(far, _OUTLIER**2 * self._far) - self._far)
        self.drift = _within(_UNIT_DRIFT, (self._far - self._near) / (_FAR - 1))

    @property
    def noise(self) -> float:
        """Of one pass."""
        return _within(_NOISE, (self._near - self.drift) / 2)

    @property
    def memory_steps(self) -> int:
        """Passes over whose mean the noise is as large as the drift, at least two, and few enough to be quick."""
        return max(2, min(16, round(math.sqrt(3 * self.noise / self.drift))))

    def noise_of(self, num_passes: int) -> float:
        """Of a mean of so many."""
        return self.noise / num_passes + self.drift * (num_passes - 1) / 3


def _within(limits: tuple[float, float, float], variance: float) -> float:
    """limits: a first guess, least and most standard deviation."""
    return min(max(variance, limits[1] ** 2), limits[2] ** 2)
