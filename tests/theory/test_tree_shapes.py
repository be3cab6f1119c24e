"""The best trees of Sequoia: three ways to find them agree, and known answers."""

import functools
import random

import pytest

from forerun.theory.trees import best_first, expected_tokens, most_tokens

KNOWN = {2: 1.6, 3: 1.96, 4: 2.176, 5: 2.376, 6: 2.5056}  # nodes, the root counted -> tokens, for shares .6, .2, .1


@functools.cache
def every_tree(num_nodes: int, depth: int) -> list[tuple]:
    """All ordered trees of so many nodes, as tuples of subtrees."""
    if num_nodes == 1:
        return [()]
    if depth == 0:
        return []
    return [
        (*rest, last)
        for size in range(1, num_nodes)
        for last in every_tree(size, depth - 1)
        for rest in every_tree(num_nodes - size, depth)
    ]


def gain(tree: tuple, a: tuple[float, ...]) -> float:
    """Tokens of a tree; one with more children than shares gains nothing by them."""
    return 1.0 + sum(share * gain(child, a) for share, child in zip(a, tree, strict=False))


def test_known_answers() -> None:
    for num_nodes, tokens in KNOWN.items():
        assert most_tokens((0.6, 0.2, 0.1), num_nodes, 5) == pytest.approx(tokens, abs=1e-12)


def test_the_programme_and_best_first_equal_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(12):
        a = tuple(sorted((rng.random() / 3 for _ in range(3)), reverse=True))
        for num_nodes in range(1, 7):
            brute = max(gain(tree, a) for tree in every_tree(num_nodes, 5))
            assert most_tokens(a, num_nodes, 5) == pytest.approx(brute, abs=1e-12)
            assert expected_tokens(best_first(a, num_nodes - 1)) == pytest.approx(brute, abs=1e-12)


def test_the_programme_needs_no_falling_shares() -> None:
    a = (0.1, 0.6, 0.2)
    brute = max(gain(tree, a) for tree in every_tree(5, 3))
    assert most_tokens(a, 5, 3) == pytest.approx(brute, abs=1e-12)


def test_the_order_is_best_first_and_keeps_to_widths() -> None:
    nodes = best_first((0.6, 0.2, 0.1), 20, (3, 2))
    assert len(nodes) == 9
    assert all(node.parent < i for i, node in enumerate(nodes))
    assert [node.value for node in nodes] == sorted((node.value for node in nodes), reverse=True)
    ranks = [(0, k) for k in range(3)] + [(1, k) for k in (0, 1) for _ in range(3)]
    assert sorted((node.depth, node.rank) for node in nodes) == ranks
