"""mixing.py: passes of a mixture of experts take as long as the experts that their rows choose."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun import LLM
from forerun.pacing import Pacing
from forerun.pacing.auto import Options, build
from forerun.pacing.cost import Costs
from forerun.pacing.measuring import LIMIT_PASSES, UNLIKE_PASSES, kept, measured, of_runner, usual
from forerun.pacing.mixing import Mixture, expected
from forerun.pacing.pass_time import WIDTHS, PassTime
from forerun.theory.formulas import distinct_experts
from forerun.theory.roofline import SHAPES, weights_read
from forerun.types import StepReport
from pacing.simulator import QUIET, Machine, World, oracle
from tiny import write_tiny

NUM, CHOSEN = 128, 8
DENSE, PER_EXPERT = 0.2, 0.1  # passes of one row, which chooses eight: a fifth of it is not of experts


def passes(num_experts: float) -> float:
    """The time of a pass that reads so many experts, whatever its rows."""
    return DENSE + PER_EXPERT * num_experts


def chosen_by(num_rows: float, overlap: float) -> float:
    return float(distinct_experts(NUM, CHOSEN, num_rows, overlap))


@dataclass
class Scratch:
    """A runner of a mixture, and the clock that its passes move on. A row takes 0.002 of a pass besides."""

    one_s: float = 0.01
    now: float = 0.0
    model: Any = field(
        default_factory=lambda: SimpleNamespace(config=SHAPES["qwen3-30b-a3b"], ops=SimpleNamespace(extra_row=0.1))
    )
    has_experts: bool = True
    fingerprint: str = "a mixture"

    @contextmanager
    def scratch(self, num_behind: int = 0) -> Iterator[Callable[[int, bool], float]]:
        yield self.run

    def run(self, num_rows: int, is_alike: bool) -> float:
        num = chosen_by(num_rows, float(is_alike))
        self.now += self.one_s * (passes(num) + 0.002 * (num_rows - 1))
        return num

    def measured(self, **given: Any) -> PassTime:
        return measured(self, clock=lambda: self.now, **given)  # type: ignore[arg-type]


def seen(curve: PassTime, overlap: float, num: int = 200) -> None:
    """Let the curve see steps of real rows."""
    costs = Costs(curve)
    for rows in (1, 4, 8, 3) * (num // 4):
        experts = chosen_by(rows, overlap)
        took = 0.01 * (passes(experts) + 0.002 * (rows - 1))
        costs.observe(StepReport(num_decoding=1, num_rows=rows, num_experts=experts, score_s=took))


def test_a_pass_takes_as_long_as_the_experts_that_its_rows_chose() -> None:
    found = Scratch(0.001).measured()
    assert found.widths == list(WIDTHS)
    assert found.one_row_s == pytest.approx(0.001)
    for rows in (1, 2, 4, 8, 16, 32):
        for overlap in (0.0, 0.3, 1.0):
            experts = chosen_by(rows, overlap)
            expected_passes = passes(experts) + 0.002 * (rows - 1)
            assert float(found.ratio(rows, experts)) == pytest.approx(expected_passes, rel=1e-6), (rows, overlap)


def test_rows_count_as_unlike_until_real_ones_were_seen() -> None:
    """And then as what was seen, whatever widths that were."""
    for overlap in (0.0, 0.5, 1.0):
        found = Scratch().measured()
        assert float(found.ratio(8)) == pytest.approx(passes(chosen_by(8, 0)) + 0.014, rel=1e-6)
        seen(found, overlap)
        for rows in (2, 8, 16):
            right = passes(chosen_by(rows, overlap)) + 0.002 * (rows - 1)
            assert float(found.ratio(rows)) == pytest.approx(right, rel=0.03), (rows, overlap)
        assert found.one_row_s == pytest.approx(0.01, rel=0.01)
    assert found.mixture.share < 0.1
    seen(found, 0.0, num=20)
    assert found.one_row_s == pytest.approx(0.01, rel=0.01), "steps over many experts, where there were few"


def test_passes_of_one_row_tell_nothing_of_others() -> None:
    found = Scratch().measured()
    for _ in range(300):
        Costs(found).observe(StepReport(num_decoding=1, num_rows=1, num_experts=CHOSEN, score_s=0.01))
    assert found.mixture.share == 1.0


@pytest.mark.parametrize("one_s", [0.01, 0.1, 2.0])
def test_a_calibration_ends_in_time_and_what_lies_beyond_is_counted(one_s: float) -> None:
    """Beyond the widest rows that were timed the experts go on as those of independent rows."""
    scratch = Scratch(one_s)
    found = scratch.measured(widths=(1, 2, 4, 8))
    assert scratch.now <= max(2 * 0.7, (LIMIT_PASSES + UNLIKE_PASSES) * one_s)
    assert found.widths[-1] == 8
    for rows in (16, 32, 64, 500):
        right = passes(chosen_by(rows, 0)) + 0.002 * (rows - 1)
        assert float(found.ratio(rows)) == pytest.approx(right, rel=0.06), rows


def test_where_nothing_was_measured_reading_is_what_counts() -> None:
    shape, curve = SHAPES["qwen3-30b-a3b"], usual(Scratch())  # type: ignore[arg-type]
    for rows in (1, 2, 8, 32):
        more = float(curve.ratio(rows)) - (1 + 0.1 * (rows - 1))
        assert more == pytest.approx(weights_read(shape, rows) / weights_read(shape) - 1, rel=1e-6)
    assert usual(replace(Scratch(), has_experts=False)).mixture is None  # type: ignore[arg-type]


def test_kept_in_a_file_with_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a dense model, or one that holds no mixture, is none of this one."""
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("forerun.pacing.measuring.measured", lambda runner, behind=0, goes_on=None: runner.measured())
    scratch = Scratch()
    first = of_runner(scratch)  # type: ignore[arg-type]
    at = scratch.now
    assert kept(scratch) == first  # type: ignore[arg-type]
    assert scratch.now == at
    (path,) = tmp_path.iterdir()
    whole = json.loads(path.read_text())
    for broken in (
        whole[:4],
        [*whole[:4], [NUM, *whole[4][1:3]]],
        [*whole[:4], [4, *whole[4][1:]]],
        [*whole[:4], [NUM, [1.0], [2.0], [0.0]]],
        [*whole[:4], None],
    ):
        path.write_text(json.dumps(broken))
        assert kept(scratch) is None  # type: ignore[arg-type]


def test_passes_that_measure_choose_experts(tmp_path: Path) -> None:
    """Alike rows those of one token, another one in each pass; unlike rows more. Nothing stays in the cache.

    Whatever is in memory that nobody has written yet.
    """
    runner = LLM(str(write_tiny(tmp_path / "mixture", "qwen3_moe")), draft="none").engine.runner
    free, fed = runner.cache.free_tokens(), list[list[int]]()
    forward = runner.forward
    runner.forward = lambda runs: fed.extend(list(run.tokens) for run in runs) or forward(runs)  # type: ignore[assignment]
    for tensor in runner.cache.pools.tensors():
        tensor.values[...] = 0x7FC0 if tensor.dtype == "bfloat16" else np.nan
    with runner.scratch(16) as run:
        alike = [run(8, True) for _ in range(10)]
        unlike = [run(8, False) for _ in range(10)]
    assert np.mean(alike) + 0.5 < np.mean(unlike) <= 4
    assert all(len(set(tokens)) == 1 for tokens in fed[:10])
    assert len({tokens[0] for tokens in fed[:10]}) > 5
    assert all(len(set(tokens)) > 5 for tokens in fed[10:])
    assert runner.cache.free_tokens() == free
    curve = measured(runner, 16)
    assert curve.mixture.num == 4
    assert curve.mixture.unlike[0] == 2.0
    dense = LLM(str(write_tiny(tmp_path / "dense")), draft="none").engine.runner
    with dense.scratch() as run:
        assert run(4, True) == 0
    assert measured(dense).mixture is None


def test_a_draft_model_has_no_part_in_what_the_target_learns() -> None:
    """Its own passes are of one row for each request, which count as unlike."""
    target, draft = PassTime(mixture=expected(8, 2, 0.8, WIDTHS)), PassTime(mixture=expected(8, 2, 0.8, WIDTHS))
    costs = Costs(target, {"model": draft})
    for _ in range(100):
        costs.observe(StepReport(num_decoding=2, num_rows=4, num_experts=2.0, score_s=0.01))
    assert isinstance(draft.mixture, Mixture)
    assert draft.mixture.share == 1.0
    assert target.mixture.share < 0.1


# ---------------------------------------------------------------------------------------------------------------- auto


@dataclass
class MixedWorld(World):
    """Requests whose rows share experts by `overlap`. knows_experts: whether the policy's curve is of a mixture."""

    overlap: float = 0.0
    knows_experts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.machine = replace(self.machine, curve=lambda n: passes(chosen_by(n, self.overlap)))

    def auto(self) -> Pacing:
        curve = Scratch(self.machine.row_s).measured()
        if not self.knows_experts:
            curve.mixture = None
        return build(Options(), None, Costs(curve, {"model": PassTime((1, 2), (1.0, 1.0), self.machine.pass_s)}))

    def report(self, *given: Any, **named: Any) -> StepReport:
        report = super().report(*given, **named)
        report.num_experts = chosen_by(report.num_rows, self.overlap)
        return report


def track_of(overlap: float, alpha: float = 0.85, **given: Any) -> tuple[float, float]:
    """The mean length of the last steps, and tokens per second over those of the best fixed length."""
    world = MixedWorld(lambda step, b: alpha, overlap=overlap, noise=QUIET, machine=Machine(), **given)
    track = world.paced(1200)
    lengths = [np.mean(granted) for granted in track.granted[400:]]
    return float(np.mean(lengths)), track.rate(400) / oracle(world, 400, 401)


def test_auto_drafts_as_far_as_rows_share_experts() -> None:
    lengths, shares = zip(*(track_of(overlap) for overlap in (0.0, 0.5, 1.0)), strict=True)
    assert lengths[0] + 0.5 < lengths[1] < lengths[2] - 4
    assert min(shares) > 0.95, shares


def test_auto_drafts_too_far_for_rows_of_one_token() -> None:
    """As it would be with a calibration over such rows, were it not for the safety net."""
    length, share = track_of(0.0, alpha=0.6)
    blind_length, blind_share = track_of(0.0, alpha=0.6, knows_experts=False)
    assert length < 1
    assert blind_length > 2 * length
    assert blind_share < share
