"""Quantised weights on their way from a file to an operator: integers and the scales of their groups, nothing rounded.

A weight is scale * code - minimum, or scale * (code - zero); where codes are looked up in a table, scale * table[code].
Along a row, `group` weights in a row share scale and minimum. The formats of GGUF, GPTQ, AWQ, compressed-tensors and
OCP MX all fit, so that a kernel reads exactly the weights of the file (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

UNIT = 32  # weights in a row whose inputs are rounded together
LARGEST_FLOAT = 448  # of 8 bits
TABLE_ZERO = 128  # the code of 8 bits that stands for 0, where the numbers of a table are codes


@dataclass(frozen=True)
class Scheme:
    """How a matrix is quantised.

    bits: 2 to 6, or 8 (codes 0 to 255). group: weights in a row that share a scale; it divides the row. offset: what is
    subtracted: "zero" (an integer of the group, times its scale) or "minimum" (a number of its own). scale_dtype: of
    scales and minimums, or of the factors above them where `super_group` is not 0. super_group: weights in a row whose
    integer scales (and minimums) share one more factor, as K-quants have them; 0 = none. zero: the zero point where all
    groups of all such matrices have this one. table: 16 integers, from -127 to 127, that codes of 4 bits stand for; the
    zero point is 0 then. () = codes stand for themselves. powers: scales are powers of two, or 0. floats: codes are the
    bits of floats of 8 bits (e4m3, without infinities), and the zero point is 0.
    """

    bits: int
    group: int
    offset: str
    scale_dtype: torch.dtype
    super_group: int = 0
    zero: int | None = None
    table: tuple[int, ...] = ()
    powers: bool = False
    floats: bool = False

    def __str__(self) -> str:
        kind = f"{self.bits} bits by a table" if self.table else f"{'fp' if self.floats else 'int'}{self.bits}"
        return f"{kind}, group {self.group}"

    @property
    def most(self) -> int:
        """The largest magnitude of what a scale is multiplied by."""
        if self.table:
            return max(map(abs, self.table))
        if self.floats:
            return LARGEST_FLOAT
        top = (1 << self.bits) - 1
        return max(self.zero, top - self.zero) if self.zero is not None else top

    def looked_up(self) -> Scheme:
        """Return the scheme of the same weights with what their codes stand for as codes of 8 bits."""
        return replace(self, bits=8, zero=TABLE_ZERO, table=(), powers=False) if self.table else self


@dataclass(frozen=True)
class QuantisedRows:
    """Some rows [R, I] of a quantised matrix.

    codes: uint8 [R, I]. scales: [R, I / group], in `scale_dtype`, or int8 where there is a super group. zeros: uint8
    [R, I / group] with offset "zero". minimums: [R, I / group] with offset "minimum", in `scale_dtype`, or uint8 where
    there is a super group. super_scales, super_minimums: [R, I / super_group] in `scale_dtype`.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def dequantise(self) -> Tensor:
        """Return the weights in float32 [R, I], rounded in the order in which GGUF's own package rounds them."""
        scales = _expanded(self.scales, self.super_scales, self.scheme)
        numbers = torch.unflatten(self._integers(), -1, (-1, self.scheme.group))
        if self.zeros is not None:
            return numbers.sub_(self.zeros.float().unsqueeze(-1)).mul_(scales).flatten(-2)
        assert self.minimums is not None
        return numbers.mul_(scales).sub_(_expanded(self.minimums, self.super_minimums, self.scheme)).flatten(-2)

    def looked_up(self) -> QuantisedRows:
        """Return the same weights with what their codes stand for as codes of 8 bits."""
        if not self.scheme.table:
            return self
        codes = _taken(self.codes, [number + TABLE_ZERO for number in self.scheme.table], torch.uint8)
        zeros = torch.full(self.zeros.shape, TABLE_ZERO, dtype=torch.uint8) if self.zeros is not None else None
        return replace(self, scheme=self.scheme.looked_up(), codes=codes, zeros=zeros)

    def _integers(self) -> Tensor:
        """Return what the codes stand for, float32 [R, I], which nobody else holds."""
        if self.scheme.table:
            return _taken(self.codes, self.scheme.table, torch.float32)
        if self.scheme.floats:
            return self.codes.view(torch.float8_e4m3fn).float()
        return self.codes.float()

    def numbers(self, span: int, count: int, offset: str) -> tuple[Tensor, Tensor]:
        """Return scales and what is subtracted in float32, [R, count] each: one for `span` weights, 0 behind the last.

        offset: "zero" or "minimum"; a zero point becomes a minimum where that is asked for. All are exact: a product
        of at most 8 bits and 16 has less than 24.
        """
        scales = _expanded(self.scales, self.super_scales, self.scheme).squeeze(-1)
        if self.zeros is not None:
            subtracted = self.zeros.float() if offset == "zero" else self.zeros.float() * scales
        else:
            assert self.minimums is not None
            assert offset == "minimum"
            subtracted = _expanded(self.minimums, self.super_minimums, self.scheme).squeeze(-1)
        repeat = self.scheme.group // span
        both = [part.repeat_interleave(repeat, dim=-1)[:, :count] for part in (scales, subtracted)]
        missing = count - both[0].shape[1]
        return tuple(torch.nn.functional.pad(part, (0, missing)).contiguous() for part in both)  # type: ignore[return-value]


# Floats of 4 bits, doubled (OCP Microscaling Formats 1.0, table 5): sign, two bits of exponent, one of mantissa.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
MXFP4 = Scheme(4, 32, "zero", torch.float32, zero=0, table=E2M1, powers=True)


def mxfp4(codes: Tensor, exponents: Tensor) -> QuantisedRows:
    """Return rows of MXFP4, the format of GGUF's type 39 and of gpt-oss.

    codes: uint8 [R, I], the floats of 4 bits in order. exponents: uint8 [R, I / 32], of E8M0: 2 ** (exponent - 127) is
    the scale of a block, and 255 is no number. A block of zeros gets the scale 0, whatever its exponent is.
    """
    # The table is doubled and the scale halved. Of the lowest two exponents it is below the least normal float32.
    bits = torch.where(exponents < 2, 0x200000 << exponents.int(), (exponents.int() - 1) << 23)
    scales = bits.view(torch.float32).masked_fill(exponents == 255, torch.nan)
    is_zero = torch.unflatten(codes & 7, -1, (-1, MXFP4.group)).amax(-1) == 0
    zeros = torch.zeros(exponents.shape, dtype=torch.uint8)
    return QuantisedRows(MXFP4, codes, scales.masked_fill(is_zero, 0.0), zeros)


class HasFileno(Protocol):
    """A file that kernels may read by its descriptor."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Where an open file has the rows of a matrix, as blocks of a type of GGUF.

    type: its number there. start: the first byte of row 0. numbers: int32 [num_out], the row of each output; None = all
    from row 0 on. rounded: the rows are meant as ops/quantising.py rounds them to 4 bits, in groups of so many; 0 = as
    they are.
    """

    file: HasFileno
    type: int
    start: int
    numbers: Tensor | None = None
    rounded: int = 0

    def chosen(self, rows: list[int]) -> StoredRows:
        """Return where some of the rows are."""
        numbers = torch.tensor(rows, dtype=torch.int32)
        return replace(self, numbers=numbers if self.numbers is None else self.numbers[numbers])


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A quantised weight [num_out, num_in] that is read when it is packed, some rows at a time, in order.

    stored: where kernels that know the blocks of a file can read the same rows themselves, many times as fast.
    """

    scheme: Scheme
    shape: tuple[int, int]
    blocks: Callable[[], Iterator[QuantisedRows]]
    stored: StoredRows | None = None


def dequantised(matrix: QuantisedMatrix, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a whole matrix, in the type of a product whose other parts are dense."""
    return torch.cat([rows.dequantise().to(dtype) for rows in matrix.blocks()])


def _taken(codes: Tensor, table: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the entries of a table at some codes."""
    entries = torch.tensor(table, dtype=dtype)
    return entries.index_select(0, codes.flatten().int()).view(codes.shape)


def _expanded(numbers: Tensor, factors: Tensor | None, scheme: Scheme) -> Tensor:
    """Return one float32 for each group, [R, I / group, 1]."""
    if factors is None:
        return numbers.float().unsqueeze(-1)
    per_factor = scheme.super_group // scheme.group
    return (
        (factors.float().unsqueeze(-1) * torch.unflatten(numbers.float(), -1, (-1, per_factor)))
        .flatten(-2)
        .unsqueeze(-1)
    )
