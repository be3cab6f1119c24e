"""`benchmarks.tune_grid` on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.tune_grid import GridPlan, print_grid, run
from forerun.bench.plans import TunePlan
from forerun.bench.tune_results import Contender, Measured, Way
from forerun.config import EngineConfig
from forerun.types import SamplingParams
from tiny import write_tiny


def test_every_way_is_measured_also_where_nothing_is_certain(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "tiny")
    request = ("one two one two one", SamplingParams(max_tokens=6, temperature=0))
    plan = TunePlan(requests=(request,), drafts=("lookup",), only=True, minutes=0.001, max_tokens=6)
    record = run(EngineConfig(target=str(target)), GridPlan(plan, (2,), 1))
    ways = {(one["draft"], one["spec_length"]) for one in record["grid"]}
    assert ways == {("none", 0), ("lookup", 2), ("lookup", None)}
    assert (record["chosen"]["draft"], record["choice_over_best"]) in (("auto", None), ("lookup", 1.0))


@pytest.mark.parametrize(
    ("speedup", "most", "verdict"),
    [(1.9, 1.9, "within the bar of 6%"), (1.5, 2.0, "inside the spread"), (1.5, 1.6, "NOT within the bar")],
)
def test_the_choice_is_held_against_the_best_of_the_grid(
    speedup: float, most: float, verdict: str, capsys: Any
) -> None:
    best = Contender(Way("lookup", 2), None, measured=Measured(2.0, 1.9, 2.1, 3))
    chosen = Contender(Way("suffix", 3), None, measured=Measured(speedup, 1.4, most, 3))
    for own, said in ((chosen, verdict), (None, "Nothing was chosen; the best of the grid is lookup with K = 2, 2.00")):
        print_grid([best, chosen], own, Console(width=200))
        assert said in capsys.readouterr().out
