"""unigram, bigram and random: which token they guess, their exact acceptance, and files that are refused."""

import random
from collections.abc import Mapping, Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from forerun.drafters import Target
from forerun.drafters.shared import artifacts, tables
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.models.toy import ToyModel, ToyTable
from forerun.testing import enumerate_outcomes
from forerun.testing.engines import TARGET, V, every_way, plain_outputs, spoken, target_for, total_variation
from forerun.theory import formulas
from forerun.train.ngram import Fit, fitted, save
from forerun.types import Budget, Draft, Probs, SamplingParams, Sequence
from house.enumeration import Case
from refusals import refusal
from support import built

NUM_IDS = 5


def target_of(num_ids: int = NUM_IDS, holes: tuple[int, ...] = ()) -> Target:
    return target_for(ToyModel(num_ids, 1), num_ids=num_ids, holes=holes, max_batch_size=2, max_seq_len=64)


def sequence(tokens: list[int], source: Seq[int] = (), **params: Any) -> Sequence:
    return Sequence(0, tokens, len(tokens), SamplingParams(**params), 0, 64, source_ids=tuple(source))


def drafted(
    name: str, options: Mapping[str, Any], tokens: list[int], num: int = 3, source: Seq[int] = (), **params: Any
) -> Draft:
    """The draft of one sequence, by the first outcome of each coin."""
    drafter = built(name, target_of(), options)
    return enumerate_outcomes(
        lambda way: drafter.propose([sequence(tokens, source, **params)], Budget([num], 0), [way.at(len(tokens))])
    )[0][1]


def fit_file(path: Path, texts: list[list[int]], num_ids: int = NUM_IDS, order: int = 2, most: int = 64) -> str:
    save(fitted(texts, num_ids, order), path, artifacts.fingerprint(None, num_ids), most)
    return str(path)


# -------------------------------------------------------------------------------------------------- known answers


def test_points_are_the_most_frequent_and_the_lowest_of_equal_ones() -> None:
    text = [4, 1, 3, 1, 2, 4, 1, 3, 1]  # behind 1: 3 twice, 2 once; behind 3: 1; behind 4: 1; 2 comes before 4
    assert drafted("bigram", {}, text).tokens == [3, 1, 3]
    assert drafted("unigram", {}, text).tokens == [1, 1, 1]
    assert drafted("bigram", {}, [1, 3, 1, 2, 1]).tokens[0] == 2
    assert drafted("unigram", {}, [3, 2]).tokens[0] == 2
    assert drafted("bigram", {}, [0, 1, 2]).tokens == []  # 2 was never followed


def test_a_source_is_counted_before_its_answer() -> None:
    source = [4, 1, 3, 1, 3]
    assert [part.tolist() for part in tables.TextTable(source).unigram()] == [[1, 3, 4], [2, 2, 1]]
    assert drafted("bigram", {}, [0, 1], source=source).tokens == [3, 1, 3]
    assert drafted("bigram", {}, [0, 1, 2, 1, 2, 1], source=source).tokens[0] == 2
    assert drafted("bigram", {}, [2, 0], source=[1, 0]).tokens == []  # nothing follows a source's end
    assert drafted("unigram", {}, [0], source=source).tokens == [1] * 3
    (probs, *_) = drafted("unigram", {"draws": "sampled"}, [0], source=source, temperature=1.0).probs
    assert [probs.at(token) for token in range(5)] == pytest.approx([1 / 6, 2 / 6, 0, 2 / 6, 1 / 6])


def test_sampled_draws_state_the_formula(tmp_path: Path) -> None:
    """(C2 + k U1) / (sum C2 + k), from the text and from a file."""
    text = [0, 1, 0, 2, 0, 1, 0]
    wanted = np.array([0, 2, 1, 0, 0]) + 0.5 * np.array([4, 2, 1, 0, 0]) / 7
    path = fit_file(tmp_path / "f", [text])
    for options in ({}, {"path": path}):
        draft = drafted("bigram", {"k": 0.5, "draws": "sampled", **options}, text, num=1)
        assert [draft.probs[0].at(i) for i in range(NUM_IDS)] == pytest.approx(list(wanted / 3.5), abs=1e-15)
        draft = drafted("unigram", {"draws": "sampled", **options}, text, num=1)
        assert [draft.probs[0].at(i) for i in range(NUM_IDS)] == pytest.approx([4 / 7, 2 / 7, 1 / 7, 0, 0], abs=1e-15)
    assert drafted("bigram", {"draws": "sampled", "path": path}, [4], num=1).probs[0].at(0) == pytest.approx(4 / 7)


def test_a_greedy_request_gets_point_masses() -> None:
    draft = drafted("bigram", {"draws": "sampled"}, [0, 1, 0, 1, 0], temperature=0.0)
    assert [probs.point for probs in draft.probs] == [1, 0, 1]


def test_random_leaves_out_ids_without_a_token() -> None:
    drafter = built("random", target_of(holes=(1, 3)), {})
    ways = enumerate_outcomes(lambda way: drafter.propose([sequence([0])], Budget([1], 0), [way.at(1)]).tokens[0])
    assert {token: weight for weight, token in ways} == pytest.approx({0: 1 / 3, 2: 1 / 3, 4: 1 / 3})


def test_wide_rows_list_the_most_frequent_ids() -> None:
    ids, counts = np.arange(10), np.array([1, 5, 5, 5, 2, 9, 0, 1, 1, 3])
    kept, their_counts = tables.most_frequent(ids, counts, 3)
    assert (kept.tolist(), their_counts.tolist()) == ([1, 2, 5], [5, 5, 9])


# ------------------------------------------------------------------------------------------------------- acceptance


def test_alpha_on_a_markov_target_is_the_overlap_of_its_rows(tmp_path: Path) -> None:
    """A target with a memory of one token, and a table fitted to a text of its own.

    Sampled drafts are accepted with probability sum min(p, q), point masses with p at the table's mode.
    """
    target = ToyModel(V, 3, ToyTable(order=1))
    rows = [softmax(target.logits_after((u,))) for u in range(V)]
    rng = random.Random(0)
    text = [0]
    for _ in range(3000):
        text.append(rng.choices(range(V), rows[text[-1]])[0])
    path = fit_file(tmp_path / "f", [text], V)
    table = tables.load(path, target_for(target, num_ids=V, max_batch_size=2, max_seq_len=64), 2)
    last = 1
    ids, weights = tables.mixture(table.behind(last), table.unigram(), 1.0)
    near = np.zeros(V)
    near[ids] = weights
    assert np.abs(near - rows[last]).max() < 0.06
    wanted = {"sampled": formulas.acceptance(rows[last], near), "point": rows[last][table.best(last)]}
    for draws, alpha in wanted.items():
        case = Case("bigram", SamplingParams(max_tokens=2, acceptance="ratio"), {"draws": draws, "path": path}, target)
        case = Case(**{**vars(case), "gamma": 1, "prompt": (0, last)})
        measured = sum(weight * reports[0].num_accepted for weight, (_, reports) in every_way(case))
        assert measured == pytest.approx(alpha, abs=1e-12)
        assert 0.2 < alpha < 1


@pytest.mark.parametrize("rule", ["ratio", "match"])
@pytest.mark.parametrize("draws", ["point", "sampled"])
@pytest.mark.parametrize("name", ["unigram", "bigram"])
def test_a_fitted_table_changes_no_output(tmp_path: Path, name: str, draws: str, rule: str) -> None:
    path = fit_file(tmp_path / "f", [[0, 1, 1, 2, 0, 1, 2, 2]], V)
    case = Case(name, SamplingParams(max_tokens=3, acceptance=rule), {"path": path, "draws": draws}, TARGET)
    assert total_variation(spoken(case), plain_outputs(case)) < 1e-12


# ------------------------------------------------------------------------------------------------------------ files


def test_a_fit_counts_pairs_within_texts_and_merges_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(NUM_IDS) for _ in range(rng.randrange(9))] for _ in range(40)]
    once = fitted(texts, NUM_IDS, 2).arrays(64)
    monkeypatch.setattr("forerun.train.ngram.MERGE_PAIRS", 7)
    often = fitted(texts, NUM_IDS, 2).arrays(64)
    assert once.keys() == often.keys() == {"counts", "starts", "followers", "follower_counts"}
    assert all(np.array_equal(once[name], often[name]) for name in once)
    pairs = np.zeros((NUM_IDS, NUM_IDS), int)
    for text in texts:
        for before, after in pairwise(text):
            pairs[before, after] += 1
    table = tables.FittedTable(once)
    for u in range(NUM_IDS):
        ids, counts = table.behind(u)
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {v: n for v, n in enumerate(pairs[u]) if n}
        assert table.best(u) == pairs[u].argmax()
    assert table.best(None) == np.bincount([t for text in texts for t in text]).argmax()


def test_a_row_keeps_its_most_frequent_followers() -> None:
    fit = Fit(NUM_IDS, 2)
    fit.add([0, 1, 0, 2, 0, 2, 0, 3, 0, 4, 0])
    ids, counts = tables.FittedTable(fit.arrays(2)).behind(0)
    assert (ids.tolist(), counts.tolist()) == ([1, 2], [1, 2])


def test_files_that_are_refused(tmp_path: Path) -> None:
    target, text = target_of(), [[0, 1, 2, 3, 4, 0, 1]]
    whole = Path(fit_file(tmp_path / "whole", text))
    assert tables.load(str(whole), target, 2).best(0) == 1
    assert "train ngram" in refusal(NotFound, tables.load, str(tmp_path / "none"), target, 2)
    (tmp_path / "empty").touch()
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:-3])
    for name in ("empty", "cut"):
        assert name in refusal(UnsupportedModel, tables.load, str(tmp_path / name), target, 2)
    with pytest.raises(BadOption, match="another tokenizer"):
        tables.load(fit_file(tmp_path / "other", text, NUM_IDS + 1), target, 2)
    assert "--order 1" in refusal(BadOption, tables.load, fit_file(tmp_path / "single", text, order=1), target, 2)
    assert tables.load(str(tmp_path / "single"), target, 1).best(None) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"counts": np.zeros(NUM_IDS, np.uint32)},
        {"counts": np.ones(NUM_IDS - 1, np.uint32)},
        {"starts": np.array([0, 9, 1, 1, 1, 1])},
        {"followers": np.full(5, NUM_IDS, np.int32)},
        {"followers": np.full(5, -1, np.int32)},
        {"follower_counts": np.ones(4, np.uint32)},
        {"counts": np.ones(NUM_IDS, np.float32)},
    ],
    ids=str,
)
def test_a_file_with_wrong_arrays_is_refused(tmp_path: Path, change: dict[str, np.ndarray]) -> None:
    arrays = fitted([[0, 1, 2, 3, 4, 0]], NUM_IDS, 2).arrays(64)
    assert len(arrays["followers"]) == 5
    artifacts.save(tmp_path / "f", tables.KIND, {**arrays, **change}, artifacts.fingerprint(None, NUM_IDS))
    assert "no table of 5 ids" in refusal(UnsupportedModel, tables.load, str(tmp_path / "f"), target_of(), 2)


def test_production_lists_float32() -> None:
    """As the target's own probabilities, which native code draws from."""
    target = target_for(ToyModel(NUM_IDS, 1, dtype="float32"), num_ids=NUM_IDS, max_batch_size=2, max_seq_len=64)
    drafter = built("bigram", target, {"draws": "sampled"})
    draft = enumerate_outcomes(lambda way: drafter.propose([sequence([0, 1, 0])], Budget([1], 0), [way.at(3)]))[0][1]
    probs: Probs = draft.probs[0]
    assert probs.listed is not None
    assert probs.listed.dtype == np.float32
