"""Another engine as a child process in an environment of its own: started, asked one thing at a time, ended.

What it is asked and how it answers is written in peer_workers/worker.py, and for single passes in forwards.py there.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "peer_workers"
LOAD_LIMIT_S = 3600.0  # conversions included
RUN_LIMIT_S = 600.0
END_LIMIT_S = 20.0

# What was installed when this was written, and worked. torch first: other packages ask for a build with CUDA.
INSTALL = {
    "transformers": "{0}/bin/pip install torch==2.13.0 transformers==5.23.0",
    "openvino": (
        "{0}/bin/pip install torch==2.13.0 openvino-genai==2026.4.1.0 optimum-intel==2.2.0 && "
        "{0}/bin/pip uninstall -y torchvision"
    ),
}


class PeerError(Exception):
    """A peer cannot be had, failed or died: one sentence that says why. The benchmark goes on without it."""


@dataclass(frozen=True)
class Outcome:
    """One generate call.

    tokens: the new ids. seconds: wall time of the call, prompt included; first_s: of that until the first tokens were
    there, num_first of them.
    """

    tokens: list[int]
    seconds: float
    first_s: float
    num_first: int

    @property
    def tokens_per_s(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of what came after the first tokens; None where all came at once."""
        rest = len(self.tokens) - self.num_first
        return rest / (self.seconds - self.first_s) if rest > 0 and self.seconds > self.first_s else None


@dataclass(frozen=True)
class Pass:
    """One forward pass. best: for each of its tokens the id of the largest logit behind it, lowest id on ties."""

    seconds: float
    best: list[int]


@dataclass(frozen=True)
class Question:
    """What a peer is to load; folders are checkpoints, `work` is for what it has to convert.

    worker: the script that it runs; forwards.py needs nothing but the target.
    """

    target: Path
    draft: Path | None
    work: Path
    num_threads: int
    spec_lengths: tuple[int, ...]
    lookup_max_n: int
    worker: str = "worker.py"

    def as_json(self) -> dict[str, Any]:
        """The first line that a worker reads."""
        paths = {"target": str(self.target), "draft": None if self.draft is None else str(self.draft)}
        return {**vars(self), **paths, "work": str(self.work)}


class PeerProcess:
    """A started peer that has loaded its models; raises PeerError where it cannot.

    about: what runs there, in words. idle_cpu_s: processor time that it took while it had nothing to do.
    """

    def __init__(self, name: str, python: Path, question: Question) -> None:
        self.name, self.python, self.idle_cpu_s = name, python, 0.0
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), str(WORKERS / question.worker), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(python, question.num_threads),
            encoding="utf-8",
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            loaded = self.ask(question.as_json(), LOAD_LIMIT_S)
        except BaseException:
            self.close()
            raise
        self.about: str = loaded["about"]
        self.configurations: list[str] = loaded["configurations"]

    def generate(self, configuration: str, ids: list[int], max_tokens: int) -> Outcome:
        """Continue one prompt. Raises PeerError."""
        question = {"configuration": configuration, "ids": ids, "max_tokens": max_tokens}
        reply = self.ask(question, RUN_LIMIT_S)
        self.idle_cpu_s += reply.pop("idle_cpu_s")
        if len(reply["tokens"]) != max_tokens:
            raise PeerError(f"it wrote {len(reply['tokens'])} tokens where {max_tokens} were asked for")
        return Outcome(**reply)

    def forward(self, past: list[int], ids: list[int]) -> Pass:
        """One pass over `ids` behind `past`. Raises PeerError."""
        reply = self.ask({"past": past, "ids": ids}, RUN_LIMIT_S)
        self.idle_cpu_s += reply.pop("idle_cpu_s")
        return Pass(**reply)

    def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """One line there and one back. Raises PeerError for an answer that is an error, a dead process, no answer."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=limit_s)
        except OSError:
            line = ""
        except queue.Empty:
            self._process.kill()
            raise PeerError(f"it did not answer within {limit_s:.0f} s and was ended") from None
        if not line:
            raise PeerError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" not in reply:
            return reply
        if reply["missing"] is not None:
            raise PeerError(f"{self.python} has no {reply['missing']}; {how_to_install(self.name)}")
        raise PeerError(reply["error"])

    def close(self) -> None:
        """End the process: its input ends, and it is killed if that does not help."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was never read cannot be written any more
            self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"its process ended with exit code {code}" + (f", its last words are {lines[-1]!r}" if lines else "")


def how_to_install(name: str) -> str:
    """The commands that make an environment for a peer, and the option that names it."""
    folder = f"peer-{name}"
    commands = f"python3 -m venv {folder} && {INSTALL[name].format(folder)}"
    return f"make an environment with `{commands}` and add --{name}-python {folder}/bin/python"


def environment(python: Path, num_threads: int) -> dict[str, str]:
    """The variables of a peer: no search path of ours in another environment, no network, no usage statistics."""
    ours = {"PYTHONPATH", "PYTHONHOME"} if str(python) != sys.executable else set()
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    # openvino's tools send statistics of their use, except where CI says so.
    return {**kept, "OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1", "CI": "true"}
