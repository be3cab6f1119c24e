"""Whether plans keep their promise: steps as planned against plain ones right beside them, everything included.

The curve of _costs.py is pieced together from widths that were seen at different times, and it knows nothing of what
lies between passes. How long it lasts against plain decoding is what a plan is chosen by, so that is measured as it is:
plain decoding is tried for a few steps, and the steps before and after are the other side of the comparison.
"""

from __future__ import annotations

import math
from statistics import median

_BESIDE = 4  # planned steps before and after plain ones that are compared with them
_ALIKE = 1 / 16  # share of the sequences that may come or go meanwhile
_FIRST_GUESS = 0.05  # logarithm of the factor: plans are chosen for looking good, so they look better than they are
_PRIOR = 1.0  # comparisons that stand for that
_FORGET = 1 / 600  # per plain step: what was once too slow is tried again
_RECENT = 0.25  # weight of a comparison among many
_MOST = 0.4  # logarithm of the factor
_UNKNOWN = (_FIRST_GUESS, 0)


def size_of(num_sequences: float) -> int:
    """The class of a batch: twice as many sequences are the next one, and a few more or less the same."""
    return round(math.log2(max(1, num_sequences)))


class PlanCheck:
    """By the size of the batch: the factor by which drafting takes longer than predicted."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, int]] = {}  # logarithm of the factor, comparisons
        self._num_sequences = 0
        self._before: list[float] = []  # seconds of the latest steps as planned
        self._plain: list[float] = []  # of plain ones behind them
        self._after: list[float] = []  # and of those as planned again

    def factor(self, num_sequences: int) -> float:
        """Of a step that drafts."""
        return math.exp(self._known.get(size_of(num_sequences), _UNKNOWN)[0])

    def num_checks(self, num_sequences: int) -> int:
        """Comparisons so far."""
        return self._known.get(size_of(num_sequences), _UNKNOWN)[1]

    def forget(self, num_sequences: int) -> None:
        """A step for which nothing was planned to be drafted."""
        size = size_of(num_sequences)
        if size in self._known:
            value, number = self._known[size]
            self._known[size] = value + _FORGET * (_FIRST_GUESS - value), number

    def observe(self, seconds: float, num_sequences: int, is_plain: bool, predicted: float) -> None:
        """A whole step, as planned or plain. predicted: relative seconds of the plan, over those of plain decoding."""
        if abs(num_sequences - self._num_sequences) > _ALIKE * num_sequences:
            self._before, self._plain, self._after = [], [], []
        self._num_sequences = num_sequences
        if is_plain:
            if self._after:
                self._before, self._plain, self._after = self._after, [], []
            if len(self._before) >= _BESIDE // 2:
                self._plain.append(seconds)
        elif self._plain:
            self._after.append(seconds)
            if len(self._after) == _BESIDE:
                self._compare(predicted)
        else:
            self._before = [*self._before[1 - _BESIDE :], seconds]

    def _compare(self, predicted: float) -> None:
        found = math.log(median(self._before + self._after) / median(self._plain) / predicted)
        size = size_of(self._num_sequences)
        value, number = self._known.get(size, _UNKNOWN)
        value += max(_RECENT, 1 / (number + 1 + _PRIOR)) * (min(max(found, -_MOST), _MOST) - value)
        self._known[size] = value, number + 1
        self._before, self._plain, self._after = self._after, [], []
