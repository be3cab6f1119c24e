"""examples/server_client.py, with the server of the other tests."""

import runpy
from pathlib import Path

import pytest

from serve.running import Running

EXAMPLE = Path(__file__).parents[2] / "examples" / "server_client.py"


def test_the_client_of_the_examples_is_answered(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["ask"](server.url)
    assert "guesses were accepted" in capsys.readouterr().out
