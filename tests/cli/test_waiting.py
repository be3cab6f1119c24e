"""What commands say while they wait: on a terminal a line that goes, in a pipe lines."""

import io
import sys
import time

import pytest

from forerun import LLM, SamplingParams
from forerun.cli.waiting import Answering
from forerun.text import waiting
from forerun.text.progress import Bar
from forerun.text.waiting import Waiting


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
    with Waiting("loading a model") as wait:
        until(said, "loading a model\nloading a model, 0 s\n")
        wait.tell("reading 3 of 8 tokens")
        until(said, "reading 3 of 8 tokens\n")


def test_the_lines_of_a_long_wait_get_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, now_s = Waiting("training"), time.monotonic()
    monkeypatch.setattr(Waiting, "_silent_since_s", now_s)
    for taken_s, silent_s in ((0, waiting.SILENT_S), (30, waiting.SILENT_S), (7200, 360)):
        wait._begun_s = now_s - taken_s
        assert silent_s - 60 < wait._still_silent_s() <= silent_s + 3


def test_a_bar_is_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    said = pipe_silent_for_an_hour(monkeypatch)
    with Bar(is_quiet=True) as bar:
        bar.add_task("measuring", total=8)
        time.sleep(0.3)
    assert said.getvalue() == ""
    with Bar() as bar:
        task = bar.add_task("", total=8, note="")
        bar.update(task, description="measuring", completed=3, note="7 per second")
        until(said, "measuring: 3 of 8, 7 per second\n")


def pipe_silent_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what a pipe gets, where nothing was printed for an hour and a display has just ended."""
    said, now_s = io.StringIO(), time.monotonic()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(waiting, "SILENT_S", 3600.0)
    monkeypatch.setattr(Waiting, "_silent_since_s", now_s - 3601)
    monkeypatch.setattr(Waiting, "_ended_s", now_s)
    return said


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
