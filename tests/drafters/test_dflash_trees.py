"""DDTree: the best paths through the rows of one pass, against an enumeration of all of them; and their law."""

import dataclasses
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import pytest

from forerun.drafters.dflash import Guess, draw_tree
from forerun.engine.engine import philox_coins
from forerun.sampling import History, probs
from forerun.testing.engines import HORIZON, drafter_for
from forerun.types import Budget, Draft, SamplingParams, Sequence
from house.enumeration import Case
from house.test_lossless_trees import check_first_round

IDS, ROWS = 6, 4
PROMPT = [3, 1, 3]
ALL = IDS + IDS**2 + IDS**3 + IDS**4  # paths through all rows
Path = tuple[int, ...]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.7, "top_k": 3},
    "penalties": {"temperature": 1.2, "repetition_penalty": 1.8, "frequency_penalty": 0.7},
    "greedy with penalties": {"temperature": 0.0, "presence_penalty": 1.5},
    "bias": {"logit_bias": {0: 2.0, 4: -float("inf")}},
}


def request(end_ids: Seq[int] = (), seed: int = 0, **params: Any) -> Sequence:
    given = SamplingParams(**{"temperature": 0.0, **params})
    return Sequence(seed, list(PROMPT), len(PROMPT), given, seed, 64, end_ids=frozenset(end_ids))


def rows_of(seed: int) -> np.ndarray:
    """Logits [ROWS, IDS] of no structure."""
    return np.random.default_rng(seed).normal(size=(ROWS, IDS)) * 1.5


def drafted(rows: np.ndarray, seq: Sequence, budget: Budget, draws: str = "point") -> Draft:
    draft = draw_tree(Guess(rows, np.arange(IDS), IDS), seq, 0, budget, philox_coins(seq), draws)
    draft.check(0)
    return draft


def paths_of(draft: Draft) -> list[Path]:
    return [tuple(draft.tokens[n] for n in draft.path(node)) for node in range(len(draft.tokens))]


def best_paths(rows: np.ndarray, seq: Sequence, end_ids: Seq[int] = ()) -> list[Path]:
    """All paths that the sampling options leave a probability, the likeliest first; none goes on behind an end."""
    params = seq.params
    if params.greedy:
        params = dataclasses.replace(params, temperature=1.0)
    level, values = {(): 1.0}, dict[Path, float]()
    for row in rows:
        open_paths = {path: value for path, value in level.items() if not {*path} & {*end_ids}}
        laws = {path: probs(row, params, History.of(seq, path)) for path in open_paths}
        level = {(*path, i): value * laws[path].at(i) for path, value in open_paths.items() for i in range(IDS)}
        values |= {path: value for path, value in level.items() if value > 0}
    return sorted(values, key=lambda path: -values[path])


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_nodes_are_the_likeliest_of_all_paths_in_their_order(sampling: str) -> None:
    for seed in range(6):
        rows, seq = rows_of(seed), request(**SAMPLING[sampling])
        wanted = best_paths(rows, seq)
        draft = drafted(rows, seq, Budget([64], 0))
        assert paths_of(draft) == wanted[:64]
        assert [own.point for own in draft.probs] == draft.tokens
    assert len({len(path) for path in wanted[:64]}) > 2, "deep"
    assert len({path for path in wanted[:64] if len(path) == 1}) > 2, "and wide"


def test_a_budget_takes_the_first_of_the_same_nodes() -> None:
    rows, seq = rows_of(1), request()
    wanted = best_paths(rows, seq)
    for most in (1, 2, 3, 7, 20, ALL + 5):
        assert paths_of(drafted(rows, seq, Budget([most], 0))) == wanted[:most]
    assert len(wanted) == ALL, "no path comes twice, and none is missing"


def test_nothing_follows_an_end_and_other_nodes_take_the_places() -> None:
    rows = rows_of(2)
    end = int(rows[0].argmax())
    for seq in (request([end]), request([end], temperature=1.0)):
        paths = paths_of(drafted(rows, seq, Budget([30], 0)))
        assert (end,) in paths
        assert paths == best_paths(rows, seq, [end])[:30]


def test_pacing_is_asked_of_each_node_and_leaves_the_budget_to_others() -> None:
    """Before the children of a node are drawn, and behind each that was."""
    rows, seq = rows_of(3), request()
    asked = list[tuple[int, float]]()

    def go_on(b: int, depth: int, law: Any, logits: Any) -> bool:
        assert logits is None
        asked.append((depth, max(law.weights)))
        return depth < 2

    paths = paths_of(drafted(rows, seq, Budget([30], 0, go_on)))
    assert paths == [path for path in best_paths(rows, seq) if len(path) <= 2][:30]
    assert {depth for depth, _ in asked} == {0, 1, 2}
    first = best_paths(rows, seq)[0][0]
    budget = Budget([30], 0, go_behind=lambda b, depth, token, *_: token != first, reads_logits=True)
    assert paths_of(drafted(rows, seq, budget)) == best_paths(rows, seq, [first])[:30]


def test_rows_without_numbers_and_masks_that_leave_no_token_end_the_paths() -> None:
    rows, seq = rows_of(4), request()
    rows[2] = np.nan
    assert {len(path) for path in paths_of(drafted(rows, seq, Budget([64], 0)))} == {1, 2}
    # Behind token 0 each id would complete a bad word.
    held = dataclasses.replace(request(), bad_word_ids=tuple((0, i) for i in range(IDS)))
    paths = paths_of(drafted(rows_of(4), held, Budget([ALL], 0)))
    assert (0,) in paths
    assert not [path for path in paths if 0 in path[:-1]]


def test_distinct_siblings_state_what_the_earlier_ones_left() -> None:
    """The shape is that of the ranks, whatever was drawn; so no token decides whether it is drafted."""
    rows, shapes, seconds, cousins = rows_of(5), set[Path](), set[int](), set[Path]()
    for seed in range(30):
        draft = drafted(rows, request(seed=seed, temperature=1.0), Budget([20], 0), "distinct")
        shapes.add(tuple(draft.parents))
        for parent in set(draft.parents):
            siblings = [n for n in range(len(draft.tokens)) if draft.parents[n] == parent]
            tokens = [draft.tokens[n] for n in siblings]
            assert len(set(tokens)) == len(tokens)
            for i, node in enumerate(siblings):
                assert [draft.probs[node].at(token) for token in tokens[:i]] == [0.0] * i
                assert sum(draft.probs[node].weights) == pytest.approx(1)
        second = draft.parents.index(-1, 1)
        seconds.add(draft.tokens[second])
        cousins.add(tuple(draft.tokens[draft.parents.index(parent)] for parent in (0, second)))
    assert len(shapes) == 1
    assert shapes == {tuple(drafted(rows, request(temperature=1.0), Budget([20], 0)).parents)}
    assert len(seconds) == IDS
    assert any(first != other for first, other in cousins), "of one distribution, and drawn by coins of their own"


PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.5}


USUAL = [("point", "ratio"), ("distinct", "ratio")]
RARE = [("point", "traversal"), ("distinct", "traversal"), ("point", "kseq"), ("point", "match"), ("distinct", "match")]
PAIRS = [*USUAL, *(pytest.param(*pair, marks=pytest.mark.parity) for pair in RARE)]


@pytest.mark.parametrize(("draws", "rule"), PAIRS)
def test_a_round_of_siblings_and_levels_says_what_the_target_says(draws: str, rule: str) -> None:
    """With penalties what follows a path depends on it, and so does where the tree grows."""
    for sampling in ({"temperature": 0.0}, PENALTIES, {}):
        params = SamplingParams(max_tokens=2 * HORIZON, acceptance=rule, **sampling)
        case = Case("dflash", params, {"shape": "tree", "draws": draws})
        rounds = check_first_round(partial(drafter_for, case), params)
        assert any(round.parents.count(-1) > 1 for round in rounds), "siblings"
        assert any(max(round.parents) >= 0 for round in rounds), "levels"
