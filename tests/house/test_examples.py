"""examples/: each program runs as it stands, on the small model, and says of itself that the texts are the same.

server_client.py runs in tests/serve, where there is a server.
"""

import io
import runpy
import sys
from pathlib import Path

import pytest

from forerun import drafters

EXAMPLES = Path(__file__).parents[2] / "examples"
# Program: its arguments, what is typed, what it prints.
RUNS = {
    "chat": (["shipped"], "class A:\ndef f(\n", "tokens per pass of the model]"),  # ended by the end of the input
    "stream": (["shipped"], "", "the same text beside another request: True"),
    "add_drafter": (["shipped"], "", "the distribution is plain decoding's: True"),
    "transformers_one_line": ([], "", "the same tokens: True"),
    "not_text": (["notes"], "", "the same melodies: True"),
}


def test_an_empty_line_ends_a_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["chat", "shipped"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("class A:\n\ndef f(\n"))
    runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")
    assert capsys.readouterr().out.count("tokens per pass of the model]") == 1


def test_each_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*RUNS, "server_client"}


@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, typed, printed = RUNS[name]
    folders = list(drafters.__path__)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        drafters.__path__[:] = folders  # add_drafter.py adds its own
        sys.modules.pop(f"forerun.drafters.{name}", None)
    lines = capsys.readouterr().out
    assert printed in lines
    assert "False" not in lines
