"""cost.py, measuring.py, pass_time.py: a usual curve, which steps correct until it is measured while nothing runs."""

import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.load import assert_empty, greedy, run, wait_for
from forerun import LLM, SamplingParams
from forerun.errors import CapacityError
from forerun.pacing.cost import Costs
from forerun.pacing.measuring import CONTEXT_TOKENS, LEAST_LIMIT_S, LIMIT_PASSES, calibrated, kept, of_runner
from forerun.pacing.pass_time import STEEPEST, WIDTHS, Fit, PassTime
from forerun.types import DraftStep, SequenceStep, StepReport


@pytest.fixture(autouse=True)
def at_any_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs beside the tests, a curve is kept; the tests of that say otherwise."""
    monkeypatch.setattr("forerun.pacing.measuring.AGREEMENT", 1e9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where curves are kept."""
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    return tmp_path


class Machine:
    """A clock that passes move on: `curve` seconds by rows, times a speed that drifts from pass to pass."""

    def __init__(self, curve: Callable[[int], float], drift: float = 1.0, most_rows: int = 10**6) -> None:
        self.curve = curve
        self.drift = drift
        self.speed = 1.0
        self.now = 0.0
        self.most_rows = most_rows
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
    assert of(machine).widths[-1] >= widest
    assert machine.now <= max(LEAST_LIMIT_S, LIMIT_PASSES * machine.curve(1))


def test_a_cache_without_room_drops_widths():
    assert of(Machine(lambda n: 0.001 * n, most_rows=8)).widths == [1, 2, 4, 8]
    assert of(Machine(lambda n: 0.001, most_rows=0)).ratios == PassTime().ratios


def test_measured_once_and_kept_in_a_file(folder, caplog):
    with caplog.at_level(logging.INFO):
        LLM("shipped", max_seq_len=256).measure_passes()
    files = sorted(folder.glob("passes-*.json"))
    assert len(files) == 2, "one of the target, one of the draft model"
    assert [r.levelno for r in caplog.records if "once" in r.getMessage()] == [logging.INFO] * 2
    widths, ratios, one_row_s, _ = json.loads(files[0].read_text())
    assert widths[0] == 1
    assert ratios == sorted(ratios)
    assert 0 < one_row_s < 10
    caplog.clear()
    texts = {path: path.read_text() for path in files}
    with caplog.at_level(logging.INFO):
        llm = LLM("shipped", max_seq_len=256)
        llm.measure_passes()
    assert "once" not in caplog.text
    assert {path: path.read_text() for path in folder.iterdir()} == texts
    assert llm.pass_times()[""].one_row_s in {json.loads(text)[2] for text in texts.values()}
    assert_empty(llm.engine.runner.cache)


def test_what_could_not_be_measured_is_not_kept(folder):
    assert of_runner(a_machine("a full cache", Machine(lambda n: 0.001 * n, most_rows=0))).one_row_s is None
    assert not list(folder.iterdir())


def test_passes_are_measured_when_no_request_comes(folder, monkeypatch):
    """The first answer does not wait for it. Nothing is measured for requests that draft nothing."""
    monkeypatch.setattr("forerun.engine.loop.PAUSE_S", 0.01)
    passes, llm = list[int](), LLM("shipped", max_seq_len=256, max_batch_size=1)
    runner, running = llm.engine.runner, llm.engine.scheduler.running
    try_pass = runner.try_pass
    monkeypatch.setattr(runner, "try_pass", lambda num, behind=0: passes.append(len(running)) or try_pass(num, behind))
    llm.generate("def f(", SamplingParams(max_tokens=40, temperature=0, draft="none"))
    time.sleep(0.1)
    assert not passes
    llm.generate("def f(", SamplingParams(max_tokens=40, temperature=0))
    wait_for(lambda: bool(passes) and not llm.engine.costs.runners)
    assert not any(passes), "what ran beside them"
    assert len(list(folder.iterdir())) == 2
    assert llm.engine.costs.target.fit is None


def test_a_request_that_comes_ends_the_measuring(folder):
    """Behind the pass that runs; it begins anew the next time, and nothing of it stays in the cache."""
    engine = LLM("shipped", max_seq_len=256, kv_cache_backend="contiguous", max_batch_size=1).engine
    run(engine, [engine.add([1, 2, 3], greedy(2))])
    for num_passes in (0, 1, 7):
        asked = iter([True] * num_passes + [False])
        engine.rest(lambda asked=asked: next(asked))  # a call behind the one that says no would raise
        assert set(engine.costs.runners) == {"", "model"}
        assert not list(folder.iterdir())
        engine.runner.cache.check_integrity()
        assert engine.runner.cache.free_tokens() >= 256
    engine.rest()
    assert not engine.costs.runners
    assert len(list(folder.iterdir())) == 2


def a_machine(name: str, machine: Machine, extra_row: float = 0.2) -> SimpleNamespace:
    """A runner of a dense model whose passes move the machine's clock on."""
    return SimpleNamespace(
        fingerprint=name,
        has_experts=False,
        model=SimpleNamespace(ops=SimpleNamespace(extra_row=extra_row)),
        try_pass=lambda num_rows, behind=0: machine.run(num_rows),
    )


@pytest.mark.parametrize(("usual_slope", "slope"), [(0.2, 0.03), (0.2, 0.2), (0.2, 0.6), (0.05, 0.15), (0.01, 0.05)])
def test_steps_correct_a_usual_curve(usual_slope: float, slope: float):
    """Whatever the machine: passes are noisy, the first one is cold, and another process holds one up."""
    noise = random.Random(1)
    costs = Costs.of({"": [a_machine("unknown", Machine(lambda n: 0.0), usual_slope)]}, {}, measures=False)
    assert costs.target.ratio([1, 4]).tolist() == pytest.approx([1.0, 1 + 3 * usual_slope])
    for i, rows in enumerate((1, 4, 2, 1, 8, 3) * 8):
        took = 0.01 * (1 + slope * (rows - 1)) * noise.uniform(0.97, 1.03) * {0: 5, 7: 20}.get(i, 1)
        costs.observe(StepReport(num_decoding=1, num_rows=rows, score_s=took, target_forward_s=took))
    assert costs.target.one_row_s == pytest.approx(0.01, rel=0.15)
    for rows in (2, 5, 8):
        assert float(costs.target.ratio(rows)) == pytest.approx(1 + slope * (rows - 1), rel=0.15), rows


def test_a_few_passes_move_a_usual_curve_a_little():
    fit = Fit(PassTime(WIDTHS, [1 + 0.2 * (rows - 1) for rows in WIDTHS]))
    assert fit.observe(0.01, 1.0) == pytest.approx(0.01)
    assert fit.steepness == pytest.approx(1.0)
    fit.observe(0.011, 1.2)  # half as steep as usual
    assert 0.6 < fit.steepness < 1.0
    for _ in range(10):
        fit.observe(0.01, 1.0)
        fit.observe(0.013, 1.6)
    assert 0.49 < fit.steepness < 0.56
    learned = fit.steepness
    for _ in range(1000):
        fit.observe(0.01, 1.0)
    assert fit.steepness == pytest.approx(learned, abs=0.04), "plain steps say nothing of it"


@pytest.mark.parametrize(("wide_s", "bound"), [(0.2, STEEPEST), (0.008, 1 / STEEPEST)])
def test_a_curve_is_neither_falling_nor_too_steep(wide_s: float, bound: float):
    """At the bound one row takes what makes the errors least there, not what it would without one."""
    fit = Fit(PassTime(WIDTHS, [1 + 0.2 * (rows - 1) for rows in WIDTHS]))
    for _ in range(200):
        fit.observe(0.01, 1.5)
        one_s = fit.observe(wide_s, 2.0)
    assert fit.steepness == bound
    narrow, wide = 1 + bound * 0.5, 1 + bound
    weights = (1 / 1.5**2, 1 / 2.0**2)
    best = (weights[0] * 0.01 * narrow + weights[1] * wide_s * wide) / (weights[0] * narrow**2 + weights[1] * wide**2)
    assert one_s == pytest.approx(best, rel=0.05)


def test_a_flat_curve_is_fitted_without_dividing_by_nothing():
    """As a busy moment may measure it: plain steps alone say what one row takes."""
    fit = Fit(PassTime(WIDTHS, [1.0] * len(WIDTHS)))
    for _ in range(3):
        assert fit.observe(0.02, 1.0) == pytest.approx(0.02)


def test_a_busy_moment_that_measures_no_slope_leaves_the_usual_one(folder, monkeypatch):
    """Else no step would ever say that wide passes cost something."""
    flat = PassTime(WIDTHS, [1.0] * len(WIDTHS), one_row_s=0.01, is_steady=False)
    monkeypatch.setattr("forerun.pacing.measuring.of_runner", lambda runner, pause: flat)
    costs = Costs.of({"": [a_machine("a machine", Machine(lambda n: 0.01))]}, {}, measures=True)
    costs.measure()
    assert costs.target.one_row_s == 0.01
    assert float(costs.target.ratio(4)) > 1.1
    for _ in range(3):
        costs.observe(StepReport(num_decoding=1, num_rows=1, score_s=0.02))
    assert 0.01 < costs.target.one_row_s < 0.03


def test_a_curve_that_was_kept_is_taken_at_once(folder, monkeypatch):
    """Of all models of a drafter, or of none; not where nothing is to be measured."""
    machine = Machine(lambda n: 0.01 * (1 + n / 8))
    monkeypatch.setattr("forerun.pacing.measuring.calibrated", lambda run: calibrated(run, machine.clock))
    first, second = (a_machine(name, machine) for name in ("first", "second"))
    of_runner(first)
    assert kept(first).ratios == pytest.approx(of_runner(first).ratios)
    assert kept(second) is None
    costs = Costs.of({"": [first], "two": [first, second], "one": [first]}, {}, measures=True)
    assert costs.runners == {"two": [first, second]}
    assert costs.target.fit is None
    assert costs.target.one_row_s == costs.draft("one").one_row_s == pytest.approx(0.01125)
    assert costs.draft("two").one_row_s is None
    costs.measure()
    assert costs.draft("two").one_row_s == pytest.approx(0.0225)
    blind = Costs.of({"": [first]}, {}, measures=False)
    assert not blind.runners
    assert blind.target.fit is not None


def flat_steps(costs: Costs, num: int) -> None:
    """So many plain steps, and steps of 8 rows that take as long."""
    for rows in (1, 8) * num:
        costs.observe(StepReport(num_decoding=1, num_rows=rows, score_s=0.01, target_forward_s=0.01))


def test_a_curve_that_steps_contradict_is_measured_again(folder, monkeypatch):
    """Once, when nothing runs: a curve from a busy moment is not kept for good."""
    machine = Machine(lambda n: 0.001 * n)
    runner = a_machine("a machine", machine)
    monkeypatch.setattr("forerun.pacing.measuring.calibrated", lambda run: calibrated(run, machine.clock))
    costs = Costs.of({"": [runner]}, {}, measures=True)
    costs.measure()
    assert float(costs.target.ratio(8)) == pytest.approx(8)
    machine.curve = lambda n: 0.001  # what it is when nothing else runs
    flat_steps(costs, 20)
    costs.measure()
    assert float(costs.target.ratio(8)) == pytest.approx(8), "a few steps may be chance"
    flat_steps(costs, 200)
    costs.measure()
    assert float(costs.target.ratio(8)) == pytest.approx(1)
    assert kept(runner).ratios[3] == pytest.approx(1), "in the file, too"
    num_passes = len(machine.ran)
    flat_steps(costs, 200)
    costs.measure()
    assert len(machine.ran) == num_passes


def test_steps_as_the_curve_says_change_nothing():
    costs = Costs(PassTime(WIDTHS, [1.0, 1.1, 1.2, 1.4, 2.0, 4.0]), _measured=["a runner"])
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
        *("", "{}", "[]", "3", "[" * 100_000),
        "[[1], [1.0], 0.1, 1e10]",
        "[[1, 2], [1.0], 0.1, 1e10]",
        "[[1, 2], [1.0, NaN], 0.1, 1e10]",
        "[[2, 1], [1.0, 2.0], 0.1, 1e10]",
        "[[1, 2], [1.0, 1.5], null, 1e10]",
        '[["a", "b"], ["c", "d"], "e", "f"]',
        "[[1, 2], [1.0, 1.5], 0.1]",
        "[[1, 2], [1.0, 1.5], 0.1, 0.0]",
    ],
)
def test_a_file_that_holds_no_curve_is_written_anew(folder, broken):
    runner = a_machine("a machine", Machine(lambda n: 0.001 * n))
    of_runner(runner)
    (path,) = folder.iterdir()
    path.write_text(broken.replace("1e10", str(time.time())))
    assert kept(runner) is None
    of_runner(runner)
    widths, ratios, one_row_s, _ = json.loads(path.read_text())
    assert widths == list(WIDTHS)
    assert len(ratios) == len(WIDTHS)
    assert one_row_s > 0


class Disturbed(Machine):
    """Some of its passes take half as long again: each third one, or one alone."""

    def __init__(self, is_busy: bool) -> None:
        super().__init__(lambda n: 0.01 * (1 + n / 8))
        self.is_busy = is_busy

    def run(self, rows: int) -> None:
        num = len(self.ran) + 1
        self.speed = 1.5 if (num % 3 == 0 if self.is_busy else num == 40) else 1.0
        super().run(rows)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_curve_of_a_busy_moment_is_used_and_not_kept(folder, monkeypatch, is_busy):
    """Rounds that disagree say that another process took its share; one pass alone may be slow."""
    machine = Disturbed(is_busy)
    runner = a_machine("a machine", machine)
    monkeypatch.setattr("forerun.pacing.measuring.AGREEMENT", 1.1)
    monkeypatch.setattr("forerun.pacing.measuring.calibrated", lambda run: calibrated(run, machine.clock))
    assert float(of_runner(runner).ratio(8)) == pytest.approx(2 / 1.125, rel=0.5)
    assert len(list(folder.iterdir())) == (not is_busy)
    if is_busy:  # it is corrected by steps
        costs = Costs.of({"": [runner]}, {}, measures=True)
        costs.measure()
        assert not list(folder.iterdir())
        assert costs.target.fit is not None
        assert not costs.runners


def test_a_model_that_fails_is_not_measured_again(folder):
    """One for which the cache has no room now is, another time."""
    costs = Costs.of({"": [a_machine("full", Machine(lambda n: 0.001 * n, most_rows=0))]}, {}, measures=True)
    costs.measure()
    assert set(costs.runners) == {""}
    costs.runners[""][0].try_pass = lambda num_rows, behind=0: 1 // 0
    with pytest.raises(ZeroDivisionError):
        costs.measure()
    costs.measure()
    assert not costs.runners
    assert costs.target.fit is not None


def test_without_calibration_nothing_is_measured(folder):
    LLM("shipped", max_seq_len=256, calibrate=False).measure_passes()
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(folder, monkeypatch, caplog):
    (folder / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(folder / "file"))
    with caplog.at_level(logging.WARNING):
        LLM("shipped", max_seq_len=256).measure_passes()
    assert "cannot be written" in caplog.text


def test_the_slow_average_follows_the_machine_and_ignores_one_pause():
    costs = Costs(PassTime(WIDTHS, [1.0, 1.0, 1.0, 1.0, 2.0, 4.0], 0.01))
    steps = [SequenceStep(0, "model", 3, 3, (0, 1), 3)]

    def step(slowness: float) -> StepReport:
        draft = DraftStep(0.003 * slowness, 1, 3, 3, 3)
        report = StepReport(num_decoding=1, num_rows=4, score_s=0.01 * slowness, draft_s=draft.seconds, sequences=steps)
        report.drafts["model"] = draft
        return report

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


def test_passes_are_calibrated_behind_a_text(folder, monkeypatch):
    """Of as many tokens as CONTEXT_TOKENS says, of which nothing is left in the cache; without where it has no room."""
    for size, seen in ((256, CONTEXT_TOKENS), (64, 0)):
        engine = LLM("shipped", draft="none", max_seq_len=size, max_batch_size=1).engine
        behind = set[int]()
        runner, forward = engine.runner, engine.runner.forward

        def seen_forward(runs, runner=runner, forward=forward, behind=behind):
            behind.add(runner.cache.length(runs[0].slot))
            return forward(runs)

        monkeypatch.setattr(runner, "forward", seen_forward)
        for path in folder.iterdir():
            path.unlink()
        of_runner(runner)
        assert behind == {seen}
        assert len(list(folder.iterdir())) == 1
        runner.cache.check_integrity()
        assert runner.cache.free_tokens() >= size


def test_a_prompt_is_read_in_the_seconds_that_were_seen() -> None:
    """Beside the target's own reading, too. A few tokens say nothing, and what was held up counts little."""
    costs = Costs(drafts={"model": PassTime((1, 33), (1.0, 4.2), 0.2)})
    assert costs.read_s("model") == pytest.approx(0.02)

    def read(num_tokens: int, seconds: float, num_prefill: int) -> float:
        report = StepReport(num_prefill_tokens=num_prefill)
        report.drafts = {"model": DraftStep(seconds, num_catchup_tokens=num_tokens, catchup_s=seconds)}
        costs.observe(report)
        return costs.read_s("model")

    assert read(8, 1.0, 8) == pytest.approx(0.02)
    assert read(100, 0.2, 100) == pytest.approx(0.002)
    assert read(100, 0.4, 0) == pytest.approx(0.0025)
    assert read(100, 100.0, 0) < 0.004
