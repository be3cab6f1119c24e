"""Rounds dense weights to 4 or 8 bits, the nearest integers of each group; no text is looked at.

8 bits are symmetric around a zero point of 128. 4 bits have a zero point within the group's range, and the scale is the
one of a few that leaves the least squared error: a range that clips the largest weight a little rounds all others
finer (the search that GGUF's K-quants do, with fewer steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from forerun import native
from forerun.blocks import Weight
from forerun.config import GROUPS, Quantization
from forerun.errors import BadOption
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme

BLOCK_WEIGHTS = 1 << 17  # rounded at a time, which takes some ten times as many floats meanwhile

SCALE_DTYPE = torch.bfloat16  # as published checkpoints have them, whose model is computed in bfloat16
LANES = 16  # of the kernels
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's range


def scheme_of(bits: int, group: int) -> Scheme:
    """Return the scheme of weights that `quantise` rounds."""
    return Scheme(bits, group, "zero", SCALE_DTYPE, zero=128 if bits == 8 else None)


def quantise(rows: Tensor, scheme: Scheme) -> QuantisedRows:
    """Round rows [R, I] to a scheme of `scheme_of`, whose group divides I. The weights must be finite.

    The native kernels do the operations of `rounded_by_torch` in the same order, some ten times as fast.
    """
    if native.isa() == "reference" or rows.device.type != "cpu":
        return rounded_by_torch(rows, scheme)
    return rounded_by_kernels(rows, scheme, native.isa())


def rounded_by_kernels(rows: Tensor, scheme: Scheme, isa: str) -> QuantisedRows:
    """Do what `quantise` does with the kernels of an instruction set; the group is a multiple of 16."""
    weights = rows.detach().float().contiguous()
    groups = (len(rows), rows.shape[1] // scheme.group)
    codes, zeros = torch.empty(rows.shape, dtype=torch.uint8), torch.empty(groups, dtype=torch.uint8)
    scales = torch.empty(groups, dtype=SCALE_DTYPE)
    places = (codes.data_ptr(), scales.data_ptr(), zeros.data_ptr())
    _kernels(isa).round_groups(weights.data_ptr(), scales.numel(), scheme.group, scheme.bits, *places)
    return QuantisedRows(scheme, codes, scales, zeros)


@cache
def _kernels(isa: str) -> Any:
    """Return kernels with a team of their own, which sleeps between two blocks."""
    return native.extension().Backend(isa, native.num_threads())


def rounded_by_torch(rows: Tensor, scheme: Scheme) -> QuantisedRows:
    """Do what `quantise` does where there are no kernels."""
    groups = rows.float().reshape(len(rows), -1, scheme.group)
    codes, scales, zeros = _eight_bits(groups) if scheme.bits == 8 else _four_bits(groups)
    return QuantisedRows(scheme, codes.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8))


def _eight_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _positive(groups.abs().amax(-1) / 127)
    codes = torch.round(groups / scales.float().unsqueeze(-1)).clamp_(-127, 127).add_(128)
    return codes, scales, torch.full_like(scales, 128)


def _four_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.empty(0)
    for share in SHARES:
        scales = _positive((high - low) * (share / 15))
        step = scales.float()
        zeros = torch.round(-share * low / step).clamp_(0, 15)
        codes = torch.round(groups / step.unsqueeze(-1)).add_(zeros.unsqueeze(-1)).clamp_(0, 15)
        errors = (codes - zeros.unsqueeze(-1)).mul_(step.unsqueeze(-1)).sub_(groups).square_()
        errors = _sum(errors)
        if best is None:
            best, least = (codes, scales, zeros), errors
            continue
        better = errors < least
        least = torch.where(better, errors, least)
        best = (
            torch.where(better.unsqueeze(-1), codes, best[0]),
            torch.where(better, scales, best[1]),
            torch.where(better, zeros, best[2]),
        )
    assert best is not None
    return best


def _sum(numbers: Tensor) -> Tensor:
    """Sum the last dimension in the kernels' order: torch's own depends on the processor, and with it which is less."""
    if numbers.shape[-1] % LANES == 0:
        lanes = torch.unflatten(numbers, -1, (-1, LANES))
        numbers = lanes[..., 0, :]
        for i in range(1, lanes.shape[-2]):
            numbers = numbers + lanes[..., i, :]
    while numbers.shape[-1] > 1:
        half, is_odd = divmod(numbers.shape[-1], 2)
        rest = numbers[..., :half] + numbers[..., half : 2 * half]
        numbers = torch.cat((rest, numbers[..., -1:]), dim=-1) if is_odd else rest
    return numbers.squeeze(-1)


def _positive(scales: Tensor) -> Tensor:
    """Return scales in their type; 1 where a group is all zeros, or too small for the type."""
    rounded = scales.to(SCALE_DTYPE)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def scheme_for(weight: Weight, quantization: Quantization) -> Scheme:
    """Return the scheme of a weight that `is_rounded`. Raises BadOption where groups do not divide its rows."""
    num_in = weight.shape[1]
    bits = quantization.bits if quantization.again else max(quantization.bits, weight.least_bits)
    scheme = scheme_of(bits, quantization.group)
    if num_in % scheme.group:
        possible = [str(group) for group in GROUPS[quantization.bits] if num_in % group == 0]
        way_out = f"{' and '.join(possible)} do" if len(possible) > 1 else f"{''.join(possible) or 'no group'} does"
        raise BadOption(
            f"quantization={str(quantization)!r} is not possible: groups of {quantization.group} do not divide the "
            f"{num_in} inputs of {weight.name}; {way_out}"
        )
    return scheme


def is_rounded(weight: Weight) -> bool:
    """Whether a weight gets fewer bits where a model is rounded: matrices, experts and the embedding do."""
    return weight.least_bits < 16


class RoundedWeights(Mapping[str, Tensor | QuantisedMatrix]):
    """Weights that are in memory, each matrix rounded when it is looked up, as `models.quantising` rounds a file's.

    weights: of the spec. read(name, rows) returns rows of a matrix; vector(name) a norm or a bias.
    as_tensors: give what the rounded matrices stand for, in this type; None = as they are packed. Raises BadOption
    where groups do not divide a row.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        read: Callable[[str, range], Tensor],
        vector: Callable[[str], Tensor],
        quantization: Quantization,
        as_tensors: torch.dtype | None,
    ) -> None:
        known = list(weights)
        self.read, self.vector, self.as_tensors = read, vector, as_tensors
        self.shapes = {weight.name: weight.shape for weight in known}
        self.matrices = {weight.name for weight in known if weight.role == "matrix"}
        self.schemes = {weight.name: scheme_for(weight, quantization) for weight in known if is_rounded(weight)}

    def __getitem__(self, name: str) -> Tensor | QuantisedMatrix:
        shape = self.shapes[name]
        if name not in self.schemes:
            kept = self.read(name, range(shape[0])) if name in self.matrices else self.vector(name)
            return kept if self.as_tensors is None else kept.to(self.as_tensors)
        matrix = QuantisedMatrix(self.schemes[name], (shape[0], shape[1]), partial(self._rows, name))
        if self.as_tensors is None:
            return matrix
        return torch.cat([rows.dequantise().to(self.as_tensors) for rows in matrix.blocks()])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _rows(self, name: str) -> Iterator[QuantisedRows]:
        num_rows, num_in = self.shapes[name]
        step = max(1, BLOCK_WEIGHTS // num_in)
        for first in range(0, num_rows, step):
            yield quantise(self.read(name, range(first, min(num_rows, first + step))), self.schemes[name])
