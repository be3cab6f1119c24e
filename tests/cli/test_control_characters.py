"""Control characters of models, prompts and files: exact in a pipe, and never raw in a terminal, header or error."""

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest
from rich.console import Console

import processes
from forerun import LLM, SamplingParams
from forerun.cli.chat import Chat
from forerun.cli.show import LiveText
from forerun.text import Tokenizer
from forerun.text.terminal import make_console, visible

TITLE = "\x1b]0;owned\x07"  # what renames the window of a terminal


def biased(checkpoints: Path, char: str) -> tuple[str, ...]:
    """A command whose output is one character, four times."""
    (token,) = Tokenizer.load(checkpoints / "llama").encode(char)
    return ("generate", "--target", "llama", "--temperature", "0", "--max-tokens", "4", "--logit-bias", f"{token}=100")


def in_terminal(folder: Path, *arguments: str, typed: Sequence[str] = ()) -> bytes:
    """All that the command writes to a pseudo-terminal. typed: what is typed at each prompt, not before it is there."""
    environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "forerun", *arguments]
    child = processes.spawn(command, env=environment, timeout=90, cwd=folder, echo=False)
    shown = b""
    for keys, end in zip(["", *typed], [*[b"> "] * len(typed), pexpect.EOF], strict=True):
        child.send(keys)
        # The prompt is shown a moment before keys are read, and what was typed in that moment is dropped.
        while child.expect_exact([end, pexpect.TIMEOUT], timeout=20 if keys else 90) == 1:
            assert keys, "the command neither ended nor asked for anything"
            child.send(keys)
        shown += bytes(child.before)
    child.close()
    return shown


def test_all_but_tab_and_newline_is_escaped() -> None:
    controls = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
    shown = visible(f"é{controls}日")
    assert [c for c in shown if c < " " or "\x7f" <= c < "\xa0"] == ["\t", "\n"]
    assert json.loads(f'["{shown}"]', strict=False) == [f"é{controls}日"]
    assert visible(TITLE, is_terminal=False) == TITLE


def test_what_a_model_writes_is_exact_in_a_pipe(cli: Any, checkpoints: Path) -> None:
    command = biased(checkpoints, "\x1b")
    assert cli(*command, "a").stdout == "\x1b" * 4 + "\n"
    assert cli(*command, "a", "b").stdout == "==> 1: a <==\n\x1b\x1b\x1b\x1b\n==> 2: b <==\n\x1b\x1b\x1b\x1b\n"
    assert json.loads(cli(*command, "--json", "a").stdout)["text"] == "\x1b" * 4


@pytest.mark.parametrize("prompts", [("a",), ("a", "b"), ("--rounds", "a")])
def test_what_a_model_writes_is_escaped_in_a_terminal(checkpoints: Path, prompts: tuple[str, ...]) -> None:
    shown = in_terminal(checkpoints, *biased(checkpoints, "\x1b"), *prompts)
    assert b"\x1b" not in shown
    assert shown.count(rb"\u001b" if "--rounds" not in prompts else rb"\x1b") >= 4


def test_json_in_a_terminal_is_json_without_control_characters(checkpoints: Path) -> None:
    shown = in_terminal(checkpoints, *biased(checkpoints, "\x7f"), "--json", "a")
    assert b"\x7f" not in shown
    assert json.loads(shown)["text"] == "\x7f" * 4


class Terminal(io.StringIO):
    """A text stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_an_answer_is_remembered_as_it_is(checkpoints: Path, written: Any, kind: type[io.StringIO]) -> None:
    template = written("{{ messages[0].content }}", "template.jinja")
    (token,) = Tokenizer.load(checkpoints / "llama").encode("\x1b")
    params = SamplingParams(temperature=0, max_tokens=4, logit_bias={token: 100.0})
    chat = Chat(LLM(checkpoints / "llama", draft="none", chat_template=template), params)
    out = kind()
    chat.answer("a", out)
    assert out.getvalue() == ("\x1b" if kind is io.StringIO else r"\u001b") * 4 + "\n"
    assert chat.messages[-1]["content"] == "\x1b" * 4


def test_what_a_template_refuses_in_a_terminal(checkpoints: Path, written: Any) -> None:
    text = "{% if messages[0].content == 'x' %}{{ raise_exception('\x1b]0;owned\x07\r') }}{% endif %}hm"
    template = ("--chat-template", written(text, "template.jinja"))
    arguments = ("chat", "llama", *template, "--max-tokens", "4", "--draft", "none")
    shown = in_terminal(checkpoints, *arguments, typed=("x\n", "\x04"))
    assert b"\x1b]" not in shown
    assert b"\x07" not in shown
    assert rb"refuses these messages (\u001b]0;owned\u0007" in shown


def test_headers_are_escaped_in_a_pipe_too(cli: Any) -> None:
    done = cli("generate", "--target", "llama", "--temperature", "0", "--max-tokens", "1", f"a{TITLE}", "b\x9b2J")
    assert r"==> 1: a\u001b]0;owned\u0007 <==" in done.stdout
    assert r"==> 2: b\u009b2J <==" in done.stdout


def test_errors_are_escaped_in_a_pipe_too(refused: Any, tmp_path: Path) -> None:
    folder = tmp_path / f"model{TITLE}"
    folder.mkdir()
    for arguments in (("generate", "--target", str(folder), "a"), ("generate", "--target", f"./no{TITLE}", "a")):
        sentence = refused(*arguments)
        assert "\x1b" not in sentence
        assert r"\u001b]0;owned\u0007" in sentence


def test_consoles_escape_what_tables_and_lines_say(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print(f"file{TITLE}")
    assert capsys.readouterr().out == "file\\u001b]0;owned\\u0007\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_live_text_is_exact_in_a_pipe_and_escaped_in_a_terminal(checkpoints: Path, is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=is_terminal, color_system=None)
    text = f"a\r\n{TITLE}"
    LiveText(Tokenizer.load(checkpoints / "llama"), console, []).write(text, "")
    assert out.getvalue() == visible(text, is_terminal)
