"""The KV cache: `KVCache` is the engine's interface to a cache; kv/cache.py has the cache that ships.

A sequence has a *slot*: a number that its owner chose. The slot holds one row for each token that was run: first the
*kept* rows in order, then *pending* rows (written but not kept, as a tree that a drafter grows level by level), then
the rows of the run that is being written. A model's forward pass writes each run behind the rows that are there.
Afterwards the rows of the run are kept, held as pending, or overwritten by the next run.

Sequences have slots from 0 on. Slots below 0 are SCRATCH_SLOT, for passes that measure, and two more for each sequence
(`fetch_slot`, `source_slot`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from typing import NamedTuple, Protocol

SCRATCH_SLOT = -1


def fetch_slot(slot: int) -> int:
    """Return the slot that holds a sequence's blocks on their way from disk."""
    return -2 - 2 * slot


def source_slot(slot: int) -> int:
    """Return the slot of a sequence's source, in the cache of an encoder-decoder. SCRATCH_SLOT has one, too."""
    return -5 - 2 * slot


class Room(NamedTuple):
    """How much a slot holds, and may still take.

    length: kept tokens. slack: free rows in the slot's own blocks, behind everything that it holds; below 0 where the
    slot must copy its last block before it may write. next_blocks: blocks that one more token takes.
    """

    length: int
    slack: int
    next_blocks: int


class Held(NamedTuple):
    """Rows that stay pending while others are kept: ascending, behind the kept ones.

    parents: of each, an index among these rows; -1 = the kept rows.
    """

    rows: Seq[int]
    parents: Seq[int]


class KVCache(Protocol):
    """The interface of a model's KV cache for Runner, Scheduler and drafters. The model itself reads it differently.

    Memory is handed out in num_blocks blocks of block_tokens tokens.
    """

    @property
    def block_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...

    # The life of a slot.

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        """Begin a sequence with the rows that other sequences published of `tokens`, at most all but the last.

        Returns the number of these rows, 0 where nothing is shared. tokens: the committed ones, from the beginning.
        salt: only rows that were published under the same salt are found.
        """

    def fork(self, slot: int, new_slot: int) -> None:
        """Begin a sequence with the kept rows of another; both may go on. Raises CapacityError without room."""

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Let later sequences find the kept rows of `tokens`; a cache that shares nothing does nothing.

        tokens: the committed ones, from the beginning.
        """

    def release(self, slot: int) -> None:
        """End a sequence and give its memory back; unknown slots are ignored."""

    # Lengths and room.

    def length(self, slot: int) -> int:
        """Return the kept tokens of the slot; 0 for a slot that is not open."""

    def pending(self, slot: int) -> Seq[int]:
        """Return the parent of each pending row: an index among the pending rows, -1 = the kept rows."""

    def room(self, slot: int) -> Room:
        """Return how much an open slot holds, and may still take."""

    def free_tokens(self, without: Collection[int] = ()) -> int:
        """Return how many tokens fit into blocks that no slot uses; slots in `without` count as released."""

    def missing_blocks(self, slot: int, num_tokens: int) -> int:
        """Return how many blocks `reserve` would take."""

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for a run of `num_tokens` rows. Raises CapacityError, and reserves nothing, where there is none."""

    # After a pass.

    def keep(self, kept: Mapping[int, Seq[int]], held: Mapping[int, Held] = ...) -> list[int]:
        """Keep some of the pending rows and of the rows just written of each slot, and drop the others.

        kept: by slot, ascending indices that count the pending rows and then the rows of the run. held: by slot, rows
        that stay pending, which beam searches ask for. Returns the slots that have something new to publish once their
        kept tokens are committed.
        """

    def hold(self, slot: int, parents: Seq[int]) -> None:
        """Make the rows of the run just written pending, behind earlier pending rows.

        parents: of each row, an index that counts the pending rows and then the rows of the run; -1 = the kept rows.
        """

    def truncate_to(self, slot: int, length: int) -> int:
        """Keep the first `length` tokens only, and drop pending rows. Raises InternalError where fewer are kept.

        Returns how many are kept: fewer where layers with a window have given back what the next row would see.
        """

    def check_integrity(self) -> None:
        """Raise InternalError where the cache has broken one of its own promises."""
