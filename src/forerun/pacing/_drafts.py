"""What drafters take, over the target's pass in the same step: the speed of the machine is in both and drops out."""

from __future__ import annotations

import numpy as np

from forerun.pacing._costs import Numbers, PassTime

_GUESS = np.array([0.0, 0.1, 0.0])  # units per call, per pass and per node, before anything was seen
_DOUBT = np.array([0.15, 0.3, 0.02])  # of that: standard deviations
_NOISE = (0.003, 0.15)  # of one draft: units, and a share of what it takes
_MISFIT = 0.05  # share of the variance of one draft that no number of them takes away
_FORGET = 1 / 200  # per draft
_MOST_SHAPES, _LEAST_WEIGHT = 48, 1e-3


class DraftTime:
    """Relative time of one drafter: a share per call, per pass (one after another), and per node.

    Kept is what drafts of each shape took over the target's pass of that step. How long such a pass is follows from the
    curve, and what is believed of that may have changed since.
    """

    def __init__(self) -> None:
        self._shares = _GUESS
        self._seen: dict[tuple[int, int, int], tuple[float, float]] = {}  # depth, nodes, rows -> ratio, drafts
        self._catchup_s = self._catchup_tokens = 0.0

    def of(self, depth: float, num_nodes: float) -> float:
        """Relative seconds of a draft of so many passes and nodes."""
        return float(self.of_many(np.array(depth), np.array(num_nodes)))

    def of_many(self, depths: Numbers, nums_nodes: Numbers) -> Numbers:
        """Relative seconds of each of many drafts."""
        per_call, per_pass, per_node = self._shares
        seconds: Numbers = per_call + per_pass * depths + per_node * nums_nodes
        return seconds

    def catchup(self, num_tokens: int) -> float:
        """Relative seconds to run so many committed tokens."""
        if self._catchup_tokens:
            return num_tokens * self._catchup_s / self._catchup_tokens
        return num_tokens * float(self._shares[1]) * 0.03

    def observe(self, ratio: float, depth: int, num_nodes: int, num_rows: int, num_drafts: int = 1) -> None:
        """What drafts of one shape took over a pass of so many rows, without catching up: the median of several."""
        keep = (1 - _FORGET) ** num_drafts
        seen = self._seen.items()
        self._seen = {shape: (old, number * keep) for shape, (old, number) in seen if number * keep > _LEAST_WEIGHT}
        old, number = self._seen.get((depth, num_nodes, num_rows), (ratio, 0.0))
        number += num_drafts
        self._seen[depth, num_nodes, num_rows] = old + num_drafts / number * (ratio - old), number
        if len(self._seen) > _MOST_SHAPES:
            del self._seen[min(self._seen, key=lambda shape: self._seen[shape][1])]

    def fit(self, passes: PassTime) -> None:
        """Bring the shares up to date: least squares over the shapes, none of the shares negative."""
        if not self._seen:
            return
        shapes = np.array([(1.0, depth, nodes) for depth, nodes, _ in self._seen])
        seconds = np.array([ratio * passes.rows(rows) for (*_, rows), (ratio, _) in self._seen.items()])
        numbers = np.array([number for _, number in self._seen.values()])
        variance = (_NOISE[0] + _NOISE[1] * seconds) ** 2 * (1 / numbers + _MISFIT)
        weighted = shapes.T / variance
        matrix, right = weighted @ shapes + np.diag(_DOUBT**-2), weighted @ seconds + _GUESS / _DOUBT**2
        free = np.ones(3, dtype=bool)
        while True:
            shares = np.zeros(3)
            shares[free] = np.linalg.solve(matrix[np.ix_(free, free)], right[free])
            if shares.min() >= 0:
                self._shares = shares
                return
            free[shares.argmin()] = False

    def observe_catchup(self, relative: float, num_tokens: int) -> None:
        """What running `num_tokens` committed tokens took."""
        self._catchup_s = self._catchup_s * 0.9 + relative
        self._catchup_tokens = self._catchup_tokens * 0.9 + num_tokens
