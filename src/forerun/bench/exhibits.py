"""A table or figure as data, and the renderer that writes it as text for a terminal, as SVG, PNG and JSON.

Pictures need matplotlib. Every picture uses the same colours for accepted, rejected, corrected and added tokens, and
for the work of the target and of the draft model.
"""

from __future__ import annotations

import importlib.util
import json
import textwrap
from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rich.console import Console
from rich.text import Text

from forerun.bench.tables import Column, table
from forerun.errors import BadOption, InternalError, not_installed, shown
from forerun.text.rounds import MARKS, STYLES, Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of pictures, by the kind of a token or pass.
COLOURS = {
    "accepted": "#157038",
    "rejected": "#b91c2b",
    "untested": "#9aa4b1",
    "correction": "#1b5dc2",
    "bonus": "#1b5dc2",
    "plain": "#17202b",
    "target": "#6d36c9",
    "draft": "#7fb2ff",
    "target encoder": "#e3b505",
    "draft encoder": "#e07b2a",
}
CURVES = ("#1b5dc2", "#a34a06", "#157038", "#6d36c9", "#b91c2b", "#556171")  # for several curves in one panel, in turn

SUFFIXES = (".png", ".svg")

Interval = tuple[float, float]


class Token(NamedTuple):
    """A token's text, and its kind, such as accepted or rejected."""

    text: str
    kind: Kind


class Tokens(NamedTuple):
    """Consecutive tokens, as the value of one cell."""

    tokens: tuple[Token, ...]


Value = float | int | str | Interval | Tokens | None


@dataclass(frozen=True)
class Curve:
    """One series of numbers in a panel. style: line, steps or dots. spans: an interval for each dot."""

    label: str
    xs: Seq[float]
    ys: Seq[float]
    style: str = "line"
    spans: Seq[Interval | None] = ()
    colour: str | None = None


@dataclass(frozen=True)
class Panel:
    """One plot. names: texts for y = 0, 1, 2 ..., from the top down, in place of numbers on the y axis."""

    title: str
    x_label: str
    y_label: str
    curves: Seq[Curve]
    names: Seq[str] = ()
    y_limit: float | None = None
    x_limit: float | None = None


@dataclass(frozen=True)
class Plot:
    """Panels side by side."""

    panels: Seq[Panel]


class Bar(NamedTuple):
    """A model's pass, as a bar of a timeline. kind: a key of COLOURS."""

    start: float
    length: float
    kind: str


@dataclass(frozen=True)
class Timeline:
    """Rows of bars over time. rows: the name of each row, and its bars. unit: the label of the time axis."""

    rows: Seq[tuple[str, Seq[Bar]]]
    unit: str


@dataclass(frozen=True)
class Coloured:
    """Lines of tokens, coloured by their kinds."""

    lines: Seq[Tokens]


@dataclass(frozen=True)
class Exhibit:
    """A table or figure: its numbers, its picture, a note on how to read it, and the command that makes it."""

    name: str
    title: str
    columns: Seq[Column]
    rows: Seq[Seq[Value]]
    picture: Plot | Timeline | Coloured
    note: str
    recipe: str


def columns(form: str, *names: str) -> list[Column]:
    """Return a column of an exhibit for each name. `form` formats the values of all these columns."""
    return [Column(name, form=form) for name in names]


def dots(label: str, rows: Seq[Seq[Value]], column: int, spans: int | None = None) -> Curve:
    """Return a curve of dots: the numbers of one column of a table as x, and the indices of their rows as y.

    Rows without a number in this column are left out. spans: the index of the column that holds an interval for each
    number.
    """
    known = [(y, row) for y, row in enumerate(rows) if isinstance(row[column], int | float)]
    intervals = [row[spans] if spans is not None else None for _, row in known]
    return Curve(
        label,
        [cast(float, row[column]) for _, row in known],
        [float(y) for y, _ in known],
        "dots",
        [one if isinstance(one, tuple) and not isinstance(one, Tokens) else None for one in intervals],
    )


# --------------------------------------------------------------------------------------------------------------- text


def print_exhibit(exhibit: Exhibit, console: Console) -> None:
    """Print the table, the note, and the command that makes the exhibit."""
    console.print(Text(exhibit.title, "bold"))
    console.print(table(exhibit.rows, [_shown(column, i, exhibit.rows) for i, column in enumerate(exhibit.columns)]))
    console.print(f"{exhibit.note}\nAgain: {exhibit.recipe}\n")


def _shown(column: Column, i: int, rows: Seq[Seq[Value]]) -> Column:
    """Return column i of an exhibit as a column that `table` can print. A column that holds tokens is folded."""
    has_tokens = any(isinstance(row[i], Tokens) for row in rows)
    return replace(column, value=lambda row: _cell(row[i], column), is_text=column.is_text or has_tokens or None)


def written(value: Value, column: Column) -> str:
    """Return a value as a table shows it. Tokens get the marks of their kind."""
    if isinstance(value, Tokens):
        return "".join(token.text.join(MARKS.get(token.kind, ("", ""))) for token in value.tokens)
    return column.written(value)


def _cell(value: Value, column: Column) -> Any:
    if not isinstance(value, Tokens):
        return value
    return Text.assemble(*((written(Tokens((token,)), column), STYLES[token.kind]) for token in value.tokens))


# --------------------------------------------------------------------------------------------------------------- files


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_can_draw(what: str = "a picture") -> None:
    """Raise BadOption where matplotlib is not installed, so that no picture can be drawn. what: needs it."""
    if not can_draw():
        raise not_installed(what, "plots", "matplotlib")


def check_picture(file: Path | None) -> None:
    """Raise BadOption for a picture's file with a wrong suffix, or where matplotlib is not installed."""
    if file is None:
        return
    if file.suffix not in ("", *SUFFIXES):
        raise BadOption(f"--picture {shown(str(file))} is not possible: its name must end in .svg or .png, or neither")
    check_can_draw("--picture")


def save_picture(figure: Figure, file: Path) -> None:
    """Save a figure as .svg or .png, or as both where the file's name has no suffix."""
    for suffix in [file.suffix] if file.suffix else SUFFIXES:
        save(figure, file.with_name(file.stem + suffix))


def write_exhibit(exhibit: Exhibit, folder: Path) -> list[Path]:
    """Write an exhibit as text, SVG, PNG and JSON, and return the files. The folder is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{exhibit.name}{suffix}" for suffix in (".txt", ".svg", ".png", ".json")]
    with files[0].open("w", encoding="utf-8") as text:
        print_exhibit(exhibit, Console(file=text, width=100, highlight=False, markup=False, emoji=False))
    for file in files[1:3]:
        save(draw(exhibit), file)
    files[3].write_text(json.dumps(record_of(exhibit), indent=1) + "\n", encoding="utf-8")
    return files


def record_of(exhibit: Exhibit) -> dict[str, Any]:
    """Return an exhibit as JSON values, with each row as a mapping from column names to values.

    Raises InternalError where two columns have the same name.
    """
    names = [" ".join(column.name.split()) for column in exhibit.columns]
    if len(set(names)) < len(names):
        raise InternalError(f"{exhibit.name} has columns of one name: {', '.join(names)}")
    rows = [dict(zip(names, map(_plain, row), strict=True)) for row in exhibit.rows]
    about = {"exhibit": exhibit.name, "title": exhibit.title, "recipe": exhibit.recipe, "note": exhibit.note}
    return {**about, "rows": rows, "picture": _plain(asdict(exhibit.picture))}


def _plain(value: Any) -> Any:
    """Return a value in types that JSON can hold. A token becomes the pair [text, kind]."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Tokens):
        return [_plain(token) for token in value.tokens]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.item() if hasattr(value, "item") else value


def save(figure: Figure, file: Any, suffix: str = "") -> None:
    """Save a figure to a file, or to a stream in the format that `suffix` names. Text in an SVG stays text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "forerun"}):
        kind = (suffix or Path(file).suffix).removeprefix(".")
        figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)


# ------------------------------------------------------------------------------------------------------------ pictures


def draw(exhibit: Exhibit) -> Figure:
    """Return the picture of an exhibit."""
    picture = exhibit.picture
    if isinstance(picture, Plot):
        figure = _plot(picture)
    elif isinstance(picture, Timeline):
        figure = _timeline(picture)
    else:
        figure = _coloured(picture)
    width = figure.get_figwidth()
    figure.suptitle(textwrap.fill(exhibit.title, int(width * 13)), fontsize=11, x=0.01, ha="left")
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plot(plot: Plot) -> Figure:
    num_names = max((len(panel.names) for panel in plot.panels), default=0)
    height = 1.9 + 0.28 * num_names if num_names else 4.2
    figure = _figure(max(6.0, 4.8 * len(plot.panels)), height)
    for axes, panel in zip(figure.subplots(1, len(plot.panels), squeeze=False)[0], plot.panels, strict=True):
        _panel(axes, panel)
    if num_names:  # dots may be anywhere in a panel, so the legend stands below
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(handles, labels, loc="outside lower right", ncols=len(labels), fontsize=8, frameon=False)
    return figure


def _panel(axes: Axes, panel: Panel) -> None:
    """Draw one plot."""
    for i, curve in enumerate(panel.curves):
        colour = curve.colour or CURVES[i % len(CURVES)]
        if curve.style != "dots":
            drawn = "steps-mid" if curve.style == "steps" else "default"
            axes.plot(curve.xs, curve.ys, label=curve.label, color=colour, linewidth=1.6, drawstyle=drawn)
            continue
        for y, span in zip(curve.ys, curve.spans, strict=False):
            if span is not None:
                axes.plot(span, (y, y), color=colour, linewidth=5, alpha=0.25, solid_capstyle="butt", zorder=1)
        marker: dict[str, Any] = {"marker": "oxs^d"[i % 5], "markerfacecolor": "none", "markeredgewidth": 1.5}
        axes.plot(curve.xs, curve.ys, label=curve.label, color=colour, linestyle="none", **marker)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92", zorder=0)
    if panel.names:
        axes.set_yticks(range(len(panel.names)), panel.names)
        axes.set_ylim(len(panel.names) - 0.5, -0.5)
    elif panel.y_limit is not None:
        axes.set_ylim(0, panel.y_limit)
    if panel.x_limit is not None:
        axes.set_xlim(0, panel.x_limit)
    if len(panel.curves) > 1 and not panel.names:
        axes.legend(fontsize=8, frameon=False)


def _timeline(timeline: Timeline) -> Figure:
    figure = _figure(10.0, 1.6 + 0.55 * len(timeline.rows))
    axes = figure.subplots()
    kinds = dict.fromkeys(bar.kind for _, bars in timeline.rows for bar in bars)
    for y, (_, bars) in enumerate(timeline.rows):
        for bar in bars:
            axes.barh(y, bar.length, left=bar.start, height=0.6, color=COLOURS[bar.kind], edgecolor="white", lw=0.3)
    for kind in kinds:
        axes.barh(0, 0, color=COLOURS[kind], label=kind)
    axes.set_yticks(range(len(timeline.rows)), [name for name, _ in timeline.rows])
    axes.set_ylim(len(timeline.rows) - 0.5, -0.5)
    axes.set_xlabel(timeline.unit, fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower right", ncols=len(kinds), fontsize=8, frameon=False)
    return figure


LINE_CHARACTERS = 96  # of a line of coloured text, at most
CHARACTER_IN, LINE_IN = 0.0765, 0.19  # inches, of the monospaced font at 9 points


def _coloured(coloured: Coloured) -> Figure:
    """Draw lines of tokens in a monospaced font. Lines that are too long are folded."""
    lines = [line for tokens in coloured.lines for line in _folded(tokens.tokens)]
    width = max(70, *(sum(len(token.text) for token in line) for line in lines))
    figure = _figure(CHARACTER_IN * width, 0.9 + LINE_IN * len(lines))
    axes = figure.subplots()
    axes.set_xlim(0, width)
    axes.set_ylim(len(lines), 0)
    axes.axis("off")
    for y, tokens in enumerate(lines):
        x = 0
        for token in tokens:
            weight = "bold" if token.kind in ("correction", "bonus") else "normal"
            font: dict[str, Any] = {"family": "monospace", "size": 9, "weight": weight}
            text = token.text.replace("$", r"\$")
            axes.text(x, y + 0.5, text, color=COLOURS[token.kind], va="center", fontdict=font)
            x += len(token.text)
    for kind in ("accepted", "rejected", "untested", "correction"):
        axes.plot([], [], color=COLOURS[kind], linewidth=4, label="the target's own" if kind == "correction" else kind)
    figure.legend(loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    return figure


def _folded(tokens: Seq[Token]) -> list[list[Token]]:
    """Break tokens into lines of at most LINE_CHARACTERS characters. No token is split."""
    lines: list[list[Token]] = [[]]
    used = 0
    for token in tokens:
        if used + len(token.text) > LINE_CHARACTERS and lines[-1]:
            lines.append([Token("    ", "plain")])
            used = 4
        lines[-1].append(token)
        used += len(token.text)
    return lines
