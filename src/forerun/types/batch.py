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
    """Where the rows of an encoder-decoder's source lie: a slot of the cache, and how many rows it has there."""

    slot: int
    num_tokens: int


@dataclass(frozen=True)
class RaggedBatch:
    """One forward pass: each sequence contributes a run of new tokens, and nothing is padded.

    tokens [T] and positions [T] (lists, or int64 tensors where they never were on the host), run_starts [B+1],
    slots [B] (cache slot of each run), cached [B] (rows of the slot that every row of the run sees, in order).
    pending [B]: rows behind the cached ones that are written but not kept, which only some rows of the run see.
    ancestors [T]: for a row in a tree, the pending rows and rows of its run that it sees, itself included, as bits: bit
    j is the j-th of them. 0 = a row of a plain run, which sees all rows before it. Both lists are empty where no run is
    a tree. `words` packs them for backends that want 64 bits.
    sources [B]: of an encoder-decoder, where the source of each run lies; else empty.
    silent: runs whose logits nobody wants, as prompt chunks.
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
        """Return the rows of run b."""
        return range(self.run_starts[b], self.run_starts[b + 1])

    def is_tree(self, b: int) -> bool:
        """Return whether run b is a tree; else each row follows the one before."""
        run = self.run(b)
        return bool(self.ancestors) and len(run) > 0 and self.ancestors[run.start] != 0

    def num_pending(self, b: int) -> int:
        """Return the number of pending rows before run b."""
        return self.pending[b] if self.pending else 0

    def end(self, b: int) -> int:
        """Return how many rows run b's slot has once the run is written: cached, pending, and the run's."""
        return self.cached[b] + self.num_pending(b) + len(self.run(b))

    def seen(self, b: int) -> list[list[int]]:
        """Return, for each row of run b, the pending rows and rows of the run that it sees, ascending, itself last.

        A row comes behind its ancestors, so this is also the order of their logical positions.
        """
        if not self.is_tree(b):
            return [list(range(i + 1)) for i in range(len(self.run(b)))]
        return [bits(self.ancestors[row]) for row in self.run(b)]

    def words(self, b: int) -> tuple[int, list[int]]:
        """Return `shared`, how many leading pending and tree rows all rows of run b see, and a word for each row.

        Bit j of a word is row `shared + j`. The first row of a verified draft is the last committed token, which all
        rows see, so the words of at most 64 nodes, extra rows included, have 64 bits. A beam search may need more.
        """
        words = [self.ancestors[row] for row in self.run(b)]
        common = functools.reduce(int.__and__, words)
        shared = (common ^ (common + 1)).bit_length() - 1
        return shared, [word >> shared for word in words]

    def parents(self, b: int) -> list[int]:
        """Return the parent of each pending row and each row of run b, as an index into both; -1 = the cached rows.

        A pending row that no row of the run sees has -1.
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
    """Return, for each row of a tree, the bits of its ancestors and its own; parents [n] come before children."""
    words: list[int] = []
    for i, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << i)
    return words


@dataclass(frozen=True)
class CacheView:
    """The rows of the cache that one ragged batch reads and writes; they are the same in all layers.

    write_rows [T]: physical row of each new token. read_rows[b]: physical rows of run b's keys, the cached ones in
    logical order, then pending ones, then the run's own.
    """

    batch: RaggedBatch
    write_rows: npt.NDArray[np.int64]
    read_rows: list[npt.NDArray[np.int64]]


class Rows(Protocol):
    """Hidden rows [T, H] where a model computes: numpy's array on the host, a tensor on a device."""

    @property
    def shape(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def tolist(self) -> Any: ...
