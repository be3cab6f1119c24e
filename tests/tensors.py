"""The native operators and their models as torch's tensors see them, for tests that compare them with torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun import ops
from forerun.blocks import Spec
from forerun.config import Quantization
from forerun.host_tensor import HostTensor
from forerun.kv.pool import Pool
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel
from forerun.ops.cpu.packed import PackedMatrix
from forerun.ops.operators import Operators
from forerun.ops.passes import Lent, Passed
from forerun.ops.reference import PLAIN, Scoring
from forerun.ops.torch_tensors import TorchRows, host_of, tensor_of
from forerun.types import CacheView


def as_tensor(numbers: Tensor | HostTensor | np.ndarray[Any, Any]) -> Tensor:
    """The same numbers as a tensor, in the same memory."""
    return numbers if isinstance(numbers, Tensor) else tensor_of(numbers)


def as_host(numbers: Any) -> Any:
    """A tensor as the host's, in the same memory; everything else as it is."""
    return host_of(numbers) if isinstance(numbers, Tensor) else numbers


def _arrays(value: Any) -> Any:
    """The tensors of an argument as numpy's arrays, in the same memory; other arguments are the same objects."""
    if isinstance(value, Tensor):
        return value.numpy() if value.dtype != torch.bfloat16 else value.float().numpy()
    if isinstance(value, dict):
        return {key: _arrays(part) for key, part in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
        return [_arrays(part) for part in value]
    return value


def _on_tensors(call: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
    """A call that takes and gives arrays, with tensors. always: give them where none was given, too."""

    @wraps(call)
    def wrapped(*args: Any, **options: Any) -> Any:
        given = [*args, *options.values()]
        result = call(*map(_arrays, args), **{name: _arrays(value) for name, value in options.items()})
        is_torch = always or any(_arrays(value) is not value for value in given if not isinstance(value, dict))
        if isinstance(result, Passed):
            inner = {k: tensor_of(rows) for k, rows in result.taps.items()}
            return Passed(tensor_of(result.hidden), inner, result.num_experts)
        return tensor_of(result) if is_torch and isinstance(result, np.ndarray) else result

    return wrapped


class TensorOps(CpuOps):
    """The operators, which pack tensors, and give tensors where they are given some."""

    linear, add_linear, add_gated, rms_norm, layer_norm, silu_mul, gated, rope, _attention = (
        _on_tensors(operator, always=False)
        for operator in (
            CpuOps.linear, CpuOps.add_linear, CpuOps.add_gated, CpuOps.rms_norm, CpuOps.layer_norm, CpuOps.silu_mul,
            CpuOps.gated, CpuOps.rope, CpuOps.attention,
        )
    )  # fmt: skip

    def pack(self, parts: Any, bias: Any = None, **options: Any) -> PackedMatrix:
        given = parts if isinstance(parts, list | tuple) else [parts]
        return super().pack([as_host(part) for part in given], as_host(bias), **options)

    def attention(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        pool: Pool,
        view: CacheView,
        window: int | None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """As ReferenceOps.attention, of scores that are multiplied by a number and nothing else."""
        assert scoring.is_plain
        own = {"scale": scoring.scale, "sees_all": scoring.sees_all}
        return self._attention(q, k, v, pool=pool, view=view, window=window, **own)


class TensorModel:
    """A native model whose rows are tensors; everything else is the native model's own."""

    rows = TorchRows("cpu", torch.float32)

    def __init__(self, native: CpuModel) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        if name == "native":
            raise AttributeError(name)
        own = getattr(self.native, name)
        takes_rows = name in ("forward", "remember", "features", "run_ahead", "norm", "logits", "best")
        return _on_tensors(own, always=True) if takes_rows or name in ("embed", "head", "weight") else own

    def rounded(self, quantization: Quantization) -> TensorModel:
        return TensorModel(self.native.rounded(quantization))


def load_model(
    spec: Spec, weights: Mapping[str, Any], operators: Operators, *, lent: Lent | None = None, **options: Any
) -> Any:
    """As ops.load_model, of tensors; a native model comes as one whose rows are tensors."""
    if not isinstance(operators, CpuOps):
        return ops.load_model(spec, weights, operators, lent=lent, **options)
    if lent is not None and isinstance(lent.target, TensorModel):
        lent = Lent(lent.target.native, lent.ids)
    host = {name: as_host(weight) for name, weight in weights.items()}
    return TensorModel(ops.load_model(spec, host, operators, lent=lent, **options))  # type: ignore[arg-type]
