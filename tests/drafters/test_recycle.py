"""Token Recycling: the fixed tree, the matrix after known passes, and what is forgotten."""

from typing import Any

import pytest
import torch

from drafters import requests
from drafters.requests import request
from drafters.toys import V, check_salts_never_share, crowded, engine_of, first_drafted, likeliest, spoken
from forerun.drafters.recycle import Matrix, Options, RecycleDrafter
from forerun.models.runner import Run
from forerun.types import Sequence

END = 11


def drafter(**options: Any) -> RecycleDrafter:
    return RecycleDrafter(Options(**options))


def begun(tokens: list[int], **options: Any) -> tuple[RecycleDrafter, Sequence, Matrix]:
    """A drafter that serves one sequence, the sequence, and its empty matrix."""
    made, seq = drafter(**options), request(tokens, end_ids=frozenset({END}))
    made.begin(seq)
    return made, seq, made._matrices.of(seq)


# ---------------------------------------------------------------------------------------------------------- the tree


ROWS = {1: [2, 3], 2: [4, 5], 3: [6], 4: [1], 6: [END, 1], END: [7]}


def drafted(most: int, go_on: Any = None, **options: Any) -> tuple[list[int], list[int]]:
    """Tokens and parents of what is drafted behind token 1 from ROWS."""
    made, seq, matrix = begun([9, 1], **options)
    for token, row in ROWS.items():
        matrix.put(token, row)
    draft = requests.drafted(made, seq, most, go_on)
    return draft.tokens, draft.parents


def test_a_tree_takes_the_best_nodes_that_have_tokens() -> None:
    """0.44: 2. 0.44^2: 2 4. 0.14: 3. 0.44^3: 2 4 1. Then 2 5, 3 6 (0.44 x 0.14 each) and 2 4 1 2 (0.44^4)."""
    tokens, parents = drafted(7)
    assert (tokens[:4], parents[:4]) == ([2, 4, 3, 1], [-1, 0, -1, 1])
    assert sorted(zip(tokens[4:], parents[4:], strict=True)) == [(2, 3), (5, 0), (6, 2)]
    for most in range(7):
        assert drafted(most) == (tokens[:most], parents[:most]), "a smaller budget takes the first of the same nodes"
    tokens, parents = drafted(64)
    assert len(set(zip(tokens, parents, strict=True))) == len(tokens), "siblings are distinct"
    assert END in tokens
    assert tokens.index(END) not in parents, "nothing follows the end"


def test_a_path_takes_the_likeliest_tokens() -> None:
    assert drafted(5, shape="path") == ([2, 4, 1, 2, 4], [-1, 0, 1, 2, 3])
    assert drafter(shape="path").shape == drafter(top=1).shape == "chain"
    assert drafter().shape == "tree"


def test_a_node_that_pacing_refuses_has_no_descendants() -> None:
    assert drafted(7, lambda b, depth, probs: depth < 1) == ([2, 3], [-1, -1])


# -------------------------------------------------------------------------------------------------------- the matrix


def test_the_matrix_holds_what_the_target_said_behind_each_token_rejected_ones_too() -> None:
    """The toy's next token depends on the last one alone, so every row is known."""
    kept: dict[int, list[int]] = {}

    class Watched(RecycleDrafter):
        def end(self, seq: Sequence) -> None:
            kept.update({token: row.tolist() for token, row in self._matrices.of(seq).rows.items()})
            super().end(seq)

    reports = spoken(engine_of(Watched(Options(top=3)), 6), [5, 2, 7])
    said = {2, 5, 7}
    for _ in range(20):
        said |= {likeliest(token)[0] for token in said}
    rows = {token: row for token, row in kept.items() if len(row) == 3}
    assert rows == {token: likeliest(token, 3) for token in rows}
    assert not set(rows) <= said, "a rejected guess gave a row, too"
    assert reports[0].num_drafted == 0, "nothing is known behind the prompt's last token"
    assert reports[-2].num_accepted == max(report.num_accepted for report in reports) >= 2


def test_the_row_of_the_text_counts_where_a_token_was_run_twice() -> None:
    made, seq, matrix = begun([8, 3, 3, 4], top=1)
    logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 5]), V).float()
    # The last two rows are of a rejected draft.
    made.observe([seq], [requests.seen_of(Run(0, [3, 4, 3]), logits, start=2)])
    assert {token: row.tolist() for token, row in matrix.rows.items()} == {3: [1], 4: [2]}


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_the_prompt_seeds_the_matrix(chunk: int) -> None:
    """With each token's followers, the latest first, however the prompt is cut into chunks."""
    made, seq, matrix = begun([1, 2, 3, 1, 2, 4, 1, 2, 4, 1], top=2)
    requests.read_prompt(made, seq, chunk)
    assert {token: row.tolist() for token, row in matrix.rows.items()} == {1: [2], 2: [4, 3], 3: [1], 4: [1]}


@pytest.mark.parametrize(("from_prompt", "rows"), [(True, {1: [3, 2], 2: [1]}), (False, {})])
def test_a_source_seeds_the_matrix(from_prompt: bool, rows: dict[int, list[int]]) -> None:
    """That of an encoder-decoder is the prompt; its last token is followed by nothing."""
    made, seq = drafter(from_prompt=from_prompt), request([0])
    seq.source_ids = (1, 2, 1, 3)
    made.begin(seq)
    assert {token: row.tolist() for token, row in made._matrices.of(seq).rows.items()} == rows


def test_a_matrix_has_at_most_so_many_rows() -> None:
    matrix = Matrix(2)
    for token in (1, 2, 1, 3):
        matrix.put(token, [9])
    assert list(matrix.rows) == [1, 3], "2 was not seen for longest"


# --------------------------------------------------------------------------------------------- who may see a matrix


def test_texts_of_different_salts_never_share() -> None:
    made = drafter(shared=True, from_prompt=False)
    check_salts_never_share(made)
    assert len(made._matrices.tables) == 3


def test_requests_share_nothing_by_default() -> None:
    made = drafter(from_prompt=False)
    engine = engine_of(made, 3)
    assert first_drafted(engine, "a") == first_drafted(engine, "a") == 0
    assert not made._matrices.tables


def test_matrices_that_nobody_uses_have_a_limit_together() -> None:
    made = drafter(shared=True, max_rows=8)
    engine = engine_of(made, 3)
    for salt in "abcdef":
        spoken(engine, [5, 2, 7], cache_salt=salt)
    assert sum(len(matrix.rows) for matrix in made._matrices.tables.values()) <= 8
    assert ("salt", "f") in made._matrices.tables, "the latest is kept"


@pytest.mark.parametrize("shared", [False, True])
def test_preempted_and_aborted_requests_leave_nothing(shared: bool) -> None:
    made = drafter(shared=shared)
    assert crowded(made) > 0
    assert not made._matrices.num_users
    assert not made._num_read
    assert len(made._matrices.tables) == shared
