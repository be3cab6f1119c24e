"""The datastore drafter: its search, its guesses, and which files it refuses."""

import random
from pathlib import Path

import numpy as np
import pytest

from drafters.requests import drafted, request
from forerun.drafters import Target, datastore
from forerun.drafters.datastore import DatastoreDrafter, Options
from forerun.drafters.shared import artifacts
from forerun.drafters.shared.stores import Datastore
from forerun.errors import BadOption, ForerunError, NotFound, UnsupportedModel
from forerun.testing.engines import TARGET, target_for
from forerun.train.datastore import joined, save, suffix_array
from refusals import refusal


def store(*texts: list[int]) -> Datastore:
    tokens = joined(texts, 100)
    return Datastore(tokens, suffix_array(tokens))


def drafter(*texts: list[int], **options) -> DatastoreDrafter:
    return DatastoreDrafter(Options(**options), store(*texts))


def target(num_ids: int = 3) -> Target:
    return target_for(TARGET, num_ids=num_ids, max_batch_size=2, max_seq_len=32)


@pytest.mark.parametrize("num_ids", [1, 2, 5, 50])
def test_the_suffix_array_is_the_sorted_suffixes(num_ids: int) -> None:
    rng = random.Random(num_ids)
    for _ in range(150):
        tokens = [rng.randrange(-1, num_ids) for _ in range(rng.randint(1, 80))]
        wanted = sorted(range(len(tokens)), key=lambda i, tokens=tokens: tokens[i:])
        assert suffix_array(np.array(tokens, dtype=np.int32)).tolist() == wanted


@pytest.mark.parametrize("num_ids", [1, 2, 5])
def test_the_search_finds_every_place_of_the_longest_suffix(num_ids: int) -> None:
    rng = random.Random(num_ids)
    for _ in range(150):
        texts = [[rng.randrange(num_ids) for _ in range(rng.randint(0, 30))] for _ in range(3)]
        texts[0].append(0)
        tokens = joined(texts, 100).tolist()
        context = [rng.randrange(num_ids) for _ in range(rng.randint(1, 10))]
        found = (0, [])
        for n in range(1, len(context) + 1):
            if starts := [i for i in range(len(tokens)) if tokens[i : i + n] == context[-n:]]:
                found = (n, starts)
        made = store(*texts)
        length, places = made.longest(context, 1)
        assert (length, sorted(made._suffixes[list(places)].tolist())) == found


def test_the_most_frequent_continuation_of_the_longest_match() -> None:
    made = drafter([1, 2, 7, 5], [3, 1, 2, 8, 6], [1, 2, 7, 4], [1, 2, 7, 4])
    assert drafted(made, request([9, 1, 2])).tokens == [7, 4]  # and its text ends there
    assert drafted(made, request([3, 1, 2])).tokens == [8, 6]
    assert drafted(made, request([3, 1, 2]), 1).tokens == [8]
    assert drafted(made, request([9])).tokens == drafted(made, request([1, 2]), 0).tokens == []


def test_matches_are_as_long_as_the_options_say() -> None:
    texts = [[3, 1, 2, 8], [1, 2, 7], [1, 2, 7]]
    assert drafted(drafter(*texts, max_match=2), request([3, 1, 2])).tokens == [7]
    assert drafted(drafter(*texts, min_match=3), request([3, 1, 2])).tokens == [8]
    assert drafted(drafter(*texts, min_match=3), request([9, 1, 2])).tokens == []
    assert drafted(drafter(*texts, min_match=3), request([2])).tokens == []


def test_a_tree_holds_the_heaviest_nodes() -> None:
    made = drafter([1, 7, 5], [1, 7, 5], [1, 8, 6], [1, 7, 4], [1, 9, 6], [1, 8, 6], shape="tree")
    draft = drafted(made, request([1]), 4)
    assert (draft.tokens, draft.parents) == ([7, 8, 5, 6], [-1, -1, 0, 1])
    assert made.shape == "tree"


def test_a_sample_of_the_occurrences_is_spread_evenly() -> None:
    made = drafter(*[[1, t] for t in (4, 5, 5, 5, 5, 5, 5, 6)], num_continuations=4)
    assert drafted(made, request([1]), 1).tokens == [5]


def test_the_end_of_a_sequence_ends_a_draft() -> None:
    assert drafted(drafter([1, 2, 3, 4]), request([1], end_ids=frozenset({3}))).tokens == [2, 3]


def test_a_text_without_tokens_is_refused_and_unknown_ids_are_left_out() -> None:
    assert "no tokens" in refusal(NotFound, joined, [[], [5]], 5)
    assert joined([[1, 5, 2], [3]], 5).tolist() == [1, 2, -1, 3, -1]


def test_files_are_refused_that_are_not_this_targets(tmp_path: Path) -> None:
    file = tmp_path / "store"
    with pytest.raises(BadOption, match="forerun train datastore --target TARGET --out FILE"):
        datastore.build(Options(), target())
    with pytest.raises(NotFound):
        datastore.build(Options(path=str(file)), target())
    save(joined([[0, 1, 2, 0]], 3), file, "3 ids")
    assert drafted(datastore.build(Options(path=str(file)), target()), request([1])).tokens == [2, 0]
    assert "another tokenizer" in refusal(BadOption, datastore.build, Options(path=str(file)), target(4))
    whole = file.read_bytes()
    for part in (b"", whole[:50], whole[:-1]):
        file.write_bytes(part)
        with pytest.raises(ForerunError):
            datastore.build(Options(path=str(file)), target())
    for arrays in ({"tokens": np.zeros(3, np.int32)}, {n: np.zeros(3, np.int32) for n in ("tokens", "suffixes")}):
        artifacts.save(file, "datastore", arrays, "3 ids")
        assert "holds no datastore" in refusal(UnsupportedModel, datastore.build, Options(path=str(file)), target())
    save(joined([[0, 1, 7]], 8), file, "3 ids")
    assert "holds no datastore" in refusal(UnsupportedModel, datastore.build, Options(path=str(file)), target())
