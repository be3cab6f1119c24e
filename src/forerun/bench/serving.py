"""`forerun bench serving`: streamed requests over HTTP, against servers that run or that it starts itself.

Loads are numbers of requests at once, and rates of a Poisson process. In every repeat and at every load the servers
take turns with the same requests, in an order that rotates, because a shared machine is faster in one minute than in
the next; the others are idle meanwhile. serving_client.py sends, serving_servers.py starts, serving_results.py makes
numbers, and serving_overhead.py measures what HTTP and texts take of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from forerun.bench.latency import progress_bar
from forerun.bench.methods import MethodsPlan, WorkPrompt, read_work
from forerun.bench.methods_picture import check_picture
from forerun.bench.serving_client import CHAT, COMPLETION, Load, Run, Server, find_model, knows_chats, run_load
from forerun.bench.serving_picture import draw
from forerun.bench.serving_results import GOODPUT_NOTE, NOTE, Limits, Line, lines_of, record_of, table_of
from forerun.bench.serving_servers import (
    PEERS,
    SHIPPED,
    VARIANTS,
    forerun_command,
    free_port,
    of_variant,
    peer_command,
    started,
)
from forerun.config import EngineConfig
from forerun.errors import BadOption, InternalError, NotFound, UserError, shown
from forerun.models.hub import locate
from forerun.text.terminal import make_console

WARM_UP_TOKENS = 16
PER_KIND = 1000  # all that a file has


@dataclass(frozen=True)
class ServingPlan:
    """What to measure. Raises BadOption for what is contradictory.

    urls: of servers that run, each "URL" or "NAME=URL"; () = servers are started for `variants`, and for the peers that
    are here. num_requests: of a run. timeout_s: of a request. ignore_eos: whether answers go
    on to max_tokens.
    """

    urls: tuple[str, ...] = ()
    model: str | None = None
    api_key: str | None = None
    variants: tuple[str, ...] = VARIANTS
    loads: tuple[Load, ...] = (Load(1), Load(4), Load(8))
    num_requests: int = 32
    num_repeats: int = 3
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 1
    ignore_eos: bool = True
    limits: Limits = field(default_factory=Limits)
    kinds: tuple[str, ...] = ()
    prompt_file: Path | None = None
    timeout_s: float = 600.0
    picture: Path | None = None

    def __post_init__(self) -> None:
        for name in self.variants:
            if name not in (*VARIANTS, *PEERS):
                raise BadOption(f"--variant {shown(name)} is not possible: it must be {', '.join((*VARIANTS, *PEERS))}")
        for load in self.loads:
            if (load.rate is not None and load.rate <= 0) or (load.concurrency is not None and load.concurrency < 1):
                raise BadOption(f"a load of {load.name} is not possible: it must be above 0")
            if load.concurrency is not None and load.concurrency > self.num_requests:
                raise BadOption(
                    f"--concurrency {load.concurrency} is not possible with --requests {self.num_requests}: there must "
                    "be as many requests, or more"
                )
        if not self.timeout_s > 0:
            raise BadOption(f"--timeout-s {self.timeout_s:g} is not possible: it must be above 0")
        for limit_s, flag in ((self.limits.ttft_s, "--slo-ttft-ms"), (self.limits.itl_s, "--slo-itl-ms")):
            if limit_s is not None and not limit_s > 0:
                raise BadOption(f"{flag} {1e3 * limit_s:g} is not possible: it must be above 0")

    @property
    def most_at_once(self) -> int:
        """The largest fixed concurrency; 1 where there is none."""
        return max((load.concurrency or 1 for load in self.loads), default=1)

    @property
    def headers(self) -> dict[str, str]:
        """What every request brings."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


def run(config: EngineConfig, plan: ServingPlan) -> dict[str, Any]:
    """Measure, print a table, and return all of it for JSON.

    Raises UserError for what cannot be measured, and InternalError where a server does not start or answers nothing.
    """
    check_picture(plan.picture)
    prompts, console = read_prompts(plan), make_console()
    with ExitStack() as stack:
        servers, left_out = _servers(config, plan, stack, console)
        path = path_of(servers, plan, console)
        console.print(
            f"{len(servers)} server{'s' * (len(servers) != 1)} ({', '.join(server.name for server in servers)}) in "
            f"turns, {plan.num_repeats} x {plan.num_requests} requests of at most {plan.max_tokens} tokens to {path} "
            f"at each load: {', '.join(load.name for load in plan.loads)}"
        )
        with progress_bar() as progress:
            runs = _measure(servers, path, prompts, plan, progress)
    lines = lines_of(runs, plan.limits)
    print_lines(lines, plan.limits, console)
    if plan.picture is not None:
        draw(lines, plan.limits, plan.picture, f"{servers[0].model}: {plan.max_tokens} tokens per request")
    return {
        "bench": "serving",
        "plan": plan_record(plan),
        "path": path,
        "prompts": [prompt.id for prompt in prompts],
        "servers": [{"name": s.name, "url": s.url, "model": s.model, "command": s.about} for s in servers],
        "left_out": left_out,
        "lines": [asdict(line) for line in lines],
        "runs": [record_of(run) for run in runs],
    }


def plan_record(plan: ServingPlan) -> dict[str, Any]:
    """The plan for JSON, without the key."""
    paths = {name: str(p) if (p := getattr(plan, name)) else None for name in ("prompt_file", "picture")}
    return {**asdict(replace(plan, api_key=None)), **paths}


def read_prompts(plan: ServingPlan) -> list[WorkPrompt]:
    """The kinds in turn. Raises NotFound, BadOption."""
    return read_work(MethodsPlan(kinds=plan.kinds, prompts_per_kind=PER_KIND, prompt_file=plan.prompt_file))


# ---------------------------------------------------------------------------------------------------------- servers


def _servers(
    config: EngineConfig, plan: ServingPlan, stack: ExitStack, console: Console
) -> tuple[list[Server], dict[str, str]]:
    """The servers, started ones included, which the stack ends; and of those left out why."""
    if plan.urls:
        return [running(text, plan) for text in plan.urls], {}
    servers, left_out = list[Server](), dict[str, str]()
    config = replace(config, max_batch_size=max(config.max_batch_size, plan.most_at_once))
    for name in dict.fromkeys((*plan.variants, *PEERS)):
        port = free_port()
        try:
            if name in PEERS:
                command = peer_command(name, config, Path(locate(config.target or SHIPPED)), port)
            else:
                command = forerun_command(of_variant(name, config), port)
            console.print(f"starting {name} ...")
            servers.append(stack.enter_context(started(name, command, port, is_own=name not in PEERS)))
        except (UserError, InternalError) as error:
            if name in plan.variants:
                raise
            left_out[name] = str(error)
            console.print(f"left out: {name}, for {error}")
    return servers, left_out


def running(text: str, plan: ServingPlan) -> Server:
    """A server that runs already, named "NAME=URL" or by its address."""
    name, separator, url = text.partition("=")
    if not separator or "/" in name:
        name, url = "", text
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise BadOption(f"--url {shown(text)} is no address: it must begin with http:// or https://, or NAME=http://")
    model = plan.model or find_model(url, plan.headers)
    return Server(name or url.partition("://")[2], url, model, plan.headers)


def path_of(servers: Seq[Server], plan: ServingPlan, console: Console) -> str:
    """The route that all of them answer: chats, or completions where a model knows no chats."""
    without = [server.name for server in servers if not knows_chats(server, plan.timeout_s)]
    if without:
        console.print(f"{', '.join(without)}: the model has no chat template, so prompts are sent as texts")
    return COMPLETION if without else CHAT


# ------------------------------------------------------------------------------------------------------ measurement


def _measure(
    servers: Seq[Server], path: str, prompts: Seq[WorkPrompt], plan: ServingPlan, progress: Progress
) -> list[Run]:
    turns = list(itertools.product(range(plan.num_repeats), plan.loads))
    task, runs = progress.add_task("warming up", total=len(turns) * len(servers)), list[Run]()
    for server in servers:
        warm_up(server, path, prompts, plan)
    for number, (repeat, load) in enumerate(turns):
        first = number % len(servers)
        for server in (*servers[first:], *servers[:first]):
            progress.update(task, description=f"{load.name}: {server.name}")
            bodies = list(bodies_of(server, path, prompts, plan, repeat, load.name))
            runs.append(_run(server, path, bodies, load, plan, repeat))
            progress.advance(task)
    order = {server.name: i for i, server in enumerate(servers)}
    places = {load: i for i, load in enumerate(plan.loads)}
    return sorted(runs, key=lambda run: (run.repeat, places[run.load], order[run.server]))


def _run(server: Server, path: str, bodies: Seq[Mapping[str, Any]], load: Load, plan: ServingPlan, repeat: int) -> Run:
    """One run. Raises NotFound where no request of it was answered: there is nothing to measure."""
    seed = plan.seed + repeat
    made = asyncio.run(run_load(server, path, bodies, load, timeout_s=plan.timeout_s, seed=seed, repeat=repeat))
    if all(answer.error is not None for answer in made.answers):
        raise NotFound(f"{server.name} answered no request ({made.answers[0].error}): see its log")
    return made


def warm_up(server: Server, path: str, prompts: Seq[WorkPrompt], plan: ServingPlan) -> None:
    """First requests pay for what is measured, compiled or mapped once."""
    short = replace(plan, max_tokens=min(plan.max_tokens, WARM_UP_TOKENS), num_requests=plan.most_at_once)
    bodies = list(bodies_of(server, path, prompts, short, 0, "warm-up"))
    _run(server, path, bodies, Load(plan.most_at_once), short, 0)


def bodies_of(
    server: Server, path: str, prompts: Seq[WorkPrompt], plan: ServingPlan, repeat: int, run_name: str
) -> Iterator[dict[str, Any]]:
    """The requests of one run, the same for every server: prompts in turn, each repeat from another one on."""
    for i in range(plan.num_requests):
        number = repeat * plan.num_requests + i
        prompt = prompts[number % len(prompts)]
        body: dict[str, Any] = {
            "model": server.model,
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if path == CHAT:
            body["messages"] = prompt.messages
        else:
            body["prompt"] = "\n\n".join(message["content"] for message in prompt.messages) + "\n\n"
        if plan.temperature > 0:
            body["seed"] = plan.seed + number
        if plan.ignore_eos:
            body["ignore_eos"] = True
        if server.is_salted:  # a prompt that comes again finds nothing of the first time
            body["cache_salt"] = f"{run_name} {number // len(prompts)} of repeat {repeat}"
        yield body


def print_lines(lines: Seq[Line], limits: Limits, console: Console) -> None:
    """The table, how it is read, and what failed."""
    console.print(table_of(lines, limits))
    console.print(NOTE + (f" {GOODPUT_NOTE}" if limits.are_set else ""))
    for line in lines:
        for error, count in line.failures.items():
            console.print(f"{line.server}, {line.load}: {count} of {line.num_requests} requests failed: {error}")
