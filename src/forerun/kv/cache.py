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

Sequences that begin with the same tokens share blocks (kv/prefix.py). `publish` lets others find the full blocks of
committed tokens, `open` finds them. Each block is in one of three states: free (nobody's and not findable), evictable
(findable, used by no slot) or referenced by one slot or several. Only a block with one reference that is not
published is written to, which `view` and `keep` assert. Two cases look as if they could break that:

*A slot is cut inside of a published block.* `truncate_to` leaves the block as it is, for its rows are still right and
others may be reading them. Whoever wants to write behind the cut reserves first, and `reserve` makes the block
private: it withdraws it where this slot is its only user, else copies the kept rows into a new block. So a cut never
needs memory and cannot fail, and a slot that is cut again or released copies nothing.

*Two slots computed the same block.* The first to publish it is found; the other's stays private, and what the other
publishes later follows the first one's node. When the first one's block is evicted, those later blocks can no longer be
found, though their slot still uses them. That costs hits and nothing else: they are evictable when their slot ends.
Apart from these, a slot that uses a block uses all blocks before it, so they are not evictable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Literal

import torch
from torch import Tensor

from forerun.errors import BadOption, CapacityError, InternalError
from forerun.kv.pools import CacheShape, make_pools
from forerun.kv.prefix import Path, PrefixIndex
from forerun.kv.slots import Room, Slot
from forerun.types import CacheView, RaggedBatch

Backend = Literal["paged", "contiguous"]
PAGED_BLOCK_TOKENS = 16


class KVCache:
    """Keys and values of every sequence of one model.

    keys, values: per layer [num_blocks * block_tokens, num_kv_heads, head_dim]. prefix_caching: whether sequences
    share blocks. prefix_queries_tokens, prefix_hit_tokens: tokens that `open` was asked for and found, in all so far.
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
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.device = device
        self.keys, self.values = make_pools(shape, num_blocks * block_tokens, dtype, device)
        self.prefix_caching = prefix_caching
        self.prefix_queries_tokens = 0
        self.prefix_hit_tokens = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_users = [0] * num_blocks  # slots that have the block in their table
        self._slots: dict[int, Slot] = {}
        self._prefixes = PrefixIndex(block_tokens)

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
        return cls(
            shape,
            block_tokens=block,
            num_blocks=num_blocks,
            dtype=dtype,
            device=torch.device(device),
            prefix_caching=prefix_caching,
        )

    # ------------------------------------------------------------------------------------------------ life of a slot

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        """Begin a sequence with what is published of `tokens`, at most all but the last; returns how many those are.

        tokens: the committed ones, from the beginning. Only blocks that were published under the same salt count.
        """
        if slot in self._slots:
            raise InternalError(f"cache slot {slot} is open already")
        path = self._prefixes.find(tokens, salt) if self.prefix_caching else Path(salt)
        table = [node.block for node in path.nodes]
        for block in table:
            self._prefixes.wake(block)
            self._num_users[block] += 1
        found = len(table) * self.block_tokens
        self._slots[slot] = Slot(table, path, found)
        if self.prefix_caching:
            self.prefix_queries_tokens += len(tokens)
            self.prefix_hit_tokens += found
        return found

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Let others find the slot's full blocks; without cost where there are no more than before (see `keep`).

        tokens: the committed ones, from the beginning. The kept rows below len(tokens) must be theirs: a draft's cache
        is cut to what was accepted before, rows behind the last committed token may be anything. Raises InternalError
        for a slot that is not open.
        """
        own = self._slots.get(slot)
        if own is None:
            raise InternalError(f"cache slot {slot} is not open, so it has nothing to publish")
        num_full = min(own.length, len(tokens)) // self.block_tokens
        if self.prefix_caching and num_full > len(own.path.nodes):
            self._prefixes.extend(own.path, tokens, own.table[:num_full])

    def release(self, slot: int) -> None:
        """End a sequence and give its blocks back; unknown slots are ignored.

        Blocks are given back deepest first, so that the tail of a sequence is evicted before what it follows.
        """
        own = self._slots.pop(slot, None)
        if own is None:
            return
        table, nodes = own.table, own.path.nodes
        for i in range(len(table) - 1, -1, -1):
            self._drop(table[i])
            if i < len(nodes) and nodes[i].block != table[i]:
                self._prefixes.touch(nodes[i])

    def clear_prefixes(self) -> None:
        """Free every published block that no slot uses: what follows finds nothing but what is in use."""
        while self._prefixes.num_evictable:
            self._free.append(self._prefixes.evict())
        self._free.sort(reverse=True)  # handed out from block 0 on, as by a new pool

    def length(self, slot: int) -> int:
        """Kept tokens of the slot; 0 for a slot that is not open."""
        own = self._slots.get(slot)
        return 0 if own is None else own.length

    def free_tokens(self) -> int:
        """Tokens that fit into blocks no slot uses, evictable ones included."""
        return self._num_available() * self.block_tokens

    def room(self, slot: int) -> Room:
        """What an open slot holds and may still take, read at once. Raises KeyError for one that is not open."""
        own = self._slots[slot]
        length, num_own = own.length, len(own.table)
        copies = own.may_be_cut and self._num_copies(own)
        slack = (num_own - copies) * self.block_tokens - length
        return Room(length, slack, 0 if slack > 0 else length // self.block_tokens + 1 - num_own + copies)

    def missing_blocks(self, slot: int, num_tokens: int) -> int:
        """Blocks that `reserve` would take from the pool: for new rows, and for a copy of a shared last one."""
        if not num_tokens:
            return 0
        own = self._slots[slot]
        blocks = -(-(own.length + num_tokens) // self.block_tokens) - len(own.table)
        return (blocks if blocks > 0 else 0) + self._num_copies(own)

    def can_reserve(self, slot: int, num_tokens: int) -> bool:
        """True where `reserve` would succeed."""
        return self.missing_blocks(slot, num_tokens) <= self._num_available()

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Own blocks for `num_tokens` rows behind the kept ones, free ones first, then the longest unused.

        Raises CapacityError when the pool is exhausted; nothing is reserved then.
        """
        own = self._slots[slot]
        cut = self._cut_block(own) if own.may_be_cut else None
        own.may_be_cut = cut is not None
        if cut is None and own.length + num_tokens <= len(own.table) * self.block_tokens:
            return  # as in most steps
        missing = self.missing_blocks(slot, num_tokens)
        if missing > self._num_available():
            raise CapacityError(
                f"the KV cache has {self.free_tokens()} free tokens and {missing * self.block_tokens} are needed: "
                "lower max_batch_size or max_seq_len, or raise kv_cache_tokens"
            )
        if num_tokens and cut is not None:
            missing -= self._make_private(own, cut)
        own.table += [self._take() for _ in range(missing)]

    def _num_available(self) -> int:
        return len(self._free) + self._prefixes.num_evictable

    def _cut_block(self, own: Slot) -> int | None:
        """The published block inside of which the slot was cut, if it was."""
        if not own.may_be_cut:
            return None
        i, inside = divmod(own.length, self.block_tokens)
        if not inside:
            return None
        block = own.table[i]
        return block if self._prefixes.holds(block) else None

    def _num_copies(self, own: Slot) -> bool:
        """Whether the slot has to copy its last block before it may write: 0 or 1 blocks."""
        block = self._cut_block(own)
        return block is not None and self._num_users[block] > 1

    def _make_private(self, own: Slot, block: int) -> bool:
        """Withdraw a block inside of which the slot was cut, or put a copy of its kept rows in its place if shared.

        Returns whether a block was taken for the copy.
        """
        own.may_be_cut = False
        if self._num_users[block] == 1:
            self._prefixes.remove(block)
            return False
        i, inside = divmod(own.length, self.block_tokens)
        copy = own.table[i] = self._take()
        source, target = block * self.block_tokens, copy * self.block_tokens
        for pool in (*self.keys, *self.values):
            pool[target : target + inside] = pool[source : source + inside]
        self._drop(block)
        return True

    def _take(self) -> int:
        """A block of one's own."""
        block = self._free.pop() if self._free else self._prefixes.evict()
        self._num_users[block] = 1
        return block

    def _drop(self, block: int) -> None:
        """One user less; without any, a published block is evictable and another one free."""
        self._num_users[block] -= 1
        if self._num_users[block] == 0 and not self._prefixes.rest(block):
            self._free.append(block)

    # --------------------------------------------------------------------------------------------------- one forward

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Physical rows of the logical positions start .. stop-1, int64 [stop - start]."""
        table, block = self._slots[slot].table, self.block_tokens
        if not table or table == list(range(table[0], table[0] + len(table))):
            base = table[0] * block if table else 0
            return torch.arange(base + start, base + stop, device=self.device)
        heads = torch.tensor(table, dtype=torch.int64)[:, None] * block
        return (heads + torch.arange(block)).flatten()[start:stop].to(self.device)

    def view(self, batch: RaggedBatch) -> CacheView:
        """Rows to write and to read for one pass. Raises InternalError where the batch and the cache disagree."""
        reads, writes = [], []
        for b, slot in enumerate(batch.slots):
            cached = batch.cached[b]
            end = cached + batch.run_starts[b + 1] - batch.run_starts[b]
            self._checked(slot, cached, end)
            read = self.rows(slot, 0, end)
            reads.append(read)
            writes.append(read[cached:])
        if len(writes) == 1:
            return CacheView(batch, writes[0], reads)
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        return CacheView(batch, torch.cat(writes) if writes else empty, reads)

    def tables(self, batch: RaggedBatch) -> list[list[int]]:
        """The block table of each run's slot, for operators that find the rows themselves. Raises as `view`."""
        starts = batch.run_starts
        return [
            self._checked(slot, cached, cached + starts[b + 1] - starts[b]).table
            for b, (slot, cached) in enumerate(zip(batch.slots, batch.cached, strict=True))
        ]

    def _checked(self, slot: int, cached: int, end: int) -> Slot:
        """A slot that a run of positions cached .. end-1 may be written to: as long as that, reserved, private."""
        own = self._slots.get(slot)
        if own is None or cached != own.length:
            raise InternalError(f"slot {slot} holds {self.length(slot)} tokens, the batch says {cached}")
        if end > len(own.table) * self.block_tokens:
            raise InternalError(f"slot {slot} has no rows for {end} tokens: reserve them first")
        self._check_private(slot, own.table, cached, end)
        return own

    def _check_private(self, slot: int, table: list[int], start: int, end: int) -> None:
        """Positions start .. end-1 of the slot may be written: nobody else reads their blocks, now or later."""
        size = self.block_tokens
        for block in table[start // size : -(-end // size)]:
            if self._num_users[block] != 1 or self._prefixes.holds(block):
                raise InternalError(f"slot {slot} would write into block {block}, which is published: reserve first")

    def keep(self, slot: int, kept: list[int]) -> bool:
        """Keep these rows of the run just written (indices within the run, ascending), in order; drop the others.

        Returns whether a block has become full, which can be published when all that is kept is committed.

        A path through a tree is copied down to consecutive rows; a source is never before its destination, so
        ascending copies are safe (Miao et al. 2023). A chain moves nothing.
        """
        own = self._slots[slot]
        start = own.length
        if kept and kept[-1] >= len(kept):
            moved = [(i, j) for i, j in enumerate(kept) if i != j]
            self._check_private(slot, own.table, start, start + kept[-1] + 1)
            run = self.rows(slot, start, start + kept[-1] + 1)
            source, target = run[[j for _, j in moved]], run[[i for i, _ in moved]]
            for pool in (*self.keys, *self.values):
                pool[target] = pool[source]
        self._set_length(own, start + len(kept))  # which is never below what is published
        return own.length // self.block_tokens > start // self.block_tokens

    def truncate_to(self, slot: int, length: int) -> None:
        """Set the absolute length and give back every block at index >= ceil(length / block_tokens).

        Raises InternalError for a length beyond what was written: rows up there are somebody's old numbers.
        """
        own = self._slots[slot]
        if length > own.length:
            raise InternalError(f"slot {slot} holds {own.length} tokens and cannot be extended to {length}")
        self._set_length(own, length)
        if len(own.path.nodes) * self.block_tokens > length:
            del own.path.nodes[length // self.block_tokens :]
            own.may_be_cut = True

    def _set_length(self, own: Slot, length: int) -> None:
        own.length = length
        needed = -(-length // self.block_tokens)
        if needed < len(own.table):
            for block in reversed(own.table[needed:]):
                self._drop(block)
            del own.table[needed:]

    # ------------------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Every promise about blocks, in time proportional to the pool. Raises InternalError where one is broken.

        A block is free, evictable or used, and used as often as the tables say; what is shared is published; what is
        published is in the index as what it holds; tables are long enough.
        """
        users = Counter(block for own in self._slots.values() for block in own.table)
        if sorted([*users, *self._free, *self._prefixes.evictable()]) != list(range(self.num_blocks)):
            raise InternalError("the KV cache lost a block or owns one twice")
        if any(users[block] != num for block, num in enumerate(self._num_users)):
            raise InternalError("the KV cache counts other users of a block than the tables name")
        self._prefixes.check_integrity()
        for block in self._free:
            if self._prefixes.holds(block):
                raise InternalError(f"block {block} of the KV cache is free and published")
        for block, num in users.items():
            if num > 1 and not self._prefixes.holds(block):
                raise InternalError(f"block {block} of the KV cache is shared and was not published")
        for slot, own in self._slots.items():
            self._check_slot(slot, own)

    def _check_slot(self, slot: int, own: Slot) -> None:
        length, table, path = own.length, own.table, own.path
        if length > len(table) * self.block_tokens:
            raise InternalError(f"slot {slot} is longer than its blocks")
        if len(set(table)) < len(table):
            raise InternalError(f"slot {slot} has a block twice")
        if len(path.nodes) * self.block_tokens > length:
            raise InternalError(f"slot {slot} published more blocks than it filled")
        self._prefixes.check_path(path, table)
        # Only the block that the slot was cut inside of may be published beyond the path.
        for block in table[len(path.nodes) :]:
            if self._prefixes.holds(block) and block != self._cut_block(own):
                raise InternalError(f"slot {slot} uses the published block {block} as a private one")
