"""Bookkeeping of the KV cache rows of a beam tree, in one slot of a runner, so that no token of the tree is run twice.

The cache keeps the rows of all committed tokens except the last. The tree's pending rows follow. The first pending row
belongs to the last committed token, whose node is the tree's base. The other pending rows belong to later nodes, in the
order in which the nodes were run. When the base moves to a later node, the rows before the new base are kept, and the
rows of abandoned beams are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.kv import Held, KVCache
from forerun.models.runner import Run
from forerun.types import Hypotheses


class Branches:
    """Holds the pending cache rows (written, not committed) of one slot.

    rows: maps each node of the slot's beam tree that has a pending row to the index of the row. base: the node of the
    first pending row.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.base = -1

    def forget(self, base: int) -> None:
        """Forget all pending rows, and set the base to node `base`.

        The cache must hold exactly the rows of all committed tokens but the last.
        """
        self.rows, self.base = {}, base

    def missing(self, tree: Hypotheses) -> list[int]:
        """Return the nodes of live beams that have no pending row. Every parent comes before its children."""
        return [node for node in tree.live() if node not in self.rows]

    def run(self, slot: int, tree: Hypotheses, nodes: Seq[int], last_token: int) -> Run:
        """Return a `Run` of the tokens of `nodes`.

        The parent of each node, except of the base, must have a pending row or be among `nodes`. last_token: the last
        committed token, which is the token of the base.
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
        """Record that the rows of `nodes` were written to the cache in this order, after the earlier pending rows."""
        for node in nodes:
            self.rows[node] = len(self.rows)

    def settle(self, tree: Hypotheses) -> tuple[list[int], Held]:
        """Move the base to `tree.base`. Returns the indices of the pending rows to keep, and the rows to leave pending.

        The rows to keep belong to the nodes from the old base to the parent of the new base. If one of these nodes has
        no row, only the rows of the nodes before this node are kept, and no row stays pending.
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
    """Call `branches.settle(tree)`, and apply the result to the rows of `slot` in `cache`.

    No other code may change this cache. Returns the number of rows that were kept.
    """
    kept, held = branches.settle(tree)
    cache.keep({slot: kept}, {slot: held})
    return len(kept)
