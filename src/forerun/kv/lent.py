"""A target's keys and values, lent to a drafter whose blocks keep none.

A drafter's row stands behind all tokens that its target has run, and sees them. Nothing is written: such a row poses as
the last kept row, so that a pass may read blocks that requests share. Its position is given separately (RaggedBatch),
so rotary positions belong to the token that it stands for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.errors import InternalError
from forerun.kv.cache import BlockCache
from forerun.kv.pool import HostPools, Pools
from forerun.types import CacheView, RaggedBatch


class LentCache:
    """A cache as another model reads it, block by block.

    cache: the target's. layers: for each block of the reader, the target's layer whose keys and values it reads.
    """

    states = None

    def __init__(self, cache: BlockCache, layers: Seq[int]) -> None:
        self._cache, self.shape = cache, _Shape(cache, layers)
        self.pools: Any = _LentPools(cache.pools, layers, self.shape)
        self.kinds = [_LentTables(cache, kind) for kind in range(len(cache.kinds))]

    def view(self, batch: RaggedBatch, kind: int = 0) -> CacheView:
        """Return the rows that a pass reads, and the last kept rows in place of rows to write.

        Raises InternalError for a run that is not one row posing as the last kept one.
        """
        self.kinds[kind].tables(batch)
        reads = [self._cache.rows(slot, 0, batch.end(b), kind) for b, slot in enumerate(batch.slots)]
        return CacheView(batch, np.concatenate([rows[-1:] for rows in reads]), reads)

    def through(self, pools: Any) -> LentCache:
        """Return this cache with its rows read through other pools, by block."""
        seen = copy.copy(self)
        seen.pools = pools
        return seen

    def behind(self, slots: Seq[int], tokens: Seq[int], positions: Seq[int]) -> RaggedBatch:
        """Return a pass over one row of each slot that sees all of its kept rows."""
        cached = [self._cache.length(slot) - 1 for slot in slots]
        return RaggedBatch(list(tokens), list(positions), list(range(len(slots) + 1)), list(slots), cached)


@dataclass(frozen=True)
class _Shape:
    """Which kind of the target's layers a block reads."""

    cache: BlockCache
    layers: Seq[int]

    def kind_of(self, block: int) -> int:
        return self.cache.shape.kind_of(self.layers[block])


class _LentTables:
    """The block tables of one kind of layers."""

    def __init__(self, cache: BlockCache, kind: int) -> None:
        self._cache, self._kind = cache, kind

    def tables(self, batch: RaggedBatch) -> list[list[int]]:
        """Return the block table of each run's slot. Raises InternalError for a row that is not the last kept one."""
        for b, slot in enumerate(batch.slots):
            if batch.end(b) != self._cache.length(slot) or len(batch.run(b)) != 1:
                raise InternalError(f"a reader of slot {slot} must be one row that poses as the last kept one")
        return [self._cache.kinds[self._kind].table(slot) for slot in batch.slots]


class _LentPools:
    """The pools of the target's layers, by the blocks that read them."""

    def __init__(self, pools: Pools, layers: Seq[int], shape: _Shape) -> None:
        self._pools = [pools[layer] for layer in layers]
        kinds = [shape.kind_of(block) for block in range(len(layers))]
        self.native = pools.for_native(self._pools, kinds) if isinstance(pools, HostPools) else None

    def __getitem__(self, block: int) -> Any:
        return self._pools[block]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pools)
