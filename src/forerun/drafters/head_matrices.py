"""Matrices of trained heads, as the operators of their target take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from forerun.config import Quantization
from forerun.errors import BadOption
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.quantising import quantise, scheme_of
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import Projections
from forerun.types import Model


@dataclass(frozen=True)
class Product:
    """Rows times a matrix. matrix: packed where operators pack, and then with its bias."""

    ops: ReferenceOps
    matrix: Any
    bias: Tensor | None = None

    @classmethod
    def of(
        cls, target: Model, parts: Seq[Tensor], bias: Tensor | None = None, rounded: Quantization | None = None
    ) -> Product:
        """Join matrices [O, I] of one input along their outputs, in the target's type.

        rounded: to how many bits; None = not. Raises BadOption where its groups do not divide I.
        """
        ops = target.ops
        own = [part.to(target.device, target.weight_dtype) for part in parts]
        bias = None if bias is None else bias.to(target.device, target.weight_dtype)
        if rounded is not None and own[0].shape[1] % rounded.group:
            raise BadOption(
                f"quantization={str(rounded)!r} is not possible: the head has rows of {own[0].shape[1]} weights; "
                "choose a group that divides them, or none"
            )
        scheme = None if rounded is None else scheme_of(rounded.bits, rounded.group)
        if ops.packs:
            made = own if scheme is None else [_quantised(part, scheme) for part in own]
            return cls(ops, cast(Any, ops).pack(made, bias))
        dense = own if scheme is None else [quantise(part, scheme).dequantise().to(part.dtype) for part in own]
        return cls(ops, dense[0] if len(dense) == 1 else torch.cat(dense), bias)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [T, I] -> [T, O]."""
        return self.ops.linear(rows, self.matrix, self.bias)


def joined_product(
    target: Model, rounded: Quantization | None, weights: Mapping[str, Tensor], names: Seq[str]
) -> Projections:
    """Make one product of the matrices of these names, which read the same rows; see `Product.of`."""
    parts = [weights[f"{name}.weight"] for name in names]
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    made, sizes = Product.of(target, parts, torch.cat(biases) if biases else None, rounded), [len(p) for p in parts]
    whole = made.matrix, made.bias
    return Projections([whole], sizes, None) if len(parts) == 1 else Projections([], sizes, whole)


def quantization_of(option: str, is_packed: bool) -> Quantization | None:
    """What a head is rounded to. option: none, a number of bits, or auto: 8 beside a target of 4 or 8 bits.

    is_packed: whether the target has such weights in memory.
    """
    if option == "auto":
        option = "int8" if is_packed else "none"
    return None if option == "none" else Quantization.parse(option)


def is_packed(target: Model) -> bool:
    """Whether a target has weights of 4 or 8 bits in memory."""
    return bool(getattr(target, "weight_bits", ()))


def _quantised(weight: Tensor, scheme: Scheme) -> QuantisedMatrix:
    return QuantisedMatrix(scheme, (weight.shape[0], weight.shape[1]), partial(_rows, weight, scheme))


def _rows(weight: Tensor, scheme: Scheme) -> Any:
    rows: QuantisedRows = quantise(weight, scheme)
    return iter([rows])
