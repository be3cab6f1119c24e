"""The draft trees that emit the most tokens for their number of nodes: Sequoia (Chen et al. 2024, arXiv 2402.12374).

a[k] is the probability that the child with rank k is the accepted child, given that its parent is accepted. The value
of a node is the product of these probabilities along the path from the root to the node. A tree emits F tokens on
average: the sum of its nodes' values, plus 1 for the final token.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import NamedTuple


class Node(NamedTuple):
    """A node of a tree, below the root.

    parent: the parent's index among the nodes, -1 = the root. rank: the node's index among its siblings. depth: 0 = a
    child of the root.
    """

    parent: int
    rank: int
    depth: int
    value: float  # the probability that the node is accepted


def best_nodes(rates: Mapping[int, Seq[float]]) -> Iterator[Node]:
    """Yield nodes in descending order of their values. A value is the product of the rates along the path to the node.

    rates: for each node, the rates of its children, best first. A node is identified by its index in the order of
    yielding; -1 = the root. After a node is yielded, the caller adds the rates of the node's children before asking for
    the next node. A node without rates has no children. Values never rise along a path or with the rank. So parents are
    yielded before their children, and siblings in the order of their ranks.
    """
    waiting: list[tuple[float, int, Node]] = []  # the order of arrival breaks ties: parents first
    arrivals, values = itertools.count(), {-1: 1.0}

    def arrive(parent: int, rank: int, depth: int) -> None:
        if rank < len(own := rates.get(parent, ())):
            value = values[parent] * own[rank]
            heapq.heappush(waiting, (-value, next(arrivals), Node(parent, rank, depth, value)))

    arrive(-1, 0, 0)
    for number in itertools.count():
        if not waiting:
            return
        node = heapq.heappop(waiting)[2]
        values[number] = node.value
        yield node
        arrive(number, 0, node.depth + 1)
        arrive(node.parent, node.rank + 1, node.depth)


def best_first(a: Seq[float], num_nodes: int, widths: Seq[int] | None = None) -> list[Node]:
    """Return the nodes of the best tree: the nodes with the largest values, best first.

    a: the probabilities a[k] by rank, as defined at the top of this file; a[k] must not rise with k. widths: the
    largest number of children of a node, by the depth of the children. The tree has at most len(widths) levels. None =
    up to len(a) children at any depth.
    """

    def at(depth: int) -> Seq[float]:
        if widths is None:
            return a
        return a[: widths[depth]] if depth < len(widths) else ()

    nodes: list[Node] = []
    rates = {-1: at(0)}
    for node in itertools.islice(best_nodes(rates), num_nodes):
        rates[len(nodes)] = at(node.depth + 1)
        nodes.append(node)
    return nodes


def expected_tokens(nodes: Seq[Node]) -> float:
    """Return F, the mean number of tokens that a round with this tree emits."""
    return 1.0 + sum(node.value for node in nodes)


def most_tokens(a: Seq[float], num_nodes: int, depth: int) -> float:
    """Return the largest F of a tree of `num_nodes` nodes, root included, and at most `depth` levels below the root.

    Sequoia's recursion holds for any a: F(n, d, b) = max_m [F(n - m, d, b - 1) + a_b max_b' F(m, d - 1, b')] and
    F(1, d, 0) = 1. Here n is the number of nodes, d the number of levels below the root, and b the number of children
    of the root.
    """

    @functools.cache
    def with_children(n: int, d: int, b: int) -> float:
        if b == 0:
            return 1.0 if n == 1 else -1.0  # no such tree
        splits = [(with_children(n - m, d, b - 1), m) for m in range(1, n) if d > 0]
        return max([first + a[b - 1] * best(m, d - 1) for first, m in splits if first > 0], default=-1.0)

    @functools.cache
    def best(n: int, d: int) -> float:
        return max(with_children(n, d, b) for b in range(min(len(a), n - 1) + 1))

    return best(num_nodes, depth)
