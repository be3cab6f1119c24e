"""The CUDA backend: Triton kernels, and whole models in CUDA graphs."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from forerun.blocks import Spec
from forerun.ops import torch as in_torch
from forerun.ops.cuda.memory import CudaSizes
from forerun.ops.cuda.model import CudaModel
from forerun.ops.cuda.operators import CudaOps as CudaOps, interprets as interprets
from forerun.ops.cuda.packed import CudaWeights
from forerun.ops.memory import Sizes, Wanted
from forerun.ops.passes import Lent
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch_tensors import DeviceWeights

NAME = "cuda"
NEEDS = "torch"
RANK = 3
DEVICE = "cuda"
row_invariant = True

LEAST_CAPABILITY = (8, 0)  # of cards that multiply bfloat16
COMPILERS = ("gcc", "clang", "cc")


def usable(device: str) -> str | None:
    """Return None if these kernels run on a device, otherwise the reason, worded to follow the backend's name."""
    if interprets():
        return _without_triton()
    if device != "cuda":
        return f"computes on a CUDA device and contradicts device={device!r}: drop one of them"
    if not torch.cuda.is_available():
        return "is not possible: torch sees no CUDA device"
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"needs a card that multiplies bfloat16 (compute capability 8.0 or more), which {name} does not"
    if not (os.environ.get("CC") or any(map(shutil.which, COMPILERS))):
        return "needs a C compiler, with which Triton makes what starts its kernels: apt-get install gcc"
    return _without_triton()


def card() -> str | None:
    """Return the name of the first GPU that torch sees, or None if torch sees no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


@cache
def _without_triton() -> str | None:
    """Return None if Triton can be imported, otherwise the reason, worded to follow the backend's name."""
    try:
        importlib.import_module("triton.language")
    except ImportError as error:
        return f"needs Triton, which comes with torch's CUDA builds and cannot be imported here ({error})"
    return None


LARGEST_HEAD = 512


def supports(spec: Spec) -> str | None:
    """Return None if this backend can compute a model, otherwise the reason as a sentence without a full stop."""
    if (reason := in_torch.supports(spec)) is not None:
        return reason
    if spec.has_states:
        return "blocks that keep a state have no CUDA kernels yet"
    if any(e.choice_bias or e.sum_eps for block in spec.blocks if (e := block.experts) is not None):
        return "numbers that count for the choice of experts alone have no CUDA kernels yet"
    attentions = [block.attention for block in spec.blocks if block.attention is not None]
    if (largest := max((a.head_dim for a in attentions), default=0)) > LARGEST_HEAD:
        return f"the CUDA kernels were not tried with heads of {largest}, but up to {LARGEST_HEAD}"
    return None if spec.encoder is None else supports(spec.encoder)


@cache
def make() -> ReferenceOps:
    """Return the CUDA operators, the same object at every call."""
    return CudaOps()


def load(
    spec: Spec,
    weights: Mapping[str, Any],
    operators: ReferenceOps,
    *,
    device: str = "cuda",
    consume: bool = False,
    lent: Lent | None = None,
) -> Any:
    """Load a model that runs a pass of a few rows as one CUDA graph; see ops.load_model."""
    return CudaModel(spec, CudaWeights(spec, DeviceWeights(weights, device)), operators, lent)


def sizes(wanted: Wanted) -> Sizes:
    """Return the object that computes the memory of weights and passes."""
    return CudaSizes(wanted.dtype, wanted.device, wanted.max_seq_len, wanted.in_place, False, wanted.schemes)
