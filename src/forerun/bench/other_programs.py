"""Counts the processors that other programs keep busy during a measurement. Such programs reduce every speed-up."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_IDLE = (3, 4)  # idle and iowait, of the columns of /proc/stat
_COUNTED = 8  # columns; the others, of guests, are parts of the first two
_FEW = 0.2  # processors: what services of a quiet machine use, and what is idle where all are wanted


@dataclass(frozen=True)
class ProcessorTimes:
    """The processor seconds up to one moment: busy and idle over all processors, and busy for this process alone."""

    at_s: float
    busy_s: float
    idle_s: float
    process_s: float

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> Self | None:
        """Return the processor seconds up to now; None where the system does not count them as Linux does."""
        try:
            ticks = [int(word) for word in stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:][:_COUNTED]]
            tick_s = 1 / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, AttributeError):
            return None
        idle_s = sum(ticks[column] for column in _IDLE) * tick_s
        return cls(time.monotonic(), sum(ticks) * tick_s - idle_s, idle_s, time.process_time())

    def remark_since(self, begun: ProcessorTimes) -> str | None:
        """Return a sentence about other programs that kept processors busy since an earlier moment.

        Returns None if these programs used little processor time, or if some processors were idle anyway.
        """
        wall_s = self.at_s - begun.at_s
        num_busy = (self.busy_s - begun.busy_s - self.process_s + begun.process_s) / wall_s
        if num_busy < _FEW or (self.idle_s - begun.idle_s) / wall_s > _FEW:
            return None
        return (
            f"Other programs kept {num_busy:.1f} processors busy, so drafting gained less: run it again without them."
        )
