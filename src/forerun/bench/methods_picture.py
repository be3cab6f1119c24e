"""The picture of `forerun bench methods`: a heat map of speed-ups, drafters by kinds of work. It needs matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence as Seq
from pathlib import Path

from forerun.bench.methods_results import AGAIN, PLAIN, Cell, Summary
from forerun.errors import BadOption, shown

MOST_SHOWN = 2.5  # the speed-up with the strongest colour; 1 / it has the strongest of the other one
DARK = 0.65  # share of the strongest colour, in logarithms, from which on black text cannot be read


def check_picture(file: Path | None) -> None:
    """Raise BadOption for a picture that cannot be drawn."""
    if file is None:
        return
    if file.suffix not in (".svg", ".png"):
        raise BadOption(f"--picture {shown(str(file))} is not possible: its name must end in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise BadOption("--picture needs matplotlib: pip install 'forerun[plots]', or leave it out")


def draw(cells: Seq[Cell], summaries: Seq[Summary], kinds: Seq[str], file: Path, target: str) -> None:
    """Write one panel for each temperature: rows are drafters, the fastest first, columns kinds and all of them."""
    from matplotlib import rc_context
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(summary.temperature for summary in summaries))
    num_rows = len({summary.draft for summary in summaries} - {PLAIN, AGAIN})
    figure = Figure(figsize=(1.8 + 5.4 * len(temperatures), 1.3 + 0.32 * num_rows), layout="constrained")
    figure.suptitle(f"{target}: speed-up over plain decoding")
    figure.supxlabel("1 = as fast as plain decoding; all = geometric mean; bold = the best of its column", fontsize=9)
    found = {(cell.temperature, cell.draft, cell.kind): cell.speedup for cell in cells}
    panels = figure.subplots(1, len(temperatures), squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        rows = [s for s in summaries if s.temperature == temperature and s.draft not in (PLAIN, AGAIN)]
        grid = [[*(found[temperature, row.draft, kind] for kind in kinds), row.speedup] for row in rows]
        panel.imshow(grid, cmap="RdBu", norm=LogNorm(1 / MOST_SHOWN, MOST_SHOWN), aspect="auto")
        panel.set_title(f"temperature {temperature:g}", fontsize=10)
        panel.set_xticks(range(len(kinds) + 1), [*kinds, "all"])
        panel.set_yticks(range(len(rows)), [row.draft for row in rows])
        panel.axvline(len(kinds) - 0.5, color="white", linewidth=3)
        panel.tick_params(length=0, labelsize=9)
        best = [max(column) for column in zip(*grid, strict=True)]
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                weight = "bold" if value == best[x] else "normal"
                colour = "white" if abs(math.log(value, MOST_SHOWN)) > DARK else "black"
                panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9, fontweight=weight, color=colour)
    with rc_context({"svg.fonttype": "none"}):  # texts stay texts
        figure.savefig(file, dpi=150)
