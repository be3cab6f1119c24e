"""The memory that this machine currently has for a new process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path


def available_bytes(device: str, root: Path = Path("/")) -> int | None:
    """Return the number of bytes that a new process may take; None where the system does not tell.

    For "cuda", return the free bytes of the device. For any other device, return the minimum of the kernel's
    MemAvailable and the bytes that each control group of this process still allows. root: the folder that contains
    /proc and /sys.
    """
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return min((n for n in [_mem_available(root), *_cgroup_rooms(root)] if n is not None), default=None)


def _mem_available(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Yield, for each control group of this process with a memory limit, the bytes that the group still allows.

    Versions 1 and 2 of the kernel's interface are read.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be one of the host, which does not exist here: the limit is then at the top.
        parts = Path(path).relative_to("/").parts
        for depth in range(len(parts) + 1):
            room = _room(top.joinpath(*parts[:depth]), *names)
            if room is not None:
                yield room


def _room(group: Path, limit: str, used: str, cache: str) -> int | None:
    """Return how many more bytes a control group allows; None where it has no limit.

    Cached files, which the kernel can drop, do not count as used.
    """
    numbers = [_read(group / name).strip() for name in (limit, used)]
    if not all(n.isdigit() for n in numbers):  # "max", or no such file
        return None
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return max(0, int(numbers[0]) - max(0, int(numbers[1]) - int(stat.get(cache, 0))))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def spare_what_is_loaded() -> None:
    """Exempt all objects that are alive now from garbage collection. Call this once the models are loaded.

    Otherwise, about once in 800 requests, a full collection would pause all requests for 50 to 100 ms, because
    libraries hold up to 180,000 objects (with torch). Only forerun's commands call this function. The class LLM does
    not call it, because reference cycles among these objects are never freed afterwards.
    """
    gc.freeze()
