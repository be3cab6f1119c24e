"""The parts of blocks in torch: matrices that share an input, and norms with their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.blocks import Norm
from forerun.ops.reference import ReferenceOps


class Join(Protocol):
    """A function that joins the matrices with these names into one Projections. The matrices share their input."""

    def __call__(self, weights: Mapping[str, Tensor], names: list[str]) -> Projections: ...


@dataclass(frozen=True)
class Parts:
    """The material from which blocks are built: weights by name, a function that joins matrices, and a dtype.

    dtype: the dtype of rows and norms. apart: whether attention has three separate Projections: one for queries, one
    for the gate, and one for keys and values. made: every Projections that `product` has returned.
    """

    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    join: Join
    apart: bool = False
    made: list[Projections] = field(default_factory=list)

    def vector(self, name: str) -> Tensor:
        """Return a vector that multiplies rows or is added to them, such as the weight of a norm."""
        return self.weights[name].to(self.dtype)

    def product(self, *names: str) -> Projections:
        """Join the matrices with these names, which share their input, into one Projections, and return it."""
        self.made.append(self.join(self.weights, list(names)))
        return self.made[-1]


@dataclass(frozen=True)
class Normed:
    """A norm with its weights."""

    norm: Norm
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, parts: Parts, at: str, norm: Norm | None) -> Normed | None:
        """Return a norm with its weights, or None if `norm` is None. at: the prefix of the weights' names."""
        if norm is None:
            return None
        weight = parts.vector(f"{at}.weight") if norm.weight else None
        return cls(norm, weight, parts.vector(f"{at}.bias") if norm.bias else None)

    def apply(self, ops: ReferenceOps, x: Tensor) -> Tensor:
        """Apply the norm to rows x."""
        weight = self.weight
        if weight is not None and self.norm.offset:
            weight = weight.float() + self.norm.offset
        if self.norm.kind == "layer":
            return ops.layer_norm(x, weight, self.bias, self.norm.eps)
        if weight is None:
            weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        rows = ops.rms_norm(x, weight, self.norm.eps)
        return rows if self.bias is None else rows + self.bias


def normed(norm: Normed | None, ops: ReferenceOps, x: Tensor) -> Tensor:
    """Apply a norm to rows x. Return x unchanged if `norm` is None."""
    return x if norm is None else norm.apply(ops, x)


@dataclass(frozen=True)
class Projections:
    """Matrices that share one input.

    parts: the weight and bias of each matrix. sizes: the number of outputs of each matrix. joined: if the matrices lie
    back to back in memory, all of them as one matrix, and its bias; otherwise None.
    """

    parts: list[tuple[Any, Tensor | None]]
    sizes: list[int]
    joined: tuple[Any, Tensor | None] | None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], names: list[str]) -> Projections:
        """Return the matrices with these names, joined if they lie back to back in memory."""
        parts = [(weights[name + ".weight"], weights.get(name + ".bias")) for name in names]
        whole = _back_to_back([weight for weight, _ in parts]) if len(parts) > 1 else None
        biases = [bias for _, bias in parts if bias is not None]
        joined = None if whole is None else (whole, torch.cat(biases) if biases else None)
        return cls(parts, [len(weight) for weight, _ in parts], joined)

    @property
    def nbytes(self) -> int:
        """The bytes of the matrices."""
        return sum(weight.nbytes for weight, _ in ([self.joined] if self.joined else self.parts))

    def apply(self, ops: ReferenceOps, x: Tensor) -> Seq[Tensor]:
        """Multiply x [T, H] by each part -> [T, size] for each part. Joined parts are multiplied at once."""
        if self.joined is None:
            return [ops.linear(x, weight, bias) for weight, bias in self.parts]
        return torch.split_with_sizes(ops.linear(x, *self.joined), self.sizes, dim=-1)


def _back_to_back(weights: list[Tensor]) -> Tensor | None:
    """Return weights that lie back to back in one storage as one matrix; None for others, and for trained weights."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not weight.is_contiguous() or weight.storage_offset() != end or weight.requires_grad:
            return None
        end += weight.numel()
    num_rows = sum(len(weight) for weight in weights)
    return first.as_strided((num_rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())
