"""The prefix index finds full blocks by the tokens that they hold and by all tokens before them.

The key of a block is a SHA-256 digest of its tokens and of the key of the block before it. The chain begins with a key
of the request's salt. So a key means one salt and one chain of tokens, even where the earlier blocks are gone, and
nobody can find two chains with the same key. A cache with several kinds of layers (kv/cache.py) has an index for each
kind, and looks for the same keys in all of them.

A published block that no sequence uses is *evictable*: it can be found until its rows are needed. The longest unused
block is evicted first, and among the blocks of one sequence the deepest block. There is a second queue for blocks that
a window has passed. The next block to evict is the first of the longer queue. With a single queue, one long text would
evict the ends of all other texts, although the last few blocks are enough to continue a text of any length.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from hashlib import sha256

from forerun.errors import InternalError

Key = bytes


def root(salt: str | None) -> Key:
    """Return the key that begins a sequence's chain of keys. salt: None = no salt, which differs from an empty salt."""
    return b"" if salt is None else sha256(b"salt" + salt.encode("utf-8", "surrogatepass")).digest()


def extended(before: Key, tokens: Seq[int]) -> Key:
    """Return the key of a block. before: the key of the block before it. tokens: the block's own tokens."""
    return sha256(before + array("q", tokens).tobytes()).digest()


def keys_of(tokens: Seq[int], salt: str | None, block_tokens: int) -> list[Key]:
    """Return the key of each full block of `tokens[:-1]`.

    The last token must be run in any case, because a cache does not hold the logits after it. salt: blocks of equal
    tokens have different keys under different salts; None = no salt.
    """
    keys, key = list[Key](), root(salt)
    for start in range(0, len(tokens) - block_tokens, block_tokens):
        keys.append(key := extended(key, tokens[start : start + block_tokens]))
    return keys


class PrefixIndex:
    """An index of the published blocks by key, and the queues of evictable blocks, each longest unused first."""

    def __init__(self) -> None:
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()  # evictable, too: sequences went on without them

    @property
    def num_evictable(self) -> int:
        """The number of published blocks that no sequence uses."""
        return len(self._evictable) + len(self._passed)

    def holds(self, block: int) -> bool:
        """Return whether the block is published."""
        return block in self._key_of

    # ------------------------------------------------------------------------------------------ finding and publishing

    def find(self, key: Key) -> int | None:
        """Return the block that is published under a key; None where there is no such block."""
        return self._block_of.get(key)

    def publish(self, key: Key, block: int) -> bool:
        """Let later sequences find a block under a key, and return True.

        If another block has the key already, return False; the block then stays private.
        """
        if key in self._block_of:
            return False
        self._block_of[key], self._key_of[block] = block, key
        return True

    def remove(self, block: int) -> None:
        """Withdraw a block: no later sequence finds it."""
        del self._block_of[self._key_of.pop(block)]

    # ------------------------------------------------------------------------------------------------ use and eviction

    def rest(self, block: int, *, is_passed: bool = False) -> bool:
        """Make a block without users evictable, as the last of its queue. Returns False if the block is not published.

        is_passed: whether the block's last user goes on without the block, because a window has passed it.
        """
        if block not in self._key_of:
            return False
        (self._passed if is_passed else self._evictable)[block] = None
        return True

    def wake(self, block: int) -> None:
        """Remove a block from the evictable blocks, because it has a user again."""
        self._evictable.pop(block, None)
        self._passed.pop(block, None)

    def touch(self, key: Key) -> None:
        """Mark the block that is published under a key as used just now, if the block is evictable.

        This is called at the end of a sequence. The sequence may have used a private block with the same tokens
        instead.
        """
        block = self._block_of.get(key, -1)
        if block in self._evictable or block in self._passed:
            self.wake(block)
            self._evictable[block] = None

    def evict(self) -> int:
        """Withdraw and return the next block to evict: the longest unused block of the longer queue.

        One queue holds the blocks that a window has passed. The other queue holds all other evictable blocks, and is
        chosen if both have the same length. There must be an evictable block.
        """
        queue = self._passed if len(self._passed) > len(self._evictable) else self._evictable
        block, _ = queue.popitem(last=False)
        self.remove(block)
        return block

    # ------------------------------------------------------------------------------------------------------- integrity

    def evictable(self) -> list[int]:
        """Return the evictable blocks, each queue in its order of eviction."""
        return [*self._evictable, *self._passed]

    def check_integrity(self) -> None:
        """Raise InternalError where the two maps of blocks disagree, or an evictable block is not published."""
        if len(self._block_of) != len(self._key_of) or any(b not in self._key_of for b in self.evictable()):
            raise InternalError("the prefix index lost a published block")
        for block, key in self._key_of.items():
            if self._block_of.get(key) != block:
                raise InternalError(f"block {block} of the KV cache is published under a key that is not its own")

    def check_keys(self, keys: Seq[Key], table: Seq[int]) -> None:
        """Raise InternalError if a block of `table` is published under another prefix key than its key in `keys`."""
        for key, block in zip(keys, table, strict=False):
            if self._key_of.get(block, key) != key:
                raise InternalError(f"block {block} of the KV cache is published as other tokens than it holds")
