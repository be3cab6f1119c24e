"""The results of `forerun tune`: the measurements of each way, the choice with its reason, a table, a config file.

The speed-up of a way is plain decoding's time for all prompts divided by the way's time. For each group of prompts, the
seconds per token of both are divided round by round, and the median of these ratios is taken. So a machine that is
slower for a minute does not matter.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from forerun.bench.results import Tally, Variant
from forerun.bench.tables import Column, table
from forerun.bench.tune_prediction import Prediction
from forerun.config import EngineConfig
from forerun.models import named
from forerun.output_file import write_whole

PLAIN, AUTO = "none", "auto"
PLAIN_MARGIN = 1.03  # a way is chosen only if it is faster than plain decoding by this factor
FEW_PROMPTS = 4  # with fewer, nothing is chosen: auto decides while it runs

Seconds = dict[int, dict[int, float]]  # seconds per token, by group of prompts and by round


@dataclass(frozen=True)
class Way:
    """A drafter and its draft length. spec_length: None = pacing=auto sets the length, 0 = plain decoding."""

    draft: str
    spec_length: int | None

    @property
    def length(self) -> str:
        """The length as a table shows it, "-" for plain decoding."""
        if self.spec_length is None:
            return AUTO
        return str(self.spec_length or "-")

    def __str__(self) -> str:
        if self.spec_length == 0:
            return "plain decoding"
        if self.draft == AUTO:
            return "draft=auto, which is as without a file"
        return f"{self.draft} with " + ("pacing=auto" if self.spec_length is None else f"K = {self.spec_length}")


@dataclass(frozen=True)
class Measured:
    """The speed-up of a way to draft over plain decoding, and its lowest and highest value in one benchmark round.

    In each round of the benchmark, every way to draft runs all prompts. num_rounds: the number of rounds.
    """

    speedup: float
    least: float
    most: float
    num_rounds: int


@dataclass
class Contender:
    """A way to draft (drafter and draft length) that is measured.

    predicted: the prediction made before the way was measured; None for plain decoding and pacing=auto. is_out: whether
    the way was so slow that it is not measured any more.
    """

    way: Way
    predicted: Prediction | None
    seconds: Seconds = field(default_factory=dict)
    tally: Tally = field(default_factory=lambda: Tally(Variant("", 0), 0.0))
    measured: Measured = Measured(1.0, 1.0, 1.0, 0)
    is_out: bool = False

    @property
    def tokens_per_pass(self) -> float:
        """The measured number of tokens per pass and request."""
        num_decoded = sum(step.num_decoding for step in self.tally.steps)
        return self.tally.total("num_emitted") / num_decoded if num_decoded else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return {
            **asdict(self.way),
            "length": self.way.length,
            "predicted": None if self.predicted is None else self.predicted.speedup,
            "measured": self.measured.speedup,
            "measured_range": [self.measured.least, self.measured.most],
            "num_rounds": self.measured.num_rounds,
            "tokens_per_pass": self.tokens_per_pass,
        }


@dataclass(frozen=True)
class Found:
    """All results of `forerun tune`.

    predictions: the predictions of each drafter, one for each length. doubt: why the choice is left to pacing=auto;
    empty if the choice is certain. alphas: for each drafter and position, the share of tested tokens that were
    accepted. alpha_hats: for each drafter, this share over all positions. pass_s: the seconds of a pass over one row.
    curve: by number of rows, the seconds of a pass without cached tokens, divided by pass_s. v: by number of rows, the
    time of a pass on the prompts, divided by the time of a plain pass. seconds: the duration of the whole run.
    """

    predictions: Mapping[str, Seq[Prediction]]
    contenders: Seq[Contender]
    chosen: Contender
    doubt: str
    alphas: Mapping[str, Seq[float]]
    alpha_hats: Mapping[str, float | None]
    pass_s: float | None
    curve: Mapping[int, float]
    v: Mapping[int, float]
    num_prompts: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **kept,
            "predictions": {spec: [asdict(one) for one in lengths] for spec, lengths in self.predictions.items()},
            "contenders": [one.as_dict() for one in self.contenders],
            "chosen": self.chosen.as_dict(),
        }


def measured_of(seconds: Seconds, plain: Seconds) -> Measured:
    """Compare a way to draft with plain decoding over the rounds that the way ran.

    seconds: the way's seconds per token, by group of prompts and by round. plain: the same for plain decoding.
    """
    ratios = {group: [in_rounds[i] / plain[group][i] for i in in_rounds] for group, in_rounds in seconds.items()}
    weights = {group: median(plain[group].values()) for group in seconds}
    num_rounds = min(map(len, ratios.values()))
    total = sum(weights.values())

    def speedup(parts: Mapping[int, float]) -> float:
        return total / sum(weights[group] * part for group, part in parts.items())

    rounds = [speedup({group: each[i] for group, each in ratios.items()}) for i in range(num_rounds)]
    return Measured(speedup({g: median(each) for g, each in ratios.items()}), min(rounds), max(rounds), num_rounds)


def chosen_of(contenders: Seq[Contender], num_prompts: int) -> tuple[Contender, str]:
    """Return the chosen way, and the reason why the choice is left to pacing=auto; "" if the measurements decide.

    The fastest way is chosen, or plain decoding where no way is faster by PLAIN_MARGIN. Where the measurements do not
    decide, the best way with pacing=auto is chosen: auto decides while it runs, and is never much slower than plain
    decoding. contenders: plain decoding comes first.
    """
    plain, *others = contenders
    running = [one for one in others if not one.is_out]
    paced = [one for one in running if one.way.spec_length is None]
    auto = max(paced, key=lambda one: one.measured.speedup, default=Contender(Way(AUTO, None), None))
    if num_prompts < FEW_PROMPTS:
        return auto, f"{num_prompts} prompt{'s' * (num_prompts != 1)} of at least {FEW_PROMPTS} were measured"
    best = max(running, key=lambda one: one.measured.speedup, default=plain)
    if best.measured.speedup < PLAIN_MARGIN:
        best = max(running, key=lambda one: one.measured.most, default=plain)
        if best.measured.most < PLAIN_MARGIN:
            return plain, ""
    elif best.measured.least > 1:
        return best, ""
    result = best.measured
    return auto, f"{best.way} made {result.least:.2f} to {result.most:.2f} times plain decoding's tokens per second"


def reason_of(results: Found) -> str:
    """Return the choice and its reason in words."""
    plain, *others = results.contenders
    order = sorted(others, key=lambda one: -one.measured.speedup)
    if results.doubt:
        return f"Nothing is certain: {results.doubt}. Chosen: {results.chosen.way}; more --minutes may tell."
    if not others:
        return "Chosen: plain decoding, for no drafted token was ever right."
    if results.chosen is plain:
        best = f"{order[0].way}, made {order[0].measured.speedup:.2f} times its tokens per second"
        return f"Chosen: plain decoding, for nothing was faster by {PLAIN_MARGIN - 1:.0%}: the best, {best}."
    result, predicted = results.chosen.measured, results.chosen.predicted
    said = "" if predicted is None else f", {predicted.speedup:.2f} were predicted"
    behind = next((one for one in order if one is not results.chosen), None)
    beside = "" if behind is None else f"; the next, {behind.way}, {behind.measured.speedup:.2f}"
    return (
        f"Chosen: {results.chosen.way}, for it made {result.speedup:.2f} times plain decoding's tokens per second "
        f"({result.least:.2f} to {result.most:.2f} in {result.num_rounds} rounds{said}){beside}."
    )


# -------------------------------------------------------------------------------------------------------------- output

NOTE = (
    "K: nodes drafted per pass at most. alpha: accepted / tested. tokens/pass, c (a drafted token over a plain pass), "
    "v (a pass with the draft over one without) and predicted: computed from one run with drafts of 16. measured: in "
    "turns with plain decoding, all prompts; least-most: of the rounds; - where others promised more. *: chosen."
)


def table_of(results: Found) -> Table:
    """Return a table with a row for each measured way, the fastest first. The other drafters' best lengths follow."""
    measured = {one.way.draft for one in results.contenders}
    best = {spec: max(lengths, key=lambda one: one.speedup) for spec, lengths in results.predictions.items()}
    rows: list[tuple[Way, Prediction | None, Contender | None]] = [
        *((one.way, one.predicted, one) for one in sorted(results.contenders, key=lambda one: -one.measured.speedup)),
        *((Way(spec, guess.spec_length), guess, None) for spec, guess in best.items() if spec not in measured),
    ]

    def predicted(name: str) -> Callable[[Any], float | None]:
        return lambda row: None if row[1] is None else getattr(row[1], name)

    def tokens(row: Any) -> float:
        return float(row[2].tokens_per_pass if row[1] is None else row[1].tokens_per_pass)

    def speedup(row: Any) -> str:
        return "- " if row[2] is None else f"{row[2].measured.speedup:.2f}" + ("*" if row[2] is results.chosen else " ")

    def spread(row: Any) -> tuple[float, float] | None:
        is_plain = row[2] is None or row[0].spec_length == 0
        return None if is_plain else (row[2].measured.least, row[2].measured.most)

    return table(
        rows,
        [
            Column("draft", lambda row: "none (plain)" if row[0].spec_length == 0 else row[0].draft),
            Column("K", lambda row: row[0].length, is_text=False),
            Column("alpha", lambda row: results.alpha_hats.get(row[0].draft), "{:.2f}"),
            Column("tokens\n/pass", tokens, "{:.2f}"),
            Column("c", predicted("c"), "{:.3f}"),
            Column("v", predicted("v"), "{:.2f}"),
            Column("pre-\ndicted", predicted("speedup"), "{:.2f}"),
            Column("meas-\nured", speedup, is_text=False),
            Column("least\n-most", spread, "{:.2f}", absent=""),
        ],
    )


def print_found(results: Found, console: Console) -> None:
    """Print the times of passes, the table with its note, and the choice."""
    if results.pass_s is not None:
        rows = ", ".join(f"{rows} {ratio:.2f}" for rows, ratio in results.v.items() if ratio > 1)
        console.print(f"A pass of 1 row takes {1e3 * results.pass_s:.2f} ms here; of more rows, times that: {rows}")
    console.print(table_of(results))
    console.print(NOTE)
    for spec in [results.chosen.way.draft] if results.alphas.get(results.chosen.way.draft) else []:
        console.print(f"alpha of {spec} by position: {' '.join(f'{alpha:.2f}' for alpha in results.alphas[spec])}")
    console.print(reason_of(results), style="bold")


def config_of(chosen: Contender, config: EngineConfig, concurrency: int) -> dict[str, Any]:
    """Return the options of an engine that runs the chosen way, and all other options that differ from the defaults.

    A target that is a folder or file of this machine gets an absolute path, so that the config file works from any
    folder.
    """
    usual = EngineConfig()
    options = {name: value for name, value in config.options().items() if value != getattr(usual, name)}
    for name in ("draft", "extra_drafts", "spec_length", "pacing"):
        options.pop(name, None)
    if config.target is not None:
        path = named.there(config.target)
        options = {"target": config.target if path is None else str(path.resolve()), **options}
    if concurrency > config.max_batch_size:
        options["max_batch_size"] = concurrency
    options["draft"] = chosen.way.draft
    if chosen.way.spec_length is None:
        options["pacing"] = AUTO
    elif chosen.way.spec_length > 0:
        options |= {"spec_length": chosen.way.spec_length, "pacing": "fixed"}
    return options


def write_config(file: Path, options: Mapping[str, Any], results: Found) -> None:
    """Write options as a config file: JSON where the name ends in .json, else TOML, with the choice's reason on top."""
    if file.suffix == ".json":
        text = json.dumps(options, indent=2)
    else:
        lines = [f"# forerun tune. {reason_of(results)}", *(f"{name} = {_toml(v)}" for name, v in options.items())]
        text = "\n".join(lines)
    write_whole(file, f"{text}\n")


def _toml(value: Any) -> str:
    """Return a text, number or boolean as TOML. Their JSON is valid TOML as well, except for the character U+007F."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
