"""The rows of one forward pass, and where they lie in the cache."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Source(NamedTuple):
    """The cache slot of a sequence's encoder input (encoder-decoder models), and the number of tokens in this input."""

    slot: int
    num_tokens: int


@dataclass(frozen=True)
class RaggedBatch:
    """One forward pass: each sequence contributes a run of new tokens, and nothing is padded.

    tokens [T], positions [T]: lists, or int64 tensors where the values were never on the host. run_starts [B+1]: the
    first row of each run, then T. slots [B]: the cache slot of each run. cached [B]: for each run, the number of cache
    rows in its slot that all rows of the run see.
    pending [B]: for each run, the number of rows after the `cached` rows that are written but not committed yet. Only
    some rows of the run see such pending rows.
    ancestors [T]: for each row of a tree, the pending rows and the rows of its run that it sees, as bits. Bit j stands
    for the j-th of these rows, counted from the first pending row on. A row sees itself. 0 = a row of a plain run,
    which sees all rows before it. `pending` and `ancestors` are empty where no run is a tree. `words` packs the bits
    for backends that read 64 bits per row.
    sources [B]: the slot and size of each run's encoder input, for an encoder-decoder; else empty.
    silent: the indices of the runs for which no logits are wanted, such as prompt chunks.
    """

    tokens: list[int] | Rows
    positions: list[int] | Rows
    run_starts: list[int]
    slots: list[int]
    cached: list[int]
    pending: Seq[int] = ()
    ancestors: Seq[int] = ()
    sources: Seq[Source] = ()
    silent: frozenset[int] = frozenset()

    def ids(self) -> tuple[list[int], list[int]]:
        """Return tokens and positions as lists on the host."""
        tokens, positions = (ids if isinstance(ids, list) else ids.tolist() for ids in (self.tokens, self.positions))
        return tokens, positions

    def run(self, b: int) -> range:
        """Return the indices of run b's rows in the batch."""
        return range(self.run_starts[b], self.run_starts[b + 1])

    def is_tree(self, b: int) -> bool:
        """Return whether run b is a tree; in any other run each row follows the row before it."""
        run = self.run(b)
        return bool(self.ancestors) and len(run) > 0 and self.ancestors[run.start] != 0

    def num_pending(self, b: int) -> int:
        """Return the number of pending rows (written, not committed yet) before run b."""
        return self.pending[b] if self.pending else 0

    def end(self, b: int) -> int:
        """Return the number of rows in run b's slot once the run is written: cached, pending and the run's own rows."""
        return self.cached[b] + self.num_pending(b) + len(self.run(b))

    def seen(self, b: int) -> list[list[int]]:
        """Return the rows that each row of run b sees, as ascending indices. The row itself comes last.

        The indices count the pending rows first and then the run's rows; cached rows, which all rows see, are left out.
        Each row comes after its ancestors, so this is also the order of the logical positions.
        """
        if not self.is_tree(b):
            return [list(range(i + 1)) for i in range(len(self.run(b)))]
        return [bits(self.ancestors[row]) for row in self.run(b)]

    def words(self, b: int) -> tuple[int, list[int]]:
        """Return `shared`, the number of leading rows that all rows of run b see, and each row's ancestors as bits.

        The pending rows come first, then the rows of the tree. Bit j of a word stands for row `shared + j`. The first
        row of a verified draft is the last committed token, which all rows see. So 64 bits are enough for a draft of at
        most 64 nodes, extra rows included. A beam search may need more.
        """
        words = [self.ancestors[row] for row in self.run(b)]
        common = functools.reduce(int.__and__, words)
        shared = (common ^ (common + 1)).bit_length() - 1
        return shared, [word >> shared for word in words]

    def parents(self, b: int) -> list[int]:
        """Return the parent of each pending row of run b, then of each row of the run; -1 = the cached rows.

        A parent is an index that counts the pending rows first and then the run's rows. A pending row that no row of
        the run sees has the parent -1.
        """
        num_pending = self.num_pending(b)
        parents = [-1] * (num_pending + len(self.run(b)))
        for path in self.seen(b):
            for parent, child in itertools.pairwise(path):
                parents[child] = parent
        return parents

    def visible(self, b: int, i: int) -> list[int]:
        """Return the rows that row i of run b attends to, as indices into CacheView.read_rows[b].

        They are the cached rows, then the row's ancestors, then the row itself.
        """
        cached = self.cached[b]
        if not self.is_tree(b):
            return list(range(cached + i + 1))
        return [*range(cached), *(cached + j for j in bits(self.ancestors[self.run_starts[b] + i]))]


def bits(word: int) -> list[int]:
    """Return the indices of the set bits, ascending."""
    places = []
    while word:
        lowest = word & -word
        places.append(lowest.bit_length() - 1)
        word ^= lowest
    return places


def ancestor_words(parents: Seq[int]) -> list[int]:
    """Return a word for each row of a tree, with the bits of the row's ancestors and the bit of the row itself.

    parents [n]: the parent of each row, which comes before the row; -1 = no parent.
    """
    words: list[int] = []
    for i, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << i)
    return words


@dataclass(frozen=True)
class CacheView:
    """The rows of the cache that one ragged batch reads and writes; they are the same in all layers.

    write_rows [T]: the physical row of each new token. read_rows[b]: the physical rows of run b's keys: the cached rows
    in logical order, then the pending rows, then the run's own rows.
    """

    batch: RaggedBatch
    write_rows: npt.NDArray[np.int64]
    read_rows: list[npt.NDArray[np.int64]]


class Rows(Protocol):
    """Hidden states [T, H] or token ids [T]: an array on the host or a tensor on the device that computes the model."""

    @property
    def shape(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def tolist(self) -> Any: ...
