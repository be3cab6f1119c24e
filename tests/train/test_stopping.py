"""Ctrl-C in a long run: what was done is kept, one line says how to go on, and going on changes nothing."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.cli.main import main
from forerun.train import lm, loop
from forerun.train.config import TrainConfig
from forerun.train.samples import SampleWriter, read_samples
from forerun.train.stopping import Stopped, uninterrupted
from train.conftest import read_log
from train.written import chatting

Make = Callable[..., TrainConfig]
STOPS_AT = 20  # a step that validates


def stop_in(patch: pytest.MonkeyPatch, place: str) -> None:
    """Let Ctrl-C come at one place of a run: once, behind what is done there."""
    real_loss, real_validate = lm.LanguageModel.loss, lm.LanguageModel.validate
    stopped = list[int]()

    def stop(step: int) -> None:
        if not stopped:
            stopped.append(step)
            signal.raise_signal(signal.SIGINT)

    def loss(self: Any, step: int) -> Any:
        value = real_loss(self, step)
        torch.rand(3)  # as a head that draws
        if step == STOPS_AT:
            stop(step)
        return value

    def validate(self: Any) -> Any:
        torch.rand(3)
        numbers = real_validate(self)
        if len(loop.read_log(self.config.out)) > STOPS_AT // loop.LOG_EVERY_STEPS + loop.LOG_EVERY_STEPS:
            stop(STOPS_AT)
        return numbers

    def optimizer(*given: Any) -> torch.optim.AdamW:
        adamw = make_optimizer(*given)
        adamw.register_step_post_hook(
            lambda *_: stop(0) if next(iter(adamw.state.values()))["step"] == STOPS_AT else None
        )
        return adamw

    make_optimizer = loop.make_optimizer
    if place == "loss":
        patch.setattr(lm.LanguageModel, "loss", loss)
    elif place == "validate":
        patch.setattr(lm.LanguageModel, "validate", validate)
    else:
        patch.setattr(loop, "make_optimizer", optimizer)


@pytest.mark.parametrize("place", ["loss", "update", "validate"])
def test_a_run_that_ctrl_c_stops_anywhere_goes_on_as_if_it_had_not(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    whole, parts = tiny("whole"), tiny("parts")
    lm.train(whole, quiet=True)
    with monkeypatch.context() as patch:
        stop_in(patch, place)
        with pytest.raises(Stopped) as stop:
            lm.train(parts, quiet=True)
    assert stop.value.at == f"step {STOPS_AT}"
    torch.manual_seed(123)  # whatever happened in between
    lm.train(parts, resume=True, quiet=True)
    assert read_log(parts) == read_log(whole)
    ours, theirs = (torch.load(c.out / "state.pt", weights_only=False)["weights"] for c in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_random_state_is_kept_as_it_was_behind_the_step(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as it is where Ctrl-C comes, when the next step has drawn already."""
    with monkeypatch.context() as patch:
        stop_in(patch, "loss")
        torch.manual_seed(7)
        with pytest.raises(Stopped):
            lm.train(tiny(), quiet=True)
    state = torch.load(tiny().out / "state.pt", weights_only=False)
    torch.manual_seed(7)
    torch.rand(3 * STOPS_AT)  # of steps
    assert torch.equal(torch.get_rng_state(), state["rng"])


def test_a_second_ctrl_c_leaves_the_old_state_whole(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config, real_save = tiny(), torch.save
    lm.train(tiny(steps=10), quiet=True)
    before = (config.out / "state.pt").read_bytes()

    def save(state: Any, file: Any) -> None:
        real_save(state, file)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        stop_in(patch, "loss")
        patch.setattr(torch, "save", save)
        with pytest.raises(KeyboardInterrupt) as stop:
            lm.train(config, resume=True, quiet=True)
    assert not isinstance(stop.value, Stopped)
    assert (config.out / "state.pt").read_bytes() == before
    lm.train(config, resume=True, quiet=True)
    assert read_log(config)[-1]["step"] == config.steps


def test_what_must_not_be_interrupted_is_not() -> None:
    done = list[str]()

    def interrupted() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all")
        done.append("more")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    def elsewhere() -> None:
        with uninterrupted():
            done.append("elsewhere")

    (thread := threading.Thread(target=elsewhere)).start()
    thread.join()
    assert done == ["all", "elsewhere"]


# ------------------------------------------------------------------------------------------------------- what is said


def said_by(capsys: pytest.CaptureFixture[str], command: list[str], code: int) -> str:
    """Run `forerun train`, and return the line on standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["train", *command, "--quiet"])
    err = capsys.readouterr().err
    assert end.value.code == code, err
    return err.strip()


def test_training_says_how_to_go_on(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--hidden-size 32 --layers 1 --heads 2 --ffn-size 64 --vocab-size 300 --validation-windows 2"
    run = f"--out {tmp_path / 'run'} --text {sources} --max-steps 22 --tokens-per-step 64 --seq-len-tokens 32"
    command = ["lm", *sizes.split(), *run.split()]
    with monkeypatch.context() as patch:
        patch.setattr(lm, "prepare", lambda config: signal.raise_signal(signal.SIGINT))
        said = said_by(capsys, command, 130)
        assert said == "stopped: nothing was saved to go on from, and the same command begins anew"
    with monkeypatch.context() as patch:
        stop_in(patch, "loss")
        said = said_by(capsys, command, 130)
        assert said == "stopped at step 20: the same command with --resume goes on from there"
    with monkeypatch.context() as patch:
        patch.setattr(lm, "prepare", lambda config: signal.raise_signal(signal.SIGINT))
        said = said_by(capsys, [*command, "--resume"], 130)
        assert said.startswith("stopped: the same command with --resume goes on from what ")
    assert said_by(capsys, [*command, "--resume"], 0) == ""
    assert loop.read_log(tmp_path / "run")[-1]["step"] == 22


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatting(tmp_path_factory.mktemp("target") / "model", max_positions=1024)


def stop_behind(patch: pytest.MonkeyPatch, num: int) -> None:
    """Let Ctrl-C come when so many samples are written."""
    append = SampleWriter.append

    def stop(self: SampleWriter, sample: Any) -> bool:
        is_new = append(self, sample)
        if self.num_samples == num:
            signal.raise_signal(signal.SIGINT)
        return is_new

    patch.setattr(SampleWriter, "append", stop)


def test_sampling_says_what_it_keeps_and_goes_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-tokens", "600", "--answer-tokens", "24", "--question-tokens", "12", "--passage-tokens", "16"]
    command = ["sample", str(target), *sizes, "--text", __file__]
    with monkeypatch.context() as patch:
        stop_behind(patch, 3)
        said = said_by(capsys, [*command, "--out", str(tmp_path / "parts")], 130)
    num_tokens = sum(len(s.ids) for s in read_samples(tmp_path / "parts").samples)
    assert said == f"stopped at {num_tokens} tokens: the same command goes on from there"
    for name in ("parts", "whole"):
        said_by(capsys, [*command, "--out", str(tmp_path / name)], 0)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_drafter_says_that_the_same_command_goes_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["drafter", str(target), "--out", str(tmp_path / "out"), "--hours", "1", "--batch-size", "4"]
    command += ["--method", "eagle:draft_vocab=200,steps=2"]
    with monkeypatch.context() as patch:
        stop_behind(patch, 3)
        said = said_by(capsys, command, 130)
    num_tokens = sum(len(s.ids) for s in read_samples(tmp_path / "out" / "samples.ids").samples)
    assert said == f"stopped at {num_tokens} tokens: the same command goes on from there"
