"""The data that native calls take: packed matrices, and the runs of a ragged batch as numbers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.ops.quantised import Scheme
from forerun.types import RaggedBatch


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A packed weight [num_out, num_in] of one or several parts.

    paired: gate and up of a gated feed-forward block, whose outputs are side by side in memory. dtype: of dense
    weights; of quantised ones the type of keys and values beside them. scheme: None = dense.
    """

    handle: Any
    num_out: int
    num_in: int
    dtype: torch.dtype
    paired: bool
    scheme: Scheme | None = None

    @property
    def nbytes(self) -> int:
        """The bytes in memory, padding of odd shapes included."""
        return int(self.handle.num_bytes)

    def unpack(self, rows: Seq[int] | None = None) -> Tensor:
        """Return rows of the weight as they were before packing, [rows, num_in]; None = all. Raises IndexError.

        Quantised weights come as float32.
        """
        chosen = range(self.num_out) if rows is None else rows
        out = torch.empty(len(chosen), self.num_in, dtype=self.dtype if self.scheme is None else torch.float32)
        for i, row in zip(chosen, out, strict=True):
            if not 0 <= i < self.num_out:
                raise IndexError(f"there is no row {i} in a matrix of {self.num_out}")
            self.handle.unpack_row(i, row.data_ptr())
        return out


def run_numbers(batch: RaggedBatch, tables: list[list[int]]) -> list[int]:
    """Return a batch as csrc/bind_ops.cpp takes it: six numbers for each run, then block tables and parents of trees.

    The six are the first row, the rows, the cached rows, the pending rows, the index at which the table begins, and the
    index at which the parents begin (0 = a chain).
    """
    numbers = [0] * (6 * len(tables))
    for b, table in enumerate(tables):
        rows, tree, start = batch.run(b), batch.tree(b), len(numbers)
        num_pending = 0 if tree is None else len(tree) - len(rows)
        at_parents = 0 if tree is None else start + len(table)
        numbers[6 * b : 6 * b + 6] = (rows.start, len(rows), batch.cached[b], num_pending, start, at_parents)
        numbers += table
        numbers += tree or ()
    return numbers
