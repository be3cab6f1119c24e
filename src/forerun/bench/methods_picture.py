"""The picture of `forerun bench methods`: the speed-ups of each way of drafting, over all kinds of work and on each.

Drawing needs matplotlib.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.bench.exhibits import save_picture
from forerun.bench.methods_results import AGAIN, PLAIN, Cell, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SHOWN = 2.5  # the speed-up with the strongest colour; its inverse has the strongest opposite colour
DARK = 0.65  # logarithm of a speed-up to the base MOST_SHOWN: beyond it a colour is too dark for black text
CHARACTERS_PER_INCH = 120  # in a font of one point, on average
NOTE = (
    "1 = as fast as plain decoding. Dots: geometric mean over the kinds; whiskers: least and most of the rounds, one "
    "prompt of each kind in each. Grey: plain decoding against itself, which is the noise. Squares: median over a "
    "kind's prompts; bold: the best of its column."
)


def draw(cells: Seq[Cell], summaries: Seq[Summary], kinds: Seq[str], file: Path, title: str, about: str) -> None:
    """Save a picture with a row of panels for each temperature: speed-ups with whiskers, and a heat map of the kinds.

    Within a panel the fastest way comes first, and plain decoding against itself comes last. title: the model and the
    machine. about: how many prompts were run, and how often.
    """
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(summary.temperature for summary in summaries))
    num_rows = len({summary.name for summary in summaries} - {PLAIN})
    height = 1.0 + 0.32 * num_rows
    size = (5.6 + 0.72 * len(kinds), 1.7 + height * len(temperatures))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(_folded(title, 11, size[0]), fontsize=11, x=0.01, ha="left")
    figure.supxlabel(_folded(f"{about}\n{NOTE}", 8, size[0]), fontsize=8, x=0.01, ha="left", color="0.3")
    widths = {"width_ratios": [3.2, 0.72 * len(kinds)]}
    panels = figure.subplots(len(temperatures), 2, squeeze=False, sharex="col", gridspec_kw=widths)
    for (dots, squares), temperature in zip(panels, temperatures, strict=True):
        drawn = [s for s in summaries if s.temperature == temperature and s.name != PLAIN]
        rows = [*(row for row in drawn if row.name != AGAIN), *(row for row in drawn if row.name == AGAIN)]
        _dots(dots, rows, temperature)
        of_kind = {(cell.name, cell.kind): cell.speedup for cell in cells if cell.temperature == temperature}
        _squares(squares, [[of_kind[row.name, kind] for kind in kinds] for row in rows], kinds)
    save_picture(figure, file)


def _folded(text: str, points: int, width_in: float) -> str:
    """Fold each line of a text, in a font of `points` points, to a width in inches."""
    return "\n".join(textwrap.fill(line, int(width_in * CHARACTERS_PER_INCH / points)) for line in text.splitlines())


def _dots(panel: Axes, rows: Seq[Summary], temperature: float) -> None:
    """Draw each way's speed-up over all kinds of work, on top of a band for plain decoding against itself."""
    for y, row in enumerate(rows):
        least, most = row.speedup_range
        colour = "tab:blue" if row.speedup >= 1 else "tab:red"
        if row.name == AGAIN:
            colour = "0.45"
            panel.axvspan(least, most, color="0.9", zorder=0)
        panel.plot([least, most], [y, y], color=colour, linewidth=1.5, marker="|", markersize=7)
        panel.plot(row.speedup, y, color=colour, marker="o", markersize=5)
        panel.annotate(
            f"{row.speedup:.2f}",
            (max(most, row.speedup), y),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )
    panel.axvline(1, color="0.45", linewidth=0.8, linestyle="--", zorder=1)
    panel.set_title(f"temperature {temperature:g}: all kinds", fontsize=10, loc="left")
    panel.set_yticks(range(len(rows)), [row.name for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.margins(x=0.16)
    panel.tick_params(labelsize=9, labelbottom=True)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _squares(panel: Axes, grid: Seq[Seq[float]], kinds: Seq[str]) -> None:
    """Draw a heat map of the speed-ups, with a row for each way and a column for each kind of work.

    The last row compares plain decoding with itself.
    """
    from matplotlib.colors import LogNorm

    panel.imshow(grid, cmap="RdBu", norm=LogNorm(1 / MOST_SHOWN, MOST_SHOWN), aspect="auto")
    panel.set_title("by kind", fontsize=10, loc="left")
    panel.set_xticks(range(len(kinds)), kinds)
    panel.set_yticks([])
    panel.tick_params(length=0, labelsize=9, labelbottom=True)
    panel.spines[:].set_visible(False)
    best = [max(column) for column in zip(*grid[:-1], strict=True)]
    panel.axhline(len(grid) - 1.5, color="white", linewidth=3)
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            is_best = value == best[x] and y < len(grid) - 1
            colour = "white" if abs(math.log(value, MOST_SHOWN)) > DARK else "black"
            weight = "bold" if is_best else "normal"
            panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9, fontweight=weight, color=colour)
