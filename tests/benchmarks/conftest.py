"""Runs benchmarks' commands in this process, with small probes of the memory."""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bench.conftest import small_probes, tiny
from benchmarks.start import start
from train.conftest import interrupt

__all__ = ["interrupt", "small_probes", "tiny"]  # found here by their names


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And behind the test as many as before."""
    monkeypatch.setenv("FORERUN_NUM_THREADS", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `python -m benchmarks.NAME ARGUMENTS` in this process."""

    def run(name: str, *arguments: str) -> Done:
        with pytest.raises(SystemExit) as exit_:
            start(importlib.import_module(f"benchmarks.{name}").command, arguments)
        return Done(int(exit_.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def record_of(bench: Callable[..., Done]) -> Callable[..., Any]:
    """Runs such a command, which must succeed, and returns its record."""

    def run(name: str, *arguments: str) -> Any:
        done = bench(name, *arguments, "--json", "-")
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
