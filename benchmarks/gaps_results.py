"""The results of `benchmarks.gaps`: medians over the repeats with their ranges, two tables, a summary.

The largest of a hundred gaps depends on the machine's worst moment. The largest gap of plain decoding in the same runs
shows how long that is without any drafter.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil
from statistics import median

from rich.console import Console

from forerun.bench.tables import Column, Ratio, milliseconds


@dataclass(frozen=True)
class Gaps:
    """Seconds between the steps in which a request emits; several tokens of one step come at once."""

    num: int
    median_s: float
    p99_s: float  # the smallest that 99 of 100 do not exceed
    max_s: float

    @classmethod
    def of(cls, gaps_s: Seq[float]) -> Gaps:
        """Summarise at least one gap."""
        return cls(len(gaps_s), median(gaps_s), sorted(gaps_s)[ceil(0.99 * len(gaps_s)) - 1], max(gaps_s))

    @property
    def max_over_median(self) -> float:
        return self.max_s / self.median_s


@dataclass(frozen=True)
class Run:
    """One variant in one repeat.

    cold_s, repeated_s: seconds to the first token of a prompt, and of the same prompt again. num_cached_cold,
    num_cached_repeated: tokens of it that the prefix cache had. alone, reading: gaps of a stream by itself, and while a
    long prompt is read. behind: gaps of both requests after the long prompt's first token. catching_up: those of
    `behind` in whose step a draft model caught up, None where none did. most_caught_up: tokens caught up in one of
    these steps. long_prompt_s: seconds to the long prompt's first token.
    """

    variant: str
    repeat: int
    cold_s: float
    num_cached_cold: int
    repeated_s: float
    num_cached_repeated: int
    alone: Gaps
    reading: Gaps
    behind: Gaps
    catching_up: Gaps | None
    most_caught_up: int
    long_prompt_s: float
    draft_prefill_s: float  # of the long request


@dataclass(frozen=True)
class Line:
    """The numbers of one variant: medians over the repeats, and ratios within one run."""

    variant: str
    cold_s: float
    repeated_s: float
    repeated_over_cold: Ratio
    alone_median_s: float
    alone_max_over_median: Ratio
    reading_median_s: float
    reading_over_alone: Ratio  # of medians
    reading_p99_over_alone: Ratio  # the 99th percentile of gaps while a prompt is read, over the median gap alone
    behind_median_s: float
    behind_max_s: float
    behind_max_over_median: Ratio
    long_prompt_s: float
    draft_prefill_s: float
    catching_up_over_median: Ratio | None  # median gap of steps that caught up / of all; only runs with such steps
    most_caught_up: int  # tokens in one step after the first token, over all repeats


def lines_of(runs: Seq[Run]) -> list[Line]:
    """Return one line for each variant, in the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.repeat):
        groups.setdefault(run.variant, []).append(run)
    return [_line(variant, own) for variant, own in groups.items()]


def _line(variant: str, runs: Seq[Run]) -> Line:
    late = [run.catching_up.median_s / run.behind.median_s for run in runs if run.catching_up]
    return Line(
        variant=variant,
        cold_s=median(run.cold_s for run in runs),
        repeated_s=median(run.repeated_s for run in runs),
        repeated_over_cold=Ratio.of([run.repeated_s / run.cold_s for run in runs]),
        alone_median_s=median(run.alone.median_s for run in runs),
        alone_max_over_median=Ratio.of([run.alone.max_over_median for run in runs]),
        reading_median_s=median(run.reading.median_s for run in runs),
        reading_over_alone=Ratio.of([run.reading.median_s / run.alone.median_s for run in runs]),
        reading_p99_over_alone=Ratio.of([run.reading.p99_s / run.alone.median_s for run in runs]),
        behind_median_s=median(run.behind.median_s for run in runs),
        behind_max_s=median(run.behind.max_s for run in runs),
        behind_max_over_median=Ratio.of([run.behind.max_over_median for run in runs]),
        long_prompt_s=median(run.long_prompt_s for run in runs),
        draft_prefill_s=median(run.draft_prefill_s for run in runs),
        catching_up_over_median=Ratio.of(late) if late else None,
        most_caught_up=max(run.most_caught_up for run in runs),
    )


# ----------------------------------------------------------------------------------------------------------- output


FIRST_TOKENS = (
    Column("", "variant"),
    Column("cold\nms", "cold_s", milliseconds),
    Column("again\nms", "repeated_s", milliseconds),
    Column("again /\ncold", "repeated_over_cold.median", "{:.3f}"),
    Column("(range)", "repeated_over_cold.range", "{:.3f}"),
    Column("long\nms", "long_prompt_s", milliseconds),
    Column("draft\nprefill ms", "draft_prefill_s", milliseconds),
)
GAPS = (
    Column("", "variant"),
    Column("alone\nms", "alone_median_s", milliseconds),
    Column("max /\nmedian", "alone_max_over_median.median", "{:.2f}"),
    Column("reading /\nalone", "reading_over_alone.median", "{:.2f}"),
    Column("p99 /\nalone", "reading_p99_over_alone.median", "{:.2f}"),
    Column("behind\nms", "behind_median_s", milliseconds),
    Column("max /\nmedian", "behind_max_over_median.median", "{:.2f}"),
    Column("(range)", "behind_max_over_median.range", "{:.2f}"),
    Column("caught\nup", "most_caught_up"),
    Column("up /\nmedian", lambda line: line.catching_up_over_median and line.catching_up_over_median.median, "{:.2f}"),
)
NOTES = """\
cold, again: time to the first token of a prompt, and of the same prompt again; long: the same of the long prompt, \
beside a stream; draft prefill: time in which the draft model caught up with the long prompt.
alone, reading, behind: gaps of a stream alone, of it while the long prompt is read, and of both requests after the \
long prompt's first token; several tokens of one step count as one. reading / alone, p99 / alone: the median and the \
99th percentile of gaps while a prompt is read, over the median gap alone. max / median: the largest gap of a run over \
its median; all are medians over the repeats. caught up: the most tokens that draft models caught up in one step after \
the first token; up / median: the median gap of such steps over that of all.
late: no drafter reads a prompt beside the target, so all of it is caught up after the first token."""


def print_summary(lines: Seq[Line], plain: str, console: Console) -> None:
    """Print the largest gap over the median after the long prompt's first token, beside that of plain decoding."""
    ratios = {line.variant: line.behind_max_over_median for line in lines}
    told = {name: "{:.2f} ({:.2f} to {:.2f})".format(ratio.median, *ratio.range) for name, ratio in ratios.items()}
    ceiling = told.pop(plain)
    others = "".join(f"{variant} {number}; " for variant, number in told.items())
    console.print(
        f"largest gap over the median, behind the first token of the long prompt: {others}plain decoding"
        f"{' in the same runs' if others else ''} {ceiling}"
    )
