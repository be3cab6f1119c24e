"""The results of `forerun bench methods`: rates by way and kind of work, and two tables for each temperature.

A way is a drafter with a pacing policy and a verification rule. A cell is one way on one kind, and a summary is one way
on all kinds. Each run of a prompt gives a ratio: the seconds per token of plain decoding in the same turn, divided by
the seconds per token of the way. The speed-up of a cell is the median of these ratios. The speed-up of a summary is the
geometric mean over its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter
from statistics import geometric_mean, median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.bench.results import Ceiling, Tally, overheads
from forerun.bench.tables import Column, table

PLAIN, AGAIN = "none", "none again"  # AGAIN is plain decoding once more: how far its speed-up is from 1 is noise

MOST_UNBROKEN = 6  # characters of a kind's name in the head of a column; longer ones get two lines


@dataclass(frozen=True)
class Counts:
    """Counts and rates over all steps of some runs. alpha_hat is None if no drafted token was tested.

    tokens_per_pass: the tokens that a step emits on average, the target's own token included. overhead_share: the
    share of the steps' time outside of the passes of target and draft model. The work of a drafter without a model
    counts as overhead. draft_share: the share of the steps' time that drafting takes.
    """

    num_tokens: int
    tokens_per_pass: float
    alpha_hat: float | None
    overhead_share: float
    draft_share: float


@dataclass(frozen=True)
class Cell(Counts):
    """The results of one way on one kind of work at one temperature. speedups: the speed-up of each run."""

    name: str
    temperature: float
    kind: str
    num_runs: int
    tokens_per_s: float
    speedup: float
    speedups: tuple[float, ...]


@dataclass(frozen=True)
class Summary(Counts):
    """The results of one way over all kinds of work at one temperature. Rates are geometric means over the kinds.

    The fields of Counts are computed over all steps. speedup_range: the least and the greatest speed-up over the
    rounds. A round has one run of each kind.
    """

    name: str
    temperature: float
    tokens_per_s: float
    speedup: float
    speedup_range: tuple[float, float]
    least_speedup: float
    least_kind: str


def counts_of(tallies: Seq[Tally]) -> Counts:
    """Compute the Counts of all steps of these runs."""
    steps = [step for tally in tallies for step in tally.steps]
    seconds = sum(step.seconds for step in steps)
    tested, accepted = (sum(tally.total(name) for tally in tallies) for name in ("num_tested", "num_accepted"))
    return Counts(
        num_tokens=sum(step.num_committed for step in steps),
        tokens_per_pass=sum(step.num_emitted for step in steps) / len(steps),
        alpha_hat=accepted / tested if tested else None,
        overhead_share=sum(sum(overheads(tally)) for tally in tallies) / seconds,
        draft_share=sum(step.draft_s for step in steps) / seconds,
    )


def cells_of(tallies: Mapping[tuple[float, str, str], Tally]) -> list[Cell]:
    """Return one cell per tally. tallies: by temperature, kind and name of the way; PLAIN is among the names."""
    cells = []
    for (temperature, kind, name), tally in tallies.items():
        plain = tallies[temperature, kind, PLAIN].seconds_per_token
        ratios = [a / b for a, b in zip(plain, tally.seconds_per_token, strict=True)]
        cells.append(
            Cell(
                **vars(counts_of([tally])),
                name=name,
                temperature=temperature,
                kind=kind,
                num_runs=len(ratios),
                tokens_per_s=1 / median(tally.seconds_per_token),
                speedup=median(ratios),
                speedups=tuple(ratios),
            )
        )
    return cells


def summaries_of(tallies: Mapping[tuple[float, str, str], Tally], cells: Seq[Cell]) -> list[Summary]:
    """Return a summary for each way of drafting and temperature. At each temperature the fastest way comes first."""
    summaries = []
    for temperature, name in dict.fromkeys((cell.temperature, cell.name) for cell in cells):
        matching = [cell for cell in cells if (cell.temperature, cell.name) == (temperature, name)]
        least = min(matching, key=lambda cell: cell.speedup)
        rounds = list(map(geometric_mean, zip(*(cell.speedups for cell in matching), strict=False)))
        summaries.append(
            Summary(
                **vars(counts_of([tallies[temperature, cell.kind, name] for cell in matching])),
                name=name,
                temperature=temperature,
                tokens_per_s=geometric_mean(cell.tokens_per_s for cell in matching),
                speedup=geometric_mean(cell.speedup for cell in matching),
                speedup_range=(min(rounds), max(rounds)),
                least_speedup=least.speedup,
                least_kind=least.kind,
            )
        )
    return sorted(summaries, key=lambda summary: (summary.temperature, -summary.speedup))


# ----------------------------------------------------------------------------------------------------------- output


def speed_table(cells: Seq[Cell], summaries: Seq[Summary], kinds: Seq[str], head: str) -> Table:
    """Return a table of the speed-ups at one temperature, with a row for each way and a column for each kind.

    The best speed-up of a column has a star.
    """
    by_cell = {(cell.name, cell.kind): cell.speedup for cell in cells}
    rows = [summary for summary in summaries if summary.name not in (PLAIN, AGAIN)]
    again = [summary for summary in summaries if summary.name == AGAIN]
    speedups = {kind: _on(kind, by_cell) for kind in kinds} | {"all": attrgetter("speedup")}
    return table(
        [*rows, *again],
        [
            Column(head, "name"),
            *(Column(broken(name), _starred(of, max(map(of, rows))), is_text=False) for name, of in speedups.items()),
            Column("least\n-most", "speedup_range", "{:.2f}"),
            Column("tokens\n/s", "tokens_per_s", "{:.1f}"),
        ],
    )


def counts_table(cells: Seq[Cell], summaries: Seq[Summary], kinds: Seq[str], head: str) -> Table:
    """Return a table of the tokens per pass at one temperature, with a row for each way and a column for each kind.

    Further columns have the acceptance rate and the shares of time, over all kinds.
    """
    by_cell = {(cell.name, cell.kind): cell.tokens_per_pass for cell in cells}
    return table(
        [summary for summary in summaries if summary.name != AGAIN],
        [
            Column(head, "name"),
            *(Column(broken(kind), _on(kind, by_cell), "{:.2f}") for kind in kinds),
            Column("all", "tokens_per_pass", "{:.2f}"),
            Column("alpha", "alpha_hat", "{:.2f}"),
            Column("draft-\ning", "draft_share", "{:.1%}"),
            Column("over-\nhead", "overhead_share", "{:.1%}"),
        ],
    )


def _on(kind: str, speedups: Mapping[tuple[str, str], float]) -> Callable[[Summary], float]:
    return lambda row: speedups[row.name, kind]


def broken(kind: str) -> str:
    """Return the name of a kind, in two lines where it is long."""
    half = len(kind) // 2
    return f"{kind[:half]}-\n{kind[half:]}" if len(kind) > MOST_UNBROKEN else kind


def _starred(of: Callable[[Summary], float], best: float) -> Callable[[Summary], Text]:
    return lambda row: Text(f"{of(row):.2f}*", "bold") if of(row) == best else Text(f"{of(row):.2f} ")


SPEED_NOTE = (
    "Speed-up: plain decoding's time per token over this way's, on the same prompt in the same turn, the median over "
    "the prompts; all: the geometric mean over the kinds; least-most: of the rounds, one prompt of each kind in each. "
    "*: the best of its column. none again: plain decoding once more, so how far it is from 1 is the noise of these "
    "numbers."
)
COUNTS_NOTE = (
    "Tokens that come of one pass of the target, none being plain decoding. alpha: accepted / tested tokens. Shares of "
    "the time of a step: drafting, and overhead, which is all outside of the target's passes and a draft model's."
)


Results = tuple[Seq[Cell], Seq[Summary]]


def print_methods(
    cells: Seq[Cell], summaries: Seq[Summary], kinds: Seq[str], head: str, ceiling: Ceiling, console: Console
) -> None:
    """Print two tables for each temperature, and notes on how to read them. head: the heading of the first column."""
    print_results({"": (cells, summaries)}, kinds, head, console, ceiling)


def print_results(
    results: Mapping[str, Results], kinds: Seq[str], head: str, console: Console, ceiling: Ceiling | None = None
) -> None:
    """Print the speed-ups and the tokens per pass for each temperature, and notes on how to read them.

    results: the cells and summaries for each measured part of the requests, such as "whole requests"; "" where there is
    only one part. Each part has a table of speed-ups. kinds: the kinds of work, one column each. head: the heading of
    the first column. ceiling: the limit to compare plain decoding with.
    """
    for temperature in dict.fromkeys(summary.temperature for _, summaries in results.values() for summary in summaries):
        begins = f"\nTemperature {temperature:g}"
        makes = "speed-up over plain decoding, which makes"
        for part, (all_cells, all_summaries) in results.items():
            cells = [cell for cell in all_cells if cell.temperature == temperature]
            summaries = [summary for summary in all_summaries if summary.temperature == temperature]
            plain = next(summary for summary in summaries if summary.name == PLAIN).tokens_per_s
            limit = "" if ceiling is None else f" ({plain / ceiling.tokens_per_s:.0%} of its limit)"
            console.print(f"{begins}{part and f', {part}'}: {makes} {plain:.1f} tokens/s{limit}", style="bold")
            console.print(speed_table(cells, summaries, kinds, head))
        console.print(f"{begins}: tokens per pass", style="bold")
        console.print(counts_table(cells, summaries, kinds, head))
    console.print(f"\n{SPEED_NOTE}\n{COUNTS_NOTE}")
