"""The picture of `forerun tune`: the speed-up by draft length, a curve for each drafter and a dot for each measurement.

Drawing needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from forerun.bench.exhibits import save_picture
from forerun.bench.tune_prediction import LONGEST
from forerun.bench.tune_results import Contender, Found

MOST_CURVES = 6  # the most promising ones; more cannot be told apart


def caption(results: Found, drawn: Collection[Contender]) -> str:
    """Return the picture's caption. It explains the marks of measured contenders only if the picture shows them."""
    parts = ["Lines: predicted from one run with drafts of 16 and the measured time of passes."]
    if drawn:
        parts.append("Dots: measured in turns with plain decoding, with the least and most of the rounds.")
    if any(one.way.spec_length is None for one in drawn):
        parts.append("Dashed: measured with pacing=auto.")
    parts.append("Star: chosen." if results.chosen in drawn else f"Chosen: {results.chosen.way}.")
    return " ".join(parts)


def draw(results: Found, file: Path, name: str) -> None:
    """Save the picture as .png or .svg, or as both where the file's name has no suffix. name: the target's name."""
    import textwrap

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.2), layout="constrained")
    panel = figure.add_subplot()
    order = sorted(results.predictions, key=lambda spec: -max(one.speedup for one in results.predictions[spec]))
    measured = {one.way.draft for one in results.contenders}
    shown = [spec for spec in order if spec in measured] + [spec for spec in order if spec not in measured]
    colours = {spec: f"C{i}" for i, spec in enumerate(shown[:MOST_CURVES])}
    for spec, colour in colours.items():
        lengths = results.predictions[spec]
        panel.plot([one.spec_length for one in lengths], [one.speedup for one in lengths], color=colour, label=spec)
    drawn = [one for one in results.contenders if one.way.spec_length != 0 and one.way.draft in colours]
    for one in drawn:
        result, colour = one.measured, colours[one.way.draft]
        marker, size = ("*", 15) if one is results.chosen else ("o", 6)
        dot: dict[str, Any] = {"color": colour, "marker": marker, "markersize": size}
        if one.way.spec_length is None:
            panel.axhline(result.speedup, color=colour, linestyle="--", linewidth=1)
            panel.plot(LONGEST, result.speedup, **dot)
        else:
            below, above = max(0, result.speedup - result.least), max(0, result.most - result.speedup)
            panel.errorbar(one.way.spec_length, result.speedup, [[below], [above]], capsize=3, **dot)
    panel.axhline(1, color="0.45", linewidth=0.8)
    panel.set_xlabel("K, nodes drafted per pass")
    panel.set_ylabel("tokens/s over plain decoding's")
    panel.set_title(f"{name}: {results.chosen.way}", fontsize=11, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)
    figure.supxlabel(textwrap.fill(caption(results, drawn), 105), fontsize=8, x=0.02, ha="left")
    save_picture(figure, file)
