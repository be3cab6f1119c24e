"""What commands print in terminals of 60, 80 and 160 columns: as wide as there is room, broken at spaces alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from forerun.cli.folding import folded
from forerun.cli.main import app
from terminal import in_a_terminal

WIDTHS = (60, 80, 160)
# A page is folded at spaces, so what it says is found in it again where each run of spaces is one.
LONGEST_FLAG = len("  --speculative-decoding / --no-speculative-decoding")


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def one_line(text: str) -> str:
    return " ".join(text.split())


# Every command in the narrowest terminal, those with most options in the others, too.
PAGES = [(path, width) for path in COMMANDS for width in (WIDTHS if path in ((), ("generate",)) else WIDTHS[:1])]


@pytest.mark.parametrize(
    ("path", "width"), PAGES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else None
)
def test_help_is_as_wide_as_the_terminal_and_breaks_no_word(cli: Any, path: tuple[str, ...], width: int) -> None:
    page = cli(*path, "--help", COLUMNS=str(width)).stdout
    lines, words = page.splitlines(), one_line(page)
    assert max(map(len, lines)) <= max(width, LONGEST_FLAG)
    helps = [param.help for param in COMMANDS[path].params if param.help]
    assert all(one_line(text) in words for text in [COMMANDS[path].help, *helps])
    if any(len(text) > 160 for text in helps):
        assert max(map(len, lines)) > width - 25, "there is room for more"


@pytest.mark.parametrize("width", [60, 160])
def test_a_plan_fits_the_terminal(width: int) -> None:
    arguments = ("--target", "shipped", "--memory", "1MB", "--ops", "reference", "--dtype", "float32")
    page = in_a_terminal(width, "plan", *arguments)
    lines, words = page.splitlines(), one_line(page)
    assert max(map(len, lines)) <= width
    assert "bytes; one row, while a token is drawn from it, 48 bytes more for each of these" in words
    assert "Nothing fits: the weights alone need " in words
    weights = next(i for i, line in enumerate(lines) if line.startswith("target weights "))
    how = lines[weights + 1] if width < 76 else lines[weights][40:]
    assert how == "    20,191,744 weights x 4 bytes".removeprefix("" if width < 76 else "    ")


LISTS = [("models", width) for width in WIDTHS] + [("drafters", min(WIDTHS))]  # each of drafters loads them all
WIDER = [pytest.param("drafters", width, marks=pytest.mark.parity) for width in WIDTHS[1:]]


@pytest.mark.parametrize(("command", "width"), [*LISTS, *WIDER])
def test_lists_fit_the_terminal(command: str, width: int) -> None:
    lines = in_a_terminal(width, command).splitlines()
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > min(width, 100) - 25, "there is room for more"


@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_errors_are_folded_by_words_in_a_terminal_and_one_line_in_a_pipe(cli: Any, kind: str) -> None:
    page = in_a_terminal(60, "generate", "x", "--target", "shipped", "--draft", "ngram-lookup-of-a-kind", kind=kind)
    assert len(page.splitlines()) > 1
    assert max(map(len, page.splitlines())) <= 60
    piped = cli("generate", "x", "--target", "shipped", "--draft", "ngram-lookup-of-a-kind").stderr
    assert piped.count("\n") == 1
    assert one_line(page) == piped.strip()


def test_a_word_that_is_too_long_keeps_its_line() -> None:
    assert folded("see /a/very-long/path-of/something now", 12) == "see\n/a/very-long/path-of/something\nnow"
