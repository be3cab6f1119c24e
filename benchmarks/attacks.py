"""`benchmarks.attacks` measures what a stream waits for while a server is flooded by clients that mean no good.

Each attack of attack_clients.py goes on for some seconds, by a process of its own. Told of each is how it was answered,
and of the measured stream the median step, the gaps at the 99th percentile and the longest one, beside those of the
stream alone, before and behind all attacks. A gap counts in median steps of the stream alone.

    python -m benchmarks.attacks --target shipped
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.attack_clients import ATTACKS, attacked
from benchmarks.hostile import Streams, streaming
from benchmarks.serving_client import Server
from benchmarks.serving_servers import forerun_command, free_port, started
from benchmarks.start import measuring, start
from forerun.bench.plans import Plan
from forerun.bench.tables import Column, table
from forerun.cli import flags
from forerun.config import EngineConfig
from forerun.registry import option
from forerun.text.terminal import make_console

ALONE = ("alone, before", "alone, behind")


@dataclass(frozen=True)
class AttacksPlan(Plan):
    """The options of the benchmark."""

    seconds: float = option(10.0, "of each attack, and of the stream alone", min=0.5, unit="s")
    rest_s: float = option(2.0, "between two attacks", flag="--rest", min=0.0, unit="s")


@dataclass(frozen=True)
class AttackLine:
    """The stream beside one attack. steps: the longest gap over the median step of the stream alone."""

    name: str
    answers: str
    step_ms: float
    p99_ms: float
    gap_ms: float
    steps: float


def line(name: str, answers: Mapping[str, int], gaps_s: list[float], step_s: float) -> AttackLine:
    """The numbers of one attack. gaps_s: of the stream meanwhile; step_s: of the stream alone."""
    ordered = sorted(gaps_s)
    told = ", ".join(f"{status}: {num:,}" for status, num in sorted(answers.items())) or "-"
    p99_s, most_s = ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]
    return AttackLine(name, told, 1e3 * median(ordered), 1e3 * p99_s, 1e3 * most_s, most_s / step_s)


def gaps_in(streams: Streams, seconds: float) -> list[float]:
    """The gaps of the next seconds. One that has not ended by then is waited for."""
    begun_s = time.perf_counter()
    time.sleep(seconds)
    ended_s = time.perf_counter()
    while not any(times and times[-1] > ended_s for times in streams.times):
        time.sleep(0.01)
    return streams.gaps_s(begun_s, ended_s)


def measure(server: Server, plan: AttacksPlan) -> list[AttackLine]:
    """Return a line for the stream alone, for each attack, and for the stream alone again."""
    with streaming(server.url, 1, priority=-1) as streams:  # it finds a place whoever waits for one
        time.sleep(1)
        alone_s = gaps_in(streams, plan.seconds)
        step_s = median(alone_s)
        lines = [line(ALONE[0], {}, alone_s, step_s)]
        for name in ATTACKS:
            with attacked(server.url, name) as answers:
                gaps_s = gaps_in(streams, plan.seconds)
            lines.append(line(name, answers, gaps_s, step_s))
            time.sleep(plan.rest_s)
        return [*lines, line(ALONE[1], {}, gaps_in(streams, plan.seconds), step_s)]


TABLE = (
    Column("attack", "name", "{}"),
    Column("answers", "answers", "{}"),
    Column("step,\nms", "step_ms", "{:.1f}"),
    Column("99 of 100,\nms", "p99_ms", "{:.1f}"),
    Column("longest\ngap, ms", "gap_ms", "{:.1f}"),
    Column("in steps\nalone", "steps", "{:.1f}"),
)


def run(config: EngineConfig, plan: AttacksPlan) -> dict[str, Any]:
    """Measure, print a table, and return all of it for JSON."""
    console, port = make_console(), free_port()
    with started("forerun", forerun_command(config, port), port, is_own=True) as server:
        lines = measure(server, plan)
    console.print(table(lines, TABLE))
    return {"bench": "attacks", "target": config.target, "plan": plan.record(), "lines": [asdict(one) for one in lines]}


command = measuring(
    run,
    AttacksPlan,
    flags.engine("target", "draft", "extra_drafts", "max_batch_size", "config", "ops"),
    "Flood a server with connections, bodies and unread answers, and measure what a stream waits for.",
)


if __name__ == "__main__":
    start(command)
