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
from forerun.train.samples import SampleWriter, read_samples
from forerun.train.stopping import Stopped, uninterrupted
from train.conftest import Make, check_resumed, ctrl_c_behind, read_log


@pytest.mark.parametrize(
    ("owner", "method", "num"),
    [(lm.LanguageModel, "loss", 21), (torch.optim.AdamW, "step", 20), (lm.LanguageModel, "validate", 3)],
)
def test_a_run_that_ctrl_c_stops_anywhere_goes_on_as_if_it_had_not(
    tiny: Make, owner: type, method: str, num: int
) -> None:
    """Within a step, within its update, and in the validation behind it."""

    def interrupt(step: int, train: Callable[[], Any]) -> None:
        with ctrl_c_behind(owner, method, num), pytest.raises(Stopped, match=f"^step {step}$"):
            train()

    check_resumed(tiny("whole"), tiny("parts"), interrupt, 20)


def test_a_random_state_is_kept_as_it_was_behind_the_step(tiny: Make) -> None:
    """Not as it is where Ctrl-C comes, when the next step has drawn already."""
    torch.manual_seed(7)
    with ctrl_c_behind(lm.LanguageModel, "loss", 21), pytest.raises(Stopped):
        lm.train(tiny(), quiet=True)
    state = torch.load(tiny().out / "state.pt", weights_only=False)
    torch.manual_seed(7)
    torch.rand(3 * 20)  # of steps
    assert torch.equal(torch.get_rng_state(), state["rng"])


def test_a_second_ctrl_c_leaves_the_old_state_whole(tiny: Make) -> None:
    config = tiny()
    lm.train(tiny(steps=10), quiet=True)
    before = (config.out / "state.pt").read_bytes()
    first, second = ctrl_c_behind(lm.LanguageModel, "loss", 11), ctrl_c_behind(torch, "save", 1)
    with first, second, pytest.raises(KeyboardInterrupt) as stop:
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


def test_training_says_how_to_go_on(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden-size 32 --layers 1 --heads 2 --ffn-size 64 --vocab-size 300 --validation-windows 2"
    run = f"--out {tmp_path / 'run'} --text {sources} --max-steps 22 --tokens-per-step 64 --seq-len-tokens 32"
    anew = ["lm", *sizes.split(), *run.split()]
    resumed = [*anew, "--resume"]
    kept = tmp_path / "run" / "state.pt"
    for owner, function, num, words, said in (
        (lm, "prepare", 1, anew, "stopped: nothing was saved to go on from, and the same command begins anew"),
        (lm.LanguageModel, "loss", 21, anew, "stopped at step 20: the same command with --resume goes on from there"),
        (lm, "prepare", 1, resumed, f"stopped: the same command with --resume goes on from what {kept} holds"),
    ):
        with ctrl_c_behind(owner, function, num):
            assert said_by(capsys, words, 130) == said
    assert said_by(capsys, resumed, 0) == ""
    assert loop.read_log(tmp_path / "run")[-1]["step"] == 22


def stop_sampling(capsys: pytest.CaptureFixture[str], command: list[str], samples: Path) -> None:
    """Stop a command behind the third text that the target writes; it must say how many tokens the file has."""
    with ctrl_c_behind(SampleWriter, "append", 3):
        said = said_by(capsys, command, 130)
    num_tokens = sum(len(s.ids) for s in read_samples(samples).samples)
    assert said == f"stopped at {num_tokens} tokens: the same command goes on from there"


def test_sampling_says_what_it_keeps_and_goes_on(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-tokens", "600", "--answer-tokens", "24", "--question-tokens", "12", "--passage-tokens", "16"]
    command = ["sample", str(target), *sizes, "--text", __file__, "--out"]
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    stop_sampling(capsys, [*command, str(parts)], parts)
    for out in (parts, whole):
        said_by(capsys, [*command, str(out)], 0)
    assert parts.read_bytes() == whole.read_bytes()


def test_a_drafter_says_that_the_same_command_goes_on(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--hours 1 --batch-size 4 --method eagle:draft_vocab=200,steps=2"
    command = ["drafter", str(target), "--out", str(tmp_path / "out"), *sizes.split()]
    stop_sampling(capsys, command, tmp_path / "out" / "samples.ids")
