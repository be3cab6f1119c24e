"""What `benchmarks.serving` makes of its runs: rates, percentiles of waiting, goodput, and a table.

    TTFT     from when a request was due until its first text: waiting for a place at the client is waiting, too
    ITL      between two pieces of a stream, as its reader sees them; a piece of a drafting server holds several tokens
    TPOT     of a request: from its first piece to its last, over the tokens behind the first
    goodput  requests per second that were answered within the limits on TTFT and TPOT; failed ones never count

A gap is "quiet" where no other request was between its sending and its first text meanwhile: no prompt was read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.serving_client import Answered, Run
from forerun.bench.tables import Column, milliseconds, rate, table

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Limits:
    """What a request may take to count as good; None = any time. itl_s: on its average, per token (TPOT)."""

    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def are_set(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None

    def are_met(self, answer: Answered) -> bool:
        """Whether a request was answered, and within the limits."""
        if answer.error is not None or (self.ttft_s is not None and answer.ttft_s > self.ttft_s):
            return False
        return self.itl_s is None or answer.tpot_s is None or answer.tpot_s <= self.itl_s


@dataclass(frozen=True)
class Percentiles:
    """Of seconds, interpolated linearly."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """None where there is no value."""
        found = list(values)
        return cls(*(float(v) for v in np.percentile(found, PERCENTILES))) if found else None


@dataclass(frozen=True)
class Line:
    """One server under one load. Rates are medians over the repeats, percentiles are over all their requests."""

    server: str
    load: str
    concurrency: int | None
    rate: float | None
    num_requests: int
    num_answered: int
    failures: dict[str, int]  # by what went wrong
    tokens_per_s: float
    requests_per_s: float
    speedup: float | None  # over the first server: median of the ratios of the repeats
    speedup_range: tuple[float, float] | None
    tokens_per_piece: float | None
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    quiet_itl_s: Percentiles | None
    num_quiet_gaps: int
    tpot_s: Percentiles | None
    num_good: int
    goodput_per_s: float
    client_cpu_share: float  # of one core, by this process


def lines_of(runs: Seq[Run], limits: Limits) -> list[Line]:
    """One line for each load and server, in the order of the runs' loads and the first repeat's servers."""
    loads = list(dict.fromkeys(run.load for run in runs))
    servers = list(dict.fromkeys(run.server for run in runs))
    rates = {(run.load, run.server, run.repeat): run.tokens_per_s for run in runs}
    lines = []
    for load in loads:
        for server in servers:
            own = [run for run in runs if (run.load, run.server) == (load, server)]
            base = [rates[load, servers[0], run.repeat] for run in own]
            speedups = [run.tokens_per_s / rate for run, rate in zip(own, base, strict=True) if rate > 0]
            lines.append(_line(own, limits, speedups if server != servers[0] else []))
    return lines


def _line(runs: Seq[Run], limits: Limits, speedups: Seq[float]) -> Line:
    answers = [answer for run in runs for answer in run.answers]
    good = [answer for answer in answers if answer.error is None]
    load = runs[0].load
    quiet = [gap for run in runs for gap in quiet_gaps_s(run.answers)]
    pieces = sum(len(answer.arrivals_s) for answer in good)
    return Line(
        server=runs[0].server,
        load=load.name,
        concurrency=load.concurrency,
        rate=load.rate,
        num_requests=len(answers),
        num_answered=len(good),
        failures=dict(Counter(answer.error for answer in answers if answer.error is not None)),
        tokens_per_s=median(run.tokens_per_s for run in runs),
        requests_per_s=median(sum(a.error is None for a in run.answers) / run.seconds for run in runs),
        speedup=median(speedups) if speedups else None,
        speedup_range=(min(speedups), max(speedups)) if speedups else None,
        tokens_per_piece=sum(answer.num_tokens for answer in good) / pieces if pieces else None,
        ttft_s=Percentiles.of(answer.ttft_s for answer in good),
        itl_s=Percentiles.of(gap for answer in good for gap in answer.gaps_s),
        quiet_itl_s=Percentiles.of(quiet),
        num_quiet_gaps=len(quiet),
        tpot_s=Percentiles.of(answer.tpot_s for answer in good if answer.tpot_s is not None),
        num_good=sum(limits.are_met(answer) for answer in answers),
        goodput_per_s=median(sum(limits.are_met(a) for a in run.answers) / run.seconds for run in runs),
        client_cpu_share=sum(run.cpu_s for run in runs) / sum(run.seconds for run in runs),
    )


def quiet_gaps_s(answers: Seq[Answered]) -> list[float]:
    """The gaps of one run during which no request waited for its first text."""
    waits = sorted((a.sent_s, a.arrivals_s[0] if a.arrivals_s else a.ended_s) for a in answers)
    starts, ends = list[float](), list[float]()
    for start, end in waits:
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    quiet = []
    for answer in answers:
        if answer.error is None:
            pairs = list(pairwise(answer.arrivals_s))
            behind = np.searchsorted(ends, [a for a, _ in pairs], side="right")  # the first wait that ends later
            quiet += [b - a for (a, b), i in zip(pairs, behind, strict=True) if i == len(starts) or starts[int(i)] >= b]
    return quiet


def record_of(run: Run) -> dict[str, Any]:
    """One run for JSON: its rates, and of each request what is not its text."""
    return {
        "server": run.server,
        "load": run.load.name,
        "repeat": run.repeat,
        "seconds": run.seconds,
        "client_cpu_s": run.cpu_s,
        "num_tokens": run.num_tokens,
        "tokens_per_s": run.tokens_per_s,
        "requests": [
            {
                "due_s": answer.due_s,
                "ttft_s": answer.ttft_s,
                "tpot_s": answer.tpot_s,
                "ended_s": answer.ended_s,
                "num_tokens": answer.num_tokens,
                "status": answer.status,
                "error": answer.error,
            }
            for answer in run.answers
        ],
    }


# ----------------------------------------------------------------------------------------------------------- output


def table_of(lines: Seq[Line], limits: Limits) -> Table:
    """Rates and percentiles, in milliseconds, one row for each load and server."""

    def at(name: str, percentile: str) -> Callable[[Line], float | None]:
        return lambda line: None if getattr(line, name) is None else getattr(getattr(line, name), percentile)

    percentiles = [
        Column(f"{head} ms\np50" if i == 0 else f"p{p}", at(name, f"p{p}"), milliseconds)
        for head, name in (("TTFT", "ttft_s"), ("ITL", "itl_s"))
        for i, p in enumerate(PERCENTILES)
    ]
    return table(
        lines,
        [
            Column("load", "load", is_once=True),
            Column("server", "server"),
            Column("tok/s", "tokens_per_s", rate),
            Column("over\nfirst", "speedup", "{:.2f}", absent=""),
            *percentiles,
            Column("TPOT\np50", at("tpot_s", "p50"), milliseconds),
            *([Column("good\nreq/s", "goodput_per_s", "{:.2f}")] if limits.are_set else []),
        ],
    )


NOTE = """\
tok/s: output tokens of a run over its whole time; over first: over the first server's in the same repeat. TTFT: from \
when a request was due until its first text; ITL: between two pieces of a stream, which hold several tokens where \
drafts were accepted; TPOT: per token behind the first, of a request."""
GOODPUT_NOTE = "good: answered requests per second whose TTFT and TPOT are within the limits."
