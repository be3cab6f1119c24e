"""Lookahead decoding: the window's rows, what the target says behind them, the pool, and how a budget is shared."""

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from drafters.requests import seen_of
from drafters.toys import crowded, engine_of, engine_with, likeliest, spoken
from engine.load import MODEL, run, runner_with
from forerun.drafters import Seen
from forerun.drafters.lookahead import LookaheadDrafter, Options, Pool, Window
from forerun.models.runner import NO_NUMBERS, Run
from forerun.types import Budget, Draft, SamplingParams, Sequence

END = 60


def drafter(**options: Any) -> LookaheadDrafter:
    return LookaheadDrafter(Options(**options))


def path(parents: Seq[int], row: int) -> list[int]:
    """A row and its ancestors, the first one first."""
    return [*(path(parents, parents[row]) if parents[row] >= 0 else []), row]


# -------------------------------------------------------------------------------------------------------- the window


def test_the_window_begins_with_tokens_of_the_text() -> None:
    assert Window.spread([5, 6, 7, 8, 9, 10], 3, 2).columns == [[5, 6], [7, 8], [9, 10]]
    assert Window.spread([5], 2, 2).columns == [[5, 5], [5, 5]]


def test_levels_attend_diagonally() -> None:
    """W = 3, N = 4: figure 2 of the paper. Behind two nodes, rows of the pass are 0 (root), 1, 2, then these."""
    rows, ends = Window([[0, 10, 20], [1, 11, 21], [2, 12, 22]]).rows(3, 2)
    assert rows.tokens == [1, 2, 10, 11, 12, 20, 21, 22]
    assert rows.parents == [-1, 2, -1, 2, 3, 4, 5, 6]
    own = [parent if parent < 0 else parent - 2 for parent in rows.parents]  # among the extra rows
    seen = [[rows.tokens[i] for i in path(own, row)] for row in range(len(own))]
    assert seen == [[1], [1, 2], [10], [1, 11], [1, 2, 12], [10, 20], [1, 11, 21], [1, 2, 12, 22]]
    assert ends == [8, 9, 10]


def test_one_level_is_a_chain_behind_the_last_token() -> None:
    rows, ends = Window([[0], [1], [2]]).rows(3, 0)
    assert (rows.tokens, rows.parents, ends) == ([1, 2], [-1, 0], [0, 1, 2])


def test_a_step_shifts_the_columns_that_were_scored() -> None:
    """An n-gram counts once the target has named all of its tokens but the first."""
    window = Window([[0, 10], [1, 11], [2, 12]])
    assert window.advance([50, 51]) == []
    assert window.columns == [[10, 50], [11, 51], [2, 12]]
    assert window.advance([60, 61, 62]) == [(10, 50, 60), (11, 51, 61)]
    assert window.columns == [[50, 60], [51, 61], [12, 62]]


def test_the_window_after_a_step_holds_what_the_target_says() -> None:
    """The toy's next token depends on the last one alone."""
    windows: list[list[list[int]]] = []

    class Watched(LookaheadDrafter):
        def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
            super().observe(seqs, seen)
            windows.extend([list(column) for column in self._states[seq.id].window.columns] for seq in seqs)

    spoken(engine_of(Watched(Options(window=3, ngram=3, from_text=False)), 9), [5, 2, 7], max_tokens=12)
    before, after = windows[:2]  # behind the prompt, and behind the first step
    assert before == [[5, 5], [2, 2], [7, 7]]
    assert after == [[token, likeliest(token)[0]] for _, token in before]


def test_ngrams_of_the_window_are_accepted() -> None:
    """Without the text's own n-grams, what is drafted was found by Jacobi iteration alone."""
    reports = spoken(engine_of(drafter(window=4, ngram=3, from_text=False), 11), [5, 2, 7], max_tokens=30)
    assert sum(report.num_accepted for report in reports) > 4
    assert max(report.num_accepted for report in reports) == 2, "N - 1 tokens"


class Recorder(LookaheadDrafter):
    """Notes the paths of the rows of each pass, and the likeliest token behind each."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.found: list[tuple[list[int], int]] = []
        self._drafts: dict[int, Draft] = {}
        self.most_extra = 0

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Any) -> Draft:
        joined = super().propose(seqs, budget, coins)
        self._drafts = {seq.id: joined.only(b) for b, seq in enumerate(seqs)}
        return joined

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, own in zip(seqs, seen, strict=True):
            draft = self._drafts.pop(seq.id, None)
            if draft is not None:
                extra = draft.extra.get(0)
                parents = [*draft.parents, *(extra.parents if extra else [])]
                drafted = [*draft.tokens, *(extra.tokens if extra else [])]
                assert list(own.tokens) == [seq.tokens[own.start], *drafted]
                self.most_extra = max(self.most_extra, len(extra.tokens) if extra else 0)
                for row, best in enumerate(own.best[1:]):
                    behind = [drafted[i] for i in path(parents, row)]
                    self.found.append(([*seq.tokens[: own.start + 1], *behind], best))
        super().observe(seqs, seen)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_seen_of_each_row_is_what_a_plain_pass_over_its_path_says(temperature: float) -> None:
    recorder = Recorder(Options(window=3, ngram=4))
    engine = engine_with(recorder, 14, max_seq_len=64)
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=1)
    run(engine, [engine.add([1, 2, 3, 4, 1, 2], params), engine.add([4, 3], params)])
    assert recorder.most_extra == 8, "the whole window was scored"
    assert len(recorder.found) > 40
    runner = runner_with(MODEL, 400)
    for slot, (tokens, best) in enumerate(recorder.found):
        runner.cache.open(slot, tokens, None)
        assert int(runner.forward([Run(slot, tokens, "last")]).logits[0][-1].argmax()) == best
        runner.cache.release(slot)


# ---------------------------------------------------------------------------------------------------------- the pool


def test_the_pool_keeps_the_continuations_that_were_seen_last() -> None:
    pool = Pool(2)
    for rest in ((1, 2), (3, 4), (1, 2), (5, 6)):
        pool.put(9, rest)
    assert pool.ngrams == {9: [(5, 6), (1, 2)]}, "3 4 was not seen for longest"
    pool.put(8, (1, 2))
    assert pool.ngrams[8] == [(1, 2)]


def sequence_of(tokens: Seq[int]) -> Sequence:
    return Sequence(0, list(tokens), len(tokens), SamplingParams(max_tokens=20), 0, 64, end_ids=frozenset({END}))


def begun(ngrams: Seq[tuple[int, ...]], **options: Any) -> tuple[LookaheadDrafter, Sequence]:
    """A drafter with these n-grams in the pool of its only sequence, which ends with token 9."""
    made, seq = drafter(**options), sequence_of([7, 8, 9])
    made.begin(seq)
    for first, *rest in ngrams:
        made._states[0].pool.put(first, tuple(rest))
    return made, seq


@pytest.mark.parametrize("from_text", [True, False])
def test_a_source_is_the_text_to_begin_with(from_text: bool) -> None:
    """Of an encoder-decoder, whose own text is then a token or two; no n-gram reaches over the source's end."""
    made, seq = drafter(ngram=3, window=2, from_text=from_text), sequence_of([0])
    seq.source_ids = (5, 6, 7, 5, 6, 8)
    made.begin(seq)
    state = made._states[seq.id]
    assert state.window.columns == [[5, 6], [5, 6]]
    assert state.pool.ngrams == ({5: [(6, 8), (6, 7)], 6: [(7, 5)], 7: [(5, 6)]} if from_text else {})


def test_continuations_are_merged_into_a_tree_newest_first() -> None:
    made, seq = begun([(9, 1, 2, 3), (9, 4, 5, 6), (9, 1, 2, 5), (8, 1, 1, 1)], ngram=4, guesses=3, window=1)
    draft = made.propose([seq], Budget([20], 0), [])
    assert draft.tokens == [1, 2, 5, 4, 5, 6, 3]
    assert draft.parents == [-1, 0, 1, -1, 3, 4, 1]
    assert made.propose([seq], Budget([20], 0, lambda b, depth, probs: depth < 2), []).tokens == [1, 2, 4, 5]


def test_nothing_follows_the_end() -> None:
    made, seq = begun([(9, END, 2)])
    assert made.propose([seq], Budget([20], 0), []).tokens == [END]


@pytest.mark.parametrize(("guesses", "shape"), [(1, "chain"), (2, "tree")])
def test_one_guess_makes_chains(guesses: int, shape: str) -> None:
    made, seq = begun([(9, 1, 2), (9, 3, 4)], guesses=guesses)
    assert made.shape == shape
    assert len(made.propose([seq], Budget([20], 0), []).tokens) == 2 * guesses


@pytest.mark.parametrize(
    ("num_ngrams", "most", "num_nodes", "num_extra"),
    [
        (2, 64, 4, 7),  # both guesses and the whole window
        (2, 11, 4, 7),
        (2, 10, 4, 5),  # guesses first, then whole columns
        (2, 8, 4, 3),
        (2, 5, 4, 1),
        (2, 3, 2, 1),  # half is the window's
        (2, 2, 1, 1),
        (2, 1, 1, 0),  # no room for a column
        (1, 8, 2, 5),  # what the guesses leave
        (0, 8, 0, 7),
        (0, 4, 0, 3),
    ],
)
def test_how_a_budget_is_shared(num_ngrams: int, most: int, num_nodes: int, num_extra: int) -> None:
    made, seq = begun([(9, 1, 2), (9, 3, 4)][:num_ngrams], window=4, ngram=3, guesses=2)
    draft = made.propose([seq], Budget([most], 0), [])
    assert (len(draft.tokens), draft.num_asked(0) - len(draft.tokens)) == (num_nodes, num_extra)
    draft.check(0)


# ------------------------------------------------------------------------------------------------- what is forgotten


def test_a_text_repeats_itself_on_the_same_engine() -> None:
    """What a request drafts does not depend on those before it."""
    engine = engine_of(drafter(), 9)
    counts = [[(r.num_drafted, r.num_accepted) for r in spoken(engine, [5, 2, 7])] for _ in range(2)]
    assert counts[0] == counts[1]


def test_preempted_and_aborted_requests_leave_nothing() -> None:
    made = drafter()
    assert crowded(made) > 0
    assert not made._states


def test_logits_that_are_no_numbers_do_not_enter_the_window() -> None:
    made, seq = begun([], window=4, ngram=3)
    draft = made.propose([seq], Budget([7], 0), [])
    run = Run(0, [seq.tokens[-1], *draft.tokens, *draft.extra[0].tokens])
    columns = [list(column) for column in made._states[0].window.columns]
    made.observe([seq], [seen_of(run, best=[1] * 7 + [NO_NUMBERS], start=2)])
    assert made._states[0].window.columns == columns


def test_rows_of_another_drafter_teach_the_window_nothing() -> None:
    """Within a compound another member's draft may be scored in place of this one's."""
    own, seq = drafter(window=2, ngram=3, from_text=False), sequence_of([5, 2, 7])
    own.begin(seq)
    tokens = [7, *own.propose([seq], Budget([8], 0), []).extra[0].tokens]
    for row, moves in (([7, 1, 1, 1, 1], False), (tokens, True)):
        before = [list(column) for column in own._states[seq.id].window.columns]
        own.propose([seq], Budget([8], 0), [])
        own.observe([seq], [seen_of(Run(0, row), best=[3] * len(row), start=2)])
        assert (own._states[seq.id].window.columns != before) is moves
