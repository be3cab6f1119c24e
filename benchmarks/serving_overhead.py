"""`benchmarks.serving --overhead`: what texts and HTTP take of the engine's throughput, with so many streams.

The same requests, the same number of them at once, in turns: the engine alone in this process, whose tokens nobody
reads; `LLM.astream` in this process, which makes texts; and a `forerun serve` with the same options, whose client is
this process, so that the client's share of the machine is part of what HTTP takes. All texts are compared. Beside
tokens per second stands the processor time per token, which other programs on the machine disturb less.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.serving import ServingPlan, bodies_of, path_of, read_prompts
from benchmarks.serving_client import CHAT, Run, Server, run_load
from benchmarks.serving_results import Line, lines_of, record_of
from benchmarks.serving_servers import cpu_s_of, forerun_command, free_port, started
from forerun.bench.latency import heard, progress_bar, rotated
from forerun.bench.tables import Column, table
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.errors import BadOption, InternalError, shown
from forerun.memory.machine import spare_what_is_loaded
from forerun.text.terminal import make_console
from forerun.types import SamplingParams, StepReport

ENGINE, TEXTS, HTTP = WAYS = ("engine", "texts", "HTTP")
ABOUT = {ENGINE: "engine alone", TEXTS: "with texts: LLM.astream", HTTP: "with HTTP: forerun serve"}


@dataclass(frozen=True)
class Timed:
    """One run of one way. cpu_s: of this process, and of the server in its way; None where it cannot be known."""

    way: str
    repeat: int
    seconds: float
    num_tokens: int
    texts: tuple[str, ...]
    cpu_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Overhead:
    """What a way takes of the engine's throughput: 1 - its tokens per second over the engine's of the same repeat."""

    way: str
    tokens_per_s: float
    share: float  # the median
    range: tuple[float, float]
    cpu_s_per_token: float | None  # the median
    cpu_share: float | None  # what comes to it over the engine's of the same repeat; the median


def run(config: EngineConfig, plan: ServingPlan) -> dict[str, Any]:
    """Measure, print, and return all of it for JSON. Raises UserError, and InternalError where a text differs."""
    if plan.urls:
        raise BadOption("--overhead compares a server with the engine in this process, so it starts it: drop --url")
    console = make_console()
    prompts = read_prompts(plan)
    at_once = plan.most_at_once
    plan = replace(plan, num_requests=max(plan.num_requests, at_once), concurrencies=(at_once,), rates=())
    # The same prompts come again, and both engines are to read them each time.
    config = replace(config, max_batch_size=at_once, prefix_caching=False)
    port = free_port()
    with started("forerun serve", forerun_command(config, port), port, is_own=True) as server:
        llm = LLM.from_config(config)
        spare_what_is_loaded()
        path = path_of([server], plan, console)
        bodies = [list(bodies_of(server, path, prompts, plan, repeat, "")) for repeat in range(plan.num_repeats)]
        ids = [[_ids(llm, path, body) for body in of_repeat] for of_repeat in bodies]
        console.print(
            f"{plan.num_repeats} x {plan.num_requests} requests of {plan.max_tokens} tokens, {at_once} at once, draft "
            f"{config.draft}, {llm.checkpoint.model.ops.num_threads} threads: three ways in turns"
        )
        steps: list[StepReport] = []
        with progress_bar() as progress:
            timed, runs = _measure(llm, server, path, bodies, ids, plan, steps, progress)
    if llm.checkpoint.model.ops.row_invariant:
        compare(timed)
    (line,) = lines_of(runs, plan.limits)
    overheads = [overhead_of(way, timed) for way in WAYS]
    step_s = median(report.seconds for report in steps if report.num_decoding and not report.num_prefill_tokens)
    _print(overheads, line, step_s, console)
    return {
        "bench": "serving overhead",
        "target": llm.checkpoint.name,
        "draft": config.draft,
        "num_threads": llm.checkpoint.model.ops.num_threads,
        "plan": plan.record("api_key"),
        "path": path,
        "overheads": [asdict(overhead) for overhead in overheads],
        "median_step_s": step_s,
        "line": asdict(line),
        "ways": [{"way": t.way, "repeat": t.repeat, "tokens_per_s": t.tokens_per_s, "cpu_s": t.cpu_s} for t in timed],
        "runs": [record_of(run) for run in runs],
    }


def _ids(llm: LLM, path: str, body: dict[str, Any]) -> list[int]:
    return llm.apply_chat_template(body["messages"]) if path == CHAT else llm.tokenizer.encode(body["prompt"])


def _measure(
    llm: LLM,
    server: Server,
    path: str,
    bodies: Seq[Seq[dict[str, Any]]],
    ids: Seq[Seq[list[int]]],
    plan: ServingPlan,
    steps: list[StepReport],
    progress: Progress,
) -> tuple[list[Timed], list[Run]]:
    (load,), timed, runs = plan.loads, list[Timed](), list[Run]()
    at_once = plan.most_at_once
    task = progress.add_task("", total=len(WAYS) * (plan.num_repeats + 1))

    def once(way: str, repeat: int) -> Timed:
        progress.update(task, description=ABOUT[way])
        params = [_params(body, plan) for body in bodies[repeat]]
        assert server.pid is not None
        cpu_s, before_s = time.process_time(), cpu_s_of(server.pid)
        if way == HTTP:
            sent = run_load(server, path, bodies[repeat], load, timeout_s=plan.timeout_s, seed=0, repeat=repeat)
            runs.append(asyncio.run(sent))
            made = _of_http(runs[-1], ids[repeat])
        elif way == TEXTS:
            made = asyncio.run(_with_texts(llm, ids[repeat], params, at_once, repeat))
        else:
            with heard(llm, steps.append):
                made = _alone(llm, ids[repeat], params, at_once, repeat)
        cpu_s, after_s = time.process_time() - cpu_s, cpu_s_of(server.pid)
        progress.advance(task)
        if before_s is None or after_s is None:
            return made
        return replace(made, cpu_s=cpu_s + (after_s - before_s if way == HTTP else 0.0))

    for way in WAYS:  # warms up, and what it measures is dropped
        once(way, 0)
    steps.clear()
    runs.clear()
    for repeat in range(plan.num_repeats):
        timed += [once(way, repeat) for way in rotated(WAYS, repeat)]
    return timed, runs


def _params(body: dict[str, Any], plan: ServingPlan) -> SamplingParams:
    return SamplingParams(
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        seed=body.get("seed"),
        ignore_eos=plan.ignore_eos,
        cache_salt=body["cache_salt"],
    )


def _alone(llm: LLM, ids: Seq[list[int]], params: Seq[SamplingParams], at_once: int, repeat: int) -> Timed:
    """The engine's thread steps, and this one gives it the next request when one is over."""
    ended = SimpleQueue[Request]()

    def hear(request: Request) -> None:
        if request.seq.finish_reason is not None:
            ended.put(request)

    waiting, requests, began_s = iter(zip(ids, params, strict=True)), list[Request](), time.perf_counter()
    for _ in range(at_once):
        requests += llm.submit(*next(waiting), hear=hear)
    for _ in ids:
        if (request := ended.get()).error is not None:
            raise request.error
        if (following := next(waiting, None)) is not None:
            requests += llm.submit(*following, hear=hear)
    seconds = time.perf_counter() - began_s
    num_tokens = sum(request.seq.num_output_tokens for request in requests)
    return Timed(ENGINE, repeat, seconds, num_tokens, tuple(request.output().text for request in requests))


async def _with_texts(llm: LLM, ids: Seq[list[int]], params: Seq[SamplingParams], at_once: int, repeat: int) -> Timed:
    texts, num_tokens = [""] * len(ids), 0

    async def lane(waiting: Iterator[tuple[int, tuple[list[int], SamplingParams]]]) -> None:
        nonlocal num_tokens
        for i, (prompt, how) in waiting:
            async for chunk in llm.astream(prompt, how):
                texts[i] += chunk.text
                num_tokens += len(chunk.token_ids)

    began_s, waiting = time.perf_counter(), enumerate(zip(ids, params, strict=True))
    await asyncio.gather(*(lane(waiting) for _ in range(at_once)))
    return Timed(TEXTS, repeat, time.perf_counter() - began_s, num_tokens, tuple(texts))


def _of_http(run: Run, ids: Seq[list[int]]) -> Timed:
    """Raises InternalError for a request that failed, or whose prompt had other tokens than here."""
    for answer, prompt in zip(run.answers, ids, strict=True):
        if answer.error is not None:
            raise InternalError(f"the server failed on a request: {answer.error}")
        if answer.num_prompt_tokens != len(prompt):
            raise InternalError(
                f"the server counts {answer.num_prompt_tokens} tokens in a prompt that has {len(prompt)} here"
            )
    return Timed(HTTP, run.repeat, run.seconds, run.num_tokens, tuple(answer.text for answer in run.answers))


def compare(timed: Seq[Timed]) -> None:
    """Raise InternalError where a way of the same repeat made another text than the engine alone."""
    alone = {t.repeat: t for t in timed if t.way == ENGINE}
    for t in timed:
        for i, (text, wanted) in enumerate(zip(t.texts, alone[t.repeat].texts, strict=True)):
            if text != wanted:
                raise InternalError(
                    f"request {i} of repeat {t.repeat} has another text {ABOUT[t.way]}: {shown(text)}, and not "
                    f"{shown(wanted)}"
                )


def overhead_of(way: str, timed: Seq[Timed]) -> Overhead:
    """The shares of all repeats."""
    rates = {(t.way, t.repeat): t.tokens_per_s for t in timed}
    repeats = [t.repeat for t in timed if t.way == way]
    shares = [1 - rates[way, repeat] / rates[ENGINE, repeat] for repeat in repeats]
    costs = {(t.way, t.repeat): t.cpu_s / t.num_tokens for t in timed if t.cpu_s is not None}
    more = [costs[way, r] / costs[ENGINE, r] - 1 for r in repeats if {(way, r), (ENGINE, r)} <= costs.keys()]
    return Overhead(
        way,
        median(rates[way, r] for r in repeats),
        median(shares),
        (min(shares), max(shares)),
        median(costs[way, r] for r in repeats) if more else None,
        median(more) if more else None,
    )


def _if_not_engine(name: str) -> Callable[[Overhead], Any]:
    return lambda one: None if one.way == ENGINE else getattr(one, name)


TABLE = (
    Column("way", lambda one: ABOUT[one.way]),
    Column("tokens/s", "tokens_per_s", "{:.1f}"),
    Column("takes", _if_not_engine("share"), "{:.1%}", absent=""),
    Column("(range)", _if_not_engine("range"), "{:.1%}", absent=""),
    Column("CPU us\nper token", "cpu_s_per_token", lambda seconds: f"{1e6 * seconds:.0f}"),
    Column("more", _if_not_engine("cpu_share"), "{:.1%}", absent=""),
)


def _print(overheads: Seq[Overhead], line: Line, step_s: float, console: Console) -> None:
    console.print(table(overheads, TABLE))
    console.print(
        "takes: 1 - tokens/s over the engine's of the same repeat, the median; CPU: processor time of all threads, "
        f"with HTTP the client's, too, which took {line.client_cpu_share:.0%} of a core."
    )
    for name, found in (("all", line.itl_s), (f"{line.num_quiet_gaps} while no prompt was read", line.quiet_itl_s)):
        if found is not None:
            console.print(
                f"gaps of the streams ({name}): median {1e3 * found.p50:.1f} ms, p99 {1e3 * found.p99:.1f} ms, which "
                f"is {found.p99 / step_s:.2f} x the engine's median step of {1e3 * step_s:.1f} ms"
            )
