"""LogitSpec: what its candidates are, the order and limits of its tree, and what is forgotten."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from drafters.requests import drafted, request, seen_of
from drafters.toys import V, crowded, engine_of, likeliest, spoken
from engine.load import run, take_steps
from forerun.drafters.logitspec import LogitSpecDrafter, Options
from forerun.drafters.lookup import LookupDrafter, Options as LookupOptions
from forerun.models.runner import Run
from forerun.types import SamplingParams, Sequence


def drafter(**options: Any) -> LogitSpecDrafter:
    """One with LogitSpec's own candidates alone, unless the options say otherwise."""
    return LogitSpecDrafter(Options(**{"recycled": 0, **options}))


def logits(*best: int) -> torch.Tensor:
    """A row of logits whose largest are those of these ids, the best first."""
    row = torch.zeros(V)
    row[list(best)] = torch.arange(len(best), 0, -1.0)
    return row


def see(
    made: LogitSpecDrafter, seq: Sequence, rows: Seq[Seq[int]], tokens: Seq[int] = (), kept: Seq[int] = (0,)
) -> None:
    """Show a pass behind which the sequence has its tokens. rows: the best ids behind each of the tokens that were run.

    tokens: empty = the sequence's last but one alone. kept: rows of the text itself; others are of rejected guesses.
    """
    rows_of_logits = torch.stack([logits(*best) for best in rows])
    start = len(seq.tokens) - 1 - len(kept)
    made.observe([seq], [seen_of(Run(0, list(tokens) or [seq.tokens[-2]]), rows_of_logits, start=start, kept=kept)])


def begun(
    tokens: Seq[int], rows: Seq[Seq[int]], ran: Seq[int] = (), end_ids: Seq[int] = (), **options: Any
) -> tuple[LogitSpecDrafter, Sequence]:
    """Return a drafter that has seen a pass, as `see` shows it, and the sequence that has these tokens behind it."""
    drafting, seq = drafter(**options), request(tokens, end_ids=frozenset(end_ids))
    see(drafting, seq, rows, ran)
    return drafting, seq


def tree(made: LogitSpecDrafter, seq: Sequence, most: int = 8, go_on: Any = None) -> list[tuple[int, ...]]:
    """The path down to each node of what is drafted, in the order of the nodes."""
    draft = drafted(made, seq, most, go_on)
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


# -------------------------------------------------------------------------------------------------------- candidates

NEW = [1, 2, 3, 4, 5, 6, 7, 8]  # 8 did not occur before


def test_what_nearly_came_is_a_candidate_where_the_text_says_nothing() -> None:
    """The text is 1 to 8; the target chose 8 and held 3 to be second best, which comes next."""
    seq = request(NEW)
    assert drafted(LookupDrafter(LookupOptions()), seq).tokens == []
    made = drafter(top=1)
    assert tree(made, seq) == [], "nothing is known of the row before the last token"
    see(made, seq, [[8, 3]])
    assert tree(made, seq) == [(3,)]


@pytest.mark.parametrize(("num_behind", "chain"), [(0, [4]), (1, [4, 0]), (3, [4, 0, 1, 2]), (9, [4, 0, 1, 2, 3])])
def test_a_candidate_is_followed_where_the_text_went_on_with_it(num_behind: int, chain: list[int]) -> None:
    """Behind "3 9" came 8, and the search finds nothing else. The second best id, 4, came behind "9"."""
    made, seq = begun([9, 4, 0, 1, 2, 3, 9, 8, 7, 6, 5, 3, 9], [[9, 4]], num_behind=num_behind, top=1)
    nodes = tree(made, seq, 64)
    behind_four = [path for path in nodes if path[0] == 4]
    assert behind_four[: len(chain)] == [tuple(chain[: i + 1]) for i in range(len(chain))]
    assert nodes[0] == (8,), "what the longest match says comes first"
    if num_behind < 9:
        assert len(behind_four) == len(chain)


def test_the_longest_suffix_that_a_candidate_followed_says_how_it_goes_on() -> None:
    """4 5 stands behind "2 3" early, and 4 6 behind "3" alone, later."""
    made, seq = begun([2, 3, 4, 5, 0, 1, 3, 4, 6, 0, 1, 2, 3, 7, 0, 1, 2, 3], [[3, 4]], num_behind=1, top=1)
    assert [path for path in tree(made, seq, 64) if path[0] == 4] == [(4,), (4, 5)]


def test_unseen_candidates_can_be_left_out() -> None:
    """Behind 7 came 8 alone, and then 7 again; of the candidates 7, which was chosen, is none, and 8 is there."""
    searched = [(8,), (8, 7), (8, 7, 8), (8, 7, 8, 7)]
    for unseen, wanted in ((True, [*searched, (3,), (2,)]), (False, searched)):
        made, seq = begun([*NEW, 7], [[3, 7, 8, 2]], unseen=unseen, top=3)
        assert tree(made, seq, 64) == wanted


def test_only_the_row_of_the_last_token_counts() -> None:
    """Of a draft the last kept row is read; of a row that is not the one before the last token, nothing."""
    seq = request(NEW)
    made = drafter(top=1)
    see(made, seq, [[6, 1], [7, 2], [8, 3], [9, 4]], tokens=[5, 6, 7, 0], kept=[0, 1, 2])
    assert tree(made, seq) == [(3,)]
    assert tree(made, seq.behind([9])) == [], "9 is forced, and the target has not run 8"
    assert tree(made, seq) == [(3,)]


def test_an_end_is_followed_by_nothing() -> None:
    made, seq = begun([7, 8, 3, 4, 6, 7, 8, 5, 1, 2, 0, 6, 7, 8], [[8, 3, 9]], end_ids=[3], top=2)
    assert [path for path in tree(made, seq, 64) if path[0] == 3] == [(3,)]


# -------------------------------------------------------------------------------------- what was said of a token before


def test_what_the_target_said_behind_the_token_before_comes_first() -> None:
    """Also where it was run as a guess that was rejected; the row of the text itself counts more."""
    made, seq = begun([1, 2, 3, 4], [[4, 0], [9, 8, 7]], ran=[3, 5], top=1, recycled=2)  # 5 was guessed, and 4 came
    assert tree(made, seq) == [(0,)]
    seq.tokens.append(5)
    see(made, seq, [[5, 6]])
    assert tree(made, seq) == [(9,), (8,), (6,)]
    seq.tokens.append(5)
    see(made, seq, [[5, 1, 2], [3, 2]], tokens=[5, 5])
    assert tree(made, seq)[-2:] == [(5, 5, 5, 5), (1,)], "of the text's own row; 3 is of the rejected one"


def test_recycling_can_be_left_out() -> None:
    made, seq = begun([1, 2, 3, 5], [[4, 0], [9, 8, 7]], ran=[3, 5], top=1, recycled=0)
    assert not made._likely[seq.id].behind.rows


# --------------------------------------------------------------------------------------------- the order and the limits


def grown(most: int, go_on: Any = None) -> list[tuple[int, ...]]:
    return tree(*begun([1, 2, 3, 4, 5, 0, 2, 6, 7, 8, 1, 2], [[2, 9, 6, 3, 11]], top=4), most, go_on)


def test_the_search_comes_first_then_candidates_by_rank_and_each_path_once() -> None:
    found = [(3,), (3, 4), (3, 4, 5), (3, 4, 5, 0), (3, 4, 5, 0, 2), (3, 4, 5, 0, 2, 6), (3, 4, 5, 0, 2, 6, 7)]
    found.append((*found[-1], 8))
    whole = grown(64)
    assert whole == [*found, (9,), (6,), (6, 7), (6, 7, 8), (6, 7, 8, 1), (11,)]
    for most in range(len(whole) + 1):
        assert grown(most) == whole[:most], "a smaller budget takes the first of the same nodes"


def test_a_node_that_pacing_refuses_has_no_descendants() -> None:
    assert grown(64, lambda b, depth, probs: depth < 1) == [(3,), (9,), (6,), (11,)]


# ----------------------------------------------------------------------------------------------------- in the engine


def test_the_toy_accepts_what_nearly_came() -> None:
    """The toy's next token depends on the last one alone, so that each of its rows is known."""
    starts = [token for token in range(V) if nearly_came(token)]
    assert len(starts) > 2
    for start in starts:
        first, second, *_ = spoken(engine_of(drafter(top=5), 5), [start], max_tokens=8)
        assert first.num_drafted == 0, "nothing is known behind the prompt's last token"
        assert (second.num_drafted, second.num_accepted) == (5, 1), "nothing has occurred before"


def nearly_came(token: int) -> bool:
    """Whether what comes second behind a token was one of the best six ids for the first place, but not the best."""
    best, *others = likeliest(token, 6)
    return likeliest(best)[0] in others and token not in (best, *others)


def test_forks_of_one_prompt_know_only_their_own_rows() -> None:
    made = drafter(recycled=4)
    engine = engine_of(made, 4)
    params = SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=3, acceptance="match")
    requests = engine.add_all([5, 2, 7], params)
    take_steps(engine, 5)
    places = [(made._likely[request.seq.id].place, len(request.seq.tokens) - 1) for request in requests]
    assert [place for place, _ in places] == [last for _, last in places]
    assert len({id(made._likely[request.seq.id].behind) for request in requests}) == 3
    outputs = run(engine, requests)
    plain = engine_of(drafter(top=1, recycled=0, unseen=False), 1)
    assert outputs == run(plain, plain.add_all([5, 2, 7], params))
    assert len({tuple(output) for output in outputs}) > 1


@pytest.mark.parametrize("recycled", [0, 4])
def test_preempted_and_aborted_requests_leave_nothing(recycled: int) -> None:
    made = drafter(recycled=recycled)
    assert crowded(made, spec_length=1) > 0
    assert not made._likely
    assert not made._texts.by_id


def test_what_is_kept_of_a_sequence_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.drafters.logitspec.MAX_ROWS", 3)
    made, seq = drafter(recycled=2), request([0, 1])
    for token in np.random.default_rng(0).integers(0, V, 40).tolist():
        seq.tokens.append(token)
        see(made, seq, [[token, 1, 2, 3]])
    assert len(made._likely[seq.id].behind.rows) == 3
    assert {len(row) for row in made._likely[seq.id].behind.rows.values()} == {2}
