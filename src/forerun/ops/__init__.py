"""The operators that compute a model, one backend per file."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from forerun import native
from forerun.errors import BadOption, shown

if TYPE_CHECKING:
    from forerun.ops.reference import ReferenceOps

NAMES = ("auto", "native", "reference", "reference_row_by_row")


def resolve(name: str, device: str) -> str:
    """Return the name of the operators that "auto" stands for on a device, and other names as they are.

    Raises BadOption for native operators where there are none.
    """
    if name == "auto":
        return "native" if device == "cpu" and native.isa() != "reference" else "reference"
    if name == "native" and device != "cpu":
        raise BadOption(f"ops='native' computes on the CPU and contradicts device={shown(device)}: drop one of them")
    if name == "native" and native.isa() == "reference":
        why = native.why_not() or "FORERUN_ISA=reference switches them off"
        raise BadOption(f"ops='native' is not possible: {why}")
    return name


def make(name: str, device: str) -> ReferenceOps:
    """Return the operators of this name (one of NAMES) on a device; native ones are shared.

    Raises BadOption as `resolve`.
    """
    name = resolve(name, device)
    if name == "native":
        return _native()
    from forerun.ops.reference import ReferenceOps

    return ReferenceOps(row_by_row=name == "reference_row_by_row")


@cache
def _native() -> ReferenceOps:
    from forerun.ops.cpu import CpuOps

    return CpuOps()
