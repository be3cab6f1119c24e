"""`forerun serve` as a process of its own, and what it tells of itself."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import processes

SOURCE = Path(__file__).parents[2] / "src"
START_S = 120  # on a busy machine
CODE = "def fib(n):\n"
JSON = {"content-type": "application/json"}


class Running:
    """A server that accepts requests. url: of its root. log: what it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        found = wait_for(lambda: re.search(r"is served on (http://\S+)", self.log) or process.poll() is not None)
        assert isinstance(found, re.Match), self.log
        self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def metric(self, name: str) -> float:
        """The sum over all labels of a metric, named with its prefix."""
        text = self.http.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)$", text, re.M))

    def is_idle(self) -> bool:
        """Whether no request holds anything."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(f"forerun:{name}") for name in names)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)


def wait_for(what: Callable[[], object]) -> object:
    """What `what` returns, as soon as it is true."""
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if found := what():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def assert_refused(answer: httpx.Response, sentence: str, status: int = 400) -> dict[str, Any]:
    """Assert the status of an answer and a sentence in the message of its error; returns the error."""
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, sentence in error["message"]) == (status, True), answer.text
    return error


@contextmanager
def serving(
    *options: str, target: str | None = "shipped", port: int = 0, command: str = "serve", **env: str
) -> Iterator[Running]:
    """A server, with these options; killed in the end where it still runs. command: `serve`, or `lab`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FORERUN_") or k == "FORERUN_CACHE_DIR"}
    named = [] if target is None else [target]
    arguments = [sys.executable, "-m", "forerun", command, *named, "--port", str(port), *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = processes.Popen(
                arguments, stderr=file, env={**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **env}
            )
        try:
            yield Running(process, log)
        finally:
            process.kill()
            process.wait()
