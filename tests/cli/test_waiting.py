"""What commands say while they wait: on a terminal a line that goes, in a pipe lines."""

import importlib
import io
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.cli.main import main
from forerun.cli.waiting import Answering
from forerun.models.named import DATA
from forerun.text import waiting
from forerun.text.progress import Bar
from forerun.text.terminal import note
from forerun.text.waiting import Waiting
from forerun.train import lm, loop
from forerun.train.config import TrainConfig
from forerun.train.shape import ModelShape


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def until(said: io.StringIO, text: str) -> None:
    give_up_s = time.monotonic() + 60
    while text not in said.getvalue() and time.monotonic() < give_up_s:
        time.sleep(0.001)
    assert text in said.getvalue()


def test_a_pipe_gets_what_is_new_and_then_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(waiting, "SILENT_S", 0.001)
    monkeypatch.setattr(waiting, "SAME_LINE_S", 0.5)
    with Waiting("loading a model") as wait:
        until(said, " s.")
        note("a line of another kind")
        until(said, "kind\n.")
        wait.tell("reading 3 of 8 tokens")
        until(said, "reading 3 of 8 tokens.")
    lines = (
        r"loading a model\.+\n(loading a model, \d+ s\.*\n)+a line of another kind\n\.+\n(loading a model, \d+ s\.*\n)*"
        r"reading 3 of 8 tokens\.+\n(reading 3 of 8 tokens, \d+ s\.*\n)*"
    )
    assert re.fullmatch(lines, said.getvalue())


def test_the_lines_of_a_long_wait_get_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text that is new, and of one that stays: dots stand between them, as often as ever."""
    wait = Waiting("training")
    assert wait._is_due("training", 0.0)
    wait._told, wait._told_s = "training", 7200.0
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: 7200.0))
    monkeypatch.setattr(Waiting, "_silent_since_s", 7200.0)
    assert wait._still_silent_s() == pytest.approx(waiting.SILENT_S)
    for taken_s, new_s, same_s in ((1, 0.1, 30), (30, 1.6, 30), (7200, 379, 379)):
        wait._begun_s = 7200.0 - taken_s
        assert [wait._is_due(text, 7200 + new_s) for text in ("training", "step 3")] == [new_s == same_s, True]
        assert [wait._is_due(text, 7200 + same_s) for text in ("training", "step 3")] == [True, True]
        assert not wait._is_due("training", 7200 + same_s * 0.9)


def test_a_bar_is_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    said = pipe_silent_for_an_hour(monkeypatch)
    with Bar(is_quiet=True) as bar:
        bar.add_task("measuring", total=8)
        time.sleep(0.3)
    assert said.getvalue() == ""
    with Bar() as bar:
        bar.add_task("warming up", total=2)
        bar.add_task("measuring", total=8, completed=3, note="7 per second")
        bar.add_task("not yet", total=1, visible=False)
        assert bar._line() == "measuring: 3 of 8, 7 per second"
        until(said, "measuring: 3 of 8, 7 per second")
        bar.add_task("certifying", total=1, completed=0.25)
        assert bar._line() == "certifying: 25 %"
    assert said.getvalue().count("\n") == 1
    assert bar._lines is not None
    assert bar._lines._over.is_set()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_line_that_is_made_too_late_is_not_said(monkeypatch: pytest.MonkeyPatch, is_over: bool) -> None:
    """Because the wait is over, or because another display has just spoken."""
    said, asked = pipe_silent_for_an_hour(monkeypatch), threading.Event()

    def late() -> str:
        if is_over:
            wait._over.set()
        else:
            Waiting._silent_since_s = time.monotonic()
        asked.set()
        return "late"

    wait = Waiting(late)
    with wait:
        assert asked.wait(60)
        time.sleep(0.3)  # in which the line would be there
    assert said.getvalue() == ""


def test_training_says_that_it_validates_and_a_quiet_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = pipe_silent_for_an_hour(monkeypatch)

    def validate(_: object) -> None:
        until(said, text)
        time.sleep(0.3)

    text = ""
    loop._validated(type("Task", (), {"validate": validate})(), quiet=True)
    assert said.getvalue() == ""
    text = "validating"
    loop._validated(type("Task", (), {"validate": validate})(), quiet=False)


def test_a_bar_gives_way_to_lines_of_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    said, printed = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setenv("TERM", "xterm")
    with Bar(transient=True) as bar:
        bar.add_task("measuring", total=8)
        with bar.aside():
            print("a line")
        assert bar.live.is_started
    assert printed.getvalue() == "a line\n"
    assert "a line" not in said.getvalue()


def test_the_first_optimizer_is_no_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch imports for seconds when it makes one."""
    said, real = pipe_silent_for_an_hour(monkeypatch), loop.make_optimizer

    def make(*given: Any) -> torch.optim.AdamW:
        until(said, "preparing the first step")
        return real(*given)

    monkeypatch.setattr(loop, "make_optimizer", make)
    (text := tmp_path / "text").mkdir()
    for name in ("alpha", "queue", "heapq"):
        (text / f"{name}.py").write_text("".join(f"value_{i} = {i}\n" for i in range(400)))
    shape = ModelShape(16, 1, 2, 1, 32, 300)
    sizes: dict[str, Any] = {"steps": 1, "tokens_per_step": 32, "seq_len_tokens": 16, "validation_windows": 1}
    monkeypatch.setattr(Waiting, "_silent_since_s", time.monotonic() - 3601)
    lm.train(TrainConfig(shape=shape, out=tmp_path / "run", text=text, **sizes))


@pytest.mark.parametrize(
    ("place", "command", "text"),
    [
        ("evaluate.decode", "pair --target {0} --draft {0} --prompts {1}/p.jsonl --max-tokens 4", "T=0: 0 of 8"),
        ("shares.accepted_shares", "tree --prompts {1}/p.jsonl --num-ranks 2 --out {1}/out", "texts: 0 of 2"),
        ("skip.Scorer.score", "skip {0} --text {1}/p.jsonl --evaluations 2 --out {1}/out", "sets of layers: 0 of 2"),
        ("sampling.texts_for", "sample {0} --num-tokens 40 --out {1}/out", "reading texts to cut passages from"),
        ("samples.SampleWriter.append", "sample {0} --num-tokens 40 --out {1}/out", "writing the first texts, "),
    ],
)
def test_a_command_that_measures_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, command: str, text: str
) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "def f(x):"}\n{"text": "import os"}\n')
    module, *names = place.split(".")
    owner: Any = importlib.import_module(f"forerun.train.{module}")
    for name in names[:-1]:
        owner = getattr(owner, name)
    real = getattr(owner, names[-1])
    said = io.StringIO()

    def wait(*given: Any, **options: Any) -> Any:
        until(said, text)
        return real(*given, **options)

    monkeypatch.setattr(owner, names[-1], wait)
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(waiting, "SILENT_S", 0.001)
    words = command.format(DATA / "target", tmp_path).split()
    with pytest.raises(SystemExit) as end:
        main(["train", *words])
    assert not end.value.code, said.getvalue()


def pipe_silent_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what a pipe gets, where nothing was printed for an hour and a display has just ended."""
    said, now_s = io.StringIO(), time.monotonic()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(waiting, "SILENT_S", 3600.0)
    monkeypatch.setattr(Waiting, "_silent_since_s", now_s - 3601)
    monkeypatch.setattr(Waiting, "_ended_s", now_s)
    return said


def test_a_reader_that_has_gone_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            if is_gone.is_set():
                raise BrokenPipeError
            return super().write(text)

    said, is_gone = Gone(), threading.Event()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(waiting, "SILENT_S", 0.001)
    with Waiting("training"):
        until(said, "training")
        is_gone.set()


def test_displays_that_follow_each_other_share_one_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    said = pipe_silent_for_an_hour(monkeypatch)
    with Waiting("loading"):
        until(said, "loading")
    with Waiting("reading"):
        time.sleep(0.3)  # in which a line that does not wait would be there
    assert said.getvalue() == "loading\n"


def test_an_answer_that_is_printed_ends_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    said = pipe_silent_for_an_hour(monkeypatch)
    llm = LLM("shipped", draft="none")
    Answering(llm, 5).end()
    with Waiting("reading"):
        time.sleep(0.3)
    assert said.getvalue() == ""


def test_what_is_soon_over_says_nothing_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SILENT_S", 3600.0)  # however busy the machine is
    with Waiting("loading a model"):
        pass
    assert capsys.readouterr().err == ""


def test_on_a_terminal_the_line_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Terminal()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setenv("TERM", "xterm")
    with Waiting("loading a model") as wait:
        until(said, "loading a model")
        wait.end()
        assert said.getvalue().endswith("\x1b[1A\x1b[2K"), "the cursor is back on a line that is empty"
    assert said.getvalue().count("\n") == said.getvalue().count("\x1b[1A")


def test_a_terminal_shows_nothing_of_what_is_soon_over(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Terminal()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setenv("TERM", "xterm")
    with Waiting("opening a model", 3600.0):
        time.sleep(0.3)  # in which a line that does not wait would be there
    assert said.getvalue() == ""


def test_it_says_how_far_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("shipped", draft="none", prefill_chunk_tokens=16)
    told = list[str]()
    monkeypatch.setattr(Answering, "tell", lambda self, text: told.append(text))
    with Answering(llm, 50) as wait:
        for _ in llm.stream(list(range(2, 52)), SamplingParams(max_tokens=4, temperature=0)):
            wait.end()
    assert told[:3] == [f"reading {num} of 50 tokens" for num in (16, 32, 48)]
    assert told[4] == "1 token written"  # before `end` the engine may have written more
    told.clear()
    with Answering(llm, None) as wait:
        for _ in llm.stream(list(range(3, 53)), SamplingParams(max_tokens=2, temperature=0)):
            wait.end()
    assert told[0] == "16 tokens read"
