"""The results of `benchmarks.peers`: rates, ratios with their range, where texts differ, and a table."""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean, median

from rich.console import Console

from benchmarks.peer_process import Outcome
from forerun.bench.methods_results import broken
from forerun.bench.tables import Column, table
from forerun.text.detokenizer import num_common

OWN = "forerun"
PLAIN = "plain"
OWN_LENGTHS = "K=auto"  # how far to draft is the engine's own choice

Variant = tuple[str, str]  # engine and configuration
Runs = Mapping[Variant, Seq[Outcome]]  # one per prompt and repeat, in the same order for all
Range = tuple[float, float]
Gap = Callable[[int, int], tuple[float, int]]  # (run, position) -> forerun's top-2 gap there, and its second best id


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from forerun's plain text.

    run: index of the run. position: index of the token in the output, from 0. own, other: the ids, None behind the end.
    top2_gap: difference of forerun's two best logits there; where it is small, rounding decides. is_second: whether the
    other engine took forerun's second best.
    """

    run: int
    position: int
    own: int | None
    other: int | None
    top2_gap: float
    is_second: bool


@dataclass(frozen=True)
class PeerLine:
    """One row of the table and of the JSON. Ratios are forerun's best configuration / this one.

    speed_up: this configuration / the same engine's plain decoding, geometric mean over the runs; None where that
    failed. num_as_plain: runs whose text is the same engine's plain text. rates: tokens per second of each run.
    """

    engine: str
    configuration: str
    tokens_per_s: float  # median over the runs, prompt included
    speed_up: float | None
    num_as_plain: int | None
    rates: tuple[float, ...]
    decode_tokens_per_s: float | None  # from the first tokens on
    ratio: float
    ratio_range: Range
    decode_ratio: float | None
    decode_ratio_range: Range | None
    num_runs: int
    divergences: tuple[Divergence, ...]


def best_of(runs: Runs, engine: str) -> Variant:
    """Return an engine's configuration with the largest geometric mean of tokens per second over the same runs.

    A geometric mean ranks configurations by their ratios run by run. A median would not, because prompts differ more
    than configurations do.
    """
    return max((v for v in runs if v[0] == engine), key=lambda v: geometric_mean(o.tokens_per_s for o in runs[v]))


def lines_of(runs: Runs, gap: Gap) -> list[PeerLine]:
    """Return all rows. runs: of every variant, in the same order of prompts and repeats."""
    best, plain = runs[best_of(runs, OWN)], runs[OWN, PLAIN]
    return [
        _line(variant, outcomes, best, plain, runs.get((variant[0], PLAIN)), gap) for variant, outcomes in runs.items()
    ]


def _line(
    variant: Variant,
    outcomes: Seq[Outcome],
    best: Seq[Outcome],
    plain: Seq[Outcome],
    theirs: Seq[Outcome] | None,
    gap: Gap,
) -> PeerLine:
    own = None if theirs is None else list(zip(outcomes, theirs, strict=True))
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(best, outcomes, strict=True)]
    rates = [outcome.decode_tokens_per_s for outcome in outcomes]
    pairs = zip([outcome.decode_tokens_per_s for outcome in best], rates, strict=True)
    decode_ratios = [a / b for a, b in pairs if a is not None and b is not None]
    pairs_of_ids = enumerate(zip(plain, outcomes, strict=True))
    return PeerLine(
        *variant,
        tokens_per_s=median(outcome.tokens_per_s for outcome in outcomes),
        speed_up=None if own is None else geometric_mean(a.tokens_per_s / b.tokens_per_s for a, b in own),
        num_as_plain=None if own is None else sum(a.tokens == b.tokens for a, b in own),
        rates=tuple(outcome.tokens_per_s for outcome in outcomes),
        decode_tokens_per_s=_median([rate for rate in rates if rate is not None]),
        ratio=median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        decode_ratio=_median(decode_ratios),
        decode_ratio_range=(min(decode_ratios), max(decode_ratios)) if decode_ratios else None,
        num_runs=len(outcomes),
        divergences=tuple(
            _divergence(run, own.tokens, other.tokens, gap)
            for run, (own, other) in pairs_of_ids
            if own.tokens != other.tokens
        ),
    )


def _median(values: Seq[float]) -> float | None:
    return median(values) if values else None


def _divergence(run: int, own: Seq[int], other: Seq[int], gap: Gap) -> Divergence:
    position = num_common(own, other)
    mine, theirs = (ids[position] if position < len(ids) else None for ids in (own, other))
    top2_gap, second = gap(run, position)
    return Divergence(run, position, mine, theirs, top2_gap, theirs == second)


@dataclass(frozen=True)
class KindLine:
    """A configuration by kinds of prompts: geometric means of its tokens per second over those of forerun's plain."""

    engine: str
    configuration: str
    ratios: Mapping[str, float]
    all: float


def rates_by_kind(runs: Runs, kinds: Seq[str]) -> list[KindLine]:
    """Return forerun's usual configuration, and each engine's plain and best. kinds: of each run's prompt."""
    engines = dict.fromkeys(engine for engine, _ in runs)
    usual = next((v for v in reversed(list(runs)) if v[0] == OWN and v[1].endswith(OWN_LENGTHS)), (OWN, PLAIN))
    shown = [(OWN, PLAIN), usual]
    for engine in engines:
        shown += [variant for variant in ((engine, PLAIN), best_of(runs, engine)) if variant in runs]
    lines = []
    for variant in dict.fromkeys(shown):
        ratios = dict[str, list[float]]()
        for kind, plain, outcome in zip(kinds, runs[OWN, PLAIN], runs[variant], strict=True):
            ratios.setdefault(kind, []).append(outcome.tokens_per_s / plain.tokens_per_s)
        means = {kind: geometric_mean(values) for kind, values in ratios.items()}
        lines.append(KindLine(*variant, means, geometric_mean(means.values())))
    return lines


# ----------------------------------------------------------------------------------------------------------- output


def print_kinds(lines: Seq[KindLine], console: Console) -> None:
    """Print a table of kinds, and how it is read."""
    columns = [Column(broken(kind), partial(_ratio, kind), "{:.2f}", is_text=False) for kind in lines[0].ratios]
    names = Column("engine", "engine"), Column("configuration", "configuration")
    console.print(table(lines, [*names, *columns, Column("all", "all", "{:.2f}")]))
    console.print("tokens per second over those of forerun's plain decoding, geometric means, prompts included")


def _ratio(kind: str, line: KindLine) -> float:
    return line.ratios[kind]


TABLE = (
    Column("engine", "engine"),
    Column("configuration", "configuration"),
    Column("tok/s", "tokens_per_s", "{:.1f}"),
    Column("over own\nplain", "speed_up", "{:.2f}x"),
    Column("as own\nplain", lambda line: _share(line.num_as_plain, line), is_text=False),
    Column("ratio", "ratio", "{:.2f}x"),
    Column("decode\ntok/s", "decode_tokens_per_s", "{:.1f}"),
    Column("as our\nplain", lambda line: _share(line.num_runs - len(line.divergences), line), is_text=False),
)


def _share(num: int | None, line: PeerLine) -> str | None:
    return None if num is None else f"{num}/{line.num_runs}"


def print_notes(lines: Seq[PeerLine], runs: Runs, prompt_ids: Seq[str], console: Console) -> None:
    """Print how to read the table, forerun's best and usual against each peer's best, and where texts differ."""
    best = best_of(runs, OWN)
    console.print(
        "tok/s: new tokens over the wall time of one generate call, prompt included, median over the runs; over own "
        "plain: geometric mean; decode: from the first tokens on; all without loading, tokenizers and warm-up. ratio: "
        f"forerun's best, {best[1]}, over this one, median of the runs' ratios. as own plain, as our "
        "plain: texts like this engine's plain decoding's, like forerun's"
    )
    usual = next((v for v in reversed(list(runs)) if v[0] == OWN and v[1].endswith(OWN_LENGTHS)), best)
    for engine in dict.fromkeys(line.engine for line in lines if line.engine != OWN):
        line = next(line for line in lines if (line.engine, line.configuration) == best_of(runs, engine))
        for ours in dict.fromkeys((best, usual)):
            pairs = zip(runs[ours], runs[engine, line.configuration], strict=True)
            ratios = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
            console.print(
                f"forerun ({ours[1]}) against the best of {engine} ({line.configuration}): "
                f"{geometric_mean(ratios):.2f}x ({min(ratios):.2f}..{max(ratios):.2f}), geometric mean"
            )
    alike: dict[tuple[str, tuple[Divergence, ...]], list[str]] = {}
    for line in lines:
        alike.setdefault((line.engine, line.divergences), []).append(line.configuration)
    for (engine, divergences), configurations in alike.items():
        if divergences:
            names = ", ".join(configurations)
            console.print(f"{engine} ({names}): {_divergences_text(divergences, lines[0].num_runs, prompt_ids)}")


def _divergences_text(divergences: Seq[Divergence], num_runs: int, prompt_ids: Seq[str]) -> str:
    """Describe the differences by the one with the largest gap of logits; the JSON has all of them."""
    worst = max(divergences, key=lambda d: d.top2_gap)
    choice = "forerun's second best" if worst.is_second else "neither of forerun's two best"
    return (
        f"{len(divergences)} of {num_runs} texts differ; the widest top-2 gap of forerun's own logits where one first "
        f"does is {worst.top2_gap:.3f}, at token {worst.position + 1} of {prompt_ids[worst.run]} (it took {choice})"
    )
