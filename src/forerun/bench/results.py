"""The results of `forerun bench latency`: rates, costs, predictions, two tables, and the record for JSON.

Each speed-up is shown beside the speed-up that theory predicts from measured costs (docs/exactness.md):

    c      seconds per drafted token / seconds of a plain target pass
    v(K)   seconds of a target pass over K+1 tokens / seconds of a plain target pass
    o      seconds of a step outside of drafting and the target pass / seconds of a plain target pass
    alpha  accepted / tested tokens

    Theorem 3.8 (Leviathan et al. 2023)   A / (c K + 1)          A = (1 - alpha^(K+1)) / (1 - alpha)
    with measured costs                   A / (c K + v(K) + o)
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from rich.console import Console

from forerun import native
from forerun.bench import bandwidth
from forerun.bench.tables import Column, table
from forerun.bench.widen import describe, num_parameters
from forerun.ops.model import LoadedModel
from forerun.text.waiting import Waiting
from forerun.theory import formulas
from forerun.types import StepReport

FULL_DRAFTS = 0.8  # the formulas have a fixed K: they are shown where at least this share of steps had a full draft


@dataclass(frozen=True)
class Variant:
    """A drafter and its draft length (0 = plain decoding)."""

    draft: str
    spec_length: int


@dataclass
class Tally:
    """The measurements of all runs of one variant at one temperature.

    seconds_per_token, num_tokens, encoder_s and num_steps have one entry per run, in order. encoder_s: the seconds of
    the encoders, where target and draft model are encoder-decoders. seconds_per_token leaves these seconds out.
    """

    variant: Variant
    temperature: float
    seconds_per_token: list[float] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    draft_forward_s: list[float] = field(default_factory=list)  # per step
    num_tokens: list[int] = field(default_factory=list)
    encoder_s: list[float] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)

    def total(self, name: str) -> int:
        """Return the sum of one count over all steps."""
        return sum(getattr(step, name) for step in self.steps)


@dataclass(frozen=True)
class Line:
    """One line of the tables and of the JSON record. A field is None if nothing was measured for it."""

    draft: str
    spec_length: int
    temperature: float
    tokens_per_s: float
    speedup: float  # median of the prompts' ratios
    speedup_range: tuple[float, float]  # the least and the largest ratio
    tokens_per_step: float
    alpha_hat: float | None
    acceptance_rate: float | None
    c: float | None
    v: float | None
    overhead_share: float  # share of a step's time outside of model forwards
    theorem_3_8: float | None
    expected: float | None  # the prediction with measured costs


# ---------------------------------------------------------------------------------------------------------- numbers


def plain_pass_s_of(tallies: Iterable[Tally]) -> float:
    """Return the median seconds of plain decoding's passes.

    Passes at all temperatures are taken together, because the temperature does not change a pass.
    """
    return median(step.target_forward_s for t in tallies if t.variant.spec_length == 0 for step in t.steps)


def line_of(tally: Tally, plain: Tally, plain_pass_s: float) -> Line:
    """Compute the rates and predictions of a tally. plain: the tally of plain decoding on the same prompts."""
    spec_length = tally.variant.spec_length
    ratios = [a / b for a, b in zip(plain.seconds_per_token, tally.seconds_per_token, strict=True)]
    drafted, tested, accepted = (tally.total(n) for n in ("num_drafted", "num_tested", "num_accepted"))
    line = Line(
        draft=tally.variant.draft,
        spec_length=spec_length,
        temperature=tally.temperature,
        tokens_per_s=1 / median(tally.seconds_per_token),
        speedup=median(ratios),
        speedup_range=(min(ratios), max(ratios)),
        tokens_per_step=tally.total("num_emitted") / len(tally.steps),
        alpha_hat=accepted / tested if tested else None,
        acceptance_rate=accepted / drafted if drafted else None,
        c=_draft_cost(tally, plain_pass_s),
        v=_verify_cost(tally, plain_pass_s, spec_length),
        overhead_share=sum(overheads(tally)) / sum(step.seconds for step in tally.steps),
        theorem_3_8=None,
        expected=None,
    )
    full = sum(step.num_drafted >= spec_length for step in tally.steps)
    if line.alpha_hat is None or line.c is None or line.v is None or full < FULL_DRAFTS * len(tally.steps):
        return line
    # c contains the drafter's own work already, sampling included.
    overhead = median(step.seconds - step.target_forward_s - step.draft_s for step in tally.steps) / plain_pass_s
    return replace(
        line,
        theorem_3_8=formulas.speedup(line.alpha_hat, spec_length, line.c),
        expected=formulas.speedup(line.alpha_hat, spec_length, line.c, line.v, overhead),
    )


def overheads(tally: Tally) -> list[float]:
    """Return, for each step, the seconds outside of the models' forward passes."""
    pairs = zip(tally.steps, tally.draft_forward_s, strict=True)
    return [step.seconds - step.target_forward_s - draft_s for step, draft_s in pairs]


def _draft_cost(tally: Tally, plain_pass_s: float) -> float | None:
    """Return c: seconds per drafted token / seconds of a plain pass.

    The median over the steps is taken, because the first draft takes longer: the draft model also reads the prompt.
    """
    costs = [step.draft_s / step.num_drafted for step in tally.steps if step.num_drafted]
    return median(costs) / plain_pass_s if costs else None


def _verify_cost(tally: Tally, plain_pass_s: float, spec_length: int) -> float | None:
    passes = [step.target_forward_s for step in tally.steps if step.num_drafted == spec_length]
    return median(passes) / plain_pass_s if passes else None


# ----------------------------------------------------------------------------------------------------------- output


@dataclass(frozen=True)
class Ceiling:
    """The limit of plain decoding: every token reads the weights once, at the bandwidth that `probe` measured."""

    bytes_per_pass: int
    bytes_per_s: float
    probe: str

    @property
    def tokens_per_s(self) -> float:
        """The largest number of tokens per second without speculation, at the bandwidth `bytes_per_s`."""
        return self.bytes_per_s / self.bytes_per_pass


def print_ceiling(model: LoadedModel, console: Console) -> Ceiling:
    """Measure the memory's bandwidth. Print and return the limit that the bandwidth sets for plain decoding."""
    with Waiting("measuring the memory"):
        measured = bandwidth.measure(model.device)
    what = "the experts that it chooses and all other weights" if model.config.has_experts else "all weights"
    ceiling = Ceiling(model.bytes_per_pass, measured.bytes_per_s, measured.probe)
    console.print(
        f"limit without speculation: {ceiling.tokens_per_s:,.1f} tokens/s, for each token reads {what}, "
        f"{ceiling.bytes_per_pass / 1e9:.3f} GB, which takes {1e3 / ceiling.tokens_per_s:,.1f} ms at the "
        f"{measured.bytes_per_s / 1e9:.1f} GB/s of this machine's memory (best probe: {measured.probe})"
    )
    return ceiling


_NAMES = (Column("T", "temperature", "{:g}"), Column("draft", "draft", is_text=True), Column("K", "spec_length"))
GAINS = (
    *_NAMES,
    Column("tokens/s", "tokens_per_s", "{:.1f}"),
    Column("speed-\nup", "speedup", "{:.2f}x"),
    Column("least\n-most", "speedup_range", "{:.2f}"),
    Column("tokens/\npass", "tokens_per_step", "{:.2f}"),
    Column("accep-\nted", "acceptance_rate", "{:.0%}"),
)
COSTS = (  # the costs, and the predictions from them
    *_NAMES,
    Column("alpha", "alpha_hat", "{:.3f}"),
    Column("c", "c", "{:.3f}"),
    Column("v(K)", "v", "{:.2f}"),
    Column("over-\nhead", "overhead_share", "{:.1%}"),
    Column("Thm\n3.8", "theorem_3_8", "{:.2f}x"),
    Column("with\ncosts", "expected", "{:.2f}x"),
)
GAINS_NOTE = (
    "T: temperature, 0 = greedy. K: tokens drafted per step. speed-up: tokens/s over those of plain decoding (none), "
    "the median over the prompts, with the least and the most. tokens/pass: tokens that come of one pass of the "
    "target. accepted: of the drafted tokens."
)
THEORY_NOTE = (
    "alpha: accepted tokens / tested ones, for behind a rejection no token is tested. c: time of a drafted token, "
    "v(K): of a pass that checks K of them, both over a plain pass. overhead: share of a step outside of the models. "
    "Thm 3.8: the speed-up that alpha and c promise where checking costs nothing, "
    "(1 - alpha^(K+1)) / ((1 - alpha) (cK + 1)); with costs: with v(K) and the overhead; - where "
    "most drafts had fewer than K tokens, which the formula does not know."
)


def print_tables(lines: Seq[Line], ceiling: Ceiling, console: Console) -> None:
    """Print both tables with notes on how to read them, and the best length for each temperature and drafter."""
    plain = next(line for line in lines if line.spec_length == 0)
    console.print(table(lines, GAINS))
    console.print(f"{GAINS_NOTE} Plain decoding reaches {plain.tokens_per_s / ceiling.tokens_per_s:.0%} of its limit.")
    if drafting := [line for line in lines if line.spec_length]:
        console.print("\nWhy, and what theory says (docs/exactness.md):")
        console.print(table(drafting, COSTS))
        console.print(THEORY_NOTE)
    groups = {(line.temperature, line.draft): 0 for line in lines if line.spec_length}
    for temperature, draft in groups:
        rows = [line for line in lines if (line.temperature, line.draft) == (temperature, draft)]
        best = max(rows, key=lambda line: line.speedup)
        if len(rows) > 1:
            theory = [formulas.optimal_gamma(line.alpha_hat, line.c) for line in rows if line.alpha_hat and line.c]
            expected = f"; Theorem 3.8 would choose {round(median(theory))}" if theory else ""
            console.print(
                f"T={temperature:g} {draft}: best of the measured lengths is K={best.spec_length} "
                f"({best.speedup:.2f}x){expected}"
            )


def record_of(lines: Seq[Line], model: LoadedModel, drafts: Seq[LoadedModel], ceiling: Ceiling) -> dict[str, Any]:
    """Return the measurement for JSON: models, machine, and every line of the tables."""
    return {
        "shape": describe(model.config),
        "num_parameters": num_parameters(model.config),
        "bytes_per_pass": ceiling.bytes_per_pass,
        "drafts": [
            {
                "shape": describe(draft.config),
                "num_parameters": num_parameters(draft.config),
                "bytes_per_pass": draft.bytes_per_pass,
                "precision": draft.precision,
            }
            for draft in drafts
        ],
        "bandwidth_bytes_per_s": round(ceiling.bytes_per_s),
        "ceiling_tokens_per_s": ceiling.tokens_per_s,
        "dtype": model.weight_dtype,
        "precision": model.precision,
        "device": str(model.device),
        "machine": platform.processor() or platform.machine(),
        "num_threads": model.ops.num_threads,
        "ops": model.ops.name,
        "build": model.ops.build,
        "torch": native.torch_version(),
        "lines": [asdict(line) for line in lines],
    }
