"""The rows of one pass of the CUDA backend: for each row, the cache row to write and the cache rows of its keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.types import CacheView, RaggedBatch, bits

GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows of captured passes; other passes are padded to the next
PER_ROW = 6  # numbers for each row: id, position, cache row to write, keys that it sees, keys in its table, its run
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Layout:
    """The sizes of the array that describes a pass; see Rows for the parts of the array.

    rows, runs: the numbers of rows (new tokens) and of runs (sequences). tail: the number of entries in each row's
    tail, which lists cache rows one by one (see Rows). blocks: the number of blocks in each run's table.
    """

    rows: int
    tail: int
    runs: int
    blocks: int

    @property
    def size(self) -> int:
        """The length of the array."""
        return self.rows * (PER_ROW + self.tail) + self.runs * self.blocks


NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Rows(CacheView):
    """The plan of a pass on the device: parts of one int32 array, `numbers`.

    ids, positions, writes, lengths, seen and runs are [T], tails [T, tail], and tables [runs, blocks]. The keys and
    values of row t are written to cache row writes[t]; -1 = they are not written. The row sees lengths[t] keys in the
    order of their logical positions. The first seen[t] of these keys lie where the block table of run runs[t] says, and
    the others in the cache rows tails[t]. num_keys: the largest number of keys that a row may see.
    """

    numbers: Tensor
    layout: Layout
    block_tokens: int
    num_keys: int

    def __post_init__(self) -> None:
        n = self.layout.rows
        parts = [self.numbers[i * n : (i + 1) * n] for i in range(PER_ROW)]
        tails_end = n * (PER_ROW + self.layout.tail)
        tails = self.numbers[n * PER_ROW : tails_end].view(n, self.layout.tail)
        tables = self.numbers[tails_end : self.layout.size].view(self.layout.runs, self.layout.blocks)
        names = ("ids", "positions", "writes", "lengths", "seen", "runs", "tails", "tables")
        for name, part in zip(names, (*parts, tails, tables), strict=True):
            object.__setattr__(self, name, part)

    ids: Tensor = None  # type: ignore[assignment]
    positions: Tensor = None  # type: ignore[assignment]
    writes: Tensor = None  # type: ignore[assignment]
    lengths: Tensor = None  # type: ignore[assignment]
    seen: Tensor = None  # type: ignore[assignment]
    runs: Tensor = None  # type: ignore[assignment]
    tails: Tensor = None  # type: ignore[assignment]
    tables: Tensor = None  # type: ignore[assignment]

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return rows `start` to `stop` - 1 of `lengths`, `seen`, `runs`, `tails` and `positions`."""
        tensors = self.lengths, self.seen, self.runs, self.tails, self.positions
        return tuple(part[start:stop] for part in tensors)  # type: ignore[return-value]


def layout_of(batch: RaggedBatch, tables: Seq[Seq[int]]) -> Layout:
    """Return the smallest layout that holds a pass."""
    tail = max((batch.ancestors[row].bit_count() for row in _tree_rows(batch)), default=0)
    blocks = max((len(table) for table in tables), default=0)
    return Layout(batch.run_starts[-1], max(tail, 1), max(len(batch.slots), 1), max(blocks, 1))


def _tree_rows(batch: RaggedBatch) -> Iterable[int]:
    return (row for b in range(len(batch.slots)) if batch.is_tree(b) for row in batch.run(b))


def fill(
    numbers: Ints,
    layout: Layout,
    batch: RaggedBatch,
    tables: Seq[Seq[int]],
    block_tokens: int,
    *,
    sees_all: bool = False,
) -> int:
    """Write the plan of a pass (Rows) into `numbers`. Returns the largest number of keys that a row sees.

    layout: a layout that holds the pass. Rows of padding see no keys, and are not written to the cache. sees_all:
    whether a row also sees the rows after it in its run. If so, the run must be a chain.
    """
    n, num = layout.rows, batch.run_starts[-1]
    by_row = numbers[: n * PER_ROW].reshape(PER_ROW, n)
    by_row[:, num:] = 0
    by_row[2, num:] = -1
    by_row[0, :num], by_row[1, :num] = batch.ids()
    tails = numbers[n * PER_ROW : n * (PER_ROW + layout.tail)].reshape(n, layout.tail)
    room = numbers[n * (PER_ROW + layout.tail) : layout.size].reshape(layout.runs, layout.blocks)
    most = 0
    for b, blocks in enumerate(tables):
        table = np.array(blocks, dtype=np.int32)
        room[b, : len(table)] = table
        rows = batch.run(b)
        end = batch.end(b)
        cached = batch.cached[b]
        start, stop = rows.start, rows.stop
        # The run's rows, as indices into the slot, in logical order.
        own = np.arange(end - len(rows), end, dtype=np.int32)
        by_row[2, start:stop] = table[own // block_tokens] * block_tokens + own % block_tokens
        by_row[5, start:stop] = b
        most = max(most, end)
        if not batch.is_tree(b):
            by_row[3, start:stop] = by_row[4, start:stop] = end if sees_all else own + 1
            continue
        behind = np.arange(cached, end, dtype=np.int32)
        places = table[behind // block_tokens] * block_tokens + behind % block_tokens
        for row in rows:
            seen = bits(batch.ancestors[row])
            by_row[3, row], by_row[4, row] = cached + len(seen), cached
            tails[row, : len(seen)] = places[seen]
    return most


def fill_alike(numbers: Ints, layout: Layout, batch: RaggedBatch, tables: Seq[Seq[int]], lengths: Seq[int]) -> int:
    """Fill `numbers` with the plan (Rows) of a pass that writes no keys, and return the most keys that a row sees.

    A run is the rows of one sequence in the pass. Each row of run b sees lengths[b] keys, in the blocks tables[b].
    layout: a layout that holds the pass.
    """
    n, num = layout.rows, batch.run_starts[-1]
    by_row = numbers[: n * PER_ROW].reshape(PER_ROW, n)
    by_row[:, num:] = 0
    by_row[0, :num], by_row[1, :num] = batch.ids()
    by_row[2] = -1
    room = numbers[n * (PER_ROW + layout.tail) : layout.size].reshape(layout.runs, layout.blocks)
    for b, (blocks, length) in enumerate(zip(tables, lengths, strict=True)):
        room[b, : len(blocks)] = blocks
        rows = batch.run(b)
        by_row[3:5, rows.start : rows.stop] = length
        by_row[5, rows.start : rows.stop] = b
    return max(lengths, default=0)


def layout_alike(batch: RaggedBatch, tables: Seq[Seq[int]]) -> Layout:
    """Return the smallest layout with which `fill_alike` can describe a pass."""
    return Layout(batch.run_starts[-1], 1, max(len(batch.slots), 1), max(map(len, tables), default=1))


def rows_alike(
    batch: RaggedBatch, tables: Seq[Seq[int]], block_tokens: int, lengths: Seq[int], device: torch.device
) -> Rows:
    """Return the plan of a pass in which each row of run b sees lengths[b] keys, in the blocks tables[b]."""
    layout = layout_alike(batch, tables)
    numbers = np.zeros(layout.size, dtype=np.int32)
    most = fill_alike(numbers, layout, batch, tables, lengths)
    return Rows(batch, NO_ROWS, [], torch.from_numpy(numbers).to(device), layout, block_tokens, most)


def rows_of_themselves(batch: RaggedBatch, device: torch.device) -> Rows:
    """Return the plan of an encoder's pass, which uses no cache. Each row sees all rows of its run."""
    runs = [batch.run(b) for b in range(len(batch.slots))]
    return rows_alike(batch, runs, 1, [len(run) for run in runs], device)


def rows_of(
    batch: RaggedBatch,
    tables: Seq[Seq[int]],
    block_tokens: int,
    device: torch.device,
    view: CacheView | None = None,
    *,
    sees_all: bool = False,
) -> Rows:
    """Return the plan of a pass on a device. sees_all: see `fill`."""
    layout = layout_of(batch, tables)
    numbers = np.zeros(layout.size, dtype=np.int32)
    most = fill(numbers, layout, batch, tables, block_tokens, sees_all=sees_all)
    writes, reads = (NO_ROWS, []) if view is None else (view.write_rows, view.read_rows)
    return Rows(batch, writes, reads, torch.from_numpy(numbers).to(device), layout, block_tokens, most)


def rows_of_view(view: CacheView, device: torch.device) -> Rows:
    """Return the plan of a pass on a device, made from a view that lists cache rows one by one."""
    if isinstance(view, Rows):
        return view
    return rows_of(view.batch, [rows.tolist() for rows in view.read_rows], 1, device, view)
