"""A measurement of how fast this machine reads memory. This rate limits plain decoding of small batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun import native
from forerun.memory.machine import available_bytes

# Far larger than any processor's cache: the largest known caches have 12 MiB per core.
MIN_BYTES, MIN_BYTES_PER_THREAD = 1 << 29, 1 << 25
GRAIN_BYTES = 1 << 22  # the size of a buffer is a multiple of this


@dataclass(frozen=True)
class Bandwidth:
    """The bytes per second that the fastest reading probe reached, and the probe's name."""

    bytes_per_s: float
    probe: str


def measure(device: str, num_repeats: int = 7, max_s: float = 2.0) -> Bandwidth:
    """Return the rate of the fastest probe in num_repeats rounds. After max_s seconds no further round begins."""
    probes = Probes(device)
    end_s = time.perf_counter() + max_s
    best = probes.read()
    for _ in range(num_repeats - 1):
        if time.perf_counter() < end_s:
            best = max(best, probes.read(), key=lambda b: b.bytes_per_s)
    return best


class Probes:
    """Functions that read a large buffer, called probes. Callers may run them between measurements of other code.

    The fastest probe sets a limit that no kernel may exceed. There are several probes, because a plain loop of loads is
    slower than a kernel that prefetches, and because the fastest probe differs from machine to machine. On a CPU
    csrc/bandwidth.cpp reads as the native kernels do. Where torch is installed, its operators are probes, too. Every
    probe reads each byte once and writes almost nothing. with_torch: False leaves torch's operators out, for callers
    that gave torch fewer threads.
    """

    def __init__(self, device: str, *, with_torch: bool = True) -> None:
        self.device = device
        self.num_bytes = _buffer_bytes(device)
        has_torch = with_torch and native.torch_version() is not None
        self._torch = _torch_probes(device, self.num_bytes) if has_torch else {}
        module = native.extension() if device == "cpu" else None
        self._native = module.BandwidthProbe(self.num_bytes, native.num_threads()) if module is not None else None
        if not self._torch and self._native is None:
            self._torch = {"sum by numpy": np.full(self.num_bytes // 4, 0.5, np.float32).sum}

    def read(self) -> Bandwidth:
        """Run every probe once, and return the rate and the name of the fastest probe."""
        rates = self.read_each()
        best = max(rates, key=lambda name: rates[name])
        return Bandwidth(rates[best], best)

    def read_each(self) -> dict[str, float]:
        """Run every probe once, and return the bytes per second of each probe, by name."""
        rates = {name: self.num_bytes / _time(probe, self.device) for name, probe in self._torch.items()}
        if self._native is not None:
            rates |= {name: values[0] for name, values in self._native.read(1)}
        return rates


def _buffer_bytes(device: str) -> int:
    """Return the size of one buffer in bytes: at most 1/8 of the free memory, because a CPU may need two buffers."""
    wanted = MIN_BYTES if device == "cuda" else max(MIN_BYTES, native.num_threads() * MIN_BYTES_PER_THREAD)
    free = available_bytes(device)
    return max(1, min(wanted, wanted if free is None else free // 8) // GRAIN_BYTES) * GRAIN_BYTES


def _torch_probes(device: str, num_bytes: int) -> dict[str, Callable[[], object]]:
    import torch

    buffer = torch.full((num_bytes // 4,), 0.5, dtype=torch.float32, device=device)
    wide, narrow = buffer.view(-1, 8192), buffer.view(-1, 2048)
    x_wide, x_narrow = torch.ones(8192, device=device), torch.ones(2048, device=device)
    return {
        "matrix-vector, rows of 8192": lambda: torch.mv(wide, x_wide),
        "matrix-vector, rows of 2048": lambda: torch.mv(narrow, x_narrow),
        "sum": buffer.sum,
        "largest": buffer.amax,
    }


def _time(probe: Callable[[], object], device: str) -> float:
    """Run a probe once, and return the seconds until the device has finished its work."""
    _wait(device)
    start = time.perf_counter()
    probe()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize(device)
