"""`benchmarks.serving`: streamed requests over HTTP, against servers that run or that it starts itself.

Loads are numbers of requests at once, and rates of a Poisson process. In every repeat and at every load the servers
take turns with the same requests, in an order that rotates, because a shared machine is faster in one minute than in
the next; the others are idle meanwhile. serving_client.py sends, serving_servers.py starts, serving_results.py makes
numbers, and serving_overhead.py measures what HTTP and texts take of the engine.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.serving_client import CHAT, COMPLETION, Load, Run, Server, find_model, knows_chats, run_load
from benchmarks.serving_picture import draw
from benchmarks.serving_results import GOODPUT_NOTE, NOTE, Limits, Line, lines_of, record_of, table_of
from benchmarks.serving_servers import PEERS, VARIANTS, forerun_command, free_port, of_variant, peer_command, started
from benchmarks.start import start
from forerun.bench.exhibits import check_picture
from forerun.bench.latency import progress_bar, rotated
from forerun.bench.methods import WorkPrompt, read_work
from forerun.bench.plans import KINDS, WORK, MethodsPlan, Plan, picture, prompt_file, repeats
from forerun.cli import flags
from forerun.cli.bench import JsonFile, keep
from forerun.cli.signatures import Fields, Given
from forerun.config import EngineConfig
from forerun.errors import BadOption, InternalError, NotFound, UserError, shown
from forerun.models.hub import locate
from forerun.models.named import default
from forerun.registry import option
from forerun.text.terminal import make_console

WARM_UP_TOKENS = 16
PER_KIND = 1000  # all that a file has


@dataclass(frozen=True)
class ServingPlan(Plan):
    """What to measure. Raises BadOption for what is contradictory.

    urls: () = servers are started for `variants`, and for the peers that are here.
    """

    urls: tuple[str, ...] = option(
        (),
        "server that runs already and speaks OpenAI's API, as URL or NAME=URL",
        flag="--url",
        usual="servers are started",
    )
    model: str | None = option(
        None, "what requests to --url call it", flag="--served-model-name", usual="the first it lists"
    )
    api_key: str | None = option(None, "of --url", envvar="FORERUN_API_KEY", usual="none")
    variants: tuple[str, ...] = option(
        VARIANTS,
        f"server to start: {', '.join((*VARIANTS, *PEERS))}",
        flag="--variant",
        usual="the first three, and the others where they are on the PATH and run the target",
    )
    concurrencies: tuple[int, ...] = option(
        (), "requests at once", flag="--concurrency", min=1, usual="1, 4 and 8; 16 with --overhead; none with --rate"
    )
    rates: tuple[float, ...] = option((), "requests per second, as a Poisson process", flag="--rate")
    num_requests: int = option(32, "of a run", flag="--requests", min=1)
    max_tokens: int = option(64, "tokens per request", min=2)
    num_repeats: int = repeats(3, "times every load is run, each time with other prompts")
    temperature: float = option(0.0, "0 = greedy")
    seed: int = option(1, "of arrivals, and of sampled requests; each adds its index")
    ignore_eos: bool = option(True, "all answers have --max-tokens; off for servers that refuse the field ignore_eos")
    slo_ttft_ms: float | None = option(None, "goodput counts requests whose TTFT is at most this")
    slo_itl_ms: float | None = option(None, "and whose time per token behind the first is at most this")
    kinds: tuple[str, ...] = option((), KINDS, flag="--kind", usual="all")
    prompt_file: Path | None = prompt_file(WORK)
    timeout_s: float = option(600.0, "for one answer")
    overhead: bool = option(False, "instead, what HTTP and texts take of the engine's throughput")
    picture: Path | None = picture("file for a plot, .svg or .png; needs matplotlib")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.variants:
            if name not in (*VARIANTS, *PEERS):
                raise BadOption(f"--variant {shown(name)} is not possible: it must be {', '.join((*VARIANTS, *PEERS))}")
        for load in self.loads:
            if load.rate is not None and load.rate <= 0:
                raise BadOption(f"a load of {load.name} is not possible: it must be above 0")
            if load.concurrency is not None and load.concurrency > self.num_requests:
                raise BadOption(
                    f"--concurrency {load.concurrency} is not possible with --requests {self.num_requests}: there must "
                    "be as many requests, or more"
                )
        if not self.timeout_s > 0:
            raise BadOption(f"--timeout-s {self.timeout_s:g} is not possible: it must be above 0")
        for limit_ms, flag in ((self.slo_ttft_ms, "--slo-ttft-ms"), (self.slo_itl_ms, "--slo-itl-ms")):
            if limit_ms is not None and not limit_ms > 0:
                raise BadOption(f"{flag} {limit_ms:g} is not possible: it must be above 0")

    @property
    def loads(self) -> tuple[Load, ...]:
        """Each load once: the fixed ones, and the rates."""
        usual = () if self.rates else ((16,) if self.overhead else (1, 4, 8))
        fixed = (Load(concurrency=num) for num in self.concurrencies or usual)
        return tuple(dict.fromkeys([*fixed, *(Load(rate=rate) for rate in self.rates)]))

    @property
    def limits(self) -> Limits:
        """What a request may take to count as good."""
        return Limits(*(None if ms is None else ms / 1e3 for ms in (self.slo_ttft_ms, self.slo_itl_ms)))

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
        "plan": plan.record("api_key"),
        "path": path,
        "prompts": [prompt.id for prompt in prompts],
        "servers": [{"name": s.name, "url": s.url, "model": s.model, "command": s.about} for s in servers],
        "left_out": left_out,
        "lines": [asdict(line) for line in lines],
        "runs": [record_of(run) for run in runs],
    }


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
                command = peer_command(name, config, Path(locate(config.target or default())), port)
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
        for server in rotated(servers, number):
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


ENGINE = ("draft", "spec_length", "pacing", "chat_template", "kv_cache_tokens", "max_batch_size", "max_seq_len")


def command(
    engine: Annotated[
        Given, flags.engine("target", "ignore_config_keys", *ENGINE, "prefill_chunk_tokens", *flags.MODEL)
    ],
    plan: Annotated[Given, Fields(ServingPlan, is_plan=True)],
    json_file: JsonFile = None,
) -> None:
    """Measure servers under load: tokens per second, time to the first token, gaps, goodput; forerun's and others'."""
    from benchmarks import serving_overhead

    asked = ServingPlan(**plan)
    keep((serving_overhead.run if asked.overhead else run)(flags.engine_config(engine), asked), json_file)


if __name__ == "__main__":
    start(command)
