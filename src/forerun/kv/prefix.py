"""The prefix index finds full blocks by the tokens that they hold and by all tokens before them.

The key of a block is a SHA-256 digest of its tokens and of the key of the block before it, which at the beginning of a
sequence is made of the salt of the request. So a key means one salt and one chain of tokens, whatever became of the
blocks before, and two chains with one key are not to be found. Caches of several kinds of layers (kv/cache.py) have an
index each, and look for the same keys.

A published block that no sequence uses is *evictable*: it can be found until its rows are needed. The longest unused
block is evicted first, and of one sequence's blocks the deepest first. Those that a window has passed wait in a queue
of their own, and the longer queue loses its first: else one long text would take the ends of all others, of which a
few blocks are enough to go on with a text of any length.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from hashlib import sha256

from forerun.errors import InternalError

Key = bytes


def root(salt: str | None) -> Key:
    """Return what stands before the first block of a sequence; None = no salt, which is not the empty one."""
    return b"" if salt is None else sha256(b"salt" + salt.encode("utf-8", "surrogatepass")).digest()


def extended(before: Key, tokens: Seq[int]) -> Key:
    """Return the key of a block of these tokens behind another block."""
    return sha256(before + array("q", tokens).tobytes()).digest()


def keys_of(tokens: Seq[int], salt: str | None, block_tokens: int) -> list[Key]:
    """Return the key of each full block of `tokens` without the last one.

    The last token must be run in any case, because a cache does not hold the logits after it.
    """
    found, key = list[Key](), root(salt)
    for start in range(0, len(tokens) - block_tokens, block_tokens):
        found.append(key := extended(key, tokens[start : start + block_tokens]))
    return found


class PrefixIndex:
    """Published blocks by key and by block, and the evictable ones, longest unused first."""

    def __init__(self) -> None:
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()  # evictable, too: sequences went on without them

    @property
    def num_evictable(self) -> int:
        """Published blocks that no sequence uses."""
        return len(self._evictable) + len(self._passed)

    def holds(self, block: int) -> bool:
        """Return whether the block is published."""
        return block in self._key_of

    # ------------------------------------------------------------------------------------------ finding and publishing

    def find(self, key: Key) -> int | None:
        """Return the block that is published under a key, if one is."""
        return self._block_of.get(key)

    def publish(self, key: Key, block: int) -> bool:
        """Let later sequences find a block; where an equal one is published already, this one stays private."""
        if key in self._block_of:
            return False
        self._block_of[key], self._key_of[block] = block, key
        return True

    def remove(self, block: int) -> None:
        """Withdraw a block: no later sequence finds it."""
        del self._block_of[self._key_of.pop(block)]

    # ------------------------------------------------------------------------------------------------ use and eviction

    def rest(self, block: int, *, is_passed: bool = False) -> bool:
        """Make a block without users evictable, as the last of its queue. Returns False where it is not published.

        is_passed: whether its last user goes on without it.
        """
        if block not in self._key_of:
            return False
        (self._passed if is_passed else self._evictable)[block] = None
        return True

    def wake(self, block: int) -> None:
        """Take a block that has a user again out of the evictable ones."""
        self._evictable.pop(block, None)
        self._passed.pop(block, None)

    def touch(self, key: Key) -> None:
        """Count the block of a key as used just now, where it is evictable.

        A sequence calls it at its end for the tokens that it held in an equal block of its own.
        """
        block = self._block_of.get(key, -1)
        if block in self._evictable or block in self._passed:
            self.wake(block)
            self._evictable[block] = None

    def evict(self) -> int:
        """Withdraw the longest unused block of the longer queue and return it. There must be one."""
        queue = self._passed if len(self._passed) > len(self._evictable) else self._evictable
        block, _ = queue.popitem(last=False)
        self.remove(block)
        return block

    # ------------------------------------------------------------------------------------------------------- integrity

    def evictable(self) -> list[int]:
        """Return the evictable blocks, those of each queue in the order in which they will be evicted."""
        return [*self._evictable, *self._passed]

    def check_integrity(self) -> None:
        """Raise InternalError where the two directories disagree, or an evictable block is not published."""
        if len(self._block_of) != len(self._key_of) or any(b not in self._key_of for b in self.evictable()):
            raise InternalError("the prefix index lost a published block")
        for block, key in self._key_of.items():
            if self._block_of.get(key) != block:
                raise InternalError(f"block {block} of the KV cache is published under a key that is not its own")

    def check_keys(self, keys: Seq[Key], table: Seq[int]) -> None:
        """Raise InternalError where a block of a table is published under another key than the sequence has for it."""
        for key, block in zip(keys, table, strict=False):
            if self._key_of.get(block, key) != key:
                raise InternalError(f"block {block} of the KV cache is published as other tokens than it holds")
