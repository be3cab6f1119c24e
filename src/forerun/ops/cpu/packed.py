"""The data that native calls take: packed matrices, and the runs of a ragged batch encoded as integers."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from forerun import native
from forerun.blocks import Buckets
from forerun.host_tensor import Array, Floats, HostTensor, address
from forerun.kv.states import StateRun
from forerun.ops.quantised import UNIT, QuantisedMatrix, QuantisedRows, Scheme
from forerun.types import RaggedBatch


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A packed weight [num_out, num_in], made of one or several parts.

    paired: whether the parts are gate and up of a gated feed-forward block. If so, their outputs lie side by side in
    memory. dtype: for dense weights, their dtype; for quantised weights, the dtype of the model's keys and values.
    bits: the bit widths of quantised weights, ascending; () = the weights are dense. bias: float32 [num_out], also
    copied into the packed matrix; None = there is no bias.
    """

    handle: Any
    num_out: int
    num_in: int
    dtype: str
    paired: bool
    bits: tuple[int, ...] = ()
    bias: Floats | None = None

    @property
    def nbytes(self) -> int:
        """The bytes in memory, padding of odd shapes included."""
        return int(self.handle.num_bytes)

    @property
    def stored(self) -> HostTensor:
        """The matrix's memory as a tensor, uint8 [nbytes]. The tensor is valid only as long as the matrix lives."""
        buffer = (ctypes.c_uint8 * self.nbytes).from_address(self.handle.address)
        return HostTensor.of(np.ctypeslib.as_array(buffer))

    def unpack(self, rows: Seq[int] | None = None) -> HostTensor:
        """Return rows of the weight as they were before packing, [rows, num_in].

        rows: the indices of the rows; None = all rows. Rows of quantised weights are float32. Raises IndexError for an
        index outside of the matrix.
        """
        chosen = range(self.num_out) if rows is None else rows
        out = HostTensor.empty((len(chosen), self.num_in), "float32" if self.bits else self.dtype)
        begin = address(out.values)
        row_bytes = out.values.itemsize * self.num_in
        for place, i in enumerate(chosen):
            if not 0 <= i < self.num_out:
                raise IndexError(f"there is no row {i} in a matrix of {self.num_out}")
            self.handle.unpack_row(i, begin + place * row_bytes)
        return out


BITS = (2, 3, 4, 5, 6, 8)  # of a code
TABLE_CODES = 16  # the number of entries of a table, one for each code


@dataclass(frozen=True)
class Format:
    """The packing of a quantised matrix's rows: the fields of Format in csrc/kernels.h that Python code chooses.

    number_bytes: the bytes of each scale and each subtracted number: 4 = float32, 2 = float16, 1 = a power of two.
    """

    bits: int
    groups: int
    head_units: int
    number_bytes: int
    two_levels: bool
    offset: int  # 0 = one zero point, 1 = zero points of groups, 2 = minimums
    zero: int
    table: tuple[int, ...] = ()

    @classmethod
    def of(cls, schemes: Seq[Scheme]) -> Format:
        """Return the format for rows of these schemes.

        If the schemes differ, the format has the most bits and the smallest groups among them, and table codes are
        packed as 8-bit codes (`Scheme.looked_up`). Scales that are powers of two take one byte each, unless the schemes
        differ. Other scales and subtracted numbers are float32 in two cases: where a scheme has float32 numbers, and
        where each number is a product of two numbers, as for K-quants that are packed together with other schemes. In
        all other cases they are float16. Packing then finds out whether the numbers fit into float16.
        """
        if len(set(schemes)) > 1:
            schemes = [scheme.looked_up() for scheme in schemes]
        first = schemes[0]
        bits = max(scheme.bits for scheme in schemes)
        zeros = {scheme.zero if scheme.offset == "zero" else -1 for scheme in schemes}
        offset = 2 if -1 in zeros else 1 if None in zeros or len(zeros) > 1 else 0
        group = min(scheme.group for scheme in schemes)
        groups = 1 if group >= UNIT else UNIT // group
        two_levels = len(set(schemes)) == 1 and first.super_group > 0 and group <= UNIT and offset != 1
        head_units = (first.super_group if two_levels else group) // UNIT if len(set(schemes)) == 1 else 1
        wide = any(s.scale_dtype == "float32" or (s.super_group > 0 and not two_levels) for s in schemes)
        number_bytes = 1 if first.powers else 4 if wide else 2
        zero = (first.zero or 0) if offset == 0 else 0
        return cls(bits, groups, max(1, head_units), number_bytes, two_levels, offset, zero, first.table)

    @property
    def numbers(self) -> list[int]:
        """The fields as integers, in the order in which csrc/bind_ops.cpp takes them."""
        *fields, _ = astuple(self)
        return [*map(int, fields), bool(self.table), *(self.table or [0] * TABLE_CODES)]

    def numbers_of(self, rows: QuantisedRows, num_in: int) -> list[Array | None]:
        """Return the arguments of the native `fill`: codes, two arrays of floats, and two arrays of integers.

        With two levels of scales, the floats are super scales and super minimums, and the integers are scales and
        minimums. Otherwise the floats are scales and offsets, and None replaces the integers. The offsets are minimums
        if `offset` is 2, else zero points. num_in: the number of weights in a row.
        """
        rows = rows if self.table else rows.looked_up()
        codes = np.ascontiguousarray(rows.codes)
        if self.two_levels:
            factors = [None if part is None else part.float32() for part in (rows.super_scales, rows.super_minimums)]
            levels = [None if part is None else part.values for part in (rows.scales, rows.minimums)]
            return [codes, *(None if part is None else np.ascontiguousarray(part) for part in (*factors, *levels))]
        num_units = -(-num_in // UNIT)
        span, count = UNIT * self.head_units // self.groups, -(-num_units // self.head_units) * self.groups
        return [codes, *rows.numbers(span, count, "minimum" if self.offset == 2 else "zero"), None, None]


def packs(scheme: Scheme) -> bool:
    """Tell whether the kernels can read matrices of this scheme.

    The kernels read integer codes of 2 to 6 or 8 bits, in groups of 16, or in groups of a multiple of 32.
    """
    return scheme.bits in BITS and not scheme.floats and (scheme.group == UNIT // 2 or scheme.group % UNIT == 0)


def sections_of(parts: list[QuantisedMatrix], paired: bool) -> list[list[QuantisedMatrix]]:
    """Divide the parts of a packed matrix into sections; all rows of a section are packed in one format.

    Consecutive parts with one scheme form a section, if each section but the last ends at the end of a panel and the
    parts are not paired. Otherwise all parts form one section.
    """
    panel = native.extension().PANEL  # outputs that the kernels compute side by side, which are packed alike
    runs = [list(run) for _, run in itertools.groupby(parts, key=lambda part: part.scheme)]
    is_whole = all(sum(part.shape[0] for part in run) % panel == 0 for run in runs[:-1])
    return runs if is_whole and not paired else [parts]


def section_numbers(sections: list[list[QuantisedMatrix]], formats: Seq[Format]) -> list[list[int]]:
    """Encode each section as integers for csrc/bind_ops.cpp: its number of rows, then the fields of its format."""
    rows = [sum(part.shape[0] for part in section) for section in sections]
    return [[num, *format.numbers] for num, format in zip(rows, formats, strict=True)]


def distances_of(buckets: Buckets) -> list[int]:
    """Return the distances for which the kernels hold a position bias, in the kernels' order.

    A distance is counted from a row back to a key. Biases in csrc/kernels.h explains the order.
    """
    block = int(native.extension().KEY_BLOCK)
    reach = buckets.max_distance + block
    return list(range(reach, -reach - block, -1))


def source_numbers(batch: RaggedBatch, tables: list[list[int]]) -> list[int]:
    """Encode the cache rows of each run's source (the encoder's input) as integers, in the form of `run_numbers`.

    tables: the block table of each source.
    """
    numbers = [0] * (6 * len(tables))
    for b, (source, table) in enumerate(zip(batch.sources, tables, strict=True)):
        numbers[6 * b : 6 * b + 6] = (0, 0, source.num_tokens, 0, len(numbers), 0)
        numbers += table
    return numbers


def state_numbers(runs: Seq[StateRun]) -> list[int]:
    """Encode the states and rows that recurrent layers read and write as integers, for csrc/bind_model.cpp."""
    numbers = list[int]()
    for run in runs:
        numbers += (run.first, len(run.before), len(run.pending), len(run.saves), *run.before, *run.pending, *run.rows)
        numbers += itertools.chain.from_iterable(run.saves)
    return numbers


def run_numbers(batch: RaggedBatch, tables: list[list[int]]) -> list[int]:
    """Encode a batch as csrc/bindings.h takes it: six integers for each run, then block tables and parents of trees.

    The six integers are the run's first row, its number of rows, its number of cached rows, its number of pending rows
    (in the cache, not committed yet), and two indices into the result: where its block table begins, and where its
    parents begin (0 = a chain).
    """
    numbers = [0] * (6 * len(tables))
    for b, table in enumerate(tables):
        rows = batch.run(b)
        is_tree = batch.is_tree(b)
        start = len(numbers)
        at_parents = start + len(table) if is_tree else 0
        numbers[6 * b : 6 * b + 6] = (rows.start, len(rows), batch.cached[b], batch.num_pending(b), start, at_parents)
        numbers += table
        if is_tree:
            numbers += batch.parents(b)
    return numbers
