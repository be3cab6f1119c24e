"""Which package index `make demo` takes torch from, that it brings what the lab needs, and what it says meanwhile."""

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BEGUN = "the kernels are compiled while packages arrive, which takes two to nine minutes"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


class Answering(BaseHTTPRequestHandler):
    """An index that is there."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def index() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        server.shutdown()


def chosen(folder: Path, gpus: str, *variables: str) -> tuple[str, str]:
    """What make chooses, and what it says, where nvidia-smi lists these GPUs."""
    tool = folder / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nprintf "{gpus}"\n', encoding="utf-8")
    tool.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("TORCH_INDEX", "MAKEFLAGS")}
    env |= {"PATH": f"{folder}:{env['PATH']}", "no_proxy": "*"}
    command = ["make", "--no-print-directory", "torch-index", *variables]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip(), done.stderr.strip()


def test_without_a_gpu_the_cpu_builds_are_taken_where_their_index_answers(tmp_path: Path, index: str) -> None:
    assert chosen(tmp_path, "", f"CPU_BUILDS={index}") == (index, "")


def test_with_a_gpu_pips_own_index_is_left_alone(tmp_path: Path, index: str) -> None:
    assert chosen(tmp_path, "GPU 0: some card", f"CPU_BUILDS={index}") == ("", "")


def test_an_index_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found, said = chosen(tmp_path, "", f"CPU_BUILDS={url}", "ANSWER_S=0.2")
    assert found == ""
    assert "does not answer: torch comes from pip's own index" in said


@pytest.mark.parametrize("given", ["", "https://example.org/simple"])
def test_an_index_that_is_named_is_the_one(tmp_path: Path, index: str, given: str) -> None:
    assert chosen(tmp_path, "", f"CPU_BUILDS={index}", f"TORCH_INDEX={given}") == (given, "")


def test_the_demo_installs_what_the_lab_needs() -> None:
    """And no torch, for which an index of its own would be asked."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("$(READY): pyproject.toml"))
    listed = '$(BIN)/python -c "$$DEPENDENCIES" serve > $(VENV)/dependencies.txt'
    assert lines[at + 1] == f"\t@{listed} && index= && $(INSTALL)"


def set_up(folder: Path, packages: str, kernels: str) -> dict[str, Any]:
    """How to run a set-up in a folder, with a pip that is a program here: what it does for each."""
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    pip = folder / "pip"
    pip.write_text(f'#!/bin/sh\ncd {folder}\ncase " $* " in *" -e "*) {kernels};; *) {packages};; esac\n', "utf-8")
    pip.chmod(0o755)
    variables = [f"VENV={folder}", f"PIP={pip}", f"BUILD={folder}/build"]
    # Within `make test` the set-up would be a make in a make, which says so in its lines.
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return {"args": ["make", "--no-print-directory", *variables, f"{folder}/ready"], "cwd": ROOT, "env": alone}


@pytest.mark.parametrize(
    ("packages", "kernels", "last"),
    [
        ("true", "true", "what pip says"),
        ("false", "true", "is there a network, and the index that it asks?"),
        ("true", "false", "they need a C++ compiler and Python's headers"),
    ],
)
def test_a_file_holds_all_that_the_set_up_says(tmp_path: Path, packages: str, kernels: str, last: str) -> None:
    """In their order, also where a part of it fails."""
    (tmp_path / "said.txt").write_text("what stood there\n", encoding="utf-8")
    with (tmp_path / "said.txt").open("a", encoding="utf-8") as said:
        how = set_up(tmp_path, f'echo "what pip says"; {packages}', kernels)
        done = subprocess.run(**how, stdout=said, stderr=said, timeout=60, check=False)
    lines = without_dots((tmp_path / "said.txt").read_text(encoding="utf-8"))
    assert lines[:3] == ["what stood there", BEGUN, "what pip says"]
    assert last in [line for line in lines if not line.startswith("make: ***")][-1]
    assert (done.returncode, (tmp_path / "ready").exists()) == ((0, True) if last in lines else (2, False))


def without_dots(said: str) -> list[str]:
    """Return the lines of a text without the dots that stand for seconds."""
    return [line.lstrip(".") for line in said.splitlines() if line.strip(".")]


# Two files to compile, of which the first is.
FIRST = "mkdir -p build/here && printf 'build %s.o: CXX\\n' a b > build/here/build.ninja && touch build/here/a.o"


def test_a_file_says_how_many_files_are_compiled_when_that_changes(tmp_path: Path) -> None:
    seen = "until grep -q '{} of 2' said.txt; do sleep 0.1; done"
    kernels = f"{FIRST}; {seen.format(1)}; sleep 1.5; touch build/here/b.o; {seen.format(2)}"
    with (tmp_path / "said.txt").open("w", encoding="utf-8") as said:
        subprocess.run(**set_up(tmp_path, "true", kernels), stdout=said, timeout=60, check=True)
    text = (tmp_path / "said.txt").read_text(encoding="utf-8")
    assert without_dots(text) == [BEGUN, "1 of 2 files are compiled", "2 of 2 files are compiled"]
    assert re.search(r"1 of 2 files are compiled\n\.+\n2 of 2 files are compiled", text), "a dot for each second"


def test_a_set_up_that_is_stopped_leaves_nothing_running(tmp_path: Path) -> None:
    """Nor what its parts have started: all of them hold the other end of a pipe here."""
    ours, theirs = os.pipe()
    how = set_up(tmp_path, "sleep 60; true", f"{FIRST}; sleep 60; true")
    with subprocess.Popen(
        **how, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, pass_fds=[theirs]
    ) as make:
        os.close(theirs)
        assert make.stdout is not None
        assert make.stdout.readline() == f"{BEGUN}\n"
        while "1 of 2 files are compiled" not in make.stdout.readline():
            pass
        os.killpg(make.pid, signal.SIGINT)
        said = make.communicate(timeout=30)[1]
    assert "stopped: the same command begins again" in said.splitlines()
    assert make.returncode != 0
    assert select.select([ours], [], [], 30)[0]
    os.close(ours)
