"""Suffix decoding: what it drafts, what it remembers of finished requests, and what it forgets."""

import random
from array import array
from collections import Counter
from typing import Any

import pytest

from drafters.requests import drafted, finished, request
from drafters.toys import engine_with
from engine.load import MODEL, run, take_steps
from forerun.drafters.lookup import LookupDrafter, Options as LookupOptions
from forerun.drafters.suffix import Options, Past, SuffixDrafter
from forerun.engine import router
from forerun.testing.engines import target_for
from forerun.types import SamplingParams


def suffix(**options) -> SuffixDrafter:
    return SuffixDrafter(Options(**options))


def chain(tokens: list[int], num_tokens: int = 8, **options) -> list[int]:
    return drafted(suffix(**options), request(tokens), num_tokens).tokens


FAR = {"max_spec_factor": 100.0}
TEXT = [1, 2, 7, 1, 2, 7, 1, 2, 8, 9, 1, 2]  # 7 followed "1 2" twice, 8 once and later


def test_frequency_beats_recency() -> None:
    assert chain(TEXT, 1, **FAR) == chain([5, *TEXT], 1, **FAR) == [7]
    assert drafted(LookupDrafter(LookupOptions()), request(TEXT), 1).tokens == [8]


def test_a_longer_match_beats_a_frequent_short_one() -> None:
    assert chain([3, 1, 2, 8, 1, 2, 7, 1, 2, 7, 3, 1, 2], 1, **FAR) == [8]


def test_runs_go_on_for_as_long_as_the_budget() -> None:
    assert chain([9, 1, 2, 1, 2, 1, 2], 7, **FAR) == [1, 2, 1, 2, 1, 2, 1]
    assert chain([4, 4], 5, **FAR) == [4] * 5


def test_nothing_is_drafted_where_nothing_is_known() -> None:
    assert chain([1, 2, 3]) == chain([1]) == chain([1, 1], 0) == []


@pytest.mark.parametrize(("factor", "offset", "most"), [(1, 0, 3), (2, 0, 6), (0.5, 0, 1), (0, 4, 4), (1, 1, 4)])
def test_a_longer_match_may_draft_more(factor: float, offset: float, most: int) -> None:
    """The match is 5 6 7."""
    text = [0, 5, 6, 7, *range(10, 30), 5, 6, 7]
    assert chain(text, 99, max_spec_factor=factor, max_spec_offset=offset) == list(range(10, 10 + most))
    assert chain(text, 2, max_spec_factor=factor, max_spec_offset=offset) == list(range(10, 10 + min(most, 2)))


def test_improbable_tokens_are_not_drafted() -> None:
    text = [t for follower in (10, 11, 12, 13) for t in (5, follower)] + [5]
    assert chain(text, 1, min_token_prob=0.25) == [13]  # of equals the latest
    assert chain(text, 1, min_token_prob=0.26) == []


def test_a_tree_holds_the_alternatives() -> None:
    draft = drafted(suffix(shape="tree", **FAR), request(TEXT), 3)
    assert (draft.tokens[:2], draft.parents[:2]) == ([7, 1], [-1, 0])
    assert (draft.tokens[2], draft.parents[2]) == (2, 1)
    wide = drafted(suffix(shape="tree", max_spec_offset=8.0), request([1, 7, 1, 8, 1, 7, 9, 1]), 5)
    assert {t for t, p in zip(wide.tokens, wide.parents, strict=True) if p == -1} == {7, 8}
    seq = request([1, 7, 1, 8, 1, 7, 9, 1])
    seq.acceptance = "block"
    parents = drafted(suffix(shape="tree", max_spec_offset=8.0), seq, 5).parents
    assert parents == list(range(-1, len(parents) - 1)), "this rule judges chains only"


def test_a_tree_among_others_is_told_to_rules() -> None:
    """Its siblings are point masses, so a mixture of it and of drawn chains is for rules that judge any siblings."""
    target = target_for(MODEL, num_ids=61, max_batch_size=4, max_seq_len=128)
    members = router.make(["none", "mixed:of=(suffix:shape=tree)+random", "mixed:of=suffix+random"], target).members
    drawn = [(member.shape, member.draws) for name, member in members.items() if name.startswith("mixed")]
    assert drawn == [("tree", "any"), ("chain", "independent")]


def test_an_end_inside_a_guess_is_its_last_token() -> None:
    assert drafted(suffix(**FAR), request([5, 6, 7, 8, 5], end_ids=frozenset({7}))).tokens == [6, 7]


@pytest.mark.parametrize("num_ids", [2, 4, 30])
def test_the_first_token_is_what_followed_most_often(num_ids: int) -> None:
    """By brute force: of all suffixes the one whose most frequent follower has the largest share, longest first."""
    rng = random.Random(num_ids)
    guessed = 0
    for _ in range(300):
        text = [rng.randrange(num_ids) for _ in range(rng.randint(2, 40))]
        best, wanted = 0.0, []
        for length in range(min(64, len(text) - 1), 0, -1):
            ends = [i for i in range(len(text) - 1, length - 1, -1) if text[i - length : i] == text[-length:]]
            if ends:
                token, count = Counter(text[end] for end in ends).most_common(1)[0]
                if count / len(ends) > best:
                    best, wanted = count / len(ends), [token]
        assert chain(text, 1, min_token_prob=0.0, **FAR) == wanted, text
        guessed += bool(wanted)
    assert guessed > 100


def test_reading_token_by_token_is_reading_at_once() -> None:
    text = random.Random(3).choices(range(4), k=80)
    one, seq = suffix(**FAR), request(text[:1])
    for token in text[1:]:
        drafted(one, seq)
        seq.tokens.append(token)
    assert drafted(one, seq).tokens == chain(text, **FAR) != []


# ------------------------------------------------------------------------------------------------ finished requests


def test_finished_requests_are_remembered_and_others_are_not() -> None:
    for reason, tokens in (("stop", [6, 7, 8]), ("length", [6, 7, 8]), ("abort", []), (None, [])):
        drafter = suffix(**FAR)
        finished(drafter, [5, 6, 7, 8], reason=reason)
        assert drafted(drafter, request([1, 5])).tokens == tokens, reason


def test_a_guess_ends_with_the_text_that_it_is_from() -> None:
    drafter = suffix(**FAR)
    finished(drafter, [5, 6, 7])
    finished(drafter, [8, 9])
    assert drafted(drafter, request([1, 5])).tokens == [6, 7]
    assert drafted(drafter, request([7, 8])).tokens == [9]  # "7 8" stands in no text


def test_cache_salts_share_nothing() -> None:
    drafter = suffix(**FAR)
    finished(drafter, [5, 6, 7], salt="a")
    finished(drafter, [5, 9, 9], salt=None)
    assert drafted(drafter, request([1, 5], salt="a")).tokens == [6, 7]
    assert drafted(drafter, request([1, 5], salt="b")).tokens == []
    assert drafted(drafter, request([1, 5])).tokens[:1] == [9]


def test_the_better_score_of_both_histories_is_drafted() -> None:
    drafter = suffix(**FAR)
    finished(drafter, [5, 6, 7, 8, 9])
    assert drafted(drafter, request([4, 6, 0, 5, 6])).tokens[:1] == [0]  # both are sure of 8 tokens or of 3
    assert drafted(drafter, request([6, 1, 6, 2, 5, 6]), 3).tokens == [7, 8, 9]
    assert drafted(drafter, request([6, 1, 6, 2, 6]), 3).tokens == [2, 6, 2]  # as long a match: its own text
    assert drafted(drafter, request([5, 6, 1, 5, 6]), 3).tokens == [1, 5, 6]  # equal scores: its own text


def test_the_oldest_texts_go_first() -> None:
    """Capacity counts a token for the end of each text, and is one for all salts."""
    past = Past(max_requests=10, max_tokens=8)
    for salt, text in (("a", [1, 2]), ("b", [3, 4]), ("a", [5])):
        past.add(salt, array("i", text))
    assert (past.of("a").tolist(), past.of("b").tolist()) == ([1, 2, -1, 5, -1], [3, 4, -1])
    past.add("a", array("i", [6, 7]))
    assert (past.of("a").tolist(), past.of("b").tolist()) == ([5, -1, 6, 7, -1], [3, 4, -1])
    past.add("a", array("i", [8]))
    assert (past.of("a").tolist(), past.of("b").tolist()) == ([5, -1, 6, 7, -1, 8, -1], [])
    past.add("c", array("i", range(100)))
    assert (past.of("a").tolist(), past.of("c").tolist()) == ([], [*range(93, 100), -1])


def test_the_number_of_requests_is_limited_too() -> None:
    past = Past(max_requests=2, max_tokens=100)
    for token in range(5):
        past.add(None, array("i", [token]))
    assert past.of(None).tolist() == [3, -1, 4, -1]


@pytest.mark.parametrize("nothing", [{"max_cached_requests": 0}, {"max_cached_tokens": 0}])
def test_remembering_can_be_turned_off(nothing) -> None:
    drafter = suffix(**FAR, **nothing)
    finished(drafter, [5, 6, 7])
    assert drafted(drafter, request([1, 5])).tokens == []


# ----------------------------------------------------------------------------------------------------- in the engine


def test_the_engine_ends_texts_with_their_last_token_and_drops_aborted_ones() -> None:
    drafter = suffix()
    engine = engine_with(drafter, 3)
    kept = engine.add([1, 2, 3, 1, 2], SamplingParams(max_tokens=8, temperature=0.0, cache_salt="a"))
    gone = engine.add([4, 5, 6, 4, 5], SamplingParams(max_tokens=8, temperature=0.0, cache_salt="b"))
    take_steps(engine, 2)
    engine.abort(gone)
    run(engine, [kept])
    assert drafter._past.of("a").tolist() == [*kept.seq.tokens, -1]
    assert len(kept.seq.output_ids) == 8
    assert list(drafter._past.of("b")) == []
    assert drafter._texts.by_id == {}


def test_auto_drafts_trees_and_chains_for_rules_of_chains() -> None:
    """Where no draft model ships with the target."""
    target = target_for(MODEL, num_ids=61, max_batch_size=4, max_seq_len=128)
    auto = engine_with(router.make(["auto"], target), 3)
    for acceptance in (None, "ratio", "typical", "block", "lenience:l=0.5"):
        for draft in (None, "auto", "suffix"):
            params = SamplingParams(max_tokens=8, temperature=0.0, acceptance=acceptance, draft=draft)
            assert auto.make([1, 2, 1], params)[0].seq.draft == "suffix"
    ways = [{"acceptance": rule} for rule in (None, "block", "match")] + [{"draft": "none"}]
    requests = [auto.add([1, 2, 3, 1, 2], SamplingParams(max_tokens=20, temperature=0.0, **way)) for way in ways]
    run(auto, requests)
    *mixed, plain = requests
    assert [request.seq.tokens for request in mixed] == [plain.seq.tokens] * 3
    assert all(request.report.num_drafted for request in mixed)


def test_two_of_one_method_are_both_there_in_either_order() -> None:
    target = target_for(MODEL, num_ids=61, max_batch_size=4, max_seq_len=128)
    shapes = {"suffix": "path", "suffix:shape=tree": "tree"}
    for specs in ([*shapes], [*shapes][::-1]):
        found = router.make(["none", *specs], target)
        chosen: dict[str, Any] = {spec: found.members[found.chosen(spec)] for spec in specs}
        assert {spec: drafter.options.shape for spec, drafter in chosen.items()} == shapes
