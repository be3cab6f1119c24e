"""`forerun bench latency`: plain decoding against every drafter, one request at a time, on held-out prompts.

What is compared is measured in the same run, interleaved prompt by prompt, because a shared machine's memory is faster
in one minute than in the next; the speed-up is the median of the per-prompt ratios. Beside it stands what theory
expects of the measured ingredients (docs/exactness.md):

    c      seconds per drafted token / seconds of a plain target pass
    v(K)   target pass over K+1 tokens / target pass over one
    o      seconds of a step outside of all model forwards / target pass over one
    alpha  accepted / tested tokens

    Theorem 3.8 (Leviathan et al. 2023)   A / (c K + 1)          A = (1 - alpha^(K+1)) / (1 - alpha)
    with measured costs                   A / (c K + v(K) + o)
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forerun import methods
from forerun.bench import bandwidth
from forerun.bench.demo import PROMPTS, load_widened
from forerun.bench.widen import bytes_per_pass, describe, num_parameters
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.errors import BadOption, NotFound, UserError
from forerun.flags import engine_options
from forerun.models.loading import Checkpoint
from forerun.models.runner import Run, Runner, Scores
from forerun.show import make_console
from forerun.theory import formulas
from forerun.types import SamplingParams, StepReport

FULL_DRAFTS = 0.8  # share of steps with a full draft from which on a formula for fixed K means something


@dataclass(frozen=True)
class Plan:
    """What to measure. drafts: () = every method that needs nothing else. shape: a preset of widen, or "none"."""

    drafts: tuple[str, ...] = ()
    shape: str = "none"
    temperatures: tuple[float, ...] = (0.0, 1.0)
    acceptance: str = "ratio"
    num_prompts: int = 5
    max_tokens: int = 64
    num_repeats: int = 1
    prompt_file: Path | None = None
    seed: int = 1


@dataclass
class Tally:
    """All runs of one drafter at one temperature; seconds_per_token has one entry per run, in the order of runs."""

    draft: str
    temperature: float
    seconds_per_token: list[float] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    draft_forward_s: list[float] = field(default_factory=list)  # per step

    def total(self, name: str) -> int:
        """Sum of one count over all steps."""
        return sum(getattr(step, name) for step in self.steps)


@dataclass(frozen=True)
class Line:
    """One row of the table, and of the JSON. Rates and predictions are None where nothing was counted."""

    draft: str
    temperature: float
    tokens_per_s: float
    speedup: float
    tokens_per_step: float
    alpha_hat: float | None
    acceptance_rate: float | None
    c: float | None
    v: float | None
    overhead_share: float  # of a step's time, outside of model forwards
    theorem_3_8: float | None
    expected: float | None  # with the measured costs


def run(config: EngineConfig, plan: Plan) -> None:
    """Measure and print: ceiling, table, one line of JSON. Raises UserError for what cannot be measured."""
    console = make_console()
    prompts = read_prompts(plan)
    checkpoint = load_widened(config, plan.shape, console)
    llms = _build(checkpoint, config, plan, console)
    ceiling = _print_ceiling(checkpoint, console)
    for llm in llms.values():
        llm.generate(prompts[0][1], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))  # warm up
    with _progress() as progress:
        lines = _measure(llms, prompts, plan, config.spec_length, progress)
    console.print(_table(lines, config.spec_length))
    _print_notes(lines, ceiling, console)
    print(json.dumps(_record(lines, config, plan, checkpoint, ceiling)), flush=True)


def read_prompts(plan: Plan) -> list[tuple[str, str]]:
    """(id, text) of the first held-out prompts, one from each module in turn. Raises NotFound, BadOption."""
    file = plan.prompt_file or PROMPTS
    if not file.is_file():
        raise NotFound(f"there is no prompt file {file}: name one with --prompt-file")
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        seen: dict[str, int] = {}
        ranked = []
        for i, row in enumerate(rows):
            module = str(row.get("module", i))
            seen[module] = seen.get(module, 0) + 1
            ranked.append((seen[module], i, str(row["id"]), str(row["text"])))
    except (ValueError, KeyError, AttributeError) as error:
        raise BadOption(f'{file} is not a prompt file: every line must be JSON with "id" and "text"') from error
    if not ranked:
        raise BadOption(f"{file} holds no prompt: every line must be JSON with id and text")
    return [(name, text) for _, _, name, text in sorted(ranked)[: plan.num_prompts]]


# ---------------------------------------------------------------------------------------------------------- engines


def _build(checkpoint: Checkpoint, config: EngineConfig, plan: Plan, console: Console) -> dict[str, LLM]:
    """One engine per drafter over the same weights, plain decoding first."""
    drafts = plan.drafts or tuple(n for n in methods.names("forerun.drafters") if n != "none")
    llms = {}
    for draft in ("none", *drafts):
        try:
            llms[draft] = LLM(checkpoint, **{**engine_options(config), "draft": draft})
        except UserError as error:
            if plan.drafts or draft == "none":
                raise
            console.print(f"left out: {error}")
    return llms


class _ForwardClock:
    """Seconds inside a runner's forward passes since the last `take`."""

    def __init__(self, runner: Runner) -> None:
        self._forward, self.seconds = runner.forward, 0.0
        runner.forward = self  # type: ignore[method-assign]

    def __call__(self, runs: Seq[Run]) -> Scores:
        scores = self._forward(runs)
        self.seconds += scores.forward_s
        return scores

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def _measure(
    llms: dict[str, LLM], prompts: list[tuple[str, str]], plan: Plan, spec_length: int, progress: Progress
) -> list[Line]:
    clocks = {}
    for draft, llm in llms.items():
        runner = getattr(llm.engine.drafter, "runner", None)
        clocks[draft] = None if runner is None else _ForwardClock(runner)
    tallies = {(t, draft): Tally(draft, t) for t in plan.temperatures for draft in llms}
    task = progress.add_task("measuring", total=len(tallies) * len(prompts) * plan.num_repeats)
    for repeat, (i, (_, text)), t in _runs(plan, prompts):
        params = SamplingParams(
            max_tokens=plan.max_tokens,
            temperature=t,
            seed=plan.seed + i + repeat * len(prompts),
            ignore_eos=True,  # every run has the same number of tokens
            acceptance=None if t == 0 else plan.acceptance,
        )
        for draft, llm in llms.items():
            progress.update(task, description=f"T={t:g} {draft}")
            _run_once(llm, text, params, tallies[t, draft], clocks[draft])
            progress.advance(task)
    return [_line(tally, tallies[tally.temperature, "none"], spec_length) for tally in tallies.values()]


def _runs(plan: Plan, prompts: list[tuple[str, str]]) -> Iterator[tuple[int, tuple[int, tuple[str, str]], float]]:
    for repeat in range(plan.num_repeats):
        for prompt in enumerate(prompts):
            for t in plan.temperatures:
                yield repeat, prompt, t


def _run_once(llm: LLM, text: str, params: SamplingParams, tally: Tally, clock: _ForwardClock | None) -> None:
    """One prompt; the clock runs from the end of the prompt's prefill, which both sides pay alike."""
    if clock is not None:
        clock.take()
    begun: list[float] = []
    start = time.perf_counter()

    def note(report: StepReport) -> None:
        if report.num_decoding == 0:
            begun[:] = [time.perf_counter()]
            return
        tally.steps.append(report)
        tally.draft_forward_s.append(clock.take() if clock is not None else 0.0)

    end = llm.listen(note)
    try:
        (output,) = llm.generate(text, params)
    finally:
        end()
    seconds = time.perf_counter() - (begun[0] if begun else start)
    tally.seconds_per_token.append(seconds / len(output.token_ids))


# ---------------------------------------------------------------------------------------------------------- numbers


def _line(tally: Tally, plain: Tally, spec_length: int) -> Line:
    plain_pass_s = median(step.target_forward_s for step in plain.steps)
    pairs = zip(plain.seconds_per_token, tally.seconds_per_token, strict=True)
    drafted, tested, accepted = (tally.total(n) for n in ("num_drafted", "num_tested", "num_accepted"))
    line = Line(
        draft=tally.draft,
        temperature=tally.temperature,
        tokens_per_s=1 / median(tally.seconds_per_token),
        speedup=median(a / b for a, b in pairs),
        tokens_per_step=tally.total("num_emitted") / len(tally.steps),
        alpha_hat=accepted / tested if tested else None,
        acceptance_rate=accepted / drafted if drafted else None,
        c=_draft_cost(tally, plain_pass_s),
        v=_verify_cost(tally, plain_pass_s, spec_length),
        overhead_share=sum(_overheads(tally)) / sum(map(_step_s, tally.steps)),
        theorem_3_8=None,
        expected=None,
    )
    full = sum(step.num_drafted >= spec_length for step in tally.steps)
    if line.alpha_hat is None or line.c is None or line.v is None or full < FULL_DRAFTS * len(tally.steps):
        return line
    overhead = median(_overheads(tally)) / plain_pass_s
    return replace(
        line,
        theorem_3_8=formulas.speedup(line.alpha_hat, spec_length, line.c),
        expected=formulas.speedup(line.alpha_hat, spec_length, line.c, line.v, overhead),
    )


def _step_s(step: StepReport) -> float:
    return step.draft_s + step.score_s + step.judge_s + step.commit_s


def _overheads(tally: Tally) -> list[float]:
    """Seconds of each step outside of model forwards."""
    pairs = zip(tally.steps, tally.draft_forward_s, strict=True)
    return [_step_s(step) - step.target_forward_s - draft_s for step, draft_s in pairs]


def _draft_cost(tally: Tally, plain_pass_s: float) -> float | None:
    """c: seconds per drafted token over a plain pass; the median, for the first draft also catches up the prompt."""
    costs = [step.draft_s / step.num_drafted for step in tally.steps if step.num_drafted]
    return median(costs) / plain_pass_s if costs else None


def _verify_cost(tally: Tally, plain_pass_s: float, spec_length: int) -> float | None:
    passes = [step.target_forward_s for step in tally.steps if step.num_drafted == spec_length]
    return median(passes) / plain_pass_s if passes else None


# ----------------------------------------------------------------------------------------------------------- output


def _progress() -> Progress:
    """On standard error, and only where that is a terminal."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@dataclass(frozen=True)
class Ceiling:
    """The fastest that plain decoding can be: every weight read once per token at the measured bandwidth."""

    bytes_per_pass: int
    bytes_per_s: float
    probe: str

    @property
    def tokens_per_s(self) -> float:
        return self.bytes_per_s / self.bytes_per_pass


def _print_ceiling(checkpoint: Checkpoint, console: Console) -> Ceiling:
    model = checkpoint.model
    found = bandwidth.measure(model.device)
    ceiling = Ceiling(bytes_per_pass(model.config, model.weights), found.bytes_per_s, found.probe)
    console.print(
        f"ceiling: {ceiling.bytes_per_pass / 1e9:.3f} GB per pass at {found.bytes_per_s / 1e9:.1f} GB/s (best probe: "
        f"{found.probe}) = {1e3 / ceiling.tokens_per_s:.1f} ms, {ceiling.tokens_per_s:.1f} tokens/s without speculation"
    )
    return ceiling


def _table(lines: list[Line], spec_length: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("T", justify="right", no_wrap=True)
    table.add_column("draft", overflow="fold", min_width=7)
    names = ("tok/s", "speed\nup", "Thm\n3.8", "with\ncosts", "tok/\nstep", "alpha", "acc.\nrate", "c")
    for name in (*names, f"v({spec_length})", "over\nhead"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            f"{line.temperature:g}",
            line.draft,
            f"{line.tokens_per_s:.1f}",
            f"{line.speedup:.2f}x",
            _number(line.theorem_3_8, "{:.2f}x"),
            _number(line.expected, "{:.2f}x"),
            f"{line.tokens_per_step:.2f}",
            _number(line.alpha_hat, "{:.3f}"),
            _number(line.acceptance_rate, "{:.0%}"),
            _number(line.c, "{:.3f}"),
            _number(line.v, "{:.2f}"),
            f"{line.overhead_share:.1%}",
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _print_notes(lines: list[Line], ceiling: Ceiling, console: Console) -> None:
    plain = next(line for line in lines if line.draft == "none")
    console.print(
        f"plain decoding reaches {plain.tokens_per_s / ceiling.tokens_per_s:.0%} of its ceiling; Thm 3.8 = A/(cK + 1); "
        "with costs = A/(cK + v + overhead); overhead = share of a step outside of model forwards"
    )


def _record(lines: list[Line], config: EngineConfig, plan: Plan, checkpoint: Checkpoint, ceiling: Ceiling) -> Any:
    model = checkpoint.model
    return {
        "bench": "latency",
        "target": checkpoint.name,
        "widened": plan.shape != "none",
        "shape": describe(model.config),
        "num_parameters": num_parameters(model.config),
        "bytes_per_pass": ceiling.bytes_per_pass,
        "bandwidth_bytes_per_s": round(ceiling.bytes_per_s),
        "ceiling_tokens_per_s": ceiling.tokens_per_s,
        "spec_length": config.spec_length,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "machine": platform.processor() or platform.machine(),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "plan": {**asdict(plan), "prompt_file": str(plan.prompt_file) if plan.prompt_file else None},
        "lines": [asdict(line) for line in lines],
    }
