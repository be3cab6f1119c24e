"""The block tables of a KV cache: which physical rows hold which tokens. The tables are on the host, not in tensors.

A slot owns a table of blocks. Its logical position j lives in this physical row of a pool (kv/pool.py):

    table[j // block_tokens] * block_tokens + j % block_tokens

In the backend "paged", a block has 16 tokens. In the backend "contiguous", a slot has one block, as long as the longest
sequence. Operators see physical rows only, so they need not know the backend.

All ranges are half-open. A slot with `length` kept rows and p pending rows, which runs n rows, has these ranges:

    [0, length)                     kept rows, read by every run of the slot
    [length, length + p)            pending rows: nodes of a tree, read by their descendants
    [length + p, length + p + n)    rows of the run that the current step verifies
    [.., len(table)*block)          reserved, unused

Sequences that begin with the same tokens share blocks (kv/prefix.py). `publish` lets other sequences find the full
blocks of committed tokens, `open` finds them, and `fork` shares a slot's blocks with another slot. Each block is in one
of three states: free (used by no slot, and not findable), evictable (used by no slot, but findable) or referenced by
one or more slots. A block is only written to if one slot refers to it and it is not published. `view` and `keep` assert
this. Three cases need an explanation:

*A slot is cut inside a block that is published or shared.* `truncate_to` leaves the block as it is, because its rows
are still right, and other slots may be reading them. After the cut, `reserve` must be called before rows are written to
the slot. `reserve` makes the block private. If the slot is the block's only user, the block is withdrawn. Otherwise the
kept rows are copied into a new block. So a cut never needs memory and cannot fail, and nothing is copied for a slot
that is cut again or released.

*Two slots computed the same block.* Later sequences find the block that was published first, and the second slot's
block stays private. Blocks that the second slot publishes later are found as continuations of the first block, until
the first block is evicted.

*Layers with a window.* Where all layers of the tables have a window, no later row of a slot sees the slot's old blocks.
The slot gives them back when it reserves its next rows. It keeps the blocks of the last SPARE_TOKENS tokens before the
window, so that it may be cut by as many tokens. Blocks that were given back can be found until they are evicted. A
sequence can begin wherever the blocks of its window are found. In the table, the first remaining block stands in for
the earlier blocks. Its rows are written, so a kernel that reads them under a mask reads valid numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forerun.errors import CapacityError, InternalError
from forerun.kv import Held, Room
from forerun.kv.prefix import Key, PrefixIndex, extended, keys_of, root
from forerun.types import RaggedBatch

if TYPE_CHECKING:
    from forerun.kv.keeping import Keeper

_NONE_HELD: Mapping[int, Held] = {}
SPARE_TOKENS = 128  # two tiles of keys: a pass may read masked lanes of one tile, and a cut hardly takes more than 64


@dataclass(slots=True)
class _Slot:
    """The blocks and rows of one sequence.

    table: the sequence's blocks. The blocks before index `first` were given back. root: the prefix key before the first
    block. keys: the prefix keys of the leading blocks for which this slot or another slot has published a block with
    the same tokens. length: the number of kept rows. pending: the parents of the pending rows.
    """

    table: list[int]
    root: Key
    keys: list[Key]
    length: int
    first: int = 0
    pending: list[int] = field(default_factory=list)

    @property
    def live(self) -> list[int]:
        """The blocks that the slot uses."""
        return self.table[self.first :] if self.first else self.table

    @property
    def end(self) -> int:
        """The logical position at which the next run is written."""
        return self.length + len(self.pending)


class BlockTables:
    """The blocks of all sequences of one model. Sequences that begin with the same tokens share blocks.

    copy: copies physical rows, sources [n] to targets [n], one after the other, in every layer of these tables.
    prefix_caching: whether sequences share blocks. window: how many positions a row sees, its own included; None = all.
    touched_blocks: once this number of blocks has been written, evictable blocks are taken before blocks that were
    never written. This saves memory, because a block takes memory only when it is written. None = num_blocks.
    prefix_queries_tokens, prefix_hit_tokens: how many tokens `open` has looked up in all, and for how many it found
    rows.
    """

    def __init__(
        self,
        block_tokens: int,
        num_blocks: int,
        copy: Callable[[list[int], list[int]], None],
        *,
        prefix_caching: bool = True,
        window: int | None = None,
        touched_blocks: int | None = None,
    ) -> None:
        self.window = window
        self.touched_blocks = num_blocks if touched_blocks is None else touched_blocks
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self.prefix_queries_tokens = 0
        self.prefix_hit_tokens = 0
        self._copy = copy
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_users = [0] * num_blocks  # slots that have the block in their table
        self._slots: dict[int, _Slot] = {}
        self._num_touched = 0  # blocks are taken from block 0 on
        self._prefixes = PrefixIndex()
        self.keeper: Keeper | None = None  # notified of blocks that are published, found and withdrawn
        self.kind = 0

    # ------------------------------------------------------------------------------------------------ life of a slot

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        """Begin a sequence with the published rows for the beginning of `tokens`, and return their number.

        The number is less than len(tokens). tokens: the committed tokens, from the beginning. salt: only blocks that
        were published under the same salt are found.
        """
        keys = keys_of(tokens, salt, self.block_tokens) if self.prefix_caching else []
        self.begin(slot, keys[: self.num_found(keys)], tokens, salt)
        return self._counted(slot, len(tokens))

    def num_found(self, keys: Seq[Key], others: Collection[Key] = ()) -> int:
        """Return the largest n such that a sequence can begin with the blocks of `keys[:n]`.

        All blocks that the sequence's next row sees must be present. keys: the prefix keys of a sequence's blocks, from
        the first block on. others: further prefix keys that count as present.
        """
        most = present = 0
        for num, key in enumerate(keys, 1):
            present = present + 1 if self._prefixes.find(key) is not None or key in others else 0
            if present >= num - self._first_seen(num * self.block_tokens):
                most = num
            elif self.window is None:
                break
        return most

    def begin(self, slot: int, keys: list[Key], tokens: Seq[int], salt: str | None) -> None:
        """Begin a sequence of `tokens` with the published blocks of `keys`.

        keys: the prefix keys of the sequence's first blocks, at most as many as `num_found` returns. salt: the salt
        under which the sequence publishes its blocks; `keys` must have the same salt.
        """
        if slot in self._slots:
            raise InternalError(f"cache slot {slot} is open already")
        length = len(keys) * self.block_tokens
        first = self._first_seen(length)
        blocks = [block for key in keys[first:] if (block := self._prefixes.find(key)) is not None]
        for block in blocks:
            self._prefixes.wake(block)
            self._num_users[block] += 1
        self._slots[slot] = _Slot(blocks[:1] * first + blocks, root(salt), list(keys), length, first)
        for i, block in enumerate(blocks if self.keeper is not None else (), first):
            self._used(block, keys[i], tokens[i * self.block_tokens : (i + 1) * self.block_tokens])

    def _counted(self, slot: int, num_tokens: int) -> int:
        """Add to the totals how many tokens `open` looked up, and how many it found. Returns the number found."""
        num_hits = self._slots[slot].length
        if self.prefix_caching:
            self.prefix_queries_tokens += num_tokens
            self.prefix_hit_tokens += num_hits
        return num_hits

    def _first_seen(self, length: int, spare: int = 0) -> int:
        """Return the index of the first block that a row at position `length - spare` sees.

        If the row sees no full block, return the index of the last full block, so that at least one block is kept.
        """
        if self.window is None:
            return 0
        return max(0, min((length + 1 - self.window - spare) // self.block_tokens, length // self.block_tokens - 1))

    def fork(self, slot: int, new_slot: int) -> None:
        """Begin a sequence in `new_slot` with the kept rows of `slot`.

        Full blocks are shared, and the rows of an incomplete last block are copied. Raises CapacityError if there is no
        block for the copy; then no sequence is begun.
        """
        if new_slot in self._slots:
            raise InternalError(f"cache slot {new_slot} is open already")
        parent = self._slots[slot]
        num_full, inside = divmod(parent.length, self.block_tokens)
        if inside and not self._num_available():
            raise self._no_room(1)
        table = parent.table[:num_full]
        for block in table[parent.first :]:
            self._num_users[block] += 1
        if inside:
            table.append(self._take_copy(parent.table[num_full], inside))
        self._slots[new_slot] = _Slot(table, parent.root, list(parent.keys), parent.length, parent.first)

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Let other sequences find the slot's full blocks. This costs nothing where no block was filled (see `keep`).

        tokens: the committed tokens, from the beginning. The kept rows at positions below len(tokens) must belong to
        these tokens, so a drafter's cache must first be cut to the accepted tokens. Rows after the last committed token
        may hold anything. Raises InternalError for a slot that is not open.
        """
        entry = self._slots.get(slot)
        if entry is None:
            raise InternalError(f"cache slot {slot} is not open, so it has nothing to publish")
        num_full = min(entry.length, len(tokens)) // self.block_tokens
        size = self.block_tokens
        for i in range(len(entry.keys), num_full if self.prefix_caching else 0):
            entry.keys.append(extended(entry.keys[-1] if i else entry.root, tokens[i * size : (i + 1) * size]))
            if i >= entry.first:
                self._publish(entry.keys[i], entry.table[i], tokens[i * size : (i + 1) * size])

    def _publish(self, key: Key, block: int, tokens: Seq[int]) -> None:
        if self._prefixes.publish(key, block):
            self._used(block, key, tokens)
        elif (equal := self._prefixes.find(key)) is not None:  # another sequence computed it before
            self._used(equal, key, tokens)

    def _used(self, block: int, key: Key, tokens: Seq[int]) -> None:
        if self.keeper is not None:
            self.keeper.used(self.kind, block, key, tokens)

    # ------------------------------------------------------------------------------------- blocks that come from disk

    def holds(self, key: Key) -> bool:
        """Return whether a block is published under a key."""
        return self._prefixes.find(key) is not None

    def absent(self, keys: Seq[Key]) -> list[int]:
        """Return the indices of the prefix keys whose blocks are not published.

        Blocks before the window of the sequence's next row are left out.
        """
        first = self._first_seen(len(keys) * self.block_tokens)
        return [i for i in range(first, len(keys)) if self._prefixes.find(keys[i]) is None]

    def lacks_blocks(self, keys: Seq[Key]) -> int:
        """Return how many blocks are lacking for a call of `await_blocks` with these prefix keys."""
        first = self._first_seen(len(keys) * self.block_tokens)
        found = [self._prefixes.find(key) for key in keys[first:]]
        unused = sum(block is not None and self._num_users[block] == 0 for block in found)
        return max(0, found.count(None) + unused - self._num_available())

    def await_blocks(self, slot: int, keys: list[Key]) -> list[int]:
        """Hold the blocks of these prefix keys in a slot. For keys that are `absent`, take blocks and return them.

        The caller writes the rows of the returned blocks, then calls `publish_awaited`.
        """
        if slot in self._slots:
            raise InternalError(f"cache slot {slot} is open already")
        length = len(keys) * self.block_tokens
        first = self._first_seen(length)
        blocks = [self._prefixes.find(key) for key in keys[first:]]
        for block in blocks:
            if block is not None:
                self._prefixes.wake(block)
                self._num_users[block] += 1
        taken = [self._take() for block in blocks if block is None]
        rest = iter(taken)
        table = [next(rest) if block is None else block for block in blocks]
        self._slots[slot] = _Slot(table[:1] * first + table, b"", [], length, first)
        return taken

    def publish_awaited(self, slot: int, blocks: Mapping[Key, int]) -> None:
        """Publish the blocks that `await_blocks` took and whose rows are written now, then release the slot.

        blocks: these blocks, by prefix key. Blocks whose rows were not written are left out, and become free.
        """
        for key, block in blocks.items():
            self._prefixes.publish(key, block)
        BlockTables.release(self, slot)

    def release(self, slot: int) -> None:
        """End a sequence and give its blocks back. Unknown slots are ignored.

        The deepest block is given back first, so that the end of a sequence is evicted before its beginning.
        """
        entry = self._slots.pop(slot, None)
        if entry is None:
            return
        for i in range(len(entry.table) - 1, entry.first - 1, -1):
            self._drop(entry.table[i])
            if i < len(entry.keys):
                self._prefixes.touch(entry.keys[i])

    def clear_prefixes(self) -> None:
        """Free every published block that no slot uses; later sequences find only blocks in use."""
        while self._prefixes.num_evictable:
            self._free.append(self._evict())
        self._free.sort(reverse=True)  # blocks are handed out from block 0 on, as in a new pool

    def length(self, slot: int) -> int:
        """Return the number of kept tokens of the slot; 0 for a slot that is not open."""
        entry = self._slots.get(slot)
        return 0 if entry is None else entry.length

    def _keys(self, slot: int) -> Seq[Key]:
        """Return the prefix keys of a slot's leading blocks that this slot or another slot has published."""
        entry = self._slots.get(slot)
        return () if entry is None else entry.keys

    def pending(self, slot: int) -> Seq[int]:
        """Return the parent of each pending row of an open slot, as an index among pending rows.

        -1 = the row follows the kept rows.
        """
        return self._slots[slot].pending

    def free_tokens(self, without: Collection[int] = ()) -> int:
        """Return how many tokens fit into the blocks that no slot uses, evictable blocks included.

        without: slots that count as released. Blocks that other slots use as well stay in use. Unknown slots are
        ignored.
        """
        released = Counter(block for slot in without if slot in self._slots for block in self._slots[slot].live)
        num_freed = sum(self._num_users[block] == num for block, num in released.items())
        return (self._num_available() + num_freed) * self.block_tokens

    def room(self, slot: int) -> Room:
        """Return the length of an open slot, and its room for more rows. Raises KeyError if the slot is not open."""
        entry = self._slots[slot]
        copies, num_own = self._num_copies(entry), len(entry.table)
        slack = (num_own - copies) * self.block_tokens - entry.end
        return Room(entry.length, slack, 0 if slack > 0 else entry.end // self.block_tokens + 1 - num_own + copies)

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
        """Take the blocks that a slot still lacks for a run of `num_tokens` rows, each block as `_take` does.

        Before that, the slot gives back the blocks that no row of the run sees, because they lie before the sliding
        window. Raises CapacityError if there are too few blocks; then none is taken.
        """
        entry = self._slots[slot]
        missing = self.missing_blocks(slot, num_tokens)
        self._give_back(entry)
        if missing > self._num_available():
            raise self._no_room(missing)
        if num_tokens and (cut := self._cut_block(entry)) is not None:
            missing -= self._make_private(entry, cut)
        entry.table += [self._take() for _ in range(missing)]

    def _give_back(self, entry: _Slot) -> None:
        """Give back the blocks that no later row sees. The first remaining block takes their places in the table."""
        first = self._first_seen(entry.length, SPARE_TOKENS)
        if first > entry.first:
            for block in entry.table[entry.first : first]:
                self._drop(block, is_passed=True)
            entry.table[:first] = entry.table[first : first + 1] * first
            entry.first = first

    def _num_available(self) -> int:
        return len(self._free) + self._prefixes.num_evictable

    def _no_room(self, num_blocks: int) -> CapacityError:
        return CapacityError(
            f"the KV cache has {self.free_tokens()} free tokens and {num_blocks * self.block_tokens} are needed: "
            "lower max_batch_size or max_seq_len, or raise kv_cache_tokens"
        )

    def _cut_block(self, entry: _Slot) -> int | None:
        """Return the block inside which the slot's kept rows end, if other slots may read it too; None otherwise."""
        i, inside = divmod(entry.length, self.block_tokens)
        if not inside:
            return None
        block = entry.table[i]
        return block if self._num_users[block] > 1 or self._prefixes.holds(block) else None

    def _num_copies(self, entry: _Slot) -> bool:
        """Return the number of blocks, 0 or 1, that the slot must copy before it may write."""
        block = self._cut_block(entry)
        return block is not None and self._num_users[block] > 1

    def _make_private(self, entry: _Slot, block: int) -> bool:
        """Make private the block in which the slot was cut, and return whether a block was taken for a copy.

        A published block without other users is withdrawn. A shared block is replaced by a copy of its kept rows.
        """
        if self._num_users[block] == 1:
            self._prefixes.remove(block)
            self._withdrawn(block)
            return False
        i, inside = divmod(entry.length, self.block_tokens)
        entry.table[i] = self._take_copy(block, inside)
        self._drop(block)
        return True

    def _take_copy(self, block: int, num_rows: int) -> int:
        """Take a block and copy the first rows of another block into it."""
        copy = self._take()
        first, start = block * self.block_tokens, copy * self.block_tokens
        self._copy(list(range(first, first + num_rows)), list(range(start, start + num_rows)))
        return copy

    def _take(self) -> int:
        """Take a free block for one user. If no block is free, evict a block (`PrefixIndex.evict`).

        A block is also evicted where the next free block was never written, and `touched_blocks` blocks have been
        written already.
        """
        is_new = bool(self._free) and self._free[-1] >= self._num_touched
        spares = is_new and self._num_touched >= self.touched_blocks and self._prefixes.num_evictable > 0
        block = self._free.pop() if self._free and not spares else self._evict()
        self._num_touched = max(self._num_touched, block + 1)
        self._num_users[block] = 1
        return block

    def _evict(self) -> int:
        block = self._prefixes.evict()
        self._withdrawn(block)
        return block

    def _withdrawn(self, block: int) -> None:
        if self.keeper is not None:
            self.keeper.withdrawn(self.kind, block)

    def _drop(self, block: int, *, is_passed: bool = False) -> None:
        """Remove one user of a block. A block without users becomes evictable if it is published, else free.

        is_passed: whether the user goes on without the block, because the user's window has passed it.
        """
        self._num_users[block] -= 1
        if self._num_users[block] == 0 and not self._prefixes.rest(block, is_passed=is_passed):
            self._free.append(block)

    # --------------------------------------------------------------------------------------------------- one forward

    def table(self, slot: int) -> list[int]:
        """Return the blocks of an open slot; the caller must not change the list."""
        return self._slots[slot].table

    def tables(self, batch: RaggedBatch) -> list[list[int]]:
        """Return the block table of each run's slot. Raises InternalError where the batch and the cache disagree."""
        return [self._checked(batch, b).table for b in range(len(batch.slots))]

    def _checked(self, batch: RaggedBatch, b: int) -> _Slot:
        """Return the slot of run b.

        Raises InternalError where the slot has another length than in the batch, or the rows of the run may not be
        written.
        """
        slot, end = batch.slots[b], batch.end(b)
        entry, start = self._slots.get(slot), end - len(batch.run(b))
        if entry is None or start != entry.end:
            raise InternalError(f"slot {slot} holds {0 if entry is None else entry.end} tokens, the batch says {start}")
        if end > len(entry.table) * self.block_tokens:
            raise InternalError(f"slot {slot} has no rows for {end} tokens: reserve them first")
        self._check_private(slot, entry.table, start, end)
        return entry

    def _check_private(self, slot: int, table: list[int], start: int, end: int) -> None:
        """Raise InternalError where positions start .. end-1 lie in a block that another slot reads or may find.

        table: the blocks of the slot.
        """
        size = self.block_tokens
        for block in table[start // size : -(-end // size)]:
            if self._num_users[block] != 1 or self._prefixes.holds(block):
                raise InternalError(f"slot {slot} would write into block {block}, which others may read: reserve first")

    def keep(self, kept: Mapping[int, Seq[int]], held: Mapping[int, Held] = _NONE_HELD) -> list[int]:
        """In each slot, keep some of the pending rows and of the rows just written, in order, and drop the other rows.

        kept: for each slot, the indices of the rows to keep, ascending. The pending rows are numbered first, and
        then the rows of the run. held: for each slot, rows that come after the kept rows and stay pending. Returns the
        slots in which a block has become full. Such a block can be published when all kept tokens are committed.

        A path through a tree is copied down to consecutive rows. A source is never before its destination, so ascending
        copies are safe (Miao et al. 2023). One call copies for all slots and layers. A chain moves nothing.
        """
        sources, targets = list[int](), list[int]()
        for slot, first in kept.items():
            entry, rows = self._slots[slot], first
            if slot in held:
                rows = [*first, *held[slot].rows]
                if any(a >= b for a, b in itertools.pairwise(rows)):
                    raise InternalError(f"slot {slot} cannot keep and hold the rows {rows}: they must ascend")
            if rows and rows[-1] >= len(rows):
                self._check_private(slot, entry.table, entry.length, entry.length + rows[-1] + 1)
                moved = [(j, i) for i, j in enumerate(rows) if i != j]
                sources += [self._row(entry, entry.length + j) for j, _ in moved]
                targets += [self._row(entry, entry.length + i) for _, i in moved]
        if sources:
            self._copy(sources, targets)
        full = list[int]()
        for slot, rows in kept.items():
            entry = self._slots[slot]
            num_full = entry.length // self.block_tokens
            self._set_length(entry, entry.length + len(rows), held[slot].parents if slot in held else ())
            if entry.length // self.block_tokens > num_full:
                full.append(slot)
        return full

    def hold(self, slot: int, parents: Seq[int]) -> None:
        """Make the rows of the run just written pending, after earlier pending rows.

        parents: the index of each row's parent; -1 = the row follows the kept rows. Indices count the pending rows
        first, and then the rows of the run. Raises InternalError for a parent that does not come before its child, and
        where too few rows are reserved.
        """
        own = self._slots[slot]
        if any(not -1 <= parent < i for i, parent in enumerate(parents, len(own.pending))):
            raise InternalError(f"slot {slot} cannot hold rows with the parents {parents}: a parent comes first")
        if own.end + len(parents) > len(own.table) * self.block_tokens:
            raise InternalError(f"slot {slot} has no {len(parents)} rows behind {own.end}: reserve them first")
        own.pending += parents

    def truncate_to(self, slot: int, length: int) -> int:
        """Keep `length` rows, drop pending rows, and give back every block at index >= ceil(length / block_tokens).

        Returns the kept length. It is 0 where the next row would see blocks that were given back because of a window.
        Raises InternalError where `length` is more than the slot's kept length, because later rows may hold
        anything.
        """
        entry = self._slots[slot]
        if length > entry.length:
            raise InternalError(f"slot {slot} holds {entry.length} tokens and cannot be extended to {length}")
        if not self.can_cut(slot, length):
            length = 0
            self._empty(entry)
        self._set_length(entry, length)
        del entry.keys[length // self.block_tokens :]
        return length

    def can_cut(self, slot: int, length: int) -> bool:
        """Return whether the slot still has all rows that the next row would see after a cut to `length`."""
        own = self._slots[slot]
        return not own.first or self._first_seen(length) >= own.first

    def _empty(self, entry: _Slot) -> None:
        """Give back all blocks of a slot. Afterwards the slot has no blocks and no rows."""
        for block in reversed(entry.live):
            self._drop(block)
        entry.table.clear()
        entry.first = entry.length = 0
        entry.pending = []

    def _set_length(self, entry: _Slot, length: int, pending: Seq[int] = ()) -> None:
        """Set the kept length and the parents of pending rows, and give back the blocks after these rows.

        If this gives back published blocks, the caller must cut `keys`, too.
        """
        entry.length, entry.pending = length, list(pending)
        needed = -(-entry.end // self.block_tokens)
        for block in reversed(entry.table[needed:]):
            self._drop(block)
        del entry.table[needed:]

    def _row(self, entry: _Slot, position: int) -> int:
        """Return the physical row of a logical position."""
        return entry.table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    # ------------------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise InternalError where the data of the blocks contradict each other. Takes longer for a larger pool.

        Each block is free, evictable or used, and its count of users agrees with the tables. The index has each
        published block under the right key. Tables are long enough for their slots. No slot can write into a
        block that another slot may read.
        """
        users = Counter(block for entry in self._slots.values() for block in entry.live)
        if sorted([*users, *self._free, *self._prefixes.evictable()]) != list(range(self.num_blocks)):
            raise InternalError("the KV cache lost a block or owns one twice")
        if any(users[block] != num for block, num in enumerate(self._num_users)):
            raise InternalError("the KV cache counts other users of a block than the tables name")
        self._prefixes.check_integrity()
        for block in self._free:
            if self._prefixes.holds(block):
                raise InternalError(f"block {block} of the KV cache is free and published")
        for slot, entry in self._slots.items():
            self._check_slot(slot, entry)

    def _check_slot(self, slot: int, entry: _Slot) -> None:
        length, table = entry.length, entry.table
        if entry.end > len(table) * self.block_tokens:
            raise InternalError(f"slot {slot} is longer than its blocks")
        if len(set(entry.live)) < len(entry.live):
            raise InternalError(f"slot {slot} has a block twice")
        if len(entry.keys) * self.block_tokens > length:
            raise InternalError(f"slot {slot} published more blocks than it filled")
        self._prefixes.check_keys(entry.keys[entry.first :], entry.live)
        # The next `reserve` makes the block private in which the slot ends. The blocks after it must be so already.
        num_filled = -(-length // self.block_tokens)
        self._check_private(slot, table, num_filled * self.block_tokens, len(table) * self.block_tokens)
