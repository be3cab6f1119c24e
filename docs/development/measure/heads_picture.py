"""Compares heads that were trained: `python docs/development/measure/heads_picture.py heads/eagle heads/medusa ...`.

Each folder is the out folder of a `forerun train head` that has ended. Prints a table of the last held-out numbers, and
draws them by position into docs/pictures/heads.svg: how often all guesses so far are the target's likeliest tokens
(the product of agreement: acceptance at temperature 0), and the overlap (at temperature 1). It needs matplotlib.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURE = Path(__file__).resolve().parents[2] / "pictures" / "heads.svg"
PANELS = {"agreement": "all guesses so far are right, share", "overlap": "overlap, mean of sum min(p, q)"}
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "black", "tab:pink")
MOST = 4  # positions that are drawn


@dataclass(frozen=True)
class Trained:
    """One run: its method, minutes by its median speed, and by name the last held-out numbers by position."""

    method: str
    minutes: float
    numbers: dict[str, list[float]]

    @classmethod
    def of(cls, folder: Path) -> Trained:
        """Read the folder's run.json and log.jsonl."""
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        last, options = lines[-1], run["options"]
        assert last.get("final"), f"{folder} has not ended"
        names = {name: [f"{name}_{k}" for k in range(1, MOST + 1)] for name in PANELS}
        numbers = {name: [last[key] for key in keys if key in last] for name, keys in names.items()}
        tokens_per_s = statistics.median(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
        return cls(options["method"], last["tokens"] / tokens_per_s / 60, numbers)


def draw(panel: Axes, runs: list[Trained], name: str) -> None:
    """Draw a line for each run; the name of a method stands in the colour of its line, in the legend of the picture."""
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        values = run.numbers[name]
        if name == "agreement":  # of rows in which the guesses before were right
            values = list(accumulate(values, mul))
        panel.plot(range(1, len(values) + 1), values, color=colour, marker="o", markersize=4, label=run.method)
    panel.set_title(PANELS[name], fontsize=10, loc="left")
    panel.set_xticks(range(1, MOST + 1))
    panel.set_xlabel("position of the guess", fontsize=9)
    panel.set_ylim(0, 0.45)
    panel.grid(axis="y", color="0.9")
    panel.tick_params(labelsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def main(folders: list[Path]) -> None:
    """Print the table and draw the picture."""
    runs = [Trained.of(folder) for folder in folders]
    for run in runs:
        cells = (" ".join(f"{value:.2f}".lstrip("0") for value in run.numbers[name]) for name in PANELS)
        print(f"| `{run.method}` | {' | '.join(cells)} | {run.minutes:.0f} |")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for panel, name in zip(figure.subplots(1, 2), PANELS, strict=True):
        draw(panel, runs, name)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9, frameon=False)
    with rc_context({"svg.fonttype": "none"}):  # texts stay texts
        figure.savefig(PICTURE)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
