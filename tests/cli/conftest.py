"""The real command line, in this process and in one of its own, in a folder of tiny checkpoints."""

import gc
import io
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import processes
from bench.conftest import small_probes
from forerun.cli.main import main
from forerun.text import waiting
from tiny import write_tiny

__all__ = ["small_probes"]  # found here by its name

SOURCE = Path(__file__).parents[2] / "src"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint per architecture and some more.

    `draft` is a draft model, `stranger` has another tokenizer, `long` has many positions.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    for model_type in ARCHITECTURES:
        write_tiny(root / model_type, model_type)
    write_tiny(root / "draft", seed=1)
    write_tiny(root / "stranger", end_token="</s>")
    write_tiny(root / "long", max_positions=100_000)
    return root


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """Writes a text into a file of the test's own folder, and returns its path."""

    def write(text: str, name: str) -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@dataclass(frozen=True)
class Done:
    """What a command left behind. is_spared: whether it kept what was loaded from garbage collections."""

    returncode: int
    stdout: str
    stderr: str
    is_spared: bool = False


def said(stderr: str) -> str:
    """Standard error without the lines of a wait, which come where a machine is busy (tests/cli/test_waiting.py)."""
    lines = stderr.splitlines(keepends=True)
    waits = r"((starting|opening|loading|reading|measuring)([ ,].*)?|.* tokens? (read|written)(, \d+ s)?|)\.*\n"
    return "".join(line for line in lines if not re.fullmatch(waits, line))


@contextmanager
def little_room(num_bytes: int = 64) -> Iterator[None]:
    """No file grows beyond so many bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Python would not notice that a file is cut
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_none
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _given(environ: Mapping[str, str]) -> list[str]:
    """Remove variables of the developer's shell that would change what a command does."""
    return [k for k in environ if k.startswith(("FORERUN_", "NO_COLOR", "FORCE_COLOR", "COLUMNS"))]


@pytest.fixture
def cli(checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `forerun ...` in the folder of the checkpoints, through `main` but in this process: torch loads once.

    stdin: text or bytes, "" by default; code: what the command must end with; env: variables to set.
    """

    def run(*arguments: str, stdin: str | bytes = "", code: int | None = None, **env: str) -> Done:
        spared = list[bool]()
        with monkeypatch.context() as patch:
            patch.chdir(checkpoints)
            for name in _given(os.environ):
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            raw = stdin if isinstance(stdin, bytes) else stdin.encode()
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
            # What is spared of the collector is so until a process ends, and this one has other tests to run.
            patch.setattr(waiting, "SILENT_S", 1e6)  # no line of a wait, however busy the machine is
            patch.setattr(gc, "freeze", lambda: spared.append(True))
            capfd.readouterr()
            with pytest.raises(SystemExit) as exit_:
                main(arguments)
        out, err = capfd.readouterr()
        done = Done(int(exit_.value.code or 0), out, err, bool(spared))
        assert code in (None, done.returncode), out + err
        return done

    return run


@pytest.fixture
def ok(cli: Callable[..., Done]) -> Callable[..., str]:
    """Runs `forerun ...`, which must end well; returns what it prints."""
    return lambda *arguments, **options: cli(*arguments, code=0, **options).stdout


@pytest.fixture
def refused(cli: Callable[..., Done]) -> Callable[..., str]:
    """Runs `forerun ...`, which must end with 2 and one line on standard error alone; returns what the line says.

    code: another code that it must end with.
    """

    def run(*arguments: str, code: int = 2, **options: Any) -> str:
        done = cli(*arguments, code=code, **options)
        assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
        assert done.stderr.startswith("error: ")
        return done.stderr.removeprefix("error: ").rstrip("\n")

    return run


@pytest.fixture
def start(checkpoints: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the real command as a process of its own, with pipes; whatever still runs is killed afterwards."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **env: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if k not in _given(os.environ)}
        process = processes.Popen(
            [sys.executable, "-m", "forerun", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=checkpoints,
            env={**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **env},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def process(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Done]:
    """Runs the real command as a process to its end. code: what it must end with."""

    def run(*arguments: str, code: int | None = None, **env: str) -> Done:
        running = start(*arguments, **env)
        out, err = running.communicate(timeout=120)
        assert code in (None, running.returncode), out + err
        return Done(running.returncode, out, said(err))

    return run
