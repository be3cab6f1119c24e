"""What goes through the native door: packed matrices, and the runs of a ragged batch as numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.types import RaggedBatch


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A packed weight [num_out, num_in] of one or several parts.

    paired: gate and up of a gated feed-forward block, whose outputs are side by side in memory.
    """

    handle: Any
    num_out: int
    num_in: int
    dtype: torch.dtype
    paired: bool

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding of odd shapes included."""
        return int(self.handle.num_bytes)

    def unpack(self) -> Tensor:
        """The rows as they were, [num_out, num_in]."""
        out = torch.empty(self.num_out, self.num_in, dtype=self.dtype)
        for i, row in enumerate(out):
            self.handle.unpack_row(i, row.data_ptr())
        return out


def run_numbers(batch: RaggedBatch, tables: list[list[int]]) -> list[int]:
    """What csrc/bind_ops.cpp wants: (first row, rows, cached, where the table begins) for each run, then the tables."""
    numbers: list[int] = []
    start = 4 * len(tables)
    for table, (first, end), cached in zip(tables, itertools.pairwise(batch.run_starts), batch.cached, strict=True):
        numbers += (first, end - first, cached, start)
        start += len(table)
    numbers += itertools.chain.from_iterable(tables)
    return numbers
