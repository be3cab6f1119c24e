"""Servers that `benchmarks.serving` starts: forerun's own variants, and llama-server and vllm where they are.

Each is a process of its own on a free port of this machine, and is ended with the benchmark.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import IO

import httpx

from benchmarks.serving_client import Server, find_model
from forerun.config import COMMAND_VARIABLES, DEFAULT_SPEC_LENGTH, EngineConfig
from forerun.errors import BadOption, InternalError, NotFound, UserError
from forerun.models.named import default

PLAIN, FIXED, AUTO = VARIANTS = ("plain", "fixed", "auto")
LLAMA, VLLM = PEERS = ("llama-server", "vllm")
START_LIMIT_S = 900.0  # models of gigabytes, calibration, and what others compile
END_LIMIT_S = 20.0
LAST_LINES = 5  # of a server that did not start


def of_variant(variant: str, config: EngineConfig) -> EngineConfig:
    """The options of a server that decodes plainly, drafts fixed lengths, or is paced by auto."""
    if variant == PLAIN:
        return replace(config, draft="none", extra_drafts=None, spec_length=None, pacing="fixed", pacing_log=None)
    if variant == FIXED:
        return replace(config, spec_length=config.spec_length or DEFAULT_SPEC_LENGTH, pacing="fixed")
    return replace(config, pacing=config.pacing or "auto")


def forerun_command(config: EngineConfig, port: int) -> list[str]:
    """The command line of a server with these options."""
    command = [sys.executable, "-m", "forerun", "serve", config.target or default()]
    command += ["--port", str(port), "--log-level", "warning"]
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name == "target" or value == option.default:
            continue
        flag = option.name.replace("_", "-")
        if option.name == "ignore_config_keys":
            command += [part for key in value.split(",") for part in ("--ignore-config-key", key)]
        elif isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    return command


def peer_command(name: str, config: EngineConfig, target: Path, port: int) -> list[str]:
    """The command line of another engine's server for the same target and as many requests at once.

    Raises NotFound where it is not on the PATH, and BadOption where it cannot run the target.
    """
    found = shutil.which(name)
    if found is None:
        raise NotFound(f"there is no {name} on the PATH")
    if (name == LLAMA) != target.is_file():
        wanted = "a GGUF file, and the target is a folder" if name == LLAMA else "a folder, and the target is a file"
        raise BadOption(f"{name} runs {wanted}")
    at_once = config.max_batch_size
    length = config.max_seq_len
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if name == LLAMA:  # its context is shared by all slots
        size = [] if length is None else ["--ctx-size", str(at_once * length)]
        return [found, "--model", str(target), *where, "--parallel", str(at_once), *size]
    size = [] if length is None else ["--max-model-len", str(length)]
    return [found, "serve", str(target), *where, "--max-num-seqs", str(at_once), *size]


@contextmanager
def started(name: str, command: Seq[str], port: int, *, is_own: bool) -> Iterator[Server]:
    """A server that answers, until the block is left.

    Raises BadOption where it refuses its options, and InternalError where it does not start for another reason.
    """
    url = f"http://127.0.0.1:{port}"
    variables = {key: value for key, value in os.environ.items() if not (is_own and key in _engine_variables())}
    variables["PYTHONUNBUFFERED"] = "1"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log, _sigterm_unwinds():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=variables
        )
        try:
            _wait(name, process, f"{url}/{'ready' if is_own else 'health'}", log)
            yield Server(name, url, find_model(url, {}), is_salted=is_own, about=" ".join(command), pid=process.pid)
        finally:
            _end(process)


def _engine_variables() -> set[str]:
    """What the command line says already: variables that would say it again, or otherwise."""
    names = {f"FORERUN_{option.name.upper()}" for option in fields(EngineConfig)}
    return names | {"FORERUN_CONFIG", *COMMAND_VARIABLES}


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """A benchmark that is ended by SIGTERM ends its servers, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s_of(pid: int) -> float | None:
    """The processor time that a process has taken; None where the system does not say it as Linux does."""
    try:
        fields_behind_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields_behind_name[11]) + int(fields_behind_name[12])) / os.sysconf("SC_CLK_TCK")


def _wait(name: str, process: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    ends_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < ends_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=10, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    log.seek(0)
    last = " / ".join([line.strip() for line in log if line.strip()][-LAST_LINES:])
    if process.poll() == UserError.exit_code:
        raise BadOption(f"the server {name} refuses how it is started: {last}")
    how = "did not answer in time" if process.poll() is None else f"ended with exit code {process.returncode}"
    raise InternalError(f"the server {name} {how}; its last words: {last or 'none'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, twice where it drains, and kill it where it does not."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)
            return
