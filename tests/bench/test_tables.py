"""Tables of what was measured: what a column shows of a row, and how it is written."""

import io
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from forerun.bench.tables import Column, Ratio, milliseconds, rate, table


@dataclass(frozen=True)
class Row:
    name: str
    speedup: Ratio
    share: float | None


ROWS = [Row("lookup", Ratio.of([1.0, 3.0, 1.5]), 0.5), Row("lookup", Ratio.of([0.25]), None)]


def lines_of(columns: list[Column]) -> list[list[str]]:
    console = Console(width=80, file=io.StringIO())
    console.print(table(ROWS, columns))
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_columns_take_fields_paths_and_functions() -> None:
    columns = [
        Column("name", "name", is_once=True),
        Column("x", "speedup.median", "{:.2f}"),
        Column("range", "speedup.range", "{:.1f}"),
        Column("share", "share", "{:.0%}"),
        Column("stars", lambda row: Text("*" * len(row.speedup.values))),
    ]
    assert lines_of(columns) == [
        ["name", "x", "range", "share", "stars"],
        ["lookup", "1.50", "1.0-3.0", "50%", "***"],
        ["0.25", "0.2-0.2", "-", "*"],
    ]


def test_texts_are_folded_at_the_left_and_numbers_are_never_cut() -> None:
    columns = [Column("a", "a"), Column("b", "b"), Column("c", "c", is_text=False)]
    made = table([SimpleNamespace(a="x" * 30, b=1.0, c="5")], columns).columns
    text, number = ("left", False, 12), ("right", True, None)
    assert [(column.justify, column.no_wrap, column.min_width) for column in made] == [text, number, number]


@pytest.mark.parametrize(("seconds", "text"), [(0.0125, "12.5"), (2.0, "2000")])
def test_milliseconds(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_rates() -> None:
    assert (rate(12.34), rate(1234.5)) == ("12.3", "1234")
    assert Ratio.of([2.0, 1.0]) == Ratio((2.0, 1.0), 1.5, (1.0, 2.0))
