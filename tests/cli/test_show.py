"""What the terminal shows: pieces of a round, token texts, wrapping, live text."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from forerun.cli.show import LiveText, RoundPrinter, wrap
from forerun.text import Tokenizer
from forerun.text.rounds import Piece, committed_pieces, round_pieces
from forerun.text.tokenizer import token_text
from forerun.types import AcceptanceTest, RoundDetail, StepReport


@pytest.fixture
def tokenizer(checkpoints: Path) -> Tokenizer:
    return Tokenizer.load(checkpoints / "llama")


def round_of(drafted: list[int], num_accepted: int, next_token: int) -> RoundDetail:
    """A chain of which the first tokens were accepted and the one behind them, if any, rejected."""
    return RoundDetail(
        sequence_id=0,
        position=9,
        tokens=drafted,
        parents=[i - 1 for i in range(len(drafted))],
        draft_probs=[1.0] * len(drafted),
        target_probs=[1.0] * len(drafted),
        tests=[AcceptanceTest(i, 1.0, 1.0, i < num_accepted) for i in range(len(drafted[: num_accepted + 1]))],
        accepted=list(range(num_accepted)),
        next_token=next_token,
        granted=len(drafted),
    )


def test_pieces_of_a_correction_a_bonus_and_a_plain_round() -> None:
    tested = [Piece(1, "accepted"), Piece(2, "rejected"), Piece(9, "correction")]
    assert round_pieces(round_of([1, 2, 3, 4], 1, 9), 2) == [*tested, Piece(3, "untested"), Piece(4, "untested")]
    assert round_pieces(round_of([1, 2], 2, 9), 3)[-1] == Piece(9, "bonus")
    assert round_pieces(round_of([], 0, 9), 1) == [Piece(9, "plain")]


def test_what_a_stop_condition_cut_is_not_shown() -> None:
    assert committed_pieces(round_of([1, 2, 3], 3, 9), 2) == [Piece(1, "accepted"), Piece(2, "accepted")]
    kinds = [piece.kind for piece in round_pieces(round_of([1, 2, 3], 1, 9), 1)]
    assert kinds == ["accepted", "rejected", "untested"]  # drafted, so shown; the correction was cut


def test_token_text_escapes_controls_and_names_bytes(tokenizer: Tokenizer) -> None:
    texts = [token_text(tokenizer, i, None) for i in tokenizer.encode("a\n\té")]
    assert texts == ["a", "\\n", "\\t", "<C3>", "<A9>"]
    assert token_text(tokenizer, 0, 5) == "<|end|>"
    assert token_text(tokenizer, 9999, None) == "<9999>"


def test_wrap_breaks_between_tokens_and_inside_only_where_it_must() -> None:
    lines = wrap([("abcd", ""), ("efg", ""), ("hijklmnopq", "")], 6)
    assert [line.plain for line in lines] == ["abcd", "efg", "hijklm", "nopq"]
    assert [line.plain for line in wrap([("日本語", "")], 4)] == ["日本", "語"]


def report_of(detail: RoundDetail, num_committed: int) -> StepReport:
    return StepReport(num_committed=num_committed, rounds=[detail])


def test_round_printer_shows_every_drafted_token_behind_a_legend(tokenizer: Tokenizer) -> None:
    out = io.StringIO()
    printer = RoundPrinter(tokenizer, Console(file=out, width=80, highlight=False, markup=False), None)
    a, b, c = tokenizer.encode("abc")
    printer(StepReport(num_prefill_tokens=4))
    printer(report_of(round_of([a, b, c], 1, c), 2))
    printer(report_of(round_of([], 0, a), 1))
    assert out.getvalue().splitlines() == [
        "accepted, [-rejected-], {never tested}, [+the target's own+]",
        "pass accepted/drafted",
        "   1  1/3  a[-b-][+c+]{c}",
        "   2  0/0  a",
    ]


@pytest.mark.parametrize("colour", [False, True])
def test_live_text_is_the_exact_text(tokenizer: Tokenizer, colour: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=20, highlight=False, markup=False, force_terminal=colour, color_system="standard")
    live = LiveText(tokenizer, console, [])
    text = "if x:\n    [bold] = 'é'  # a long line that is not wrapped\n\n\n  y  "
    ids = tokenizer.encode(text)
    for i in range(0, len(ids), 3):
        live(report_of(round_of(ids[i : i + 2], len(ids[i : i + 2]), (ids[i + 2 : i + 3] or [0])[0]), 3))
    live.finish()
    # Which codes there are depends on NO_COLOR; the text between them does not.
    assert re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) == text + "\n"
