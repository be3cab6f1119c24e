"""Runs benchmarks' commands in this process, with small probes of the memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from bench.conftest import small_probes
from benchmarks.start import start
from train.conftest import interrupt

__all__ = ["interrupt", "small_probes"]  # found here by their names


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
