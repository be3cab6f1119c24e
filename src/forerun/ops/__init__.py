"""The operators that compute a model, one backend per file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from forerun import native
from forerun.errors import BadOption, shown

if TYPE_CHECKING:
    from forerun.blocks import Spec
    from forerun.ops.cpu import CpuOps
    from forerun.ops.cpu_model import CpuModel
    from forerun.ops.reference import ReferenceOps
    from forerun.ops.torch import TorchModel

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


def load_model(
    spec: Spec, weights: Mapping[str, Any], operators: ReferenceOps, *, consume: bool = False
) -> TorchModel | CpuModel:
    """Make a model of a spec and its weights, computed by these operators.

    weights: every name of `blocks.weights(spec)`, with that shape; tensors of one dtype on one device. They are looked
    up once: later changes must be in place. consume: a backend that packs may take the tensors apart while it does, so
    that nothing is in memory twice; the mapping must then not be used again. Raises UnsupportedModel for a spec that
    the operators do not compute.
    """
    if operators.packs:
        from forerun.ops.cpu_model import CpuModel

        return CpuModel(cast("CpuOps", operators), spec, weights, consume=consume)
    from forerun.ops.torch import TorchModel

    return TorchModel(spec, weights, operators)
