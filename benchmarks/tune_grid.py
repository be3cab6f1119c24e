"""`benchmarks.tune_grid`: whether `forerun tune` is right, by measuring what it did not.

It tunes, and then measures every drafter at every length and with pacing=auto in turns with plain decoding, on the same
prompts in the same engine: how far predictions are off, and how much faster the best of all is than what was chosen.
"""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.start import start
from forerun.bench.latency import progress_bar
from forerun.bench.plans import SHAPE_HELP, Plan, TunePlan, repeats
from forerun.bench.tables import Column, table
from forerun.bench.tune import one_round, prediction_of, tuned
from forerun.bench.tune_engine import TuningEngine, candidates_of
from forerun.bench.tune_results import AUTO, PLAIN, Contender, Found, Way, measured_of, print_found
from forerun.bench.widen import load_widened, measured_target
from forerun.cli import flags
from forerun.cli.bench import JsonFile, keep
from forerun.cli.signatures import Fields, Given
from forerun.config import EngineConfig
from forerun.registry import option
from forerun.text.terminal import make_console

BAR_PREDICTION, BAR_CHOICE = 0.15, 0.06


@dataclass(frozen=True)
class GridPlan(Plan):
    """What is measured behind the tuning, which is done by `tune`."""

    tune: TunePlan
    lengths: tuple[int, ...] = option(
        (1, 2, 3, 4, 6, 8, 12, 16), "length of the grid", flag="--spec-length", min=1, max=16
    )
    num_rounds: int = repeats(3, "rounds of the grid")


def run(config: EngineConfig, plan: GridPlan) -> dict[str, Any]:
    """Tune, measure the grid, print both, and return them for JSON."""
    console, opened = make_console(), measured_target(config, plan.tune.shape)
    config = opened.config
    candidates = candidates_of(opened, plan.tune)
    checkpoint = load_widened(opened, plan.tune.shape, console)
    bench = TuningEngine.of(checkpoint, config, plan.tune, candidates, console)
    found = tuned(bench, console)
    print_found(found, console)
    grid = _measured(bench, found, plan)
    chosen = next((one for one in grid if one.way == found.chosen.way), None)
    print_grid(grid, chosen, console)
    best = max(one.measured.speedup for one in grid)
    return {
        "bench": "tune",
        "target": checkpoint.name,
        "widened": plan.tune.shape != "none",
        "build": checkpoint.model.ops.build,
        "precision": checkpoint.model.precision,
        **found.as_dict(),
        "grid": [one.as_dict() for one in grid],
        "errors": {str(one.way): error for one, error in errors_of(grid)},
        "choice_over_best": None if chosen is None else chosen.measured.speedup / best,
    }


def _measured(bench: TuningEngine, found: Found, plan: GridPlan) -> list[Contender]:
    """Every way of the grid, plain decoding first, and what was chosen: where nothing is certain, the engine's auto."""
    ways = [Way(spec, k) for spec in bench.candidates for k in (*plan.lengths, None)]
    chosen = [found.chosen.way] if found.chosen.way.draft != AUTO else []
    every = dict.fromkeys([Way(PLAIN, 0), *chosen, *ways])
    grid = [Contender(way, prediction_of(way, found.predictions)) for way in every]
    with progress_bar() as progress:
        task = progress.add_task("grid", total=plan.num_rounds * len(grid) * len(bench.groups))
        for number in range(plan.num_rounds):
            one_round(bench, grid, 1000 + number, progress, task)  # the drafters know nothing of earlier rounds
    for one in grid:
        one.measured = measured_of(one.seconds, grid[0].seconds)
    return grid


def errors_of(grid: Seq[Contender]) -> list[tuple[Contender, float]]:
    """Of each way that was predicted: how much faster it was predicted than measured, as a share."""
    return [(one, one.predicted.speedup / one.measured.speedup - 1) for one in grid if one.predicted is not None]


def print_grid(grid: Seq[Contender], chosen: Contender | None, console: Console) -> None:
    """Print every way, the fastest first, and what comes of the two bars. chosen: None = nothing was certain."""
    errors: Mapping[Way, float] = {one.way: error for one, error in errors_of(grid)}

    def predicted(name: str) -> Callable[[Contender], float | None]:
        return lambda one: None if one.predicted is None else getattr(one.predicted, name)

    columns = [
        Column("draft", lambda one: one.way.draft + ("*" if one is chosen else "")),
        Column("K", "way.length", is_text=False),
        Column("tokens/pass\npredicted", predicted("tokens_per_pass"), "{:.2f}"),
        Column("counted", "tokens_per_pass", "{:.2f}"),
        Column("speed-up\npredicted", predicted("speedup"), "{:.2f}"),
        Column("measured", "measured.speedup", "{:.2f}"),
        Column("least-most", lambda one: (one.measured.least, one.measured.most), "{:.2f}"),
        Column("error", lambda one: errors.get(one.way), "{:+.0%}"),
    ]
    console.print(table(sorted(grid, key=lambda one: -one.measured.speedup), columns))
    close = sum(abs(error) <= BAR_PREDICTION for error in errors.values())
    if errors:
        usual = median(map(abs, errors.values()))
        console.print(f"Predicted within {BAR_PREDICTION:.0%}: {close} of {len(errors)}; median error {usual:.1%}.")
    best = max(grid, key=lambda one: one.measured.speedup)
    if chosen is None:
        console.print(f"Nothing was chosen; the best of the grid is {best.way}, {best.measured.speedup:.2f}.")
        return
    share = chosen.measured.speedup / best.measured.speedup
    is_inside = chosen.measured.most >= best.measured.least
    verdict = (
        "within the bar" if share >= 1 - BAR_CHOICE else "inside the spread" if is_inside else "NOT within the bar"
    )
    console.print(
        f"Chosen (*): {chosen.way}, {share:.3f} of the best of the grid, {best.way} ({best.measured.least:.2f} to "
        f"{best.measured.most:.2f} by round): {verdict} of {BAR_CHOICE:.0%}."
    )


TUNE = ("drafts", "only", "temperature", "concurrency", "minutes", "max_tokens")


def command(
    engine: Annotated[Given, flags.engine("target", "ignore_config_keys", "dtype", "quantization", "ops", "config")],
    tune: Annotated[Given, Fields(TunePlan, TUNE, is_plan=True)],
    grid: Annotated[Given, Fields(GridPlan, is_plan=True)],
    shape: Annotated[str, typer.Option(help=f"{SHAPE_HELP}, or none")] = "none",
    json_file: JsonFile = None,
) -> None:
    """Check `forerun tune`: measure every drafter at every length beside what it predicted and chose."""
    keep(run(flags.engine_config(engine), GridPlan(TunePlan(shape=shape, **tune), **grid)), json_file)


if __name__ == "__main__":
    start(command)
