"""What `benchmarks.throughput` makes of its runs: rates, paired ratios, overheads, two tables and a summary.

A ratio is always of two runs of the same prompts in the same repeat. Which of the others `auto` is held against in a
repeat is chosen on the other repeats: the best of many noisy runs would be better than any of the variants is.
"""

import math
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from rich.console import Console

from forerun.bench.tables import Column, Ratio, rate

PLAIN, AGAIN, AUTO, WRONG = "plain", "plain again", "auto", "auto, always wrong"


def fixed_name(spec_length: int) -> str:
    """The variant that drafts so many tokens in every step."""
    return f"K={spec_length}"


@dataclass(slots=True)
class Counts:
    """One run of one variant: sums over its steps.

    num_sequence_steps: sequences that decoded, summed over the steps. seconds: from the end of the step before each of
    them, so what happens between steps is in it. forward_s: inside the models' forward passes.
    """

    variant: str
    concurrency: int
    repeat: int
    num_steps: int = 0
    num_sequence_steps: int = 0
    num_committed: int = 0
    num_granted: int = 0  # by the pacing policy
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0
    forward_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_committed / self.seconds


@dataclass(frozen=True)
class Cost:
    """What a variant's steps take outside of model forwards, over all repeats."""

    mean_batch: float  # sequences that decode in a step
    step_s: float
    overhead_share: float  # of a step
    overhead_us_per_sequence: float  # of a step, over the sequences that decoded in it


@dataclass(frozen=True)
class Line:
    """One number of requests at once. Rates are medians over the repeats; lengths are per sequence and step."""

    concurrency: int
    plain_tokens_per_s: float
    spec_lengths: tuple[int, ...]  # the best fixed length for each repeat, chosen on the others
    fixed_tokens_per_s: float  # with those
    auto_tokens_per_s: float
    auto_over_better: Ratio  # over plain or the best fixed length, whichever was better in the other repeats
    auto_over_max: Ratio  # over the faster of the two in the same repeat
    wrong_over_plain: Ratio | None  # auto with the drafter that is always wrong
    again_over_plain: Ratio | None  # the same engine once more: what is not 1 is noise
    mean_granted: float
    mean_drafted: float
    mean_accepted: float
    plain_cost: Cost
    auto_cost: Cost


@dataclass(frozen=True)
class Bar:
    """What all repeats at all concurrencies say of one ratio."""

    geometric_mean: float
    num_pairs: int
    smallest_median: float
    at_concurrency: int  # where that is


Run = Mapping[str, Counts]  # the variants of one repeat, by name


def lines_of(runs: Seq[Counts], spec_lengths: Seq[int]) -> list[Line]:
    """One line for each concurrency, in the order of the runs; every one needs two repeats of every variant."""
    groups: dict[int, dict[int, dict[str, Counts]]] = {}
    for run in runs:
        groups.setdefault(run.concurrency, {}).setdefault(run.repeat, {})[run.variant] = run
    return [_line(num, list(repeats.values()), spec_lengths) for num, repeats in groups.items()]


def _line(concurrency: int, repeats: Seq[Run], spec_lengths: Seq[int]) -> Line:
    names = {fixed_name(length): length for length in spec_lengths}
    others = [[*repeats[:i], *repeats[i + 1 :]] for i in range(len(repeats))]
    fixed = [best_of(names, other) for other in others]
    better = [best_of((PLAIN, name), other) for name, other in zip(fixed, others, strict=True)]
    rates = [{name: run.tokens_per_s for name, run in repeat.items()} for repeat in repeats]
    fastest = [max(rate[PLAIN], rate[name]) for rate, name in zip(rates, fixed, strict=True)]
    wrong, again = ([rate[name] / rate[PLAIN] for rate in rates if name in rate] for name in (WRONG, AGAIN))
    autos = [repeat[AUTO] for repeat in repeats]
    steps = sum(run.num_sequence_steps for run in autos)
    return Line(
        concurrency=concurrency,
        plain_tokens_per_s=median(own[PLAIN] for own in rates),
        spec_lengths=tuple(names[name] for name in fixed),
        fixed_tokens_per_s=median(rate[name] for rate, name in zip(rates, fixed, strict=True)),
        auto_tokens_per_s=median(rate[AUTO] for rate in rates),
        auto_over_better=Ratio.of([rate[AUTO] / rate[name] for rate, name in zip(rates, better, strict=True)]),
        auto_over_max=Ratio.of([rate[AUTO] / most for rate, most in zip(rates, fastest, strict=True)]),
        wrong_over_plain=Ratio.of(wrong) if wrong else None,
        again_over_plain=Ratio.of(again) if again else None,
        mean_granted=sum(run.num_granted for run in autos) / steps,
        mean_drafted=sum(run.num_drafted for run in autos) / steps,
        mean_accepted=sum(run.num_accepted for run in autos) / steps,
        plain_cost=cost_of([repeat[PLAIN] for repeat in repeats]),
        auto_cost=cost_of(autos),
    )


def best_of(names: Seq[str] | Mapping[str, int], repeats: Seq[Run]) -> str:
    """The variant with the largest geometric mean of rates over plain decoding's in the same repeat; ties: the first.

    A machine that is slow in one repeat and fast in the next weighs the same in both.
    """
    return max(names, key=lambda name: sum(math.log(r[name].tokens_per_s / r[PLAIN].tokens_per_s) for r in repeats))


def cost_of(runs: Seq[Counts]) -> Cost:
    """Sums over runs first, so that what happens rarely is counted, too."""
    seconds, overhead_s = sum(r.seconds for r in runs), sum(r.seconds - r.forward_s for r in runs)
    steps, sequence_steps = sum(r.num_steps for r in runs), sum(r.num_sequence_steps for r in runs)
    return Cost(sequence_steps / steps, seconds / steps, overhead_s / seconds, 1e6 * overhead_s / sequence_steps)


def bars_of(lines: Seq[Line]) -> dict[str, Bar]:
    """By the name of the ratio; one that was not measured is not there."""
    bars = {}
    for name in ("auto_over_better", "auto_over_max", "wrong_over_plain", "again_over_plain"):
        ratios = {line.concurrency: getattr(line, name) for line in lines if getattr(line, name) is not None}
        if ratios:
            values = [value for ratio in ratios.values() for value in ratio.values]
            least = min(ratios, key=lambda num: ratios[num].median)
            bars[name] = Bar(geometric_mean(values), len(values), ratios[least].median, least)
    return bars


# ----------------------------------------------------------------------------------------------------------- output


def _of(ratio: str, part: str) -> Callable[[Line], Any]:
    """A part of a ratio; None where it was not measured."""
    return lambda line: None if getattr(line, ratio) is None else getattr(getattr(line, ratio), part)


RATES = (
    Column("at\nonce", "concurrency"),
    Column("plain\ntok/s", "plain_tokens_per_s", rate),
    Column("best\nK", lambda line: "/".join(map(str, sorted(set(line.spec_lengths)))), is_text=False),
    Column("its\ntok/s", "fixed_tokens_per_s", rate),
    Column("auto\ntok/s", "auto_tokens_per_s", rate),
    Column("auto /\nbetter", "auto_over_better.median", "{:.3f}"),
    Column("(range)", "auto_over_better.range", "{:.2f}"),
    Column("auto /\nmax", "auto_over_max.median", "{:.3f}"),
    Column("wrong /\nplain", _of("wrong_over_plain", "median"), "{:.3f}"),
    Column("(range)", _of("wrong_over_plain", "range"), "{:.2f}", absent=""),
    Column("A/A\n(range)", _of("again_over_plain", "range"), "{:.2f}", absent=""),
)
COSTS = (
    Column("at\nonce", "concurrency"),
    Column("granted", "mean_granted", "{:.2f}"),
    Column("drafted", "mean_drafted", "{:.2f}"),
    Column("accepted", "mean_accepted", "{:.2f}"),
    Column("batch\nplain", "plain_cost.mean_batch", "{:.1f}"),
    Column("auto", "auto_cost.mean_batch", "{:.1f}"),
    Column("overhead\nplain", "plain_cost.overhead_share", "{:.1%}"),
    Column("auto", "auto_cost.overhead_share", "{:.1%}"),
    Column("us/seq\nplain", "plain_cost.overhead_us_per_sequence", "{:.0f}"),
    Column("auto", "auto_cost.overhead_us_per_sequence", "{:.0f}"),
)
NOTES = """\
at once: requests that are kept going; rates: committed tokens per second of everything, prompts included; better: \
plain or the best fixed K, chosen on the other repeats; max: the faster of these two in the same repeat; wrong: auto \
with a drafter that is always wrong; A/A: the plain engine's double over it, so the noise.
Auto learns while it runs and keeps what it learned from one concurrency to the next: its first run at each \
concurrency includes that learning, which is not left out.
granted, drafted, accepted: tokens of auto per sequence and step; batch: sequences per step; overhead: a step outside \
of model forwards, as a share of it and in microseconds for each sequence."""

_SENTENCES = {
    "auto_over_better": "auto over the better of plain and the best fixed K, chosen on the other repeats",
    "auto_over_max": "auto over the faster of the two in the same repeat",
    "wrong_over_plain": "auto with a drafter that is always wrong over plain",
    "again_over_plain": "the noise of this run, plain's double over plain",
}


def print_bars(bars: Mapping[str, Bar], console: Console) -> None:
    """One line for each ratio."""
    for name, bar in bars.items():
        console.print(
            f"{_SENTENCES[name]}: geometric mean {bar.geometric_mean:.3f} of {bar.num_pairs} pairs, smallest median "
            f"{bar.smallest_median:.3f} (at concurrency {bar.at_concurrency})"
        )
