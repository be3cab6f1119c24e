"""Quantised weights as a file stores them and as operators take them: codes, and scales for groups of codes.

A weight is scale * code - minimum, or scale * (code - zero). Where codes are looked up in a table, a weight is scale
times the table's entry. Along a row, `group` consecutive weights share a scale and a minimum. The formats of GGUF,
GPTQ, AWQ, compressed-tensors and OCP MX all have this form. So nothing is rounded between the file and the kernel,
which reads exactly the weights of the file (docs/development/kernels.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forerun.host_tensor import Array, Floats, HostTensor, float8_numbers

Codes = npt.NDArray[np.uint8]

UNIT = 32  # consecutive weights of a row whose inputs are rounded together
LARGEST_FLOAT = 448  # of the floats of 8 bits, e4m3
TABLE_ZERO = 128  # the 8-bit code for 0, where table codes were turned into 8-bit codes


@dataclass(frozen=True)
class Scheme:
    """The quantisation scheme of a matrix.

    bits: the bits of a code, 2 to 6, or 8 (codes 0 to 255). group: the number of consecutive weights of a row that
    share a scale; it divides the length of a row. offset: what each group subtracts, "zero" (an integer, subtracted
    from the codes before the scale is applied) or "minimum" (a number, subtracted after the scale is applied).
    scale_dtype: the dtype of scales and minimums; where `super_group` is not 0, the dtype of their factors.
    super_group: as in K-quants, the number of consecutive weights whose scales are integers times one common factor;
    another common factor multiplies their minimums. 0 = scales and minimums have no factors. zero: the zero point, if
    all groups of all matrices of this scheme share it; otherwise None. table: the 16 integers from -127 to 127 that the
    codes of 4 bits stand for; the zero point is 0 then. () = codes stand for themselves. powers: whether every scale is
    0 or a power of two. floats: whether codes are the bits of floats of 8 bits (e4m3, without infinities); the zero
    point is 0 then.
    """

    bits: int
    group: int
    offset: str
    scale_dtype: str
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
        """The largest magnitude of a code's value before its scale is applied."""
        if self.table:
            return max(map(abs, self.table))
        if self.floats:
            return LARGEST_FLOAT
        top = (1 << self.bits) - 1
        return max(self.zero, top - self.zero) if self.zero is not None else top

    def looked_up(self) -> Scheme:
        """Return the scheme after table lookup: each table code becomes the 8-bit code of its entry in the table.

        A scheme without a table is returned as it is.
        """
        return replace(self, bits=8, zero=TABLE_ZERO, table=(), powers=False) if self.table else self


@dataclass(frozen=True)
class QuantisedRows:
    """Some rows [R, I] of a quantised matrix.

    codes: [R, I]. scales: [R, I / group], in `scale_dtype`, or int8 where there is a super group. zeros:
    [R, I / group], only with offset "zero". minimums: [R, I / group], only with offset "minimum", in `scale_dtype`, or
    uint8 where there is a super group. super_scales, super_minimums: [R, I / super_group] in `scale_dtype`.
    """

    scheme: Scheme
    codes: Codes
    scales: HostTensor
    zeros: Codes | None = None
    minimums: HostTensor | None = None
    super_scales: HostTensor | None = None
    super_minimums: HostTensor | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def dequantise(self) -> Floats:
        """Return the weights, float32 [R, I], computed with the order of operations of GGUF's own package."""
        scales = _expanded(self.scales, self.super_scales, self.scheme)
        numbers = self._integers().reshape(len(self.codes), -1, self.scheme.group)
        if self.zeros is not None:
            numbers -= self.zeros.astype(np.float32)[..., None]
            numbers *= scales
        else:
            assert self.minimums is not None
            numbers *= scales
            numbers -= _expanded(self.minimums, self.super_minimums, self.scheme)
        return numbers.reshape(len(self.codes), -1)

    def looked_up(self) -> QuantisedRows:
        """Return the same weights after table lookup: each table code becomes the 8-bit code of its entry in the table.

        Rows without a table are returned as they are.
        """
        if not self.scheme.table:
            return self
        codes = np.array([number + TABLE_ZERO for number in self.scheme.table], np.uint8)[self.codes]
        zeros = None if self.zeros is None else np.full_like(self.zeros, TABLE_ZERO)
        return replace(self, scheme=self.scheme.looked_up(), codes=codes, zeros=zeros)

    def _integers(self) -> Floats:
        """Return the number that each code stands for, before scaling, as a new float32 array [R, I]."""
        if self.scheme.table:
            return np.array(self.scheme.table, np.float32)[self.codes]
        return float8_numbers()[self.codes] if self.scheme.floats else self.codes.astype(np.float32)

    def numbers(self, span: int, count: int, offset: str) -> tuple[Floats, Floats]:
        """Return float32 scales and offsets (see Scheme), each [R, count]: one for every `span` weights of a row.

        Entries beyond the end of a row are 0. offset: the form of the returned offsets, "zero" or "minimum"; "minimum"
        turns zero points into minimums. All numbers are exact, because the product of an 8-bit number and a 16-bit
        number has fewer than 24 bits.
        """
        scales = _expanded(self.scales, self.super_scales, self.scheme)[..., 0]
        if self.zeros is not None:
            zeros = self.zeros.astype(np.float32)
            subtracted = zeros if offset == "zero" else zeros * scales
        else:
            assert self.minimums is not None
            assert offset == "minimum"
            subtracted = _expanded(self.minimums, self.super_minimums, self.scheme)[..., 0]
        repeats = self.scheme.group // span

        def spread(numbers: Floats) -> Floats:
            repeated = np.repeat(numbers, repeats, axis=1)[:, :count]
            return np.ascontiguousarray(np.pad(repeated, ((0, 0), (0, count - repeated.shape[1]))))

        return spread(scales), spread(subtracted)


# Floats of 4 bits, doubled (OCP Microscaling Formats 1.0, table 5): sign, two bits of exponent, one of mantissa.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
MXFP4 = Scheme(4, 32, "zero", "float32", zero=0, table=E2M1, powers=True)


def mxfp4(codes: Codes, exponents: Codes) -> QuantisedRows:
    """Return rows of MXFP4, the format of GGUF's type 39 and of gpt-oss.

    codes: uint8 [R, I], the floats of 4 bits in order. exponents: uint8 [R, I / 32] in the format E8M0. The scale of a
    block is 2 ** (exponent - 127), and the exponent 255 means NaN. A block of zeros gets the scale 0, whatever its
    exponent is.
    """
    # The table is doubled and the scale halved, which makes the scale denormal for the lowest two exponents.
    wide = exponents.astype(np.int32)
    scales = np.where(wide < 2, 0x200000 << np.minimum(wide, 1), (wide - 1) << 23).astype(np.int32).view(np.float32)
    scales[exponents == 255] = np.nan
    is_zero = ~(codes & 7).reshape(len(codes), -1, MXFP4.group).any(-1)
    scales[is_zero] = 0
    return QuantisedRows(MXFP4, codes, HostTensor.of(scales), np.zeros_like(exponents))


class HasFileno(Protocol):
    """A file that kernels can read through its descriptor."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The location of a matrix's rows in an open file, where they are stored as blocks of a GGUF type.

    type: the number of that type in GGUF. start: the offset of row 0 in bytes. numbers: int32 [num_out], the index of
    the file's row for each output; None = all rows from row 0 on. rounded: the group size with which ops/quantising.py
    rounds the rows to 4 bits; 0 = the rows stay as they are.
    """

    file: HasFileno
    type: int
    start: int
    numbers: npt.NDArray[np.int32] | None = None
    rounded: int = 0

    def chosen(self, rows: list[int]) -> StoredRows:
        """Return the location of only these rows."""
        numbers = np.array(rows, np.int32)
        return replace(self, numbers=numbers if self.numbers is None else self.numbers[numbers])


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A quantised weight [num_out, num_in]. The rows are read in order, some at a time, when the matrix is packed.

    blocks(): yields the rows. stored: the location of the rows in a file. Kernels that know the file's format can read
    the rows from there, many times as fast as `blocks` yields them. None = only `blocks` can read the rows.
    """

    scheme: Scheme
    shape: tuple[int, int]
    blocks: Callable[[], Iterator[QuantisedRows]]
    stored: StoredRows | None = None


def dequantised(matrix: QuantisedMatrix, dtype: str = "bfloat16") -> HostTensor:
    """Return a whole matrix as dense numbers, for a product that joins the matrix with dense matrices."""
    return HostTensor.joined([HostTensor.of(rows.dequantise()).to(dtype) for rows in matrix.blocks()])


def _expanded(numbers: HostTensor, factors: HostTensor | None, scheme: Scheme) -> Floats:
    """Return each group's value, such as its scale, float32 [R, I / group, 1].

    numbers: the stored values. factors: the factors of the stored values, one for each super group; None = no factors.
    """
    floats = numbers.float32()
    if factors is None:
        return floats[..., None]
    per_factor = scheme.super_group // scheme.group
    products: Array = factors.float32()[..., None] * floats.reshape(len(floats), -1, per_factor)
    return products.reshape(len(floats), -1)[..., None]
