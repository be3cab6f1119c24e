"""`benchmarks.hostile` sends 200 grammars and schemas that are meant to take much to a server, beside plain streams.

Each must be refused, or served to a few tokens. What is told of each: its status, the time until it is answered, the
memory that the server's processes hold afterwards, and the longest gap between two tokens of the streams meanwhile,
beside the median step of the streams when nothing else is asked.

    python -m benchmarks.hostile --target shipped
"""

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.hostile_grammars import NUM, hostile
from benchmarks.serving_client import COMPLETION, Server
from benchmarks.serving_servers import forerun_command, free_port, started
from benchmarks.start import measuring, start
from forerun.bench.plans import Plan
from forerun.bench.tables import Column, table
from forerun.cli import flags
from forerun.config import EngineConfig
from forerun.registry import option
from forerun.text.terminal import make_console

QUIET_S = 15.0  # of the streams alone, in which the median step is measured
MOST_SHOWN = 8


@dataclass(frozen=True)
class HostilePlan(Plan):
    """The options of the benchmark."""

    num_grammars: int = option(NUM, "of the 200 grammars", flag="--grammars", min=1)
    num_streams: int = option(2, "plain streams beside them", flag="--streams", min=1)
    max_tokens: int = option(4, "of an answer that is served", min=1)
    seed: int = option(1, "of the grammars and their order")


@dataclass(frozen=True)
class HostileLine:
    """One grammar. gap_ms: the longest of a stream meanwhile; megabytes: of the server's processes afterwards."""

    name: str
    status: int
    seconds: float
    gap_ms: float
    steps: float  # the gap over the median step
    megabytes: float
    said: str


class Streams:
    """Plain streams that go on until the end, and when their tokens came. fields: of their bodies, beside the usual."""

    def __init__(self, url: str, num: int, **fields: Any) -> None:
        self._url, self._fields, self._is_over = url, fields, False
        self.times: list[list[float]] = [[] for _ in range(num)]
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(num)]
        for thread in self._threads:
            thread.start()

    def gaps_s(self, since_s: float, until_s: float = float("inf")) -> list[float]:
        """Between two tokens that follow each other, at least partly in this time."""
        pairs = [pair for times in self.times for pair in pairwise(list(times))]
        return [after - before for before, after in pairs if before >= 0 and after >= since_s and before <= until_s]

    def end(self) -> None:
        """Let the threads end."""
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        body = {"prompt": "def f(", "max_tokens": 1000, "ignore_eos": True, "temperature": 0.7, "stream": True}
        while not self._is_over:
            self.times[index].append(-1.0)  # what comes first waits for its prompt
            asked = body | {"draft": "none"} | self._fields
            with httpx.stream("POST", self._url + COMPLETION, json=asked, timeout=600) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.times[index].append(time.perf_counter())
                    if self._is_over:
                        break


@contextmanager
def streaming(url: str, num: int, **fields: Any) -> Iterator[Streams]:
    """Plain streams beside what is done. This process collects no garbage meanwhile: that took up to 0.1 s of a gap."""
    gc.disable()
    streams = Streams(url, num, **fields)
    try:
        yield streams
    finally:
        streams.end()
        gc.enable()


def megabytes_of(pid: int) -> float:
    """The resident memory of a process and its children, in MB."""
    total = 0.0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
        except OSError:
            continue
        if pid in (int(lines["Pid"]), int(lines["PPid"])) and "VmRSS" in lines:
            total += int(lines["VmRSS"].split()[0]) / 1e3
    return total


@dataclass(frozen=True)
class Alone:
    """The streams before anything else is asked. step_ms: the median; gap_ms: the longest; megabytes: of the server."""

    step_ms: float
    gap_ms: float
    megabytes: float


def measure(server: Server, plan: HostilePlan) -> tuple[Alone, list[HostileLine]]:
    """Return the streams alone, and a line for each grammar. The server runs here."""
    assert server.pid is not None
    lines = []
    with streaming(server.url, plan.num_streams) as streams, httpx.Client(timeout=600) as client:
        time.sleep(1)
        begun_s = time.perf_counter()
        time.sleep(QUIET_S)
        quiet_s = streams.gaps_s(begun_s)
        step_s = median(quiet_s)
        alone = Alone(1e3 * step_s, 1e3 * max(quiet_s), megabytes_of(server.pid))
        for name, inside in hostile(plan.seed)[: plan.num_grammars]:
            body = b'{"prompt": "x", "max_tokens": %d, "temperature": 0, %s}' % (plan.max_tokens, inside)
            begun_s = time.perf_counter()
            answer = client.post(server.url + COMPLETION, content=body, headers={"content-type": "application/json"})
            ended_s = time.perf_counter()
            time.sleep(2 * step_s)
            gap_s = max(streams.gaps_s(begun_s, ended_s), default=ended_s - begun_s)
            said = answer.json().get("error", {}).get("message", "")[:200]
            made = (ended_s - begun_s, 1e3 * gap_s, gap_s / step_s, megabytes_of(server.pid))
            lines.append(HostileLine(name, answer.status_code, *made, said))
    return alone, lines


TABLE = (
    Column("grammar", "name", "{}"),
    Column("status", "status", "{}"),
    Column("answered\nin s", "seconds", "{:.2f}"),
    Column("longest\ngap, ms", "gap_ms", "{:.1f}"),
    Column("in steps", "steps", "{:.1f}"),
    Column("MB", "megabytes", "{:.0f}"),
)


def run(config: EngineConfig, plan: HostilePlan) -> dict[str, Any]:
    """Measure, print the worst, and return all of it for JSON."""
    console, port = make_console(), free_port()
    with started("forerun", forerun_command(config, port), port, is_own=True) as server:
        alone, lines = measure(server, plan)
    worst = sorted(lines, key=lambda line: -line.seconds)[:MOST_SHOWN]
    worst += sorted(set(lines) - set(worst), key=lambda line: -line.steps)[:MOST_SHOWN]
    console.print(table(worst, TABLE))
    gaps = sorted(line.steps for line in lines)
    console.print(
        f"{len(lines)} grammars: {dict(Counter(line.status for line in lines))}; answered in "
        f"{median(line.seconds for line in lines):.2f} s (median), {max(line.seconds for line in lines):.2f} s (most); "
        f"a step of the streams alone takes {alone.step_ms:.1f} ms (median), {alone.gap_ms / alone.step_ms:.1f} steps "
        f"(most in {QUIET_S:g} s); their longest gaps beside a grammar are "
        f"{median(gaps):.1f} steps (median), {gaps[int(0.95 * len(gaps))]:.1f} (95 of 100), {gaps[-1]:.1f} (most); "
        f"memory {alone.megabytes:.0f} MB before, {max(line.megabytes for line in lines):.0f} MB at most, "
        f"{lines[-1].megabytes:.0f} MB in the end",
        markup=False,
    )
    return {
        "bench": "hostile",
        "target": config.target,
        "plan": plan.record(),
        "alone": asdict(alone),
        "lines": [asdict(line) for line in lines],
    }


command = measuring(
    run,
    HostilePlan,
    flags.engine("target", "draft", "extra_drafts", "max_batch_size", "config", "ops"),
    "Send hostile grammars and schemas to a server, and measure what they take of it and of other streams.",
)


if __name__ == "__main__":
    start(command)
