"""What a model remembers. `KVCache` is what the engine asks of a memory; kv/cache.py has the one that ships.

A sequence has a *slot*: a number that its owner chose. The slot holds rows, one for each token that was run: the *kept*
ones in order, then *pending* ones (written, not kept: a tree that a drafter grows level by level), then those of the
run that is being written. A model's forward pass writes its runs behind what is there, and afterwards the rows of a run
are kept, held as pending, or overwritten by the next run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from typing import NamedTuple, Protocol


class Room(NamedTuple):
    """What a slot holds and may still take.

    length: kept tokens. slack: tokens that its own blocks have room for behind all that it holds; below 0 where it must
    copy its last block before it may write. next_blocks: blocks that one more token takes.
    """

    length: int
    slack: int
    next_blocks: int


class KVCache(Protocol):
    """What Runner, Scheduler and drafters ask of a model's memory; how the model itself reads it is the model's affair.

    Memory is handed out in blocks of block_tokens tokens, of which there are num_blocks.
    """

    @property
    def block_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...

    # The life of a slot.

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        """Begin a sequence with what other sequences published of `tokens`, at most all but the last.

        Returns how many tokens those are; 0 where nothing is shared. tokens: the committed ones, from the beginning.
        salt: only what was published under the same one counts.
        """

    def fork(self, slot: int, new_slot: int) -> None:
        """Begin a sequence with the kept rows of another; either may go on. Raises CapacityError without room."""

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Let later sequences find what is kept of `tokens`, the committed ones from the beginning; may do nothing."""

    def release(self, slot: int) -> None:
        """End a sequence and give its memory back; unknown slots are ignored."""

    # What there is and what there is room for.

    def length(self, slot: int) -> int:
        """Kept tokens of the slot; 0 for a slot that is not open."""

    def pending(self, slot: int) -> Seq[int]:
        """The parent of each pending row: an index among the pending rows, -1 = the kept ones."""

    def room(self, slot: int) -> Room:
        """What an open slot holds and may still take."""

    def free_tokens(self, without: Collection[int] = ()) -> int:
        """Tokens that fit into blocks no slot uses, or would use if the slots `without` were released."""

    def missing_blocks(self, slot: int, num_tokens: int) -> int:
        """Blocks that `reserve` would take."""

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for a run of `num_tokens` rows. Raises CapacityError, and reserves nothing, where there is none."""

    # After a pass.

    def keep(self, kept: Mapping[int, Seq[int]]) -> list[int]:
        """Of each slot, keep these of its pending rows and of the run just written, and drop the others.

        kept: by slot, ascending indices among the pending rows, then the rows of the run. Returns the slots that have
        something new to publish once all that is kept is committed.
        """

    def hold(self, slot: int, parents: Seq[int]) -> None:
        """The rows of the run just written become pending, behind those that are pending already.

        parents: of each row, an index among the pending rows, then the rows of the run; -1 = the kept rows.
        """

    def truncate_to(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens only, and drop what is pending. Raises InternalError where there are fewer."""

    def check_integrity(self) -> None:
        """Raise InternalError where the cache has broken a promise of its own."""
