"""Traversal verification: the leaves of a tree are judged first, then their parents; on a chain it is `block`.

Weng et al. 2025, arXiv 2505.12398. Each node v has a share a_v of the draft's mass that may stay on its path: a = 1 at
the root, and min(1, a p(x) / q(x)) at a child with token x, where p is the target's distribution behind its parent and
q the one that x was drawn from. The subtrees of a node are visited in the order of the draws. A subtree
without an accepted node is removed, and takes its q with it:

    r = (a p - q)+,  R = sum r;    p <- norm(r),  a <- R / (R + 1 - a)

A node that has lost all children is accepted with probability a, and the round then ends with a draw from what is left
of its p. At the root a stays 1, so that something is always emitted. Every step is a step of block verification,
with the distribution of the next sibling's draw in place of the first's; so siblings may be drawn without replacement,
independently, or be points, provided that each states the distribution of its own draw.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.types import AcceptanceTest, Coins, Draft, Probs
from forerun.verify import Ruling, children_of
from forerun.verify.arithmetic import acceptance, excess
from forerun.verify.block import remaining_share

LOSSLESS = True
SHAPES = ("chain", "tree")
DRAWS = ("point", "independent", "distinct")
NEEDS_ALL_ROWS = True


@dataclass(frozen=True)
class Options:
    """No options."""


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, options: Options | None = None) -> Ruling:
    """Judge one sequence: (accepted nodes, correction or bonus, acceptance tests).

    The tests cover the accepted nodes and the siblings that were removed before them.
    """
    first, lanes = draft.node_starts[b], _lanes(draft, b)

    def visit(node: int, share: float, depth: int) -> Ruling | None:
        """Judge the subtree of a node at a depth (-1, 0 = the root). None where none of its nodes was accepted."""
        if share == 0:
            return None
        p, removed = target_probs[node - first + 1 if node >= 0 else 0], list[AcceptanceTest]()
        for child in children_of(draft, b, [node]):
            token, q = draft.tokens[child], draft.probs[child]
            target_prob, draft_prob = p.at(token), q.at(token)
            found = visit(child, acceptance(share * target_prob, draft_prob), depth + 1)
            if found is not None:
                path, next_token, tests = found
                kept = AcceptanceTest(child, target_prob, draft_prob, True)
                return [child, *path], next_token, [*removed, kept, *tests]
            removed.append(AcceptanceTest(child, target_prob, draft_prob, False))
            if draft_prob > 0:  # else it was drawn by underflow alone
                p, room = excess(p, q, share)
                share = remaining_share(share, room)
        if node < 0 or coins.accept(share, depth - 1, lanes[node]):
            return [], coins.draw(p, depth), removed
        return None

    ruling = visit(-1, 1.0, 0)
    assert ruling is not None, "the root is always accepted"
    return ruling


def _lanes(draft: Draft, b: int) -> dict[int, int]:
    """Number the nodes of each depth, in draft order: each tosses a coin of its own."""
    depths, lanes, counts = {-1: 0}, dict[int, int](), dict[int, int]()
    for node in draft.nodes(b):
        depth = depths[node] = depths[draft.parents[node]] + 1
        lanes[node] = counts.get(depth, 0)
        counts[depth] = lanes[node] + 1
    return lanes
