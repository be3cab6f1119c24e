"""How fast this machine reads memory: the ceiling of plain decoding at small batch, where time = bytes / bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

PROBE_BYTES = 1 << 29  # far beyond every cache


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of the fastest reading probe, and its name."""

    bytes_per_s: float
    probe: str


def measure(device: torch.device, num_repeats: int = 7) -> Bandwidth:
    """Read one large float32 buffer in several ways and take the best time of the best way.

    A ceiling must not be beaten by what it is the ceiling of: a plain load loop reaches less than a kernel that
    prefetches, and which of torch's operators does so differs from machine to machine. Every probe reads each byte
    once and writes almost nothing. Takes about two seconds.
    """
    buffer = torch.empty(PROBE_BYTES // 4, dtype=torch.float32, device=device).uniform_(-1, 1)
    wide, narrow = buffer.view(-1, 8192), buffer.view(-1, 2048)
    x_wide, x_narrow = torch.ones(8192, device=device), torch.ones(2048, device=device)
    probes: dict[str, Callable[[], object]] = {
        "matrix-vector, rows of 8192": lambda: torch.mv(wide, x_wide),
        "matrix-vector, rows of 2048": lambda: torch.mv(narrow, x_narrow),
        "sum": buffer.sum,
        "largest": buffer.amax,
    }
    best = {name: min(_time(probe, device) for _ in range(num_repeats)) for name, probe in probes.items()}
    name = min(best, key=lambda key: best[key])
    return Bandwidth(PROBE_BYTES / best[name], name)


def _time(probe: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, the device's queue included."""
    _wait(device)
    start = time.perf_counter()
    probe()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
