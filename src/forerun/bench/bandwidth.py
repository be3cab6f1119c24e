"""How fast this machine reads memory: the ceiling of plain decoding at small batch, where time = bytes / bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from forerun import native
from forerun.memory.machine import available_bytes

# Far beyond every cache: the largest known have 12 MiB per core.
MIN_BYTES, MIN_BYTES_PER_THREAD = 1 << 29, 1 << 25
GRAIN_BYTES = 1 << 22  # buffers are whole multiples of this


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of the fastest reading probe, and its name."""

    bytes_per_s: float
    probe: str


def measure(device: torch.device, num_repeats: int = 7, max_s: float = 2.0) -> Bandwidth:
    """The best time of the best way to read a large buffer: num_repeats rounds, fewer where they take beyond max_s."""
    probes = Probes(device)
    end_s = time.perf_counter() + max_s
    found = probes.read()
    for _ in range(num_repeats - 1):
        if time.perf_counter() < end_s:
            found = max(found, probes.read(), key=lambda b: b.bytes_per_s)
    return found


class Probes:
    """Ways to read a large buffer, kept so that they can be run between the runs of what they are the ceiling of.

    A ceiling must not be beaten by what it is the ceiling of: a plain load loop reaches less than a kernel that
    prefetches, and what is fastest differs from machine to machine. On a CPU csrc/bandwidth.cpp reads as the native
    kernels do; without the extension, and on other devices, there are torch's operators, which can be left out where
    torch has been given fewer threads. Every probe reads each byte once and writes almost nothing.
    """

    def __init__(self, device: torch.device, *, with_torch: bool = True) -> None:
        self.device = device
        self.num_bytes = _buffer_bytes(device)
        self._torch = _torch_probes(device, self.num_bytes) if with_torch else {}
        module = native.extension() if device.type == "cpu" else None
        self._native = module.BandwidthProbe(self.num_bytes, native.num_threads()) if module is not None else None

    def read(self) -> Bandwidth:
        """One round, in which every probe runs once; the best of them."""
        found = self.read_each()
        best = max(found, key=lambda name: found[name])
        return Bandwidth(found[best], best)

    def read_each(self) -> dict[str, float]:
        """One round: bytes per second of every probe."""
        found = {name: self.num_bytes / _time(probe, self.device) for name, probe in self._torch.items()}
        if self._native is not None:
            found |= {name: values[0] for name, values in self._native.read(1)}
        return found


def _buffer_bytes(device: torch.device) -> int:
    """Bytes of one buffer; at most an eighth of the free memory, for a CPU has two of them."""
    wanted = MIN_BYTES if device.type == "cuda" else max(MIN_BYTES, native.num_threads() * MIN_BYTES_PER_THREAD)
    free = available_bytes(device.type)
    return max(1, min(wanted, wanted if free is None else free // 8) // GRAIN_BYTES) * GRAIN_BYTES


def _torch_probes(device: torch.device, num_bytes: int) -> dict[str, Callable[[], object]]:
    buffer = torch.full((num_bytes // 4,), 0.5, dtype=torch.float32, device=device)
    wide, narrow = buffer.view(-1, 8192), buffer.view(-1, 2048)
    x_wide, x_narrow = torch.ones(8192, device=device), torch.ones(2048, device=device)
    return {
        "matrix-vector, rows of 8192": lambda: torch.mv(wide, x_wide),
        "matrix-vector, rows of 2048": lambda: torch.mv(narrow, x_narrow),
        "sum": buffer.sum,
        "largest": buffer.amax,
    }


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
