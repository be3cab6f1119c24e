"""Traversal verification: the leaves of a tree are judged first, then their parents; chains are judged as by `block`.

Weng et al. 2025, arXiv 2505.12398. Each node has a share a: the share of the draft's mass that may stay on the path to
the node. At the root a = 1. At a child with token x the share is min(1, a p(x) / q(x)). Here a is the parent's share, p
is the target's distribution after the parent, and q is the distribution that x was drawn from. The subtrees of a node
are visited in the order of the draws. A subtree without an accepted node is removed, and the q of the subtree's root is
subtracted:

    r = (a p - q)+,  R = sum r;    p <- norm(r),  a <- R / (R + 1 - a)

A node without children, or with all children removed, is accepted with probability a. The round then ends with a draw
from the p that remains at this node. At the root a stays 1, so that a token is always emitted. Every step is a step of
block verification in which the next sibling's q takes the place of the first sibling's q. So siblings may be drawn
without replacement or independently, or be points. The q of each sibling must be the distribution of its own draw.
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
    """Judge one sequence. Returns (accepted nodes, correction or bonus, acceptance tests).

    The tests cover the accepted nodes, the siblings removed before each accepted node, and the removed children of the
    last accepted node.
    """
    first, lanes = draft.node_starts[b], _lanes(draft, b)

    def visit(node: int, share: float, depth: int) -> Ruling | None:
        """Judge the subtree of a node (-1 = the root, at depth 0). Returns None if none of its nodes is accepted."""
        if share == 0:
            return None
        p = target_probs[node - first + 1 if node >= 0 else 0]
        removed = list[AcceptanceTest]()
        for child in children_of(draft, b, [node]):
            token, q = draft.tokens[child], draft.probs[child]
            target_prob, draft_prob = p.at(token), q.at(token)
            child_ruling = visit(child, acceptance(share * target_prob, draft_prob), depth + 1)
            if child_ruling is not None:
                path, next_token, tests = child_ruling
                kept = AcceptanceTest(child, target_prob, draft_prob, True)
                return [child, *path], next_token, [*removed, kept, *tests]
            removed.append(AcceptanceTest(child, target_prob, draft_prob, False))
            if draft_prob > 0:  # a probability of 0 comes from underflow alone
                p, room = excess(p, q, share)
                share = remaining_share(share, room)
        if node < 0 or coins.accept(share, depth - 1, lanes[node]):
            return [], coins.draw(p, depth), removed
        return None

    ruling = visit(-1, 1.0, 0)
    assert ruling is not None, "the root is always accepted"
    return ruling


def _lanes(draft: Draft, b: int) -> dict[int, int]:
    """Map each node to its number among the nodes of its depth, in draft order, so that each node has its own coin."""
    depths = {-1: 0}
    lanes = dict[int, int]()
    counts = dict[int, int]()
    for node in draft.nodes(b):
        depth = depths[node] = depths[draft.parents[node]] + 1
        lanes[node] = counts.get(depth, 0)
        counts[depth] = lanes[node] + 1
    return lanes
