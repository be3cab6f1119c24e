"""The trees of a given number of nodes that gain the most: Sequoia's programme (Chen et al. 2024, arXiv 2402.12374).

a[k] is the probability that the child drawn as number k is the accepted one, given that its parent is accepted. A tree
then emits F = 1 + the sum over its nodes of the product of a along the path, in tokens; the 1 is the final token.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import NamedTuple


class Node(NamedTuple):
    """A node of a tree. parent: index among the nodes, -1 = the root. rank: among its siblings. depth: 0 = first."""

    parent: int
    rank: int
    depth: int
    value: float  # the probability that it is accepted


def best_nodes(rates: Mapping[int, Seq[float]]) -> Iterator[Node]:
    """Yield the nodes of a tree in the order of their values, which are products of rates; the largest comes first.

    rates: the rates of each node's children, best first, by the number of the node in this order (-1 = the root). When
    a node was yielded the caller adds the rates of its children before it asks for the next node; a node without rates
    has no children. Values never rise, so a parent comes before its children, and siblings in their order.
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
    """Return the nodes of the best tree, where a falls with the rank: the nodes of the largest products, best first.

    widths: most children of a node by its children's depth, which also limits the depth; None = no limit but len(a).
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
    """Return F of a tree."""
    return 1.0 + sum(node.value for node in nodes)


def most_tokens(a: Seq[float], num_nodes: int, depth: int) -> float:
    """Return the largest F of a tree of `num_nodes` nodes, the root counted, with `depth` levels below the root.

    Sequoia's recursion, for any a: F(n, d, b) = max_m F(n - m, d, b - 1) + a_b max_b' F(m, d - 1, b'), with b children
    of the root; F(1, d, 0) = 1.
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
