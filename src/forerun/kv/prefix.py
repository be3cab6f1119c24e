"""The prefix index: which full block holds which tokens, found again by what it holds and by what comes before it.

A trie. A node is one published block; its key is (parent, the block's tokens), where the parent is the number of the
node before it, or at the root the salt of the request. Keys are compared as they are, no hash stands in for one, and a
number is never given twice. So a number means one salt and one chain of tokens for ever, and whatever is found under
it is right, whichever blocks came and went in between.

A published block that no sequence uses is *evictable*: it stays findable until its rows are needed. The longest unused
goes first, and the blocks of one sequence deepest first. An evicted node takes the way to its children along: their
key names a number that nobody can reach again. Such a child is merely useless, never wrong, and evictable like any
other as soon as nobody uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.errors import InternalError

Parent = int | str | None  # number of the node before, or the salt; None = no salt
Key = tuple[Parent, tuple[int, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One published block."""

    number: int
    key: Key
    block: int


@dataclass(slots=True)
class Path:
    """Where a sequence stands in the trie: node i means the same tokens as block i of its table.

    Node i's block is the sequence's own, shared or not, or the equal one that somebody else published first. Only in
    the second case may the node be evicted while the sequence lives.
    """

    salt: str | None
    nodes: list[Node] = field(default_factory=list)

    @property
    def parent(self) -> Parent:
        """What the key of the next node begins with."""
        return self.nodes[-1].number if self.nodes else self.salt


class PrefixIndex:
    """Published blocks by key and by block, and the evictable ones, longest unused first."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._by_key: dict[Key, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._next_number = 0

    @property
    def num_evictable(self) -> int:
        """Published blocks that no sequence uses."""
        return len(self._evictable)

    def holds(self, block: int) -> bool:
        """True where the block is published."""
        return block in self._by_block

    # ------------------------------------------------------------------------------------------ finding and publishing

    def find(self, tokens: Seq[int], salt: str | None) -> Path:
        """The longest chain of published blocks that `tokens`, without the last one, begin with.

        The last token is left over because somebody must run it: the logits behind it are in no cache.
        """
        path, size = Path(salt), self.block_tokens
        for start in range(0, len(tokens) - size, size):
            node = self._by_key.get((path.parent, tuple(tokens[start : start + size])))
            if node is None:
                break
            path.nodes.append(node)
        return path

    def extend(self, path: Path, tokens: Seq[int], blocks: Seq[int]) -> None:
        """Publish those of `blocks` (a sequence's first ones, full of `tokens`) that the path has not reached yet.

        Where an equal block is there already, the path goes on through it and this one stays private.
        """
        size = self.block_tokens
        for i in range(len(path.nodes), len(blocks)):
            key = (path.parent, tuple(tokens[i * size : (i + 1) * size]))
            node = self._by_key.get(key)
            if node is None and self.holds(blocks[i]):
                return  # a fork published the shared block behind another node, which need not be findable any more
            path.nodes.append(node or self._add(key, blocks[i]))

    def _add(self, key: Key, block: int) -> Node:
        node = Node(self._next_number, key, block)
        self._next_number += 1
        self._by_key[key] = self._by_block[block] = node
        return node

    def remove(self, block: int) -> None:
        """Nobody finds this block any more."""
        del self._by_key[self._by_block.pop(block).key]

    # ------------------------------------------------------------------------------------------------ use and eviction

    def rest(self, block: int) -> bool:
        """The last user has gone: a published block becomes the last to be evicted. False: it is not published."""
        if block not in self._by_block:
            return False
        self._evictable[block] = None
        return True

    def wake(self, block: int) -> None:
        """The block has a user again."""
        self._evictable.pop(block, None)

    def touch(self, node: Node) -> None:
        """A sequence that had an equal block of its own has gone: if nobody uses this one, it was used just now."""
        if node.block in self._evictable and self._by_block[node.block] is node:
            self._evictable.move_to_end(node.block)

    def evict(self) -> int:
        """Withdraw the longest unused block; returns it. There must be one."""
        block, _ = self._evictable.popitem(last=False)
        self.remove(block)
        return block

    # ------------------------------------------------------------------------------------------------------- integrity

    def evictable(self) -> list[int]:
        """Evictable blocks, the next to go first."""
        return list(self._evictable)

    def check_integrity(self) -> None:
        """Both directories say the same, and every evictable block is published. Raises InternalError otherwise."""
        if len(self._by_key) != len(self._by_block) or any(b not in self._by_block for b in self._evictable):
            raise InternalError("the prefix index lost a published block")
        for block, node in self._by_block.items():
            parent, tokens = node.key
            if self._by_key.get(node.key) is not node or node.block != block or len(tokens) != self.block_tokens:
                raise InternalError(f"block {block} of the KV cache is published under a key that is not its own")
            if isinstance(parent, int) and parent >= node.number:
                raise InternalError(f"node {node.number} of the prefix index is older than its parent {parent}")

    def check_path(self, path: Path, table: Seq[int]) -> None:
        """The path is a chain, and blocks of the table are published as the path says or not at all.

        Raises InternalError otherwise.
        """
        parent: Parent = path.salt
        for node, block in zip(path.nodes, table, strict=False):
            if node.key[0] != parent:
                raise InternalError(f"node {node.number} of the prefix index does not follow {parent!r}")
            if self._by_block.get(block, node).key[1] != node.key[1]:
                raise InternalError(f"block {block} of the KV cache is published as other tokens than it holds")
            parent = node.number
