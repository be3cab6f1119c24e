"""The KV cache: `KVCache` is the engine's interface to a cache; kv/cache.py has the cache that ships.

Each sequence has a *slot*, a number that the caller of `open` chooses. The slot holds one cache row for each token that
was run. The *kept* rows come first, in order. Then come *pending* rows, which are written but not kept yet, such as the
nodes of a tree that a drafter grows level by level. The rows of the *run* (the sequence's tokens in the current pass)
come last: a model's forward pass writes each run after the rows that the slot already has. Afterwards the rows of the
run are kept, made pending, or overwritten by the next run.

Sequences have slots from 0 on. Slots below 0 are reserved: SCRATCH_SLOT is for passes that only measure, and each
sequence has two further slots (`fetch_slot`, `source_slot`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from typing import NamedTuple, Protocol

SCRATCH_SLOT = -1


def fetch_slot(slot: int) -> int:
    """Return the slot that holds the blocks of the sequence in `slot` while their rows are read from disk."""
    return -2 - 2 * slot


def source_slot(slot: int) -> int:
    """Return the slot that holds the encoder's rows for the sequence in `slot`, which may be SCRATCH_SLOT.

    Only sequences of encoder-decoder models have such a slot.
    """
    return -5 - 2 * slot


class Room(NamedTuple):
    """The length of a slot, and its room for more rows.

    length: the number of kept tokens. slack: the number of free rows in the slot's own blocks, after its kept and
    pending rows. slack is negative if the slot must copy its last block before the next write. next_blocks: the number
    of blocks that must be taken before one more token can be written.
    """

    length: int
    slack: int
    next_blocks: int


class Held(NamedTuple):
    """Rows that stay pending while other rows are kept.

    rows: the ascending indices of these rows, numbered as in `KVCache.keep`. They come after the indices of the kept
    rows. parents: the parent of each row, as an index into `rows`; -1 = the row follows the kept rows.
    """

    rows: Seq[int]
    parents: Seq[int]


class KVCache(Protocol):
    """The methods of a model's KV cache that Runner, Scheduler and drafters call. The model calls further methods.

    Memory is handed out in whole blocks. There are `num_blocks` blocks of `block_tokens` tokens.
    """

    @property
    def block_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...

    # The life of a slot.

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        """Begin a sequence in `slot` with the rows that other sequences have published for a prefix of `tokens`.

        Returns the number of these rows. It is less than len(tokens), and 0 if no such row is found. tokens: the
        committed tokens, from the beginning. salt: only rows that were published under the same salt are found.
        """

    def fork(self, slot: int, new_slot: int) -> None:
        """Begin a sequence in `new_slot` with the kept rows of `slot`. Both sequences may go on.

        Raises CapacityError where there is no room.
        """

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Let later sequences find the kept rows of `tokens`. Does nothing if prefix caching is off.

        tokens: the committed tokens, from the beginning.
        """

    def release(self, slot: int) -> None:
        """End the sequence in `slot` and give its blocks back. Unknown slots are ignored."""

    # Lengths and room.

    def length(self, slot: int) -> int:
        """Return the number of kept tokens of the slot; 0 for a slot that is not open."""

    def pending(self, slot: int) -> Seq[int]:
        """Return the parent of each pending row, as an index among pending rows; -1 = the row follows the kept rows."""

    def room(self, slot: int) -> Room:
        """Return the length of an open slot, and its room for more rows."""

    def free_tokens(self, without: Collection[int] = ()) -> int:
        """Return how many tokens fit into the blocks that no slot uses. Slots in `without` count as released."""

    def missing_blocks(self, slot: int, num_tokens: int) -> int:
        """Return how many blocks `reserve` would take for these arguments."""

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for a run of `num_tokens` rows.

        Raises CapacityError if there is no room; then nothing is reserved.
        """

    # After a pass.

    def keep(self, kept: Mapping[int, Seq[int]], held: Mapping[int, Held] = ...) -> list[int]:
        """In each slot, keep the chosen rows. Drop the other pending rows and the other rows of the run just written.

        kept: for each slot, the ascending indices of the rows to keep. Indices count the slot's pending rows first, and
        then the rows of the run. held: for each slot, the rows that stay pending, as beam searches need. Returns the
        slots in which a block has become full. Such a block can be published when its tokens are committed.
        """

    def hold(self, slot: int, parents: Seq[int]) -> None:
        """Make the rows of the run just written pending, after earlier pending rows.

        parents: the index of each row's parent; -1 = the row follows the kept rows. Indices count the pending rows
        first, and then the rows of the run.
        """

    def truncate_to(self, slot: int, length: int) -> int:
        """Keep only the first `length` tokens, and drop pending rows.

        Returns the number of tokens that are kept afterwards. It is less than `length` where layers with a window have
        given back blocks that the next row would see. Raises InternalError where the slot has fewer than `length`
        tokens.
        """

    def check_integrity(self) -> None:
        """Raise InternalError if the data structures of the cache contradict each other."""
