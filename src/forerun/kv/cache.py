"""The KV cache: one class with block tables, for the paged and the contiguous backend alike.

A sequence (its *slot*) owns a table of blocks. Logical position j of a slot lives in physical row
`table[j // block_tokens] * block_tokens + j % block_tokens` of the pool. "paged" has blocks of 16 tokens,
"contiguous" one block that is as long as the longest sequence; operators see physical rows and know neither.

The length of a slot counts rows that are *kept*. A forward pass writes its run behind them (`view`), and afterwards
`keep` says which rows of the run stay: all of a prompt chunk, the accepted path of a draft. The rest is overwritten
by the next run (docs/journey.md). Half-open ranges everywhere:

    [0, length)                 kept rows, read by every run of the slot
    [length, length + n)        the run being verified, owned by the step
    [.., len(table)*block)      reserved, unused
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forerun.errors import BadOption, CapacityError, InternalError
from forerun.types import CacheView, RaggedBatch

Backend = Literal["paged", "contiguous"]
PAGED_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class CacheShape:
    """What one token costs: num_layers x 2 x num_kv_heads x head_dim numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of every sequence of one model.

    keys, values: per layer [num_blocks * block_tokens, num_kv_heads, head_dim].
    """

    def __init__(
        self, shape: CacheShape, *, block_tokens: int, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        pool = (num_blocks * block_tokens, shape.num_kv_heads, shape.head_dim)
        # Not zeroed: untouched pages cost no memory on a CPU, and nothing reads a row before it was written.
        try:
            self.keys = [torch.empty(pool, dtype=dtype, device=device) for _ in range(shape.num_layers)]
            self.values = [torch.empty(pool, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        except RuntimeError as error:  # torch's OutOfMemoryError is one, and a CPU's refusal is a plain one
            num_gb = num_blocks * block_tokens * shape.bytes_per_token(dtype) / 1e9
            raise CapacityError(
                f"there is no memory for a KV cache of {num_gb:.1f} GB on {device}: lower max_batch_size, max_seq_len "
                "or kv_cache_tokens; forerun plan says what fits"
            ) from error
        self.device = device
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

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
    ) -> KVCache:
        """A pool for `max_batch_size` sequences of `max_seq_len` tokens, or for `num_tokens` in all.

        Raises BadOption where `num_tokens` is less than one block.
        """
        block = PAGED_BLOCK_TOKENS if backend == "paged" else max_seq_len
        per_sequence = -(-max_seq_len // block)
        num_blocks = max_batch_size * per_sequence if num_tokens is None else num_tokens // block
        if num_blocks < 1:
            raise BadOption(
                f"kv_cache_tokens={num_tokens} is less than one block of {block} tokens: raise it, or lower max_seq_len"
            )
        return cls(shape, block_tokens=block, num_blocks=num_blocks, dtype=dtype, device=torch.device(device))

    # ------------------------------------------------------------------------------------------------ life of a slot

    def open(self, slot: int) -> None:
        """Begin an empty sequence."""
        if slot in self._tables:
            raise InternalError(f"cache slot {slot} is open already")
        self._tables[slot], self._lengths[slot] = [], 0

    def release(self, slot: int) -> None:
        """End a sequence and give its blocks back; unknown slots are ignored."""
        self._free.extend(reversed(self._tables.pop(slot, [])))
        self._lengths.pop(slot, None)

    def length(self, slot: int) -> int:
        """Kept tokens of the slot; 0 for a slot that is not open."""
        return self._lengths.get(slot, 0)

    def free_tokens(self) -> int:
        """Tokens that fit into blocks nobody owns."""
        return len(self._free) * self.block_tokens

    def can_reserve(self, slot: int, num_tokens: int) -> bool:
        """True where `reserve` would succeed."""
        return self._missing_blocks(slot, num_tokens) <= len(self._free)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Own blocks for `num_tokens` rows behind the kept ones.

        Raises CapacityError when the pool is exhausted; nothing is reserved then.
        """
        missing = self._missing_blocks(slot, num_tokens)
        if missing > len(self._free):
            raise CapacityError(
                f"the KV cache has {self.free_tokens()} free tokens and {missing * self.block_tokens} are needed: "
                "lower max_batch_size or max_seq_len, or raise kv_cache_tokens"
            )
        self._tables[slot] += [self._free.pop() for _ in range(missing)]

    def _missing_blocks(self, slot: int, num_tokens: int) -> int:
        blocks = -(-(self._lengths[slot] + num_tokens) // self.block_tokens)
        return max(0, blocks - len(self._tables[slot]))

    # --------------------------------------------------------------------------------------------------- one forward

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Physical rows of the logical positions start .. stop-1, int64 [stop - start]."""
        table, block = self._tables[slot], self.block_tokens
        if not table or table == list(range(table[0], table[0] + len(table))):
            base = table[0] * block if table else 0
            return torch.arange(base + start, base + stop, device=self.device)
        heads = torch.tensor(table, dtype=torch.int64)[:, None] * block
        return (heads + torch.arange(block)).flatten()[start:stop].to(self.device)

    def view(self, batch: RaggedBatch) -> CacheView:
        """Rows to write and to read for one pass. Raises InternalError where the batch and the cache disagree."""
        reads, writes = [], []
        for b, slot in enumerate(batch.slots):
            read = self.rows(slot, 0, self._end(batch, b))
            reads.append(read)
            writes.append(read[batch.cached[b] :])
        if len(writes) == 1:
            return CacheView(batch, writes[0], reads)
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        return CacheView(batch, torch.cat(writes) if writes else empty, reads)

    def tables(self, batch: RaggedBatch) -> list[list[int]]:
        """The block table of each run's slot, for operators that find the rows themselves. Raises as `view`."""
        for b in range(len(batch.slots)):
            self._end(batch, b)
        return [self._tables[slot] for slot in batch.slots]

    def _end(self, batch: RaggedBatch, b: int) -> int:
        """Logical positions of run b's slot with the run: checked against what is kept and reserved."""
        slot, cached = batch.slots[b], batch.cached[b]
        end = cached + len(batch.run(b))
        if cached != self._lengths.get(slot):
            raise InternalError(f"slot {slot} holds {self.length(slot)} tokens, the batch says {cached}")
        if end > len(self._tables[slot]) * self.block_tokens:
            raise InternalError(f"slot {slot} has no rows for {end} tokens: reserve them first")
        return end

    def keep(self, slot: int, kept: list[int]) -> None:
        """Keep these rows of the run just written (indices within the run, ascending), in order; drop the others.

        A path through a tree is copied down to consecutive rows; a source is never before its destination, so
        ascending copies are safe (Miao et al. 2023). A chain moves nothing.
        """
        start = self._lengths[slot]
        moved = [(i, j) for i, j in enumerate(kept) if i != j]
        if moved:
            run = self.rows(slot, start, start + kept[-1] + 1)
            source, target = run[[j for _, j in moved]], run[[i for i, _ in moved]]
            for pool in (*self.keys, *self.values):
                pool[target] = pool[source]
        self.truncate_to(slot, start + len(kept), written=True)

    def truncate_to(self, slot: int, length: int, *, written: bool = False) -> None:
        """Set the absolute length and free every block at index >= ceil(length / block_tokens).

        Raises InternalError for a length beyond what was written: rows up there are somebody's old numbers.
        """
        if not written and length > self._lengths[slot]:
            raise InternalError(f"slot {slot} holds {self._lengths[slot]} tokens and cannot be extended to {length}")
        self._lengths[slot] = length
        table = self._tables[slot]
        needed = -(-length // self.block_tokens)
        self._free.extend(reversed(table[needed:]))
        del table[needed:]

    def check_integrity(self) -> None:
        """Every block is free or owned once, and every table is long enough. Raises InternalError otherwise."""
        owned = [block for table in self._tables.values() for block in table]
        if sorted(owned + self._free) != list(range(self.num_blocks)):
            raise InternalError("the KV cache lost a block or owns one twice")
        for slot, length in self._lengths.items():
            if length > len(self._tables[slot]) * self.block_tokens:
                raise InternalError(f"slot {slot} is longer than its blocks")
