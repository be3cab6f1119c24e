"""`forerun train drafter`: the shares of its time, and that a run goes on where it was stopped."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.drafters.shared import trained
from forerun.engine.opened import Opened
from forerun.errors import BadOption, InternalError
from forerun.models.loading import Checkpoint
from forerun.ops.model import LoadedModel
from forerun.train import head as training, loop, recipe
from forerun.train.config import DrafterConfig, HeadConfig, SampleConfig
from forerun.train.features import Recomputed, Stored, facts_of
from forerun.train.recipe import SAMPLE_SHARE, State
from forerun.train.recording import Recorder, Recording
from forerun.train.samples import Samples, read_samples
from forerun.train.sampling import write
from forerun.types import Sequence
from refusals import refusal

METHOD = "eagle:draft_vocab=200,steps=2"
HOURS = 120 / 3600  # readings of the clock: 72 samples, and steps


def loaded(target: Path) -> Checkpoint:
    return Opened.of(EngineConfig(target=str(target), ops="native", device="cpu")).load()


def sample(config: SampleConfig, target: Path, recording: Recording | None) -> None:
    """Let the target write, and record it."""
    write(config, str(target), lambda now: None, dtype="auto", ops="native", recording=recording)


def clock_of(step_s: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by so many seconds whenever it is read."""
    now = 0.0

    def read() -> float:
        nonlocal now
        now += step_s
        return now

    return read


def config_of(out: Path, **given: object) -> DrafterConfig:
    fields: dict[str, object] = {"out": out, "hours": HOURS, "method": METHOD, "batch_size": 4, "lr": 1e-3}
    return DrafterConfig(**{**fields, **given})  # type: ignore[arg-type]


def test_a_drafter_of_nothing_but_hours(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by auto, drafts what the target accepts, and changes no text."""
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path / "cache"))
    out, said = tmp_path / "out", list[str]()
    monkeypatch.setattr(Recomputed, "of", None)  # for nothing is run again
    head = recipe.make(config_of(out), str(target), ops="native", quiet=True, say=said.append, clock=clock_of())
    samples = read_samples(out / "samples.ids").samples
    state = State.of(config_of(out))
    assert state.is_sampled
    share_s = SAMPLE_SHARE * 3600 * HOURS
    assert share_s <= state.sampled_s <= share_s + 2, "the target has written for its share, and no longer"
    assert len(samples) >= state.sampled_s - 3, "a reading for each of them"
    assert state.steps is not None
    assert said[-1].startswith(f"{state.steps} steps of 1024 tokens")
    assert json.loads((out / "run.json").read_text())["options"]["steps"] == state.steps
    assert head.folder == out / "head"
    trained.keep(head.target, head.folder)
    drafting, plain = LLM(str(target)), LLM(str(target), draft="none")
    assert drafting.engine.drafter.main == "eagle"
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    assert drafting.generate("some words", params)[0].token_ids == plain.generate("some words", params)[0].token_ids


@pytest.mark.parametrize("stops_at", [3, 30, None])
def test_a_run_that_was_stopped_goes_on(target: Path, tmp_path: Path, stops_at: int | None) -> None:
    """While it samples, or behind that: what was done is not done again, and its time is counted."""

    class Stopped(Exception):
        pass

    ticks = clock_of()

    def until() -> float:
        now = ticks()
        if State.of(config_of(out)).is_sampled if stops_at is None else now >= stops_at:
            raise Stopped
        return now

    out = tmp_path / "out"
    with pytest.raises(Stopped):
        recipe.make(config_of(out), str(target), quiet=True, clock=until)
    before = State.of(config_of(out))
    num_before = len(read_samples(out / "samples.ids").samples) if (out / "samples.ids").exists() else 0
    stored = out / "features" / "features.bin"
    bytes_before = stored.read_bytes() if stored.exists() else b""
    recipe.make(config_of(out), str(target), quiet=True, clock=clock_of())
    after = State.of(config_of(out))
    samples = read_samples(out / "samples.ids").samples
    assert len(samples) >= num_before
    assert after.sampled_s >= max(before.sampled_s, SAMPLE_SHARE * 3600 * HOURS)
    assert (before.is_sampled, len(samples)) in ((False, len(samples)), (True, num_before))
    assert stored.read_bytes().startswith(bytes_before)
    log = loop.read_log(out)
    assert log[-1]["final"]
    assert log[-1]["step"] == after.steps
    recipe.make(config_of(out), str(target), quiet=True, clock=clock_of())
    assert State.of(config_of(out)) == after


def test_hidden_states_are_kept_while_the_target_writes(target: Path, tmp_path: Path) -> None:
    """To the bit those that a pass over the finished text computes, also behind a stop, for texts of every kind."""
    checkpoint, folder = loaded(target), tmp_path / "rows"
    for sizes in ({"num_tokens": 1500}, {"num_tokens": 3000}):
        config = SampleConfig(out=tmp_path / "samples.ids", batch_size=5, question_tokens=60, answer_tokens=60, **sizes)
        sample(config, target, Recording(folder, (2, 1)))
    samples = read_samples(tmp_path / "samples.ids")
    assert {sample.kind for sample in samples.samples} == {"chat", "task", "text"}
    before = (folder / "features.bin").stat()
    stored = equal_features(folder, samples, checkpoint.model, (2, 1))
    after = (folder / "features.bin").stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size), "nothing was missing"
    assert len(stored.file.rows()) == sum(len(sample.ids) for sample in samples.samples)


def equal_features(folder: Path, samples: Samples, model: LoadedModel, layers: tuple[int, ...]) -> Stored:
    """Assert that stored features are those that a pass over the finished texts computes, and return them."""
    source = Recomputed(model, layers, 300)
    stored = Stored(folder, samples.samples, source, layers, facts_of(model, samples.options))
    for sample in samples.samples:
        for had, computed in zip(stored.of(sample).tensors, source.of(sample).tensors, strict=True):
            assert torch.equal(had[:-1], computed[:-1])
    return stored


@pytest.mark.parametrize("lost", ["all", "some bytes", "a text"])
def test_what_a_folder_lacks_is_computed_before_more_is_written(target: Path, tmp_path: Path, lost: str) -> None:
    """As of a file that was begun without, or as a kill leaves it: within a row, or between a text and its rows."""
    config = SampleConfig(out=tmp_path / "samples.ids", batch_size=4, num_tokens=800)
    folder = tmp_path / "rows"
    sample(config, target, Recording(folder, (1,)) if lost != "all" else None)
    samples, file = read_samples(config.out), folder / "features.bin"
    if lost != "all":
        row = file.stat().st_size // sum(len(sample.ids) for sample in samples.samples)
        with file.open("r+b") as rows:
            rows.truncate(file.stat().st_size - (7 if lost == "some bytes" else row * len(samples.samples[-1].ids)))
    computed = list[tuple[int, int]]()
    recording = Recording(folder, (1,), lambda num, of: computed.append((num, of)))
    sample(replace(config, num_tokens=1200), target, recording)
    num = len(samples.samples)
    assert computed == [(i, num) for i in (range(1, num + 1) if lost == "all" else [num])]
    with file.open("ab") as rows:
        rows.write(b"a text that is being written")
    equal_features(folder, read_samples(config.out), loaded(target).model, (1,))


def test_a_head_begins_the_same_of_recorded_features(target: Path, tmp_path: Path) -> None:
    """Nothing was recorded of a text's last token, and nothing is fitted to it."""
    config = SampleConfig(out=tmp_path / "samples.ids", batch_size=4, num_tokens=3000)
    sample(config, target, Recording(tmp_path / "rows", (2, 1)))
    checkpoint = loaded(target)
    sizes: dict[str, Any] = {"tokens_per_step": 256, "seq_len_tokens": 256, "fit_tokens": 2048, "steps": 1}
    sizes |= {"out": tmp_path / "out", "samples": config.out}
    for method in ("eagle:layers=1+2,mlp=20", "mtp", "blockwise:heads=2"):
        own = HeadConfig(method=f"{method}{',' if ':' in method else ':'}draft_vocab=200", **sizes)
        tasks = [training.prepare(replace(own, features=rows), checkpoint) for rows in (tmp_path / "rows", None)]
        recorded, computed = (task.head.weights for task in tasks)
        for name, weight in recorded.items():
            assert torch.equal(weight, computed[name]), (method, name)


def test_a_recorder_that_fails_ends_the_run(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("forerun.train.recording.features_of", fails)
    config = SampleConfig(out=tmp_path / "samples.ids", batch_size=4, num_tokens=800)
    assert "no memory" in refusal(InternalError, sample, config, target, Recording(tmp_path / "r", (1,)))
    assert not read_samples(config.out).samples


def test_a_sequence_that_gave_way_is_recorded_from_its_beginning() -> None:
    """What was seen before it gave way is seen again, and counts once; a text of which rows are missing is refused."""
    target: Any = SimpleNamespace(model=SimpleNamespace(rows=SimpleNamespace(to_host=lambda rows: rows)))

    def seen(start: int, values: list[float]) -> Any:
        rows = np.array(values, np.float32)[:, None]
        return SimpleNamespace(start=start, kept=values, hidden=rows, best=[7] * len(values), layer=lambda k: rows * k)

    recorder, seq = Recorder(target, (2, 1)), cast(Sequence, SimpleNamespace(id=3))
    for start, values in ((0, [1.0, 2.0]), (2, [3.0]), (0, [1.0, 2.0, 3.0]), (3, [4.0])):
        recorder.observe([seq], [seen(start, values)])
    features = recorder.take(3, 5)
    assert features.hidden.flatten().tolist() == [1, 2, 3, 4, 0]
    assert features.layers[:, :, 0].tolist() == [[2, 1], [4, 2], [6, 3], [8, 4], [0, 0]]
    assert features.best.tolist() == [7, 7, 7, 7, 0]
    recorder.observe([seq], [seen(0, [1.0])])
    assert "2 of 5 tokens of a text were seen" in refusal(InternalError, recorder.take, 3, 5)


@pytest.mark.parametrize(
    ("bf16_s", "autocast", "per_s"), [(0.25, "bf16", 4), (0.48, "off", 2), (2.0, "off", 2), (None, "off", 2)]
)
def test_steps_are_those_that_fit_into_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16_s: float | None, autocast: str, per_s: int
) -> None:
    """In the faster arithmetic; a tenth of the time however long the rest took, and ten times the samples at most."""
    monkeypatch.setattr(loop, "has_bf16", lambda device: bf16_s is not None)
    step_s = {"off": 0.5, "bf16": bf16_s or 0.0}
    num_timed = 1 + recipe.TIMED_STEPS
    timed_s = num_timed * sum(step_s.values())
    now, weight = 0.0, torch.ones(1)

    def loss(step: int) -> torch.Tensor:
        nonlocal now
        now += step_s[task.config.autocast]
        return (weight * step).sum()

    run = HeadConfig(out=tmp_path, samples=tmp_path / "samples.ids", method=METHOD, tokens_per_step=1024)
    task: Any = SimpleNamespace(weights={"w": weight}, loss=loss, facts={"num_tokens": 10**6}, config=run)

    def steps(sampled_s: float) -> int | None:
        state = State(HOURS, METHOD, sampled_s=sampled_s)
        after = recipe.planned(config_of(tmp_path), state, task, lambda: now, now - 1)
        assert after == replace(state, autocast=cast(Any, autocast), steps=after.steps)
        assert task.config == run
        return after.steps

    assert recipe._run_of(config_of(tmp_path), State(HOURS, METHOD, autocast="bf16"), 8).autocast == "bf16"
    assert steps(95.0) == round(per_s * (120 - 95 - 1 - timed_s))
    assert steps(1000.0) == per_s * 12
    assert weight.grad is None
    task.facts["num_tokens"] = 2048
    assert steps(55.0) == 20


def test_too_few_tokens_are_no_samples(target: Path, tmp_path: Path) -> None:
    """Time that is too short for anything is not held."""
    recipe.make(config_of(tmp_path / "out", hours=2 / 3600), str(target), quiet=True, clock=clock_of())
    samples = read_samples(tmp_path / "out" / "samples.ids").samples
    assert sum(len(sample.ids) for sample in samples) >= recipe.LEAST_TOKENS


def test_other_words_for_a_folder_are_refused(target: Path, tmp_path: Path) -> None:
    """And a method that cannot be trained, before a folder is begun."""
    with pytest.raises(BadOption, match="steps"):
        recipe.make(config_of(tmp_path, method="eagle:steps=none"), str(target), quiet=True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "recipe.json").write_text(json.dumps({**asdict(State(HOURS, METHOD)), "of_another_version": 1}))
    assert State.of(config_of(tmp_path)) == State(HOURS, METHOD), "what it does not know it leaves alone"
    older = {name: value for name, value in asdict(State(HOURS, METHOD)).items() if name != "autocast"}
    (tmp_path / "recipe.json").write_text(json.dumps(older))
    assert State.of(config_of(tmp_path)) == State(HOURS, METHOD), "a run from before it had a choice"
    State(1.0, METHOD).save(tmp_path)
    assert "begun with hours=" in refusal(BadOption, recipe.make, config_of(tmp_path), str(target), quiet=True)
    with pytest.raises(BadOption, match="begun with method="):
        recipe.make(config_of(tmp_path, hours=1.0, method="medusa"), str(target), quiet=True)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(BadOption, match="is not of `forerun train drafter`"):
        recipe.make(config_of(tmp_path), str(target), quiet=True)
    assert "hours" in refusal(BadOption, config_of, tmp_path, hours=0.0)
