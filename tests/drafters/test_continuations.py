"""What followed the occurrences of a suffix: the search and the growth of chains and trees, by known answers."""

import random

import numpy as np
import pytest

from forerun.drafters.shared.continuations import END_OF_TEXT, NUM_FOLLOWED, NUM_MASKS, grow, levels
from forerun.types import Budget, SamplingParams, Sequence


def by_brute_force(text: list[int], context: list[int]) -> dict[tuple[int, ...], int]:
    """Ends of the occurrences of each suffix -> the longest suffix that has those."""
    found = {}
    for length in range(1, len(context) + 1):
        if ends := tuple(i for i in range(length, len(text) + 1) if text[i - length : i] == context[-length:]):
            found[ends] = length
    return found


def by_levels(text: list[int], context: list[int]) -> dict[tuple[int, ...], int]:
    found = levels(np.array(text, dtype=np.intc), context)
    assert [level.length for level in found] == sorted({level.length for level in found})
    return {tuple(level.ends(10**6)[::-1]): level.length for level in found}


@pytest.mark.parametrize("num_ids", [1, 2, 3, 20])
def test_every_suffix_is_found_wherever_it_occurs(num_ids: int) -> None:
    rng = random.Random(num_ids)
    lengths = set()
    for _ in range(600):
        text = [rng.randrange(num_ids) for _ in range(rng.randint(0, 60))]
        context = text[-20:] if text and rng.random() < 0.5 else [rng.randrange(num_ids) for _ in range(12)]
        assert by_levels(text, context) == by_brute_force(text, context), (text, context)
        lengths |= set(by_levels(text, context).values())
    assert len(lengths) > 5


def test_a_frequent_suffix_is_followed_at_its_latest_places() -> None:
    """The work is bounded: a longer suffix is not looked for further back, a shorter one is found everywhere."""
    found = levels(np.full(1000, 7, dtype=np.intc), [7] * 20)
    assert [level.length for level in found] == [*range(1, NUM_MASKS), 20]
    assert found[0].ends(10**6) == list(range(1000, 0, -1))
    assert found[-1].ends(10**6) == list(range(1000, 1000 - NUM_FOLLOWED, -1))
    assert found[-1].ends(3) == [1000, 999, 998]


def test_a_chain_takes_the_most_frequent_token_and_the_latest_of_equals() -> None:
    chain = grow([[5, 1], [4, 2], [4, 3], [5, 4], [4, 3]], 2, is_tree=False)
    assert (chain.tokens, chain.parents, chain.probs) == ([4, 3], [-1, 0], [0.6, 0.4])
    assert chain.score == 1.0
    assert grow([[5, 1], [4, 2]], 2, is_tree=False).tokens == [5, 1]  # rows come latest first


def test_a_tree_takes_the_likeliest_nodes_first() -> None:
    rows = [[4, 3, END_OF_TEXT], [4, 3, END_OF_TEXT], [4, 2, END_OF_TEXT], [5, 1, END_OF_TEXT], [6, 1, END_OF_TEXT]]
    tree = grow(rows, 4, is_tree=True)
    assert (tree.tokens, tree.parents) == ([4, 3, 5, 6], [-1, 0, -1, -1])
    assert tree.probs == [0.6, 0.4, 0.2, 0.2]
    assert sorted(grow(rows, 99, is_tree=True).tokens) == [1, 1, 2, 3, 4, 5, 6]


def test_min_prob_cuts_and_counts_rows_that_ended() -> None:
    rows = [[4, END_OF_TEXT], [4, END_OF_TEXT], [4, 3], [4, END_OF_TEXT]]
    assert grow(rows, 8, is_tree=False, min_prob=0.25).tokens[:2] == [4, 3]
    assert grow(rows, 8, is_tree=False, min_prob=0.26).tokens == [4]
    assert grow([[END_OF_TEXT]], 8, is_tree=True).tokens == []


def test_a_row_that_runs_into_the_end_of_the_text_reads_on_in_the_draft() -> None:
    assert grow([[1, 2]], 7, is_tree=False).tokens == [1, 2, 1, 2, 1, 2, 1]


def test_nothing_follows_an_end_id() -> None:
    rows = [[4, 9, 5, END_OF_TEXT], [4, 9, 5, END_OF_TEXT], [4, 6, 5, END_OF_TEXT]]
    assert grow(rows, 3, is_tree=False, end_ids={9}).tokens == [4, 9]
    tree = grow(rows, 5, is_tree=True, end_ids={9})
    assert (tree.tokens, tree.parents) == ([4, 9, 6, 5], [-1, 0, 0, 2])


def test_a_node_that_pacing_refuses_takes_its_descendants_along() -> None:
    tree = grow([[token, 3, 1, END_OF_TEXT] for token in (4, 4, 5)], 6, is_tree=True)
    asked = []

    def go_on(b: int, depth: int, probs) -> bool:
        asked.append((b, depth, probs.point))
        return probs.point != 4

    draft = tree.draft(Sequence(0, [1], 1, SamplingParams(), 0, 9), 7, Budget([6], 0, go_on))
    assert (draft.tokens, draft.parents, draft.node_starts) == ([5, 3, 1], [-1, 0, 1], [0, 3])
    assert asked == [(7, 0, 4), (7, 0, 5), (7, 1, 3), (7, 2, 1)]
