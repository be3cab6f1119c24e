"""The picture of `benchmarks.serving`: throughput and waiting over the load, one line per server; by matplotlib."""

from collections.abc import Callable, Sequence as Seq
from pathlib import Path

from benchmarks.serving_results import Limits, Line, Percentiles
from forerun.bench.exhibits import save_picture


def draw(lines: Seq[Line], limits: Limits, file: Path, title: str) -> None:
    """Write a row of panels for each kind of load that was measured: concurrency, rate."""
    from matplotlib.figure import Figure

    kinds = [
        ("requests at once", [line for line in lines if line.rate is None]),
        ("requests per second (Poisson)", [line for line in lines if line.rate is not None]),
    ]
    rows = [(name, of_kind) for name, of_kind in kinds if of_kind]
    panels = _panels(limits)
    figure = Figure(figsize=(3.6 * len(panels), 3.2 * len(rows) + 0.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(len(rows), len(panels), squeeze=False)
    for (what, of_kind), row in zip(rows, axes, strict=True):
        loads = sorted({_load(line) for line in of_kind})
        for (name, values), panel in zip(panels, row, strict=True):
            for number, server in enumerate(dict.fromkeys(line.server for line in of_kind)):
                own = [line for line in of_kind if line.server == server]
                places = [_load(line) for line in own]
                for style, pick in zip(("o-", "o:"), values, strict=False):
                    label = server if style == "o-" else None
                    panel.plot(
                        places, [pick(line) for line in own], style, color=f"C{number}", label=label, markersize=4
                    )
            panel.set_title(name, fontsize=10)
            panel.set_xlabel(what, fontsize=9)
            if "ms" in name:  # a median and a 99th percentile may be far apart
                panel.set_yscale("log")
            else:
                panel.set_ylim(bottom=0)
            panel.set_xscale("log", base=2)
            panel.set_xticks(loads, [f"{load:g}" for load in loads], minor=False)
            panel.set_xticks([], minor=True)
            panel.tick_params(labelsize=9)
            panel.grid(alpha=0.3)
        row[0].legend(fontsize=8)
    save_picture(figure, file)


def _load(line: Line) -> float:
    return float(line.rate or line.concurrency or 0)


Pick = Callable[[Line], float]


def _panels(limits: Limits) -> list[tuple[str, tuple[Pick, ...]]]:
    nan = float("nan")

    def ms(found: Percentiles | None, name: str) -> float:
        return nan if found is None else 1e3 * float(getattr(found, name))

    panels: list[tuple[str, tuple[Pick, ...]]] = [
        ("output tokens/s", (lambda line: line.tokens_per_s,)),
        ("TTFT, ms: p50, dotted p99", (lambda line: ms(line.ttft_s, "p50"), lambda line: ms(line.ttft_s, "p99"))),
        ("ITL, ms: p50, dotted p99", (lambda line: ms(line.itl_s, "p50"), lambda line: ms(line.itl_s, "p99"))),
    ]
    if limits.are_set:
        panels.append(("goodput, requests/s", (lambda line: line.goodput_per_s,)))
    return panels
