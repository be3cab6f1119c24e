"""Access to the native extension: the module or why it is missing, its instruction sets, and its number of threads.

No other file imports forerun._native. This module reads the environment variables FORERUN_ISA, FORERUN_NUM_THREADS and
FORERUN_CACHE_DIR. A further variable, FORERUN_REQUIRE_NATIVE, is read when forerun is installed (pyproject.toml).
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from forerun.errors import BadOption, pip, pip_for, shown

VARIABLES = ("FORERUN_CACHE_DIR", "FORERUN_ISA", "FORERUN_NUM_THREADS", "FORERUN_REQUIRE_NATIVE")
MAX_THREADS = 1024
FEW_THREADS = 256  # on a machine with few processors, a larger number is taken for a slip of the hand
PACKAGE = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_SOURCES = {".cpp", ".h", ".inc"}


def needs_torch(what: str, extra: str = "torch") -> str:
    """Return the error message that a feature needs torch, and how to install torch. what: the feature."""
    return f"{what} needs torch: {pip_for(extra)}"


def torch_version() -> str | None:
    """Return the version of the installed torch without importing torch, or None if torch is not installed."""
    from importlib import metadata  # whose own imports take time, and most commands say nothing of torch

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------------ the extension


def extension() -> Any:
    """Return the module forerun._native, or None if it is missing. `why_not` returns the reason."""
    return _load()[0]


@cache
def isa() -> str:
    """Return the instruction set whose kernels run: the best one that was built and that the processor has.

    "reference" means that no kernels run, and that torch computes. "reference" is also the default if torch is
    installed and only portable kernels were compiled, because portable kernels have not been tested on such processors
    yet. FORERUN_ISA overrides the choice. Raises BadOption for a value of FORERUN_ISA that is not possible here.
    """
    possible = available_isas()
    wanted = os.environ.get("FORERUN_ISA")
    if wanted is None:
        return possible[0] if len(known_isas()) > 1 or torch_version() is None else "reference"
    if wanted not in possible:
        why = "" if extension() is not None else f" ({why_not()})"
        raise BadOption(
            f"FORERUN_ISA={shown(wanted)} is not possible here{why}: it must be one of {', '.join(possible)}"
        )
    return wanted


def why_reference() -> str:
    """Return why `isa` is "reference", so that no kernels run. The reason is worded as the end of a sentence."""
    if (reason := why_not()) is not None:
        return reason
    if os.environ.get("FORERUN_ISA") is not None:
        return "FORERUN_ISA=reference switches them off"
    return f"portable ones alone were compiled, which FORERUN_ISA={available_isas()[0]} switches on"


def available_isas() -> list[str]:
    """Return the values that FORERUN_ISA may have here, best first; "reference" is always among them."""
    module = extension()
    return [*(module.supported_isas() if module is not None else []), "reference"]


def known_isas() -> dict[str, str]:
    """Map the instruction sets that kernels were compiled for, best first, to the features that a processor needs.

    The features of a set are one text, separated by spaces. The last set is portable C++ and needs no features. Empty
    where there is no extension.
    """
    module = extension()
    return {} if module is None else dict(module.known_isas())


def processor_isas() -> list[str]:
    """Return the compiled instruction sets that this processor runs, best first."""
    module = extension()
    return [] if module is None else list(module.supported_isas())


def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's model name, or "" if /proc/cpuinfo does not state a name."""
    return _field("model name", root)


@cache
def why_not() -> str | None:
    """Return why the extension is missing or differs from its sources, and what to do; None if there is no fault."""
    module, error = _load()
    if module is not None:
        return _why_stale(module)
    if error is not None:
        return f"{error}: {_reinstall()}"
    if sys.platform == "win32":
        return "there are no native kernels for Windows yet"
    others = [path.name for path in PACKAGE.glob("_native*") if path.suffix in (".so", ".pyd")]
    if others:
        version = ".".join(map(str, sys.version_info[:2]))
        return f"the extension was built for another Python ({others[0]}) than this one, {version}: {_reinstall()}"
    return f"the extension was not built when forerun was installed: {_missing_tools()}{_reinstall()}"


def source_hash(folder: Path) -> str:
    """Return the SHA-256 over all source files of the extension.

    csrc/CMakeLists.txt writes this hash into the extension.
    """
    paths = [path for path in folder.rglob("*") if path.suffix in _SOURCES or path.name == "CMakeLists.txt"]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    listing = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()} {name}\n" for name in names)
    return hashlib.sha256(listing.encode()).hexdigest()


@cache
def _load() -> tuple[Any, str | None]:
    """Return the extension, and the error from loading it. At least one of the two is None.

    The error is the dynamic linker's message, if a file exists but cannot be loaded. If there is no file, both are
    None.
    """
    try:
        return importlib.import_module("forerun._native"), None
    except ImportError as error:
        is_there = any((PACKAGE / f"_native{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
        return None, f"the extension cannot be loaded ({error})" if is_there else None


def _why_stale(module: Any) -> str | None:
    root = checkout()
    if root is None or module.source_hash == source_hash(root / "csrc"):
        return None
    return f"the extension was built from other C++ sources than those in csrc: {_reinstall()}"


def checkout() -> Path | None:
    """Return the folder that contains csrc/, or None if this package does not run from its sources."""
    root = PACKAGE.parents[1]
    return root if (root / "csrc" / "CMakeLists.txt").is_file() else None


def _missing_tools() -> str:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    missing = [] if compiler else ["a C++ compiler (g++)"]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python's headers (python3-dev)")
    return f"install {' and '.join(missing)}, then " if missing else ""


def _reinstall() -> str:
    root = checkout()
    if root is None:  # not by name: forerun is on no package index yet, and anyone could take its name there
        return f"run {pip('install --force-reinstall --no-deps --no-cache-dir .')} in the folder of forerun's sources"
    has_tools = Path(sys.prefix) == root / ".venv" and (root / ".venv" / "ready-for-tests").exists()
    return "run make native" if has_tools else f"run {pip('install -e .')} in the checkout"


# ------------------------------------------------------------------------------------------------------------ threads


@dataclass(frozen=True)
class Cores:
    """The processors and cores of the machine, and how many of them this process may use."""

    num_logical: int  # logical processors of the machine
    num_allowed: int  # logical processors that this process may run on
    num_physical: int  # cores of the allowed logical processors: hyperthread siblings count once
    quota: float | None  # logical processors' worth of time that the control groups grant; None = no limit

    @property
    def num_usable(self) -> int:
        """The number of threads that can run at once, at least 1."""
        limit = self.num_physical if self.quota is None else math.floor(self.quota)
        return max(1, min(self.num_physical, limit))


def cores(root: Path = Path("/")) -> Cores:
    """Count the processors from the affinity mask, and from /sys and /proc below `root`."""
    num_logical = os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(num_logical))
    quotas = list(_quotas(root))
    return Cores(
        num_logical=num_logical,
        num_allowed=len(allowed),
        num_physical=len({_siblings(cpu, root) for cpu in allowed}),
        quota=min(quotas, default=None),
    )


def cache_folder() -> Path:
    """Return the folder for files that are kept from one run to the next: FORERUN_CACHE_DIR, else ~/.cache/forerun."""
    folder = os.environ.get("FORERUN_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "forerun")
    return Path(folder).expanduser()


def num_threads() -> int:
    """Return the number of threads of the native kernels.

    The number is FORERUN_NUM_THREADS, else OMP_NUM_THREADS, else the number of usable cores. Raises BadOption for a
    FORERUN_NUM_THREADS that is no number, or far above the number of processors. An OMP_NUM_THREADS that is no number
    from 1 to MAX_THREADS is ignored, as OpenMP ignores wrong values.
    """
    wanted = os.environ.get("FORERUN_NUM_THREADS")
    if wanted is not None:
        processors = os.cpu_count() or 1
        most = min(max(FEW_THREADS, 4 * processors), MAX_THREADS)
        if not wanted.isdecimal() or not 1 <= int(wanted) <= most:
            raise BadOption(
                f"FORERUN_NUM_THREADS={shown(wanted)} is not possible: it must be in 1 .. {most} on this machine, "
                f"which has {processors} logical processors"
            )
        return int(wanted)
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if outermost.isdecimal() and 1 <= int(outermost) <= MAX_THREADS:
        return int(outermost)
    return cores().num_usable


def _siblings(cpu: int, root: Path) -> str:
    """Return the logical processors that share a core with `cpu`, as the kernel writes them; `cpu` alone if unknown."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list") or str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    for group, version in control_groups("cpu", root):
        if version == 2:
            numbers = _read(group / "cpu.max").split()
        else:
            numbers = [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if len(numbers) == 2 and all(n.isdecimal() for n in numbers):  # not "max", not -1
            yield int(numbers[0]) / int(numbers[1])


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each control group of this process, outermost first, and its version (1 or 2).

    controller: "cpu" or "memory". The folders need not exist.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the path may be one of the host, which does not exist here: the limit is then at the top.
        parts = Path(path).relative_to("/").parts
        yield from ((top.joinpath(*parts[:depth]), 1 if controllers else 2) for depth in range(len(parts) + 1))


def _field(name: str, root: Path) -> str:
    """Return the value of the first line of /proc/cpuinfo with this name; "" where there is no such line."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
