"""`benchmarks.tune_grid` on a tiny model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tune_grid import GridPlan, run
from forerun.bench.plans import TunePlan
from forerun.config import EngineConfig
from forerun.types import SamplingParams
from tiny import write_tiny


def test_the_check_of_the_choice_measures_a_grid(tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "tiny")
    request = ("one two one two one", SamplingParams(max_tokens=6, temperature=0))
    plan = TunePlan(requests=(request,), drafts=("lookup",), only=True, minutes=0.001, max_tokens=6)
    record = run(EngineConfig(target=str(target)), GridPlan(plan, (2,), 1))
    ways = {(one["draft"], one["spec_length"]) for one in record["grid"]}
    assert {("none", 0), ("lookup", 2), ("lookup", None)} <= ways
    assert record["choice_over_best"] <= 1
