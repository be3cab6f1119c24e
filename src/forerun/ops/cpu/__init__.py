"""The native CPU backend: the kernels of forerun._native, and models that run each pass in one native call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import cast

from forerun import native
from forerun.blocks import Spec
from forerun.host_tensor import HostTensor
from forerun.ops.cpu.memory import NativeSizes
from forerun.ops.cpu.model import CpuModel
from forerun.ops.cpu.operators import CpuOps as CpuOps
from forerun.ops.memory import Sizes, Wanted
from forerun.ops.operators import Operators
from forerun.ops.passes import Lent
from forerun.ops.quantised import QuantisedMatrix

NAME = "native"
RANK = 2
DEVICE = "cpu"
KV_DTYPES = ("bfloat16", "float32", "int8")  # of a KV cache
row_invariant = True


def usable(device: str) -> str | None:
    """Return None if these kernels run on a device, otherwise the reason, worded to follow the backend's name."""
    if device != "cpu":
        return f"computes on the CPU and contradicts device={device!r}: drop one of them"
    if native.isa() == "reference":
        return f"is not possible: {native.why_reference()}"
    return None


def supports(spec: Spec) -> str | None:
    """Return None if this backend can compute a model, otherwise the reason as a sentence without a full stop."""
    extension = native.extension()
    return "the native extension is not there" if extension is None else extension.refusal(spec)


@cache
def make() -> Operators:
    """Return the operators with the best kernels for this machine.

    There is one object per process, because the operators own a team of threads.
    """
    return CpuOps()


def load(
    spec: Spec,
    weights: Mapping[str, HostTensor | QuantisedMatrix],
    operators: Operators,
    *,
    device: str = "cpu",
    consume: bool = False,
    lent: Lent | None = None,
) -> CpuModel:
    """Load a model that runs each pass in one native call; see ops.load_model."""
    return CpuModel(cast(CpuOps, operators), spec, weights, consume=consume, lent=lent)


def sizes(wanted: Wanted) -> Sizes:
    """Return the object that computes the memory of packed weights and passes."""
    return NativeSizes(wanted.dtype, wanted.max_seq_len, native.num_threads(), wanted.schemes, wanted.rounded)
