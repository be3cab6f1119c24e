"""`benchmarks.replicas`: Ray's replicas against as many `forerun serve` processes, pinned to cores of their own.

Both are started once and hold the same model. A round keeps so many requests going for some seconds, on one of the two
and then on the other, because a shared machine is faster in one minute than in the next; which of them is first
alternates. Clients of the processes take them in turn. What the other one does while it has no requests stays in the
numbers: the processes do nothing, Ray's controller, proxies and heartbeats take a few per cent of a core, so its own
share of that is in both. Clients run on the same machine.
"""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from benchmarks.start import start
from forerun.bench.plans import Plan, repeats
from forerun.bench.tables import Column, Ratio, table
from forerun.cli.bench import JsonFile, keep
from forerun.cli.signatures import Fields, Given
from forerun.errors import BadOption, InternalError, not_installed
from forerun.registry import option
from forerun.text.terminal import make_console

START_S = 300.0
PROCESSES, RAY = "forerun serve", "Ray replicas"
TABLE = (
    Column("", lambda side: side[0]),
    Column("tokens/s", lambda side: statistics.median(side[1]), "{:,.0f}"),
    Column("least", lambda side: min(side[1]), "{:,.0f}"),
    Column("most", lambda side: max(side[1]), "{:,.0f}"),
)


@dataclass(frozen=True)
class ReplicasPlan(Plan):
    """What is measured."""

    target: str = option("shipped", "what every replica serves")
    num_replicas: int = option(2, "on each side", flag="--replicas", min=1)
    concurrency: int = option(16, "requests at once", min=1)
    max_tokens: int = option(64, "tokens per request", min=1)
    seconds: float = option(10.0, "of each round", min=0.1)
    num_repeats: int = repeats(5, "rounds of each side")


def run(plan: ReplicasPlan) -> dict[str, Any]:
    """Measure, print the table and return it as JSON. Raises BadOption where it cannot be measured here."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < plan.num_replicas:
        raise BadOption(f"--replicas={plan.num_replicas} is not possible: this machine has {len(cores)} cores")
    console = make_console()
    share = len(cores) // plan.num_replicas
    with ExitStack() as stack:
        urls = [
            stack.enter_context(_process(plan.target, cores[i * share : (i + 1) * share]))
            for i in range(plan.num_replicas)
        ]
        sides = {PROCESSES: urls, RAY: [stack.enter_context(_replicas(plan, share))]}
        for side in sides.values():
            _load(plan, side, 2.0)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(plan.num_repeats):
            for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
                rates[name].append(_load(plan, sides[name], plan.seconds))
    ratio = Ratio.of([a / b for a, b in zip(rates[RAY], rates[PROCESSES], strict=True)])
    console.print(table(list(rates.items()), TABLE))
    console.print(
        f"Ray's are at {ratio.median:.3f} of the processes (each round against the one beside it: "
        f"{ratio.range[0]:.3f} to {ratio.range[1]:.3f})"
    )
    return {
        "bench": "replicas",
        **plan.record(),
        "num_cores": len(cores),
        "tokens_per_s": rates,
        "ratio": round(ratio.median, 4),
    }


@contextmanager
def _process(target: str, cores: Seq[int]) -> Iterator[str]:
    """`forerun serve` on these cores. Yields its URL."""
    command = [sys.executable, "-m", "forerun", "serve", target, "--port", "0"]
    with _child(command, {"OMP_NUM_THREADS": str(len(cores))}) as (child, log):
        os.sched_setaffinity(child.pid, cores)
        yield _when_there(child, log, r"is served on (http://\S+)")


@contextmanager
def _replicas(plan: ReplicasPlan, num_cores: int) -> Iterator[str]:
    """A Ray cluster of this machine with its replicas. Yields the URL of its proxy."""
    port, num = 18_000 + os.getpid() % 10_000, plan.num_replicas
    arguments = [f"target={plan.target}", f"min_replicas={num}", f"max_replicas={num}", f"cpus={num_cores}"]
    command = [sys.executable, "-m", "forerun.deploy", f"port={port}", *arguments]
    with _child(command, {"OMP_NUM_THREADS": str(num_cores)}) as (child, log):
        _when_there(child, log, r"(is ready at http://\S+)")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _child(command: Seq[str], env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            child = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **env})
        try:
            yield child, log
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _when_there(child: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s and child.poll() is None:
        if found := re.search(pattern, log.read_text(encoding="utf-8", errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise BadOption(f"{child.args!r:.200} did not start: {log.read_text(errors='replace')[-2000:]}")


_number = itertools.count()


def _load(plan: ReplicasPlan, urls: Seq[str], seconds: float) -> float:
    """Keep requests going, each with a prompt of its own. Returns the tokens of those that ended, per second."""
    ends_s = time.monotonic() + seconds
    counts, failures = [0] * plan.concurrency, list[str]()

    def ask(i: int) -> None:
        connection = HTTPConnection(urls[i % len(urls)].removeprefix("http://"), timeout=START_S)
        while time.monotonic() < ends_s and not failures:
            body = {"prompt": f"def f{next(_number)}(x):\n", "max_tokens": plan.max_tokens, "temperature": 0}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            if "usage" not in answer:
                failures.append(str(answer)[:300])
                return
            if time.monotonic() < ends_s:
                counts[i] += answer["usage"]["completion_tokens"]
        connection.close()

    with ThreadPoolExecutor(plan.concurrency) as threads:
        list(threads.map(ask, range(plan.concurrency)))
    if failures:
        raise InternalError(f"a request of the benchmark failed: {failures[0]}")
    return sum(counts) / seconds


def command(plan: Annotated[Given, Fields(ReplicasPlan, is_plan=True)], json_file: JsonFile = None) -> None:
    """Compare replicas of Ray on this machine with pinned `forerun serve` processes, in tokens per second."""
    if find_spec("ray") is None:
        raise not_installed("this benchmark", "ray", "ray")
    keep(run(ReplicasPlan(**plan)), json_file)


if __name__ == "__main__":
    start(command)
