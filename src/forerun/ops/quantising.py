"""Rounding of dense weights to 4 or 8 bits, to the nearest integers of each group, without calibration text.

8-bit codes are symmetric around a zero point of 128. 4-bit codes have a zero point within the group's range. For each
4-bit group, several scales are tried, and the scale with the least squared error is taken. A scale that clips the
largest weight a little rounds all other weights more finely. The search is like the search of GGUF's K-quants, with
fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from forerun import native
from forerun.blocks import Weight
from forerun.config import GROUPS, Quantization
from forerun.errors import BadOption
from forerun.host_tensor import Floats, HostTensor, address, kernels
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme

BLOCK_WEIGHTS = 1 << 17  # weights that are rounded at a time, with some ten times as many floats in memory

SCALE_DTYPE = "bfloat16"  # as in published checkpoints of models that are computed in bfloat16
LANES = 16  # of a sum in the kernels
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # the shares of a group's range that are tried as the range of 4-bit codes


def scheme_of(bits: int, group: int) -> Scheme:
    """Return the scheme with which `quantise` rounds weights to these bits per code and this group size."""
    return Scheme(bits, group, "zero", SCALE_DTYPE, zero=128 if bits == 8 else None)


def quantise(rows: Floats, scheme: Scheme) -> QuantisedRows:
    """Round finite weights [R, I] to a scheme from `scheme_of`. The scheme's group size must divide I.

    The native kernels do the operations of `rounded_by_numpy` in the same order, some ten times as fast.
    """
    return (
        rounded_by_numpy(rows, scheme)
        if native.isa() == "reference"
        else rounded_by_kernels(rows, scheme, native.isa())
    )


def rounded_by_kernels(rows: Floats, scheme: Scheme, isa: str) -> QuantisedRows:
    """Round as `quantise` does, with the kernels of an instruction set; the group must be a multiple of 16."""
    weights = np.ascontiguousarray(rows)
    groups = (len(rows), rows.shape[1] // scheme.group)
    codes, zeros = np.empty(rows.shape, np.uint8), np.empty(groups, np.uint8)
    scales = HostTensor.empty(groups, SCALE_DTYPE)
    places = address(codes), address(scales.values), address(zeros)
    kernels(isa).round_groups(address(weights), zeros.size, scheme.group, scheme.bits, *places)
    return QuantisedRows(scheme, codes, scales, zeros)


def rounded_by_numpy(rows: Floats, scheme: Scheme) -> QuantisedRows:
    """Round as `quantise` does, in numpy instead of native kernels."""
    groups = rows.reshape(len(rows), -1, scheme.group)
    with np.errstate(over="ignore"):  # infinite squares of large errors lose against any other
        codes, scales, zeros = _eight_bits(groups) if scheme.bits == 8 else _four_bits(groups)
    return QuantisedRows(scheme, codes.astype(np.uint8).reshape(len(rows), -1), scales, zeros.astype(np.uint8))


def _eight_bits(groups: Floats) -> tuple[Floats, HostTensor, Floats]:
    scales = _positive(np.abs(groups).max(-1) / np.float32(127))
    codes = np.clip(np.rint(groups / scales.float32()[..., None]), -127, 127) + np.float32(128)
    return codes, scales, np.full(scales.shape, 128, np.float32)


def _four_bits(groups: Floats) -> tuple[Floats, HostTensor, Floats]:
    low = np.minimum(groups.min(-1), 0)
    high = np.maximum(groups.max(-1), 0)
    codes = np.empty_like(groups)
    least = np.full(low.shape, np.inf, np.float32)
    steps, zeros = np.empty_like(low), np.empty_like(low)
    for share in SHARES:
        step = _positive((high - low) * np.float32(share / 15)).float32()
        zero = np.clip(np.rint(np.float32(-share) * low / step), 0, 15)
        rounded = np.clip(np.rint(groups / step[..., None]) + zero[..., None], 0, 15)
        errors = _sum(np.square((rounded - zero[..., None]) * step[..., None] - groups))
        better = errors < least if share < SHARES[0] else np.ones(errors.shape, np.bool_)
        least = np.where(better, errors, least)
        codes, zeros = np.where(better[..., None], rounded, codes), np.where(better, zero, zeros)
        steps = np.where(better, step, steps)
    return codes, HostTensor.of(steps).to(SCALE_DTYPE), zeros


def _sum(numbers: Floats) -> Floats:
    """Sum the last dimension in the native kernels' order, which can decide which of two close errors is smaller."""
    if numbers.shape[-1] % LANES == 0:
        lanes = numbers.reshape(*numbers.shape[:-1], -1, LANES)
        numbers = lanes[..., 0, :]
        for i in range(1, lanes.shape[-2]):
            numbers = numbers + lanes[..., i, :]
    while numbers.shape[-1] > 1:
        half, is_odd = divmod(numbers.shape[-1], 2)
        rest = numbers[..., :half] + numbers[..., half : 2 * half]
        numbers = np.concatenate((rest, numbers[..., -1:]), axis=-1) if is_odd else rest
    return numbers[..., 0]


def _positive(scales: Floats) -> HostTensor:
    """Return scales in SCALE_DTYPE; a scale that is 0 in this dtype, as in a group of zeros, becomes 1."""
    rounded = HostTensor.of(scales).to(SCALE_DTYPE)
    wide = rounded.float32()
    return HostTensor.of(np.where(wide > 0, wide, np.float32(1))).to(SCALE_DTYPE)


def scheme_for(weight: Weight, quantization: Quantization) -> Scheme:
    """Return the scheme to which a weight is rounded; only for weights that `is_rounded` accepts.

    Raises BadOption if the group size does not divide the length of the weight's rows.
    """
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
    """Tell whether a weight gets fewer bits when a model is rounded.

    Matrices, experts and the embedding get fewer bits.
    """
    return weight.least_bits < 16


class RoundedWeights(Mapping[str, HostTensor | QuantisedMatrix]):
    """A view of weights in memory that rounds each matrix when it is looked up.

    The module `models.quantising` does the same for weights in files. weights: the weights of the spec. read(name,
    rows): returns rows of a matrix. vector(name): returns a norm or a bias. as_tensors: the dtype in which all weights
    are returned, with rounded matrices dequantised; None = rounded matrices stay quantised. Raises BadOption if the
    group size does not divide the length of a row.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        read: Callable[[str, range], HostTensor],
        vector: Callable[[str], HostTensor],
        quantization: Quantization,
        as_tensors: str | None,
    ) -> None:
        known = list(weights)
        self.read, self.vector, self.as_tensors = read, vector, as_tensors
        self.shapes = {weight.name: weight.shape for weight in known}
        self.matrices = {weight.name for weight in known if weight.role == "matrix"}
        self.schemes = {weight.name: scheme_for(weight, quantization) for weight in known if is_rounded(weight)}

    def __getitem__(self, name: str) -> HostTensor | QuantisedMatrix:
        shape = self.shapes[name]
        if name not in self.schemes:
            kept = self.read(name, range(shape[0])) if name in self.matrices else self.vector(name)
            return kept if self.as_tensors is None else kept.to(self.as_tensors)
        matrix = QuantisedMatrix(self.schemes[name], (shape[0], shape[1]), partial(self._rows, name))
        if self.as_tensors is None:
            return matrix
        return HostTensor.joined([HostTensor.of(rows.dequantise()).to(self.as_tensors) for rows in matrix.blocks()])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _rows(self, name: str) -> Iterator[QuantisedRows]:
        num_rows, num_in = self.shapes[name]
        step = max(1, BLOCK_WEIGHTS // num_in)
        for first in range(0, num_rows, step):
            rows = self.read(name, range(first, min(num_rows, first + step)))
            yield quantise(rows.float32(), self.schemes[name])
