"""Tables of measurements: columns that take their values from rows, and ratios with their range.

A row may be any object: a column reads a field of the row by name, or calls a function with the row. exhibits.py makes
tables and pictures with the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

MOST_FOLDED = 12  # characters: the least width of a column of texts, unless all its texts are shorter


@dataclass(frozen=True)
class Ratio:
    """The ratios of paired measurements, one for each repeat, with their median and range."""

    values: tuple[float, ...]
    median: float
    range: tuple[float, float]

    @classmethod
    def of(cls, values: Seq[float]) -> Ratio:
        """Return these ratios with their median and range. There must be at least one ratio."""
        return cls(tuple(values), median(values), (min(values), max(values)))


@dataclass(frozen=True)
class Column:
    """A column of a table.

    name: the heading, in which \\n breaks the line. value: the path of a field of the row, or a function of the row;
    None in exhibits, where rows are tuples. form: the format of a value, or of each end of an interval. absent: the
    text for None. is_text: whether the column is left-justified and folded; None = only if a value is a text. is_once:
    whether a cell stays empty where the cell above has the same value.
    """

    name: str
    value: str | Callable[[Any], Any] | None = None
    form: str | Callable[[Any], str] = "{}"
    absent: str = "-"
    is_text: bool | None = None
    is_once: bool = False

    def of(self, row: Any) -> Any:
        """Return this column's value for a row."""
        if isinstance(self.value, str):
            return attrgetter(self.value)(row)
        return row if self.value is None else self.value(row)

    def written(self, value: Any) -> str:
        """Return a value as text."""
        if value is None:
            return self.absent
        if isinstance(value, tuple):
            return "-".join(self.written(end) for end in value)
        if isinstance(value, str):
            return value
        return self.form.format(value) if isinstance(self.form, str) else self.form(value)


def table(rows: Seq[Any], columns: Seq[Column]) -> Table:
    """Return a table with these columns and a line for each row. A value may be a rich Text."""
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    shown = [_values(column, rows) for column in columns]
    for column, values in zip(columns, shown, strict=True):
        is_text = any(isinstance(value, str) for value in values) if column.is_text is None else column.is_text
        longest = max((len(value) for value in values if isinstance(value, str)), default=0)
        grid.add_column(
            column.name,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            min_width=min(longest, MOST_FOLDED) if is_text else None,
        )
    for i in range(len(rows)):
        cells = [(column, values[i]) for column, values in zip(columns, shown, strict=True)]
        grid.add_row(*(value if isinstance(value, Text) else Text(column.written(value)) for column, value in cells))
    return grid


def _values(column: Column, rows: Seq[Any]) -> list[Any]:
    values = [column.of(row) for row in rows]
    if not column.is_once:
        return values
    return ["" if i > 0 and value == values[i - 1] else value for i, value in enumerate(values)]


def milliseconds(seconds: float) -> str:
    """Return a duration in seconds as a text in milliseconds, without the unit."""
    return f"{1e3 * seconds:.1f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def rate(per_s: float) -> str:
    """Return a rate per second as a text, without the unit."""
    return f"{per_s:.1f}" if per_s < 1000 else f"{per_s:.0f}"
