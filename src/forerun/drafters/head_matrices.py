"""Matrices of trained heads, as the operators of their target take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from forerun.config import Quantization
from forerun.errors import BadOption
from forerun.ops.quantised import QuantisedMatrix, Scheme, dequantised
from forerun.ops.quantising import quantise, scheme_of
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import Projections
from forerun.types import Model

Weight = Tensor | QuantisedMatrix  # of a head, as its file has it


@dataclass(frozen=True)
class Product:
    """Rows times a matrix. matrix: packed where operators pack, and then with its bias."""

    ops: ReferenceOps
    matrix: Any
    bias: Tensor | None = None

    @classmethod
    def of(
        cls, target: Model, parts: Seq[Weight], bias: Tensor | None = None, rounded: Quantization | None = None
    ) -> Product:
        """Join matrices [O, I] of one input along their outputs, in the target's type.

        rounded: to how many bits; None = not. Raises BadOption where its groups do not divide I.
        """
        ops, dtype = target.ops, target.weight_dtype
        bias = None if bias is None else bias.to(target.device, dtype)
        own = [taken(part, target, rounded) for part in parts]
        if ops.packs:
            return cls(ops, cast(Any, ops).pack(own, bias))
        dense = [
            (dense_of(part) if isinstance(part, QuantisedMatrix) else part).to(target.device, dtype) for part in own
        ]
        return cls(ops, dense[0] if len(dense) == 1 else torch.cat(dense), bias)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [T, I] -> [T, O]."""
        return self.ops.linear(rows, self.matrix, self.bias)


def taken(part: Weight, target: Model, rounded: Quantization | None) -> Weight:
    """Return a matrix as a product takes it: dense, or rounded, which a matrix of that scheme is already.

    Raises BadOption where groups do not divide its rows.
    """
    scheme = None if rounded is None else scheme_of(rounded.bits, rounded.group)
    if isinstance(part, QuantisedMatrix):
        if part.scheme == scheme:
            return part
        part = dense_of(part)
    own = part.to(target.device, target.weight_dtype)
    if scheme is None:
        return own
    if own.shape[1] % scheme.group:
        raise BadOption(
            f"quantization={str(rounded)!r} is not possible: the head has rows of {own.shape[1]} weights; "
            "choose a group that divides them, or none"
        )
    return quantised(own, scheme)


def dense_of(weight: Weight) -> Tensor:
    """Return what a weight of a head stands for: in its own type, or float32."""
    return dequantised(weight, torch.float32) if isinstance(weight, QuantisedMatrix) else weight


def joined_product(
    target: Model, rounded: Quantization | None, weights: Mapping[str, Any], names: Seq[str]
) -> Projections:
    """Make one product of the matrices of these names, which read the same rows; see `Product.of`."""
    parts = [weights[f"{name}.weight"] for name in names]
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    made, sizes = Product.of(target, parts, torch.cat(biases) if biases else None, rounded), [p.shape[0] for p in parts]
    whole = made.matrix, made.bias
    return Projections([whole], sizes, None) if len(parts) == 1 else Projections([], sizes, whole)


def quantization_of(option: str, shapes: Collection[tuple[int, ...]], *, pays: bool) -> Quantization | None:
    """Return what a head is rounded to: what an option says, or by auto 8 bits where that pays and groups divide rows.

    shapes: of its weights. pays: whether the target has weights of 4 or 8 bits, or the head drafts as well in 8.
    """
    if option != "auto":
        return None if option == "none" else Quantization.parse(option)
    usual = Quantization(8)
    fits = all(shape[1] % usual.group == 0 for shape in shapes if len(shape) == 2)
    return usual if pays and fits else None


def is_packed(target: Model) -> bool:
    """Whether a target has weights of 4 or 8 bits in memory."""
    return bool(getattr(target, "weight_bits", ()))


def quantised(weight: Tensor, scheme: Scheme) -> QuantisedMatrix:
    """Return a matrix that is rounded when it is read."""
    return QuantisedMatrix(scheme, (weight.shape[0], weight.shape[1]), lambda: iter([quantise(weight, scheme)]))
