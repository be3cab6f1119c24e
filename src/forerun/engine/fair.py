"""How many tokens of prompts a step runs while other requests decode, so that it takes at most so many times as long.

A chunk of 512 tokens on a CPU takes as long as dozens of decoding steps, and every stream would wait for it. What a
token of a prompt takes and how long a step usually is are learned from the reports of steps; no clock is read here.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from forerun.types import StepReport

LEAST_TOKENS = 16  # per step, however long they take: else a prompt might never be read
FIRST_TOKENS = 32  # while nothing is known
_NUM_STEPS = 9  # whose median is the usual one
_NUM_CHUNKS = 3  # whose tokens and seconds are added up: behind many tokens each takes longer than at first


class Fair:
    """The allowance of each step. stretch: of a step with prompts over one without; None = there is no limit."""

    def __init__(self, stretch: float | None) -> None:
        self.stretch = stretch
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._chunks: deque[tuple[int, float]] = deque(maxlen=_NUM_CHUNKS)

    def tokens(self, most: int) -> int:
        """Tokens of prompts for a step in which requests decode, at most `most`."""
        if self.stretch is None:
            return most
        if not self._steps_s or not self._chunks:
            return min(most, FIRST_TOKENS)
        token_s = sum(seconds for _, seconds in self._chunks) / sum(tokens for tokens, _ in self._chunks)
        own = (self.stretch - 1) * median(self._steps_s) / max(token_s, 1e-9)
        return min(most, max(LEAST_TOKENS, int(own)))

    def observe(self, report: StepReport) -> None:
        """The numbers of the step that was just done."""
        if not report.num_decoding:
            return
        if not report.num_prefill_tokens:
            self._steps_s.append(report.seconds)
        elif self._steps_s:
            more_s = max(0.0, report.seconds - median(self._steps_s))
            self._chunks.append((report.num_prefill_tokens, more_s))
