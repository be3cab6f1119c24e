"""Another engine as a child process in its own environment: starts it, asks it one question at a time, ends it.

peer_workers/worker.py describes questions and answers, and forwards.py beside it those of single passes.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "peer_workers"
PROMPTS_WORKER = "worker.py"
LOAD_LIMIT_S = 3600.0  # conversions included
RUN_LIMIT_S = 600.0
END_LIMIT_S = 20.0

# Versions with which this was written and tested. torch comes first, because other packages ask for a build with CUDA.
INSTALL = {
    "transformers": "{0}/bin/pip install torch==2.13.0 transformers==5.23.0",
    "openvino": (
        "{0}/bin/pip install torch==2.13.0 openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0 && "
        "{0}/bin/pip uninstall -y torchvision"
    ),
    "llama.cpp": "{0}/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36",
}


BUILD_SERVER = (
    "build one in the source of llama.cpp with `cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON && cmake "
    "--build build --target llama-server` and add --llama-server build/bin/llama-server"
)


class PeerError(Exception):
    """A peer cannot be started, failed or died; the message says why. The benchmark continues without it."""


@dataclass(frozen=True)
class Outcome:
    """The result of one generate call.

    tokens: the new ids. seconds: wall time of the call, prompt included. first_s: the part of it until the first tokens
    came. num_first: how many tokens came then.
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
        """The tokens per second after the first tokens; None where all tokens came at once."""
        rest = len(self.tokens) - self.num_first
        return rest / (self.seconds - self.first_s) if rest > 0 and self.seconds > self.first_s else None


@dataclass(frozen=True)
class Pass:
    """The result of one forward pass. best: for each token the id of the largest logit after it, lowest id on ties."""

    seconds: float
    best: list[int]


@dataclass(frozen=True)
class Question:
    """The models that a peer is to load.

    target, draft: checkpoint folders, or GGUF files. work: the folder for conversions. weights: None = bfloat16, else
    "int8" or "int4[:group=...]". dtype: of a folder's weights, where they are not compressed. num_positions,
    num_places: tokens of a text, and texts that are held at once. worker: the script that it runs; forwards.py needs
    the target alone. server: llama.cpp's. folders: target and draft as folders in bfloat16, for engines that read no
    GGUF files; None = as they are.
    """

    target: Path
    draft: Path | None
    work: Path
    num_threads: int
    spec_lengths: tuple[int, ...]
    lookup_max_n: int
    weights: str | None = None
    dtype: str = "bfloat16"
    num_positions: int = 4096
    num_places: int = 1
    worker: str = PROMPTS_WORKER
    server: Path | None = None
    folders: tuple[Path, Path | None] | None = None

    def refuse(self, name: str) -> None:
        """Raise PeerError for an engine that cannot run the target, or not in these weights."""
        is_file = self.target.is_file()
        continues = self.worker == PROMPTS_WORKER
        if is_file and name != "llama.cpp" and not continues:
            raise PeerError("it runs checkpoint folders here, and the target is a GGUF file")
        if not is_file and name == "llama.cpp":
            raise PeerError("it runs GGUF files, and the target is a folder: name a file, as in --target model.gguf")
        if not is_file and self.weights is not None and name == "transformers":
            raise PeerError(f"it runs bfloat16 weights here, and {self.weights} was asked for")
        if name == "llama.cpp" and continues:
            if self.server is None:
                raise PeerError(f"there is no llama-server on the path: {BUILD_SERVER}")
            if self.draft is not None and not self.draft.is_file():
                raise PeerError(f"it runs GGUF files, and the draft model {self.draft.name} is a folder: name a file")

    def as_json(self) -> dict[str, Any]:
        """Return the first line that a worker reads, as JSON values."""
        target, draft = self.folders or (self.target, self.draft)
        paths = {name: value for name, value in vars(self).items() if isinstance(value, Path)}
        texts = {name: str(path) for name, path in paths.items()}
        folders = {"target": str(target), "draft": None if draft is None else str(draft)}
        return {**vars(self), **texts, "folders": folders}


class PeerProcess:
    """A started peer that has loaded its models. Raises PeerError where that fails.

    about: what runs there, in words. idle_cpu_s: processor time that it took while it had nothing to do.
    """

    def __init__(self, name: str, python: Path, question: Question) -> None:
        question.refuse(name)
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
            start_new_session=True,  # a server that it started ends with it
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
        reply = self.ask({"configuration": configuration, "ids": ids, "max_tokens": max_tokens}, RUN_LIMIT_S)
        self.idle_cpu_s += reply.pop("idle_cpu_s")
        if len(reply["tokens"]) != max_tokens:
            raise PeerError(f"it wrote {len(reply['tokens'])} tokens where {max_tokens} were asked for")
        return Outcome(**reply)

    def forward(self, past: list[int], ids: list[int], place: int = 0) -> Pass:
        """Run one pass over `ids` behind `past`, in one of the question's places. Raises PeerError."""
        reply = self.ask({"past": past, "ids": ids, "place": place}, RUN_LIMIT_S)
        self.idle_cpu_s += reply.pop("idle_cpu_s")
        return Pass(**reply)

    def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send one line and read one line. Raises PeerError for an error, a dead process, and where no answer comes."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=limit_s)
        except OSError:
            line = ""
        except queue.Empty:
            self._kill()
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
        """End the process by closing its input, and kill it where it does not end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a dead process cannot take what is still in the buffer
            self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._kill()  # what a worker has started and left behind when it died
        self._errors.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

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
    """Return the commands that make an environment for a peer, and the option that names it."""
    folder = f"peer-{name}"
    commands = f"python3 -m venv {folder} && {INSTALL[name].format(folder)}"
    return f"make an environment with `{commands}` and add {python_flag(name)} {folder}/bin/python"


def has(python: Path, name: str) -> bool:
    """Tell whether an interpreter has a peer's packages, so that it is worth while to prepare its files."""
    module = {"openvino": "openvino_genai"}.get(name, name)
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code], check=False, env=environment(python, 1)).returncode == 0


def python_flag(name: str) -> str:
    """Return the option that names a peer's interpreter."""
    return f"--{name.replace('.', '-')}-python"


def environment(python: Path, num_threads: int) -> dict[str, str]:
    """Return the variables of a peer's process: without our search path, network, and usage statistics."""
    ours = {"PYTHONPATH", "PYTHONHOME"} if str(python) != sys.executable else set()
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    # openvino's tools send statistics of their use, except where CI says so.
    return {**kept, "OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1", "CI": "true"}
