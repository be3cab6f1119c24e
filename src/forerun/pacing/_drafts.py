"""What drafters take, over the target's pass in the same step: the speed of the machine is in both and drops out."""

from __future__ import annotations

import numpy as np

from forerun.pacing._costs import Numbers, PassTime

_GUESS = (0.0, 0.1, 0.0)  # units per call, per pass and per node, before anything was seen
_DOUBT = (0.15, 0.3, 0.02)  # of that: standard deviations
_NOISE = (0.003, 0.15)  # of one draft: units, and a share of what it takes
_MISFIT = 0.05  # share of the variance of one draft that no number of them takes away
_FORGET, _FADE = 1 / 200, 1 / 2000  # per draft, per step
_MOST_SHAPES, _LEAST_WEIGHT = 48, 1e-3

_Shape = tuple[int, int, int, int]  # depth, nodes; rows and sequences of the target's pass


class DraftTime:
    """Relative time of one drafter: a share per call, per pass (one after another), and per node.

    Kept is what drafts of each shape took over the target's pass of that step. How long such a pass is follows from the
    curve, and what is believed of that may have changed since.
    """

    def __init__(self) -> None:
        self._shares = _GUESS
        self._seen: dict[_Shape, tuple[float, float]] = {}  # -> ratio, drafts
        self._catchup_s = self._catchup_tokens = 0.0

    def of(self, depth: float, num_nodes: float) -> float:
        """Relative seconds of a draft of so many passes and nodes."""
        per_call, per_pass, per_node = self._shares
        return per_call + per_pass * depth + per_node * num_nodes

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

    def observe(self, ratio: float, shape: _Shape, num_drafts: int = 1) -> None:
        """What drafts of one shape took over the target's pass, without catching up: the median of several."""
        keep = (1 - _FORGET) ** num_drafts
        seen = self._seen.items()
        self._seen = {other: (old, number * keep) for other, (old, number) in seen if number * keep > _LEAST_WEIGHT}
        old, number = self._seen.get(shape, (ratio, 0.0))
        number += num_drafts
        self._seen[shape] = old + num_drafts / number * (ratio - old), number
        if len(self._seen) > _MOST_SHAPES:
            del self._seen[min(self._seen, key=lambda shape: self._seen[shape][1])]

    def fade(self, num_steps: int) -> None:
        """So many steps went by, with or without drafts: what was seen long ago is no reason never to draft again."""
        keep = (1 - _FADE) ** num_steps
        self._seen = {shape: (ratio, number * keep) for shape, (ratio, number) in self._seen.items()}

    def fit(self, passes: PassTime) -> None:
        """Bring the shares up to date: least squares over the shapes, none of the shares negative."""
        # Sums in plain Python: with cold caches, between two passes, 0.05 ms instead of numpy's 0.3 for so few numbers.
        matrix = [[d**-2 if i == j else 0.0 for j in range(3)] for i, d in enumerate(_DOUBT)]
        right = [g / d**2 for g, d in zip(_GUESS, _DOUBT, strict=True)]
        for (depth, num_nodes, rows, num_sequences), (ratio, number) in self._seen.items():
            seconds = ratio * passes.of(rows, num_sequences)
            weight = 1 / ((_NOISE[0] + _NOISE[1] * seconds) ** 2 * (1 / number + _MISFIT))
            parts = (1.0, depth, num_nodes)
            for i, x in enumerate(parts):
                right[i] += weight * x * seconds
                for j, y in enumerate(parts):
                    matrix[i][j] += weight * x * y
        free = [0, 1, 2]
        while True:
            part = [[matrix[i][j] for j in free] for i in free]
            found = np.linalg.solve(part, [right[i] for i in free]).tolist() if free else []
            if min(found, default=0.0) >= 0:
                shares = dict(zip(free, found, strict=True))
                self._shares = (shares.get(0, 0.0), shares.get(1, 0.0), shares.get(2, 0.0))
                return
            del free[found.index(min(found))]

    def observe_catchup(self, relative: float, num_tokens: int) -> None:
        """What running `num_tokens` committed tokens took."""
        self._catchup_s = self._catchup_s * 0.9 + relative
        self._catchup_tokens = self._catchup_tokens * 0.9 + num_tokens
