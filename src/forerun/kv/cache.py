"""The KV cache of the models in models/: block tables on the host, and a pool of rows for each layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from forerun.blocks import CacheShape as CacheShape
from forerun.errors import BadOption
from forerun.kv.pool import Pool as Pool, Pools
from forerun.kv.tables import BlockTables
from forerun.types import CacheView, RaggedBatch

Backend = Literal["paged", "contiguous"]
PAGED_BLOCK_TOKENS = 16


class BlockCache(BlockTables):
    """The keys and values of every sequence of one model, in blocks; for the paged and the contiguous backend alike.

    pools: the rows of each layer, see kv/pool.py.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        block_tokens: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        prefix_caching: bool = True,
    ) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.pools = Pools(shape, block_tokens, num_blocks, dtype, device)
        super().__init__(block_tokens, num_blocks, self.pools.copy, prefix_caching=prefix_caching)

    @classmethod
    def create(
        cls,
        shape: CacheShape,
        backend: Backend,
        *,
        max_batch_size: int,
        max_seq_len: int,
        num_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix_caching: bool = True,
    ) -> BlockCache:
        """Allocate a pool for `max_batch_size` sequences of `max_seq_len` tokens, or for `num_tokens` in all.

        Raises BadOption where `num_tokens` is less than one block, CapacityError where there is no memory.
        """
        block = PAGED_BLOCK_TOKENS if backend == "paged" else max_seq_len
        per_sequence = -(-max_seq_len // block)
        num_blocks = max_batch_size * per_sequence if num_tokens is None else num_tokens // block
        if num_blocks < 1:
            raise BadOption(
                f"kv_cache_tokens={num_tokens} is less than one block of {block} tokens: raise it, or lower max_seq_len"
            )
        return cls(
            shape,
            block_tokens=block,
            num_blocks=num_blocks,
            dtype=dtype,
            device=torch.device(device),
            prefix_caching=prefix_caching,
        )

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Return the physical rows of the logical positions start .. stop-1, int64 [stop - start]."""
        table, block = self.table(slot), self.block_tokens
        if not table or table == list(range(table[0], table[0] + len(table))):
            base = table[0] * block if table else 0
            return torch.arange(base + start, base + stop, device=self.device)
        heads = torch.tensor(table, dtype=torch.int64)[:, None] * block
        return (heads + torch.arange(block)).flatten()[start:stop].to(self.device)

    def view(self, batch: RaggedBatch) -> CacheView:
        """Return the rows that one pass writes and reads. Raises InternalError where batch and cache disagree."""
        reads, writes = [], []
        self.tables(batch)
        for b, slot in enumerate(batch.slots):
            read = self.rows(slot, 0, batch.end(b))
            reads.append(read)
            writes.append(read[len(read) - len(batch.run(b)) :])
        if len(writes) == 1:
            return CacheView(batch, writes[0], reads)
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        return CacheView(batch, torch.cat(writes) if writes else empty, reads)
