"""The prefix index finds full blocks by the tokens that they hold and by the tokens before them.

It is a trie. A node is one published block; its key is (parent, the block's tokens), where the parent is the number of
the node before it, or at the root the salt of the request. Whole keys are compared, not their hashes, and a number is
never given twice. So a number always means one salt and one chain of tokens, and a block that is found under it is
right, even if other blocks were evicted and published again in between.

A published block that no sequence uses is *evictable*: it can be found until its rows are needed. The longest unused
block is evicted first, and of one sequence's blocks the deepest first. After a node is evicted its children cannot be
found any more, because their keys contain its number. Such children are useless but not wrong, and they are evictable
as soon as no sequence uses them.
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
    """The nodes of one sequence: node i stands for the same tokens as block i of the sequence's table.

    Node i's block is either that block of the table, or an equal block that another sequence published first. Only in
    the second case may the node be evicted while the sequence lives.
    """

    salt: str | None
    nodes: list[Node] = field(default_factory=list)

    @property
    def parent(self) -> Parent:
        """The first part of the next node's key."""
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
        """Return whether the block is published."""
        return block in self._by_block

    # ------------------------------------------------------------------------------------------ finding and publishing

    def find(self, tokens: Seq[int], salt: str | None) -> Path:
        """Return the longest chain of published blocks with which `tokens`, without the last one, begin.

        The last token must be run in any case, because the cache does not hold the logits after it.
        """
        path, size = Path(salt), self.block_tokens
        for start in range(0, len(tokens) - size, size):
            node = self._by_key.get((path.parent, tuple(tokens[start : start + size])))
            if node is None:
                break
            path.nodes.append(node)
        return path

    def extend(self, path: Path, tokens: Seq[int], blocks: Seq[int]) -> None:
        """Publish those of `blocks` (a sequence's first ones, full of `tokens`) that the path does not have yet.

        Where an equal block is published already, the path takes that block's node, and this block stays private.
        """
        size = self.block_tokens
        for i in range(len(path.nodes), len(blocks)):
            key = (path.parent, tuple(tokens[i * size : (i + 1) * size]))
            node = self._by_key.get(key)
            if node is None and self.holds(blocks[i]):
                return  # the block is published behind another node, by a fork that shares it
            path.nodes.append(node or self._add(key, blocks[i]))

    def _add(self, key: Key, block: int) -> Node:
        node = Node(self._next_number, key, block)
        self._next_number += 1
        self._by_key[key] = self._by_block[block] = node
        return node

    def remove(self, block: int) -> None:
        """Withdraw a block: no later sequence finds it."""
        del self._by_key[self._by_block.pop(block).key]

    # ------------------------------------------------------------------------------------------------ use and eviction

    def rest(self, block: int) -> bool:
        """Make a block without users evictable, as the last of all. Returns False where it is not published."""
        if block not in self._by_block:
            return False
        self._evictable[block] = None
        return True

    def wake(self, block: int) -> None:
        """Take a block that has a user again out of the evictable ones."""
        self._evictable.pop(block, None)

    def touch(self, node: Node) -> None:
        """Count a node's block as used just now, where it is evictable.

        A sequence calls it at its end for nodes whose tokens it held in an equal block of its own.
        """
        if node.block in self._evictable and self._by_block[node.block] is node:
            self._evictable.move_to_end(node.block)

    def evict(self) -> int:
        """Withdraw the longest unused block and return it. There must be one."""
        block, _ = self._evictable.popitem(last=False)
        self.remove(block)
        return block

    # ------------------------------------------------------------------------------------------------------- integrity

    def evictable(self) -> list[int]:
        """Return the evictable blocks in the order in which they will be evicted."""
        return list(self._evictable)

    def check_integrity(self) -> None:
        """Raise InternalError where the two directories disagree, or an evictable block is not published."""
        if len(self._by_key) != len(self._by_block) or any(b not in self._by_block for b in self._evictable):
            raise InternalError("the prefix index lost a published block")
        for block, node in self._by_block.items():
            parent, tokens = node.key
            if self._by_key.get(node.key) is not node or node.block != block or len(tokens) != self.block_tokens:
                raise InternalError(f"block {block} of the KV cache is published under a key that is not its own")
            if isinstance(parent, int) and parent >= node.number:
                raise InternalError(f"node {node.number} of the prefix index is older than its parent {parent}")

    def check_path(self, path: Path, table: Seq[int]) -> None:
        """Raise InternalError where the path is no chain, or a block of the table is published as other tokens."""
        parent: Parent = path.salt
        for node, block in zip(path.nodes, table, strict=False):
            if node.key[0] != parent:
                raise InternalError(f"node {node.number} of the prefix index does not follow {parent!r}")
            if self._by_block.get(block, node).key[1] != node.key[1]:
                raise InternalError(f"block {block} of the KV cache is published as other tokens than it holds")
            parent = node.number
