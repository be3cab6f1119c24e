"""A target's KV cache, lent to a drafter whose layers keep no keys and values of their own.

A token that the drafter runs comes after all tokens that its target has run, and attends to them. The drafter writes
nothing to the cache, so it may also read blocks that requests share. In the drafter's batch, each sequence has one
row, at the index of the last kept row of its slot. The position of the drafter's token is given separately
(RaggedBatch), so its rotary position is right.
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
    """Shows the target's cache to a borrowing model: a drafter whose layers read the target's keys and values.

    cache: the target's cache. layers: for each layer of the borrowing model, the index of the target's layer whose keys
    and values are read.
    """

    states = None

    def __init__(self, cache: BlockCache, layers: Seq[int]) -> None:
        self._cache, self.shape = cache, _Shape(cache, layers)
        self.pools: Any = _LentPools(cache.pools, layers, self.shape)
        self.kinds = [_LentTables(cache, kind) for kind in range(len(cache.kinds))]

    def view(self, batch: RaggedBatch, kind: int = 0) -> CacheView:
        """Return the cache rows of a pass in layers of a kind. Each run reads all kept rows of its slot.

        kind: the index of the kind in the target's cache. The row to write of a run is the last kept row of its slot.
        Raises InternalError where a run is not one row at the index of the last kept row.
        """
        self.kinds[kind].tables(batch)
        reads = [self._cache.rows(slot, 0, batch.end(b), kind) for b, slot in enumerate(batch.slots)]
        return CacheView(batch, np.concatenate([rows[-1:] for rows in reads]), reads)

    def through(self, pools: Any) -> LentCache:
        """Return a copy of this cache that reads its rows through other pools.

        pools: a pool for each layer of the borrowing model.
        """
        seen = copy.copy(self)
        seen.pools = pools
        return seen

    def behind(self, slots: Seq[int], tokens: Seq[int], positions: Seq[int]) -> RaggedBatch:
        """Return the batch of a pass with one token for each slot. Each token attends to all kept rows of its slot.

        positions: the rotary position of each token.
        """
        cached = [self._cache.length(slot) - 1 for slot in slots]
        return RaggedBatch(list(tokens), list(positions), list(range(len(slots) + 1)), list(slots), cached)


@dataclass(frozen=True)
class _Shape:
    """Maps each layer of the borrowing model to the kind of the target's layer that it reads.

    layers: for each layer of the borrowing model, the index of the target's layer whose keys and values are read.
    """

    cache: BlockCache
    layers: Seq[int]

    def kind_of(self, block: int) -> int:
        return self.cache.shape.kind_of(self.layers[block])


class _LentTables:
    """The block tables of the target's layers of one kind, for batches of the borrowing model."""

    def __init__(self, cache: BlockCache, kind: int) -> None:
        self._cache, self._kind = cache, kind

    def tables(self, batch: RaggedBatch) -> list[list[int]]:
        """Return the block table of each run's slot.

        Raises InternalError where a run is not one row at the index of the last kept row.
        """
        for b, slot in enumerate(batch.slots):
            if batch.end(b) != self._cache.length(slot) or len(batch.run(b)) != 1:
                raise InternalError(f"a reader of slot {slot} must be one row that poses as the last kept one")
        return [self._cache.kinds[self._kind].table(slot) for slot in batch.slots]


class _LentPools:
    """The target's pools as the borrowing model sees them: pools[i] belongs to the target layer that layer i reads."""

    def __init__(self, pools: Pools, layers: Seq[int], shape: _Shape) -> None:
        self._pools = [pools[layer] for layer in layers]
        kinds = [shape.kind_of(block) for block in range(len(layers))]
        self.native = pools.for_native(self._pools, kinds) if isinstance(pools, HostPools) else None

    def __getitem__(self, block: int) -> Any:
        return self._pools[block]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pools)
