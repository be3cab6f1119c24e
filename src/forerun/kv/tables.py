"""The block tables of a KV cache: which physical rows hold which tokens. All of it is on the host, without tensors.

A slot owns a table of blocks. Logical position j of it lives in physical row
`table[j // block_tokens] * block_tokens + j % block_tokens` of a pool (kv/pool.py). "paged" has blocks of 16 tokens,
"contiguous" one block that is as long as the longest sequence; operators see physical rows and know neither.

Half-open ranges everywhere, of a slot with `length` kept and p pending rows:

    [0, length)                     kept rows, read by every run of the slot
    [length, length + p)            pending rows: nodes of a tree, read by their descendants
    [length + p, length + p + n)    the run being verified, owned by the step
    [.., len(table)*block)          reserved, unused

Sequences that begin with the same tokens share blocks (kv/prefix.py). `publish` lets others find the full blocks of
committed tokens, `open` finds them, and `fork` shares those of one slot with another. Each block is in one of three
states: free (used by no slot and not findable), evictable (findable, used by no slot) or referenced by one slot or
several. Only a block with one reference that is not published is written to, which `view` and `keep` assert. Two cases
look as if they could break that:

*A slot is cut inside a block that is published or shared.* `truncate_to` leaves the block as it is: its rows are still
right, and other slots may be reading them. A slot must call `reserve` before it writes behind the cut, and `reserve`
makes the block private: it withdraws the block where this slot is its only user, else it copies the kept rows into a
new block. So a cut never needs memory and cannot fail, and a slot that is cut again or released copies nothing.

*Two slots computed the same block.* Later sequences find the block that was published first. The other block stays
private, and what its slot publishes later follows the first block's node. When the first block is evicted, those later
blocks can no longer be found, though their slot still uses them. That only loses prefix hits: they become evictable
when their slot ends. In all other cases a slot that uses a block also uses all blocks before it, so none of those is
evictable.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field

from forerun.errors import CapacityError, InternalError
from forerun.kv import Held, Room
from forerun.kv.prefix import Path, PrefixIndex
from forerun.types import RaggedBatch

_NONE_HELD: Mapping[int, Held] = {}


@dataclass(slots=True)
class _Slot:
    """One sequence: its blocks, those of them that are published, its kept length, and the parents of pending rows."""

    table: list[int]
    path: Path
    length: int
    pending: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The logical position at which the next run is written."""
        return self.length + len(self.pending)


class BlockTables:
    """The blocks of every sequence of one model, shared where sequences begin alike.

    copy: copies physical rows, sources [n] to targets [n], one after the other, in all that the tables are of.
    prefix_caching: whether sequences share blocks. prefix_queries_tokens, prefix_hit_tokens: totals of the tokens that
    `open` was asked for and of those it found.
    """

    def __init__(
        self,
        block_tokens: int,
        num_blocks: int,
        copy: Callable[[list[int], list[int]], None],
        *,
        prefix_caching: bool = True,
    ) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self.prefix_queries_tokens = 0
        self.prefix_hit_tokens = 0
        self._copy = copy
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_users = [0] * num_blocks  # slots that have the block in their table
        self._slots: dict[int, _Slot] = {}
        self._prefixes = PrefixIndex(block_tokens)

    # ------------------------------------------------------------------------------------------------ life of a slot

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        """Begin a sequence with the published rows of `tokens`, at most all but the last, and return their number.

        tokens: the committed ones, from the beginning. Only blocks that were published under the same salt are found.
        """
        if slot in self._slots:
            raise InternalError(f"cache slot {slot} is open already")
        path = self._prefixes.find(tokens, salt) if self.prefix_caching else Path(salt)
        table = [node.block for node in path.nodes]
        for block in table:
            self._prefixes.wake(block)
            self._num_users[block] += 1
        found = len(table) * self.block_tokens
        self._slots[slot] = _Slot(table, path, found)
        if self.prefix_caching:
            self.prefix_queries_tokens += len(tokens)
            self.prefix_hit_tokens += found
        return found

    def fork(self, slot: int, new_slot: int) -> None:
        """Begin a sequence with the kept rows of another. Full blocks are shared; rows of the last block are copied.

        Raises CapacityError, and begins nothing, where there is no block for the copy.
        """
        if new_slot in self._slots:
            raise InternalError(f"cache slot {new_slot} is open already")
        own = self._slots[slot]
        num_full, inside = divmod(own.length, self.block_tokens)
        if inside and not self._num_available():
            raise self._no_room(1)
        table = own.table[:num_full]
        for block in table:
            self._num_users[block] += 1
        if inside:
            table.append(self._take_copy(own.table[num_full], inside))
        self._slots[new_slot] = _Slot(table, Path(own.path.salt, list(own.path.nodes)), own.length)

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Let other sequences find the slot's full blocks. It costs nothing where no block was added (see `keep`).

        tokens: the committed ones, from the beginning. The kept rows below len(tokens) must belong to these tokens, so
        a drafter's cache must be cut to what was accepted first; rows behind the last committed token may hold
        anything. Raises InternalError for a slot that is not open.
        """
        own = self._slots.get(slot)
        if own is None:
            raise InternalError(f"cache slot {slot} is not open, so it has nothing to publish")
        num_full = min(own.length, len(tokens)) // self.block_tokens
        if self.prefix_caching and num_full > len(own.path.nodes):
            self._prefixes.extend(own.path, tokens, own.table[:num_full])

    def release(self, slot: int) -> None:
        """End a sequence and give its blocks back; unknown slots are ignored.

        Blocks are given back deepest first, so that the end of a sequence is evicted before its beginning.
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
        """Free every published block that no slot uses; later sequences find only blocks that are in use."""
        while self._prefixes.num_evictable:
            self._free.append(self._prefixes.evict())
        self._free.sort(reverse=True)  # blocks are handed out from block 0 on, as in a new pool

    def length(self, slot: int) -> int:
        """Return the kept tokens of the slot; 0 for a slot that is not open."""
        own = self._slots.get(slot)
        return 0 if own is None else own.length

    def pending(self, slot: int) -> Seq[int]:
        """Return the parent of each pending row of an open slot: an index among them, -1 = the kept rows."""
        return self._slots[slot].pending

    def free_tokens(self, without: Collection[int] = ()) -> int:
        """Tokens that fit into blocks no slot uses, evictable ones included.

        without: slots that count as released; what they share with others stays in use. Unknown ones are ignored.
        """
        released = Counter(block for slot in without if slot in self._slots for block in self._slots[slot].table)
        num_freed = sum(self._num_users[block] == num for block, num in released.items())
        return (self._num_available() + num_freed) * self.block_tokens

    def room(self, slot: int) -> Room:
        """Return what an open slot holds, and what it may still take. Raises KeyError for a slot that is not open."""
        own = self._slots[slot]
        copies, num_own = self._num_copies(own), len(own.table)
        slack = (num_own - copies) * self.block_tokens - own.end
        return Room(own.length, slack, 0 if slack > 0 else own.end // self.block_tokens + 1 - num_own + copies)

    def missing_blocks(self, slot: int, num_tokens: int) -> int:
        """Return how many blocks `reserve` would take: for new rows, and for a copy of a shared last block."""
        if not num_tokens:
            return 0
        own = self._slots[slot]
        blocks = -(-(own.end + num_tokens) // self.block_tokens) - len(own.table)
        return (blocks if blocks > 0 else 0) + self._num_copies(own)

    def can_reserve(self, slot: int, num_tokens: int) -> bool:
        """Return whether `reserve` would succeed."""
        return self.missing_blocks(slot, num_tokens) <= self._num_available()

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Take blocks for a run of `num_tokens` rows: free ones first, then the longest unused evictable ones.

        Raises CapacityError when the pool is exhausted; nothing is reserved then.
        """
        own, missing = self._slots[slot], self.missing_blocks(slot, num_tokens)
        if missing > self._num_available():
            raise self._no_room(missing)
        if num_tokens and (cut := self._cut_block(own)) is not None:
            missing -= self._make_private(own, cut)
        own.table += [self._take() for _ in range(missing)]

    def _num_available(self) -> int:
        return len(self._free) + self._prefixes.num_evictable

    def _no_room(self, num_blocks: int) -> CapacityError:
        return CapacityError(
            f"the KV cache has {self.free_tokens()} free tokens and {num_blocks * self.block_tokens} are needed: "
            "lower max_batch_size or max_seq_len, or raise kv_cache_tokens"
        )

    def _cut_block(self, own: _Slot) -> int | None:
        """Return the block that the slot ends inside of, if other slots may read that block too."""
        i, inside = divmod(own.length, self.block_tokens)
        if not inside:
            return None
        block = own.table[i]
        return block if self._num_users[block] > 1 or self._prefixes.holds(block) else None

    def _num_copies(self, own: _Slot) -> bool:
        """Return whether the slot must copy its last block before it may write, counted as 0 or 1 blocks."""
        block = self._cut_block(own)
        return block is not None and self._num_users[block] > 1

    def _make_private(self, own: _Slot, block: int) -> bool:
        """Make the block inside of which the slot was cut the slot's own.

        A published block without other users is withdrawn; a shared one is replaced by a copy of its kept rows. Returns
        whether a block was taken for a copy.
        """
        if self._num_users[block] == 1:
            self._prefixes.remove(block)
            return False
        i, inside = divmod(own.length, self.block_tokens)
        own.table[i] = self._take_copy(block, inside)
        self._drop(block)
        return True

    def _take_copy(self, block: int, num_rows: int) -> int:
        """Take a block and copy the first rows of another block into it."""
        copy = self._take()
        first, start = block * self.block_tokens, copy * self.block_tokens
        self._copy(list(range(first, first + num_rows)), list(range(start, start + num_rows)))
        return copy

    def _take(self) -> int:
        """Take a free block, else the longest unused evictable one, for one user."""
        block = self._free.pop() if self._free else self._prefixes.evict()
        self._num_users[block] = 1
        return block

    def _drop(self, block: int) -> None:
        """Remove one user of a block. Without users, a published block becomes evictable, any other becomes free."""
        self._num_users[block] -= 1
        if self._num_users[block] == 0 and not self._prefixes.rest(block):
            self._free.append(block)

    # --------------------------------------------------------------------------------------------------- one forward

    def table(self, slot: int) -> list[int]:
        """Return the blocks of an open slot, which is not to be written to."""
        return self._slots[slot].table

    def tables(self, batch: RaggedBatch) -> list[list[int]]:
        """Return the block table of each run's slot. Raises InternalError where batch and cache disagree."""
        return [self._checked(batch, b).table for b in range(len(batch.slots))]

    def _checked(self, batch: RaggedBatch, b: int) -> _Slot:
        """Return the slot of run b. Raises InternalError where its length is another or its rows may not be written."""
        slot, end = batch.slots[b], batch.end(b)
        own, start = self._slots.get(slot), end - len(batch.run(b))
        if own is None or start != own.end:
            raise InternalError(f"slot {slot} holds {0 if own is None else own.end} tokens, the batch says {start}")
        if end > len(own.table) * self.block_tokens:
            raise InternalError(f"slot {slot} has no rows for {end} tokens: reserve them first")
        self._check_private(slot, own.table, start, end)
        return own

    def _check_private(self, slot: int, table: list[int], start: int, end: int) -> None:
        """Raise InternalError where positions start .. end-1 lie in a block that another slot reads or may find."""
        size = self.block_tokens
        for block in table[start // size : -(-end // size)]:
            if self._num_users[block] != 1 or self._prefixes.holds(block):
                raise InternalError(f"slot {slot} would write into block {block}, which others may read: reserve first")

    def keep(self, kept: Mapping[int, Seq[int]], held: Mapping[int, Held] = _NONE_HELD) -> list[int]:
        """Keep some of the pending rows and of the rows just written of each slot, in order, and drop the others.

        kept: by slot, ascending indices that count the pending rows and then the rows of the run. held: by slot, rows
        behind the kept ones that stay pending. Returns the slots in which a block has become full; it can be published
        when all kept tokens are committed.

        A path through a tree is copied down to consecutive rows. A source is never before its destination, so
        ascending copies are safe (Miao et al. 2023). One call copies for all slots and layers; a chain moves nothing.
        """
        sources, targets = list[int](), list[int]()
        for slot, first in kept.items():
            own, rows = self._slots[slot], first
            if slot in held:
                rows = [*first, *held[slot].rows]
                if any(a >= b for a, b in itertools.pairwise(rows)):
                    raise InternalError(f"slot {slot} cannot keep and hold the rows {rows}: they must ascend")
            if rows and rows[-1] >= len(rows):
                self._check_private(slot, own.table, own.length, own.length + rows[-1] + 1)
                moved = [(j, i) for i, j in enumerate(rows) if i != j]
                sources += [self._row(own, own.length + j) for j, _ in moved]
                targets += [self._row(own, own.length + i) for _, i in moved]
        if sources:
            self._copy(sources, targets)
        full = list[int]()
        for slot, rows in kept.items():
            own = self._slots[slot]
            num_full = own.length // self.block_tokens
            self._set_length(own, own.length + len(rows), held[slot].parents if slot in held else ())
            if own.length // self.block_tokens > num_full:
                full.append(slot)
        return full

    def hold(self, slot: int, parents: Seq[int]) -> None:
        """Make the rows of the run just written pending, behind those that are pending already.

        parents: of each row, an index that counts the pending rows and then the rows of the run; -1 = the kept rows.
        Raises InternalError for a parent that does not come before its child, and where no such rows were reserved.
        """
        own = self._slots[slot]
        if any(not -1 <= parent < i for i, parent in enumerate(parents, len(own.pending))):
            raise InternalError(f"slot {slot} cannot hold rows with the parents {parents}: a parent comes first")
        if own.end + len(parents) > len(own.table) * self.block_tokens:
            raise InternalError(f"slot {slot} has no {len(parents)} rows behind {own.end}: reserve them first")
        own.pending += parents

    def truncate_to(self, slot: int, length: int) -> None:
        """Set the kept length, drop pending rows, and give back every block at index >= ceil(length / block_tokens).

        Raises InternalError for a length beyond the kept one, because the rows there may hold anything.
        """
        own = self._slots[slot]
        if length > own.length:
            raise InternalError(f"slot {slot} holds {own.length} tokens and cannot be extended to {length}")
        self._set_length(own, length)
        del own.path.nodes[length // self.block_tokens :]

    def _set_length(self, own: _Slot, length: int, pending: Seq[int] = ()) -> None:
        """Set the kept length, which is never below the published one, and the parents of pending rows."""
        own.length, own.pending = length, list(pending)
        needed = -(-own.end // self.block_tokens)
        for block in reversed(own.table[needed:]):
            self._drop(block)
        del own.table[needed:]

    def _row(self, own: _Slot, position: int) -> int:
        """Return the physical row of a logical position."""
        return own.table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    # ------------------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Check every promise about blocks. Raises InternalError where one is broken; takes time as the pool is large.

        Each block is free, evictable or used, and its count of users is that of the tables. The index has each
        published block under the tokens that it holds. Tables are long enough for their slots. No slot can write into a
        block that another slot may read.
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
        for slot, own in self._slots.items():
            self._check_slot(slot, own)

    def _check_slot(self, slot: int, own: _Slot) -> None:
        length, table, path = own.length, own.table, own.path
        if own.end > len(table) * self.block_tokens:
            raise InternalError(f"slot {slot} is longer than its blocks")
        if len(set(table)) < len(table):
            raise InternalError(f"slot {slot} has a block twice")
        if len(path.nodes) * self.block_tokens > length:
            raise InternalError(f"slot {slot} published more blocks than it filled")
        self._prefixes.check_path(path, table)
        # The next `reserve` makes the block that the slot ends inside of private; the blocks behind it must be already.
        num_filled = -(-length // self.block_tokens)
        self._check_private(slot, table, num_filled * self.block_tokens, len(table) * self.block_tokens)
