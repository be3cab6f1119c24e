"""`forerun bench latency`: plain decoding against every drafter, one request at a time, on held-out prompts.

All variants are measured in the same run, interleaved prompt by prompt, because a shared machine's memory is faster in
one minute than in the next. The speed-up is the median of the ratios of single prompts. results.py computes the
rates and costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun import drafters, registry
from forerun.bench import results, widen
from forerun.bench.plans import LatencyPlan
from forerun.config import DEFAULT_SPEC_LENGTH, EngineConfig
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.opened import SHIPPED_DRAFT, auto_draft, is_shipped
from forerun.engine.prompts import Prompt
from forerun.engine.request import RequestOutput
from forerun.errors import BadOption, NotFound, UserError, shown
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.loading import Checkpoint
from forerun.models.runner import Runner
from forerun.ops.model import LoadedModel
from forerun.text.progress import Bar
from forerun.text.terminal import make_console
from forerun.text.waiting import Waiting
from forerun.types import SamplingParams, StepReport

T = TypeVar("T")

PLAIN = results.Variant("none", 0)


# Named workloads: options of the plan, and options of the engine. The command line overrides both.
WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Llama 3.2 1B drafts for Llama 3.2 3B, at the true shapes of both, one request at a time.
    "w1": (
        {"shape": "llama-3.2-3b", "draft_shape": "llama-3.2-1b", "spec_lengths": (1, 2, 3, 5)},
        {"dtype": "bfloat16"},
    )
}


def planned(workload: str | None, given: Mapping[str, Any]) -> tuple[LatencyPlan, dict[str, Any]]:
    """Return the benchmark's plan, and the options of the engine that a named workload sets.

    given: options of the plan, which override the workload's plan. Raises BadOption for an unknown workload, and for a
    shape that is given together with a workload.
    """
    if workload is not None and workload not in WORKLOADS:
        raise BadOption(registry.unknown("workload", workload, WORKLOADS))
    measured, engine = ({}, {}) if workload is None else WORKLOADS[workload]
    for key in ("shape", "draft_shape"):
        if workload is not None and key in given:
            raise BadOption(f"--workload {workload} contradicts --{key.replace('_', '-')}: drop one")
    return LatencyPlan(**{**measured, **given}), engine


@dataclass(frozen=True)
class Measured:
    """The lines of the tables, the measured models, and the limit of plain decoding."""

    lines: list[results.Line]
    target: Checkpoint
    drafts: list[LoadedModel]
    ceiling: results.Ceiling


def run(config: EngineConfig, plan: LatencyPlan) -> dict[str, Any]:
    """Measure, print tables, and return the results for JSON. Raises UserError where the measurement is impossible."""
    console = make_console()
    found = measured(config, plan, console)
    results.print_tables(found.lines, found.ceiling, console)
    about = {"bench": "latency", "target": found.target.name, "widened": plan.shape != "none", "plan": plan.record()}
    return about | results.record_of(found.lines, found.target.model, found.drafts, found.ceiling)


def measured(config: EngineConfig, plan: LatencyPlan, console: Console) -> Measured:
    """Run the measurement, print how many prompts and drafters it has, and return the results.

    Raises UserError where the measurement is impossible.
    """
    prompts = read_texts_or_ids(plan.num_prompts, plan.prompt_file)
    for draft in plan.drafts:  # an unknown drafter is refused before a model is read
        drafters.resolve(draft)
    if plan.draft_shape != "none":
        for name in _models(config, plan):
            widen.draft_options(name)
    checkpoint = widen.load_widened(widen.measured_target(config, plan.shape), plan.shape, console)
    llms = engines(checkpoint, config, plan, console)
    spare_what_is_loaded()
    ceiling = results.print_ceiling(checkpoint.model, console)
    drafts = draft_models(llm.engine.drafter.first for llm in llms.values())
    num_drafters = len({variant.draft for variant in llms} - {PLAIN.draft})
    temperatures = " and ".join(f"{t:g}" for t in plan.temperatures)
    most = "at most " * plan.until_end
    console.print(
        f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}, {most}{plan.max_tokens} tokens each, at temperature "
        f"{temperatures}: plain decoding against {num_drafters} drafter{'s' * (num_drafters != 1)}, in turns"
    )
    for model in drafts:
        share = model.bytes_per_pass / ceiling.bytes_per_pass
        console.print(
            f"draft model: {widen.num_parameters(model.config):,} parameters ({widen.describe(model.config)}), "
            f"{model.precision}, {share:.3f} of the target's bytes"
        )
    with Waiting("warming up"):
        for llm in llms.values():
            llm.generate(prompts[0][1], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    with progress_bar() as progress:
        tallies = tallied(llms, prompts, plan, progress)
    plain_pass_s = results.plain_pass_s_of(tallies.values())
    lines = [results.line_of(tally, tallies[tally.temperature, PLAIN], plain_pass_s) for tally in tallies.values()]
    return Measured(lines, checkpoint, drafts, ceiling)


def read_prompts(num: int, file: Path | None = None) -> list[tuple[str, str]]:
    """Return the name and the text of the first `num` held-out prompts, one from each source module in turn.

    Raises NotFound for a missing file, and BadOption for a file of another form.
    """
    prompts = read_texts_or_ids(num, file)
    for name, prompt in prompts:
        if not isinstance(prompt, str):
            raise BadOption(f'the prompt {shown(name)} is token ids, and this benchmark takes texts: give "text"')
    return cast(list[tuple[str, str]], prompts)


def read_texts_or_ids(num: int, file: Path | None = None) -> list[tuple[str, Prompt]]:
    """Return what `read_prompts` returns, but allow token ids ("ids") in place of "text" in a line of the file."""
    file = file or widen.PROMPTS
    if not file.is_file():
        raise NotFound(f"there is no prompt file {file}: name one with --prompt-file")
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        seen: dict[str, int] = {}
        ranked: list[tuple[int, int, str, Prompt]] = []
        for i, row in enumerate(rows):
            module = str(row.get("module", i))
            seen[module] = seen.get(module, 0) + 1
            prompt = [int(token) for token in row["ids"]] if "ids" in row else str(row["text"])
            ranked.append((seen[module], i, str(row["id"]), prompt))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadOption(f'{file} is not a prompt file: every line must be JSON with "id" and "text"') from error
    if not ranked:
        raise BadOption(f"{file} holds no prompt: every line must be JSON with id and text")
    ranked.sort(key=lambda one: one[:2])
    return [(name, prompt) for _, _, name, prompt in ranked[:num]]


# ---------------------------------------------------------------------------------------------------------- engines


def engines(
    checkpoint: Checkpoint, config: EngineConfig, plan: LatencyPlan, console: Console
) -> dict[results.Variant, LLM]:
    """Return an engine for each drafter and draft length, plain decoding first. All share the target's weights."""
    # With prefix caching, a prompt's second run would find most of the first run's cache.
    options = {**config.options(), "draft": "none", "prefix_caching": False}
    llms = {PLAIN: LLM(checkpoint, **options)}
    drafts: dict[str, str | Checkpoint] = {name: name for name in plan.drafts}
    if plan.draft_shape != "none":
        drafts = {
            f"{name} ({plan.draft_shape})": widen.load_widened_draft(name, config, checkpoint, plan.draft_shape)
            for name in _models(config, plan)
        }
    elif not drafts:
        drafts = {name: name for name in registry.names("forerun.drafters") if name != "none"}
    for name, draft in drafts.items():
        for spec_length in plan.spec_lengths or (config.spec_length or DEFAULT_SPEC_LENGTH,):
            try:
                with Waiting(f"preparing {name}"):
                    draft = loaded_once(draft, checkpoint, config.ignored_config_keys)
                    llm = LLM(checkpoint, **{**options, "draft": draft, "spec_length": spec_length})
                    llm.measure_passes()
                llms[results.Variant(name, spec_length)] = llm
            except UserError as error:
                if plan.drafts or plan.draft_shape != "none":
                    raise
                console.print(f"left out: {name}, for {error}")
                break
    return llms


def _models(config: EngineConfig, plan: LatencyPlan) -> tuple[str, ...]:
    """Return the specs of the draft models to widen."""
    return plan.drafts or (str(config.draft) if config.draft not in ("none", "auto") else "model",)


def loaded_once(draft: str | Checkpoint, target: Checkpoint, ignore: Collection[str]) -> str | Checkpoint:
    """Load a draft model given without options, so that all engines share it. Return any other draft unchanged.

    ignore: entries of the draft model's config.json that are ignored.
    """
    if isinstance(draft, Checkpoint):
        return draft
    shipped = is_shipped(target.opened.path)
    method, options = drafters.resolve(draft, auto_draft(target.opened.asked))
    path = getattr(options, "path", None) or (str(SHIPPED_DRAFT) if shipped else None)
    if method != "model" or path is None or replace(options, path=None) != type(options)():
        return draft
    return widen.load_beside(target.model, path, ignore)


@contextmanager
def heard(engine: LLM | Engine, hear: Callable[[StepReport], object], *, detail: bool = False) -> Iterator[None]:
    """Call `hear` with the report of every step while the block runs."""
    end = engine.listen(hear, detail=detail)
    try:
        yield
    finally:
        end()


def draft_models(members: Iterable[Drafter]) -> list[LoadedModel]:
    """Return the draft models of these drafters, each once. Trained heads are left out."""
    runners = [drafter.runner for drafter in members]
    models = {id(runner.model): runner.model for runner in runners if runner is not None}
    return [cast(LoadedModel, model) for model in models.values() if hasattr(model, "weight")]


class Clock:
    """A clock that counts the seconds inside the calls that it wraps, since the last `take`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that its seconds are counted."""

        def timed(*given: Any, **more: Any) -> Any:
            started = time.perf_counter()
            result = call(*given, **more)
            self.seconds += time.perf_counter() - started
            return result

        return timed

    def take(self) -> float:
        """Return the counted seconds since the last `take`."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class ForwardClock(Clock):
    """A clock that counts the seconds in a runner's `forward` and `run_ahead`."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        runner.forward = self.timed(runner.forward)  # type: ignore[method-assign]
        runner.run_ahead = self.timed(runner.run_ahead)  # type: ignore[method-assign]


class EncoderClock(Clock):
    """A clock that counts the seconds in an LLM's encoders: the target's and the draft model's."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        for runner in (llm.engine.runner, llm.engine.drafter.first.runner):
            if runner is not None and runner.sources is not None:
                runner.sources.run = self.timed(runner.sources.run)  # type: ignore[method-assign]


def tallied(
    llms: Mapping[results.Variant, LLM], prompts: Seq[tuple[str, Prompt]], plan: LatencyPlan, progress: Progress
) -> dict[tuple[float, results.Variant], results.Tally]:
    """Run every prompt on every engine, in turns, and return the tallies by temperature and variant.

    Each prompt begins with a different variant than the prompt before it, because a run may be slower after one variant
    than after another. The runs of a tally are in the order of repeats, and within a repeat in the order of prompts.
    Several variants may have the same engine.
    """
    by_id = {id(llm): llm for llm in llms.values()}
    for llm in by_id.values():
        llm.engine.drafter.spares = False  # a drafter's error ends the measurement, or plain decoding would go on
    clocks = {key: _draft_clock(llm) for key, llm in by_id.items()}
    encoders = {key: EncoderClock(llm) for key, llm in by_id.items()}
    tallies = {(t, variant): results.Tally(variant, t) for t in plan.temperatures for variant in llms}
    task = progress.add_task("measuring", total=len(tallies) * len(prompts) * plan.num_repeats)
    for repeat, (i, (_, prompt)), t in _runs(plan, prompts):
        params = SamplingParams(
            max_tokens=plan.max_tokens,
            temperature=t,
            seed=plan.seed + i + repeat * len(prompts),
            ignore_eos=not plan.until_end,  # without until_end every run has the same number of tokens
            acceptance=None if t == 0 else plan.acceptance,
        )
        for variant in rotated(list(llms), repeat + i):
            llm = llms[variant]
            progress.update(task, description=f"T={t:g} {variant.draft} K={variant.spec_length}")
            run_once(llm, prompt, params, tallies[t, variant], clocks[id(llm)], encoders[id(llm)])
            progress.advance(task)
    return tallies


def rotated(items: Seq[T], by: int) -> list[T]:
    """Return the items in the same cyclic order, beginning with the item at index `by`."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def _draft_clock(llm: LLM) -> ForwardClock | None:
    runner = llm.engine.drafter.first.runner
    return None if runner is None else ForwardClock(runner)


def _runs(
    plan: LatencyPlan, prompts: Seq[tuple[str, Prompt]]
) -> Iterator[tuple[int, tuple[int, tuple[str, Prompt]], float]]:
    for repeat in range(plan.num_repeats):
        for prompt in enumerate(prompts):
            for t in plan.temperatures:
                yield repeat, prompt, t


def run_once(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    tally: results.Tally,
    clock: ForwardClock | None,
    encoder: Clock | None = None,
) -> list[int]:
    """Run one prompt and return the token ids of the output; see `run_together`."""
    return run_together(llm, [prompt], [params], tally, clock, encoder)[0]


def run_together(
    llm: LLM,
    prompts: Seq[Prompt],
    params: Seq[SamplingParams],
    tally: results.Tally,
    clock: ForwardClock | None = None,
    encoder: Clock | None = None,
    *,
    detail: bool = False,
) -> list[list[int]]:
    """Run prompts at once, add the measurements to `tally`, and return the token ids of the outputs.

    The time per token leaves out the prefill before decoding begins, because the prefill takes the same time with every
    variant. clock: measures the time of the draft model's passes. encoder: measures the time of the encoders, which the
    time per token leaves out, too. detail: whether the reports of steps contain `rounds` (drafts and accepted tokens).
    """
    encoder = encoder or Clock()
    for one in filter(None, (clock, encoder)):
        one.take()
    start = time.perf_counter(), 0.0  # the time, and the encoders' seconds until then

    def note(report: StepReport) -> None:
        nonlocal start
        draft_forward_s = clock.take() if clock is not None else 0.0  # in every step: a draft model reads prompts, too
        if report.num_decoding == 0:
            start = time.perf_counter(), encoder.seconds
            return
        tally.steps.append(report)
        tally.draft_forward_s.append(draft_forward_s)

    with heard(llm, note, detail=detail):
        outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start[0] - (encoder.seconds - start[1])
    tally.encoder_s.append(encoder.take())
    tally.num_steps.append(len(tally.steps) - sum(tally.num_steps))
    tally.num_tokens.append(sum(len(output.token_ids) for output in outputs))
    tally.seconds_per_token.append(seconds / tally.num_tokens[-1])
    return [output.token_ids for output in outputs]


class Took(NamedTuple):
    """The seconds of one answer. first_s: the seconds until the end of the first step that emits tokens.

    num_first: the number of tokens that this step emits.
    """

    seconds: float
    first_s: float
    num_first: int


def answered(
    llm: LLM, ids: list[int], params: SamplingParams, hear: Callable[[StepReport], object] = lambda report: None
) -> tuple[RequestOutput, Took]:
    """Answer one prompt, and return the output and its seconds. hear: called with the report of every step."""
    firsts = list[tuple[float, int]]()

    def note(report: StepReport) -> None:
        if report.num_committed and not firsts:
            firsts.append((time.perf_counter(), report.num_committed))
        hear(report)

    with heard(llm, note):
        start = time.perf_counter()
        (output,) = llm.generate([ids], params)
    seconds, (first_at, num_first) = time.perf_counter() - start, firsts[0]
    return output, Took(seconds, first_at - start, num_first)


def progress_bar() -> Progress:
    """Make the progress bar of a measurement. It is removed at the end."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, transient=True)
