"""The cache rows of a tree of beams, in one slot of a runner. With these rows, no token of the tree is run twice.

The cache keeps the rows of all committed tokens except the last one. After them come the tree's pending rows: first the
row of the last committed token, which is the tree's base, then the rows of other nodes in the order in which they were
run. When the base moves to a later node, the rows before the new base are kept, and rows of abandoned beams are
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.kv import Held, KVCache
from forerun.models.runner import Run
from forerun.types import Hypotheses


class Branches:
    """The pending cache rows (written, not committed) of one slot: the index of each, by node of the slot's tree.

    base: the node to which the first pending row belongs.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.base = -1

    def forget(self, base: int) -> None:
        """Start over at node `base`. The cache must hold just the rows of all committed tokens but the last."""
        self.rows, self.base = {}, base

    def missing(self, tree: Hypotheses) -> list[int]:
        """Return the nodes of live beams that have no pending row, each after its parent."""
        return [node for node in tree.live() if node not in self.rows]

    def run(self, slot: int, tree: Hypotheses, nodes: Seq[int], last_token: int) -> Run:
        """Return a `Run` of these nodes' tokens. Each node's parent must have a pending row, or be in the same run.

        last_token: the last committed token, which is the token of the base.
        """
        first = len(self.rows)
        places = {node: first + i for i, node in enumerate(nodes)}
        parents = []
        for node in nodes:
            parent = -1 if node == self.base else tree.parents[node]
            parents.append(-1 if node == self.base else places.get(parent, self.rows.get(parent, -1)))
        tokens = [last_token if node == self.base else tree.tokens[node] for node in nodes]
        return Run(slot, tokens, "all", parents)

    def add(self, nodes: Seq[int]) -> None:
        """Record that these nodes' rows were written after the pending rows."""
        for node in nodes:
            self.rows[node] = len(self.rows)

    def settle(self, tree: Hypotheses) -> tuple[list[int], Held]:
        """Move on to the tree's new base. Returns the pending rows to keep, by index, and the rows that stay pending.

        Rows are kept from the old base to the parent of the new base. If a row on this path is missing, only the rows
        before the missing one are kept, and no row stays pending.
        """
        moved = [self.base, *tree.path(tree.base, self.base)]
        kept = [self.rows[node] for node in moved[:-1] if node in self.rows]
        is_whole = len(kept) == len(moved) - 1
        if not is_whole:
            first = next(i for i, node in enumerate(moved) if node not in self.rows)
            kept = kept[:first]
        stay = sorted((n for n in tree.live() if n in self.rows), key=self.rows.__getitem__) if is_whole else []
        rows = [self.rows[node] for node in stay]
        places = {node: i for i, node in enumerate(stay)}
        parents = [-1 if node == tree.base else places[tree.parents[node]] for node in stay]
        self.rows, self.base = places, tree.base
        return kept, Held(rows, parents)


def settle(cache: KVCache, slot: int, branches: Branches, tree: Hypotheses) -> int:
    """Apply `Branches.settle` to a cache that no other code changes. Returns the number of rows that were kept."""
    kept, held = branches.settle(tree)
    cache.keep({slot: kept}, {slot: held})
    return len(kept)
