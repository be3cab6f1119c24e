"""STAND: what a table averages, which context speaks, what is drawn from it, and what is forgotten."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from drafters.requests import read_prompt, seen_of
from drafters.toys import TOY, V, check_salts_never_share, crowded, engine_of, first_drafted, likeliest, spoken
from engine.load import heard, run
from forerun.drafters.none import NoDrafter
from forerun.drafters.stand import PART, Options, StandDrafter, Table
from forerun.models.runner import Run
from forerun.sampling import History, probs
from forerun.sampling.random import PhiloxCoins
from forerun.testing.engines import every_way, plain_outputs, summed, total_variation
from forerun.theory.trees import best_first
from forerun.types import Budget, Draft, Probs, SamplingParams, Sequence, Stop
from house import test_lossless_trees as one_round
from house.enumeration import Case

END = 11


def drafter(vocab_size: int = V, dtype: Any = np.float64, **options: Any) -> StandDrafter:
    return StandDrafter(Options(**options), vocab_size, dtype)


def sequence(tokens: list[int], **params: Any) -> Sequence:
    wanted = SamplingParams(**{"max_tokens": 20, "temperature": 0.7, **params})
    words = ((3, 4), (2,)) if wanted.bad_words else ()
    return Sequence(0, tokens, len(tokens), wanted, 5, 64, end_ids=frozenset({END}), bad_word_ids=words)


def begun(
    tokens: list[int], params: Mapping[str, Any] | None = None, **options: Any
) -> tuple[StandDrafter, Sequence, Table]:
    """A drafter that serves one sequence, the sequence, and its empty table."""
    made, seq = drafter(**options), sequence(tokens, **(params or {}))
    made.begin(seq)
    return made, seq, made._tables.of(seq)


def learned(table: Table, rows: dict[tuple[int, ...], dict[int, float]]) -> None:
    """Put logits behind contexts, one occurrence of each; the likeliest id of each comes first."""
    for context, row in rows.items():
        table.learn([context], np.array([list(row)]), np.array([list(row.values())]))


def known(table: Table, context: tuple[int, ...], longest: int = 4) -> dict[int, float] | None:
    """The ids and the mean logits that a table finds behind a context."""
    kept = table.find(context, longest)
    return None if kept is None else dict(zip(kept[0].tolist(), kept[1].tolist(), strict=True))


def drafted(made: StandDrafter, seq: Sequence, most: int = 4, **budget: Any) -> Draft:
    draft = made.propose([seq], Budget([most], 0, **budget), [PhiloxCoins(seq.seed, len(seq.tokens), 0)])
    draft.check(0)
    return draft


# ---------------------------------------------------------------------------------------------------------- the table


def test_logits_are_averaged_over_occurrences() -> None:
    """What a list lacks had at most its least logit: 9 in the second list, 7 in the first."""
    table = Table(PART, 3, np.float64)
    learned(table, {(1, 2): {5: 4.0, 3: 2.0, 9: 1.0}})
    assert known(table, (1, 2)) == {3: 2.0, 5: 4.0, 9: 1.0}
    learned(table, {(1, 2): {5: 2.0, 7: 1.5, 3: 1.0}})
    assert known(table, (1, 2)) == {3: 1.5, 5: 3.0, 7: 1.25}, "9 has (1 + 1) / 2"
    learned(table, {(1, 2): {7: 6.0, 5: 3.0, 3: 3.0}})
    assert known(table, (1, 2)) == {3: 2.0, 5: 3.0, 7: pytest.approx(1.25 + 4.75 / 3)}
    assert list(known(table, (1, 2)) or ()) == [3, 5, 7], "ids ascend, as those of a distribution do"


def test_a_context_that_occurs_twice_in_a_pass_counts_twice() -> None:
    ids, logits = np.array([[5, 3], [1, 2], [3, 5], [5, 4]]), np.array([[4.0, 2], [9, 8], [3, 1], [6, 0]])
    together, apart = Table(PART, 2, np.float64), Table(PART, 2, np.float64)
    contexts = [(1,), (2,), (1,), (1,)]
    together.learn(contexts, ids, logits)
    for i, context in enumerate(contexts):
        apart.learn([context], ids[i : i + 1], logits[i : i + 1])
    assert known(together, (1,)) == known(apart, (1,)) == {3: pytest.approx(5 / 3), 5: pytest.approx(11 / 3)}
    assert known(together, (2,)) == {1: 9.0, 2: 8.0}


def test_the_longest_known_context_speaks() -> None:
    table = Table(PART, 1, np.float64)
    learned(table, {(1,): {5: 1.0}, (2, 1): {6: 1.0}, (4, 3, 2, 1): {7: 1.0}})
    assert known(table, (4, 3, 2, 1)) == known(table, (9, 4, 3, 2, 1)) == {7: 1.0}
    assert known(table, (0, 3, 2, 1)) == known(table, (4, 3, 2, 1), longest=3) == {6: 1.0}
    assert known(table, (3, 1)) == {5: 1.0}
    assert known(table, (1, 2)) is None


def test_a_guess_of_the_prompt_yields_to_what_the_target_says() -> None:
    table = Table(PART, 2, np.float64)
    table.guess([(1,), (2,), (1,)], [8, 3, 9])
    assert (known(table, (1,)), known(table, (2,))) == ({9: 0.0}, {3: 0.0}), "of several the last"
    learned(table, {(1,): {5: 4.0, 6: 2.0}})
    table.guess([(1,)], [8])
    assert known(table, (1,)) == {5: 4.0, 6: 2.0}


def test_a_table_has_at_most_so_many_contexts() -> None:
    table = Table(PART + 1, 1, np.float64)
    for i in range(PART + 1):
        learned(table, {(i,): {i: 1.0}})
    learned(table, {(0,): {0: 1.0}, (999,): {9: 2.0}})
    assert len(table) == len(table._counts) == PART + 1
    assert known(table, (1,)) is None, "it was not seen for longest"
    assert (known(table, (0,)), known(table, (999,))) == ({0: 1.0}, {9: 2.0})
    assert all(known(table, (i,)) == {i: 1.0} for i in range(2, PART + 1))
    table.guess([(1000,)], [4])
    assert known(table, (1000,)) == {4: 0.0}, "nothing is left of the context that had the row"


def test_a_pass_of_more_contexts_than_a_table_has_mixes_none() -> None:
    table, num = Table(PART, 1, np.float64), 2 * PART + 7
    table.learn([(i,) for i in range(num)], np.arange(num)[:, None], np.arange(num, dtype=float)[:, None])
    assert len(table) == PART
    assert all(known(table, (i,)) == {i: float(i)} for i in range(num - PART, num))


# ------------------------------------------------------------------------------------------------- what is drawn from


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.3},
    {"temperature": 0.6, "top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2, "top_k": 4, "top_p": 0.95},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": {3: 2.0, 5: -float("inf"), 20: 9.0}},
    {"min_tokens": 3},
    {"bad_words": ["any"]},
    {"forced_eos_token_id": END},
]
KEPT = {2: 1.5, 3: 0.75, 5: 2.25, 9: -0.5, END: 1.0, 20: -2.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("params", SAMPLING, ids=str)
def test_a_guess_is_drawn_from_what_the_pipeline_makes_of_the_kept_logits(params: dict[str, Any], dtype: Any) -> None:
    made, seq, table = begun([1, 2, 3, 4, 1], params, top=6, dtype=dtype, shape="path")
    order = sorted(KEPT, key=lambda token: -KEPT[token])
    learned(table, {(t,): {token: KEPT[token] for token in order} for t in range(V)})
    row = np.full(V, -np.inf, dtype)
    row[list(KEPT)] = list(KEPT.values())
    draft, path = drafted(made, seq, 3), list[int]()
    for token, stated in zip(draft.tokens, draft.probs, strict=True):
        wanted = probs(row, seq.params, History.of(seq, path))
        exact = 0 if dtype == np.float32 else 1e-14  # sums of float64 depend on how many there are
        assert [stated.at(i) for i in range(V)] == pytest.approx([wanted.at(i) for i in range(V)], rel=exact, abs=0)
        assert stated.at(token) > 0
        path.append(token)


def test_masks_that_leave_none_of_the_kept_ids_leave_no_guess() -> None:
    made, seq, table = begun([1], {"logit_bias": {5: -float("inf"), 6: -float("inf")}}, top=2)
    learned(table, {(1,): {5: 2.0, 6: 1.0}})
    assert drafted(made, seq).tokens == []


def test_siblings_state_what_the_earlier_ones_left() -> None:
    made, seq, table = begun([1], top=4)
    made._order = [node for node in best_first((0.9, 0.8, 0.7), 40) if node.parent == -1]
    learned(table, {(1,): {5: 2.0, 6: 1.0, 7: 0.0, 8: -1.0}})
    draft = drafted(made, seq, 3)
    first, second, third = draft.tokens
    weights = dict(zip((5, 6, 7, 8), np.exp(np.array([2.0, 1, 0, -1]) / 0.7), strict=True))
    assert len({first, second, third}) == 3
    for i, gone in enumerate([(), (first,), (first, second)]):
        left = {token: weight for token, weight in weights.items() if token not in gone}
        wanted = [left.get(token, 0.0) / sum(left.values()) for token in range(V)]
        assert [draft.probs[i].at(token) for token in range(V)] == pytest.approx(wanted)


ROWS = {(1,): {2: 3.0, 3: 2.0}, (2,): {4: 3.0, 5: 0.0}, (4,): {1: 1.0, END: 0.0}, (3,): {6: 1.0, 1: 0.0}}


def test_greedy_guesses_are_the_largest_kept_logits() -> None:
    made, seq, table = begun([9, 1], {"temperature": 0.0, "top_p": 0.1}, top=2)
    learned(table, ROWS)
    draft = drafted(made, seq, 5)
    assert (draft.tokens, draft.parents) == ([2, 4, 1, 3, 2], [-1, 0, 1, -1, 2]), "rank 1 of the first is 3"
    assert draft.probs == [Probs.of_point(token) for token in draft.tokens]
    assert drafted(made, seq, 3).tokens == [2, 4, 1]


def test_a_path_tells_how_sure_it_is_and_stops_behind_a_token_that_stays() -> None:
    made, seq, table = begun([9, 1], {"temperature": 0.0}, top=2, shape="path")
    learned(table, ROWS)
    assert (made.shape, made.draws, made.tells_confidence) == ("chain", "independent", True)
    assert (drafter().shape, drafter().draws, drafter().tells_confidence) == ("tree", "distinct", False)
    assert drafter(top=1).shape == "chain"
    stop = Stop((0.9,) * 7, (0.0, 0.85, 0.85, 0.85))
    assert drafted(made, seq, 4, stops={0: stop}).tokens == [2, 4]
    assert stop.confidences == [pytest.approx(1 / (1 + np.exp(-1))), pytest.approx(1 / (1 + np.exp(-3)))]


def test_nothing_follows_the_end_nor_what_pacing_refuses() -> None:
    made, seq, table = begun([1], top=1)
    learned(table, {(1,): {2: 1.0}, (2,): {END: 1.0}, (END,): {3: 1.0}})
    assert drafted(made, seq).tokens == [2, END]
    assert drafted(made, seq, go_on=lambda b, depth, expected: depth < 1).tokens == [2]


# ------------------------------------------------------------------------------------------------------ what is learned


def watched(made: StandDrafter, prompt: list[int], **params: Any) -> tuple[Table, list[int], list[Any]]:
    """The table of one request when it ends, its text, and the reports of its steps."""
    tables, end = list[Table](), made.end

    def keep(seq: Sequence) -> None:
        tables.append(made._tables.of(seq))
        end(seq)

    made.end = keep  # type: ignore[method-assign]
    engine = engine_of(made, 6)
    reports = heard(engine)
    (output,) = run(engine, [engine.add(prompt, SamplingParams(max_tokens=30, **params))])
    return tables[0], prompt + output, [report for report in reports if report.num_decoding]


@pytest.mark.parametrize("shape", ["tree", "path"])
def test_the_table_holds_what_the_target_said_behind_each_row_rejected_ones_too(shape: str) -> None:
    """The toy's next token depends on the last one alone, so the logits of every context are known."""
    made = drafter(shape=shape, top=3, from_prompt=False)
    table, text, reports = watched(made, [5, 2, 7], seed=3, acceptance="ratio")
    assert sum(report.num_accepted for report in reports) > 0
    of_text = {tuple(text[max(0, end - n) : end]) for end in range(1, len(text) + 1) for n in (1, 2, 3, 4)}
    assert set(table._places) - of_text, "a rejected guess is a context, too"
    assert len([context for context in table._places if context in of_text and len(context) == 4]) > 20
    for context in table._places:
        best = sorted(likeliest(context[-1], 3))
        wanted = TOY.logits_after([context[-1]])
        assert known(table, context) == {token: pytest.approx(wanted[token]) for token in best}


def test_the_context_of_a_row_is_the_way_to_it() -> None:
    made, seq, table = begun([7, 8, 1, 5], top=1, max_context=3)
    made.observe([seq], [seen_of(Run(0, [1, 2, 3, 2], parents=[-1, 0, 0, 2]), np.eye(V)[[5, 6, 9, 4]], start=2)])
    assert known(table, (7, 8, 1)) == known(table, (8, 1)) == {5: 1.0}
    assert (known(table, (8, 1, 2)), known(table, (8, 1, 3)), known(table, (1, 3, 2))) == ({6: 1}, {9: 1}, {4: 1})
    assert known(table, (2,)) == {6: 1.0}, "4 was at most as likely before as 6, and of equal means the older stays"
    assert (8, 1, 3, 2) not in table._places


def test_rows_that_are_no_tokens_or_no_numbers_are_not_learned() -> None:
    made, seq, table = begun([1, 5], top=1)
    logits = np.eye(V)[[5, 6, 9, 4]]
    logits[3] = np.nan
    made.observe([seq], [seen_of(Run(0, [1, 2, 3, 4], parents=[-1, 0, 1, 0], vectors={1: np.zeros(1)}), logits)])
    assert list(table._places) == [(1,)]


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_the_prompt_is_guessed_to_go_on_as_it_did(chunk: int) -> None:
    made, seq, table = begun([1, 2, 3, 1, 2, 4, 1], max_context=2)
    read_prompt(made, seq, chunk)
    followers = {(1,): 2, (2,): 4, (3,): 1, (4,): 1, (1, 2): 4, (2, 3): 1, (3, 1): 2, (2, 4): 1}
    assert {context: known(table, context) for context in table._places} == {c: {t: 0.0} for c, t in followers.items()}


@pytest.mark.parametrize(("from_prompt", "rows"), [(True, {(1,): 3, (2,): 1, (1, 2): 1, (2, 1): 3}), (False, {})])
def test_a_source_is_guessed_from(from_prompt: bool, rows: dict[tuple[int, ...], int]) -> None:
    """That of an encoder-decoder is the prompt; its last token is followed by nothing."""
    made, seq = drafter(from_prompt=from_prompt, max_context=2), sequence([0])
    seq.source_ids = (1, 2, 1, 3)
    made.begin(seq)
    table = made._tables.of(seq)
    assert {context: known(table, context) for context in table._places} == {c: {t: 0.0} for c, t in rows.items()}


# --------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("shape", ["tree", "path"])
@pytest.mark.parametrize("acceptance", ["ratio", "match"])
def test_what_a_perfect_table_drafts_is_always_accepted(acceptance: str, shape: str) -> None:
    """Behind every token the table has all of the target's logits, so q is p, and the noise of `match` is shared."""
    made = drafter(shape=shape, top=V, max_context=1, shared=True)
    table = made._tables.tables["salt", None] = Table(PART, V, np.float64)
    for token in range(V):
        row = TOY.logits_after([token])
        learned(table, {(token,): {int(i): row[i] for i in np.argsort(-row, kind="stable")}})
    engine = engine_of(made, 3)
    reports = heard(engine)
    params = SamplingParams(max_tokens=33, seed=8, acceptance=acceptance, temperature=0.9, top_p=0.95)
    run(engine, [engine.add([5, 2, 7], params)])
    rounds = [report for report in reports if report.num_decoding]
    assert sum(report.num_tested for report in rounds) > 20
    assert all(report.num_accepted == report.num_tested for report in rounds)


TABLES: dict[str, Callable[[StandDrafter], Any]] = {
    "as measured": lambda made: None,
    "three siblings": lambda made: setattr(made, "_order", best_first((0.9, 0.8, 0.7), 8)),
}


@pytest.mark.parametrize("sampling", ["plain", "filters", "penalties", "greedy"])
@pytest.mark.parametrize("order", TABLES)
@pytest.mark.parametrize("rule", ["ratio", "traversal", "match"])
def test_a_tree_with_siblings_is_exact(rule: str, order: str, sampling: str) -> None:
    """One round of the real engine in which the table is wrong about the target, by every outcome of every coin."""

    class Wrong(StandDrafter):
        def begin(self, seq: Sequence) -> None:
            self._tables.tables.clear()
            super().begin(seq)
            rng = np.random.default_rng(1)
            for token in range(one_round.V):
                row = np.sort(rng.normal(size=2))[::-1]
                ids = rng.permutation(one_round.V)[:2].tolist()
                learned(self._tables.of(seq), {(token,): dict(zip(ids, row.tolist(), strict=True))})

    params = dataclasses.replace(one_round.SAMPLING[sampling], acceptance=rule)
    made = Wrong(Options(top=2, from_prompt=False), one_round.V, np.float64)
    TABLES[order](made)
    assert one_round.has_siblings(one_round.check_first_round(lambda: made, params))


@pytest.mark.parametrize("shape", ["tree", "path"])
@pytest.mark.parametrize("rule", ["ratio", "match"])
def test_what_rejected_draws_taught_biases_no_later_round(rule: str, shape: str) -> None:
    case = Case("stand", SamplingParams(max_tokens=4, acceptance=rule), {"shape": shape, "top": 2}, gamma=1)
    ways = every_way(case)
    ends = [reports[-2:] for _, (_, reports) in ways if len(reports) > 1]
    assert any(before.num_accepted < before.num_tested and last.num_drafted for before, last in ends)
    assert total_variation(summed(ways), plain_outputs(case)) < 1e-12


# ------------------------------------------------------------------------------------------------ who may see a table


def test_texts_of_different_salts_never_share() -> None:
    made = drafter(shared=True, from_prompt=False)
    check_salts_never_share(made)
    assert len(made._tables.tables) == 3


def test_requests_share_nothing_by_default() -> None:
    made = drafter(from_prompt=False)
    engine = engine_of(made, 3)
    assert first_drafted(engine, "a") == first_drafted(engine, "a") == 0
    assert not made._tables.tables


def test_tables_that_nobody_uses_have_a_limit_together() -> None:
    made = drafter(shared=True, max_contexts=PART)
    engine = engine_of(made, 5)
    for salt in "abcdefghij":
        spoken(engine, [5, 2, 7], 40, cache_salt=salt)
    assert sum(len(table) for table in made._tables.tables.values()) <= PART
    assert len(made._tables.tables) > 1
    assert ("salt", "j") in made._tables.tables, "the latest is kept"


@pytest.mark.parametrize("shape", ["tree", "path"])
def test_several_answers_of_a_request_are_those_of_plain_decoding(shape: str) -> None:
    texts = []
    for made in (NoDrafter(), drafter(shape=shape)):
        engine = engine_of(made, 4)
        texts.append(run(engine, engine.add_all([5, 2, 5, 2], SamplingParams(max_tokens=25, seed=4, n=3))))
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_preempted_and_aborted_requests_leave_nothing(shared: bool) -> None:
    made = drafter(shared=shared)
    assert crowded(made) > 0
    assert not made._tables.num_users
    assert not made._requests
    assert len(made._tables.tables) == shared
