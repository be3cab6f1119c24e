"""cost.py: the curve is measured once, within a time limit, kept in a file, and never falls."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import CapacityError
from forerun.pacing.cost import (
    CONTEXT_TOKENS,
    LEAST_LIMIT_S,
    LIMIT_PASSES,
    WIDTHS,
    Costs,
    PassTime,
    calibrated,
    of_runner,
)
from forerun.types import DraftStep, SequenceStep, StepReport


@pytest.fixture(autouse=True)
def at_any_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs beside the tests, a curve is kept; the tests of that say otherwise."""
    monkeypatch.setattr("forerun.pacing.cost.AGREEMENT", 1e9)


class Machine:
    """A clock that passes move on: `curve` seconds by rows, times a speed that drifts from pass to pass."""

    def __init__(self, curve: Callable[[int], float], drift: float = 1.0, most_rows: int = 10**6) -> None:
        self.curve, self.drift, self.speed, self.now, self.most_rows = curve, drift, 1.0, 0.0, most_rows
        self.ran: list[int] = []

    def run(self, rows: int) -> None:
        if rows > self.most_rows:
            raise CapacityError("no room")
        self.ran.append(rows)
        self.speed *= self.drift
        self.now += self.curve(rows) * self.speed

    def clock(self) -> float:
        return self.now


def of(machine: Machine) -> PassTime:
    return calibrated(machine.run, machine.clock)


def test_ratios_are_those_of_the_machine_although_it_drifts():
    """Widths take turns, so that a speed that changes by 10 % during the calibration does not change the ratios."""
    found = of(Machine(lambda n: 0.001 * (1 + 0.05 * n), drift=1.003))
    for n in (1, 2, 4, 8, 16, 32, 64):
        assert float(found.ratio(n)) == pytest.approx((1 + 0.05 * n) / 1.05, rel=0.03)


def test_a_curve_never_falls():
    """A width that seems to be faster than a narrower one is a measurement that was disturbed."""
    found = of(Machine(lambda n: 0.5e-3 if n == 8 else 1e-3 * n))
    ratios = [float(found.ratio(n)) for n in range(1, 65)]
    assert ratios == sorted(ratios)
    assert ratios[7] == ratios[3]


@pytest.mark.parametrize(("one_s", "widest"), [(0.01, 32), (0.5, 8), (20.0, 4)])
def test_the_time_limit_drops_rounds_then_widths(one_s: float, widest: int):
    machine = Machine(lambda n: one_s * (1 + n / 8))
    found = of(machine)
    assert machine.now <= max(LEAST_LIMIT_S, LIMIT_PASSES * machine.curve(1))
    assert found.widths[-1] >= widest


def test_a_cache_without_room_drops_widths():
    assert of(Machine(lambda n: 0.001 * n, most_rows=8)).widths == [1, 2, 4, 8]
    assert of(Machine(lambda n: 0.001, most_rows=0)).ratios == PassTime().ratios


def test_measured_once_and_kept_in_a_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    params = SamplingParams(max_tokens=4, temperature=0)
    with caplog.at_level(logging.INFO):
        LLM("shipped", max_seq_len=256).generate("def f(", params)
    files = sorted(tmp_path.glob("passes-*.json"))
    assert len(files) == 2, "one of the target, one of the draft model"
    said = [r for r in caplog.records if "once" in r.getMessage()]
    assert [r.levelno for r in said] == [logging.INFO] * 2
    widths, ratios, one_row_s, _ = json.loads(files[0].read_text())
    assert widths[0] == 1
    assert ratios == sorted(ratios)
    assert 0 < one_row_s < 10
    caplog.clear()
    kept = {path: path.read_text() for path in files}
    with caplog.at_level(logging.INFO):
        llm = LLM("shipped", max_seq_len=256)
        llm.generate("def f(", params)
    assert "once" not in caplog.text
    assert {path: path.read_text() for path in tmp_path.iterdir()} == kept
    cache = llm.engine.runner.cache
    cache.check_integrity()
    assert cache.free_tokens() == cache.num_blocks * cache.block_tokens


def test_what_could_not_be_measured_is_not_kept(tmp_path, monkeypatch):
    machine = Machine(lambda n: 0.001 * n, most_rows=0)
    runner = SimpleNamespace(fingerprint="a full cache", has_experts=False, try_pass=lambda n, behind=0: machine.run(n))
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    assert of_runner(runner).one_row_s is None
    assert not list(tmp_path.iterdir())


def test_passes_are_measured_before_the_first_request_is_admitted(tmp_path, monkeypatch):
    """While nothing runs, so that no stream waits; not for a request that drafts nothing."""
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    engine = LLM("shipped", max_seq_len=256, kv_cache_backend="contiguous", max_batch_size=1).engine
    costs, ready, running = engine.costs, engine.costs.ready, list[int]()

    def watched() -> None:
        running.append(len(engine.scheduler.running))
        ready()

    monkeypatch.setattr(costs, "ready", watched)
    for draft in ("none", None, None):
        request = engine.add([1, 2, 3], SamplingParams(max_tokens=2, temperature=0, draft=draft))
        while request.seq.finish_reason is None:
            engine.step()
        assert bool(costs.runners) == (draft == "none"), "what is to be measured"
    assert running == [0, 0]


def flat_steps(costs: Costs, num: int) -> None:
    """So many plain steps, and steps of 8 rows that take as long."""
    for rows in (1, 8) * num:
        costs.observe(StepReport(num_decoding=1, num_rows=rows, score_s=0.01, target_forward_s=0.01))


def test_a_curve_that_steps_contradict_is_measured_again(tmp_path, monkeypatch):
    """Once, when nothing runs: a curve from a busy moment is not kept for good."""
    machine = Machine(lambda n: 0.001 * n)
    runner = SimpleNamespace(fingerprint="a machine", has_experts=False, try_pass=lambda n, behind=0: machine.run(n))
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    costs = Costs(runners={"": [runner]})
    monkeypatch.setattr("forerun.pacing.cost.calibrated", lambda run: calibrated(run, machine.clock))
    costs.ready()
    assert float(costs.target.ratio(8)) == pytest.approx(8)
    machine.curve = lambda n: 0.001  # what it is when nothing else runs
    flat_steps(costs, 20)
    costs.ready()
    assert float(costs.target.ratio(8)) == pytest.approx(8), "a few steps may be chance"
    flat_steps(costs, 200)
    costs.ready()
    assert float(costs.target.ratio(8)) == pytest.approx(1)
    assert of_runner(runner).ratios[3] == pytest.approx(1), "in the file, too"
    num_passes = len(machine.ran)
    flat_steps(costs, 200)
    costs.ready()
    assert len(machine.ran) == num_passes


def test_steps_as_the_curve_says_change_nothing():
    costs = Costs(PassTime(WIDTHS, [1.0, 1.1, 1.2, 1.4, 2.0, 4.0]), _calibrated=["a runner"])
    for rows in (1, 8) * 200:
        forward_s = 0.01 * float(costs.target.ratio(rows))
        costs.observe(StepReport(num_decoding=1, num_rows=rows, score_s=forward_s, target_forward_s=forward_s))
    assert not costs.runners


def test_a_drafter_with_two_models_takes_the_time_of_both():
    steep, flat = PassTime((1, 2, 4), (1.0, 2.0, 4.0), 0.01), PassTime((1, 8), (1.0, 1.0), 0.03)
    both = PassTime.together([steep, flat])
    assert both.one_row_s == pytest.approx(0.04)
    assert float(both.ratio(4)) == pytest.approx((0.04 + 0.03) / 0.04)
    assert PassTime.together([steep]) is steep
    assert PassTime.together([steep, PassTime()]).one_row_s is None


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{}",
        "[]",
        "3",
        "[[1], [1.0], 0.1, 1e10]",
        "[[1, 2], [1.0], 0.1, 1e10]",
        "[[1, 2], [1.0, NaN], 0.1, 1e10]",
        "[[2, 1], [1.0, 2.0], 0.1, 1e10]",
        "[[1, 2], [1.0, 1.5], null, 1e10]",
        '[["a", "b"], ["c", "d"], "e", "f"]',
        "[[1, 2], [1.0, 1.5], 0.1]",
        "[[1, 2], [1.0, 1.5], 0.1, 0.0]",
        "[" * 100_000,
    ],
)
def test_a_file_that_holds_no_curve_is_written_anew(tmp_path, monkeypatch, broken):
    machine = Machine(lambda n: 0.001 * n)
    runner = SimpleNamespace(fingerprint="a machine", has_experts=False, try_pass=lambda n, behind=0: machine.run(n))
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    of_runner(runner)
    (path,) = tmp_path.iterdir()
    path.write_text(broken.replace("1e10", str(time.time())))
    of_runner(runner)
    widths, ratios, one_row_s, _ = json.loads(path.read_text())
    assert widths == list(WIDTHS)
    assert len(ratios) == len(WIDTHS)
    assert one_row_s > 0


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_curve_of_a_busy_moment_is_used_and_not_kept(tmp_path, monkeypatch, is_busy):
    """Rounds that disagree say that another process took its share; one pass alone may be slow."""
    machine, num = Machine(lambda n: 0.01 * (1 + n / 8)), 0

    def run(rows: int, behind: int = 0) -> None:
        nonlocal num
        num += 1
        machine.speed = 1.5 if (num % 3 == 0 if is_busy else num == 40) else 1.0
        machine.run(rows)

    runner = SimpleNamespace(fingerprint="a machine", has_experts=False, try_pass=run)
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("forerun.pacing.cost.AGREEMENT", 1.1)
    monkeypatch.setattr("forerun.pacing.cost.calibrated", lambda run: calibrated(run, machine.clock))
    assert float(of_runner(runner).ratio(8)) == pytest.approx(2 / 1.125, rel=0.5)
    assert len(list(tmp_path.iterdir())) == (not is_busy)


def test_without_calibration_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    LLM("shipped", max_seq_len=256, calibrate=False).generate("def f(", SamplingParams(max_tokens=4, temperature=0))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        LLM("shipped", max_seq_len=256).generate("def f(", SamplingParams(max_tokens=4, temperature=0))
    assert "cannot be written" in caplog.text


def test_the_slow_average_follows_the_machine_and_ignores_one_pause():
    costs = Costs(PassTime(WIDTHS, [1.0, 1.0, 1.0, 1.0, 2.0, 4.0], 0.01))
    steps = [SequenceStep(0, "model", 3, 3, (0, 1), 3)]

    def step(slowness: float) -> StepReport:
        draft = DraftStep(0.003 * slowness, 1, 3, 3, 3)
        return StepReport(
            num_decoding=1,
            num_rows=4,
            score_s=0.01 * slowness,
            draft_s=draft.seconds,
            sequences=steps,
            drafts={"model": draft},
        )

    for _ in range(200):
        costs.observe(step(2.0))
    assert costs.target.one_row_s == pytest.approx(0.02, rel=0.05)
    assert costs.draft("model").one_row_s == pytest.approx(0.002, rel=0.05)
    costs.observe(step(1000.0))
    assert costs.target.one_row_s < 0.022
    prompt = step(50.0)
    prompt.num_prefill_tokens = 100
    before = costs.target.one_row_s
    costs.observe(prompt)
    assert costs.target.one_row_s == before, "what a prompt took says nothing of a pass over a few rows"


def test_what_was_found_in_the_text_is_no_row_of_a_draft_model():
    costs = Costs(drafts={"model": PassTime((1, 32), (1.0, 5.0), 0.01)})
    for _ in range(200):
        costs.observe(StepReport(num_decoding=4, drafts={"model": DraftStep(0.02, 4, 26, 8, 2, num_found=24)}))
    assert costs.draft("model").one_row_s == pytest.approx(0.01)


def test_passes_that_come_slowly_into_caches_are_timed_when_they_have():
    """Behind a pass of 16 rows or more, and at first, one row takes twice as long, less by a tenth with each pass."""

    class Cached(Machine):
        cold = 1.0

        def run(self, rows: int) -> None:
            super().run(rows)
            self.now += self.curve(1) * self.cold
            self.cold = 1.0 if rows >= 16 else 0.9 * self.cold

    found = of(Cached(lambda n: 0.001 * (1 + 0.05 * n)))
    for rows in (2, 4, 8):
        assert float(found.ratio(rows)) == pytest.approx((1 + 0.05 * rows) / 1.05, rel=0.03)
    assert found.one_row_s == pytest.approx(0.00105, rel=0.05)


def test_passes_are_calibrated_behind_a_text(tmp_path, monkeypatch):
    """Of as many tokens as CONTEXT_TOKENS says, of which nothing is left in the cache; without where it has no room."""
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    for size, seen in ((256, CONTEXT_TOKENS), (64, 0)):
        engine, behind = LLM("shipped", draft="none", max_seq_len=size, max_batch_size=1).engine, set[int]()
        runner = engine.runner
        forward = runner.forward
        monkeypatch.setattr(
            runner,
            "forward",
            lambda runs, r=runner, f=forward, b=behind: b.add(r.cache.length(runs[0].slot)) or f(runs),
        )
        for path in tmp_path.iterdir():
            path.unlink()
        of_runner(runner)
        assert behind == {seen}
        assert len(list(tmp_path.iterdir())) == 1
        runner.cache.check_integrity()
        assert runner.cache.free_tokens() >= size
