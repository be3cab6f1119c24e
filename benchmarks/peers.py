"""`benchmarks.peers` runs the same models, prompts and threads in forerun and in other engines.

All decode greedily, one request at a time, and every engine has its own environment. A folder runs in bfloat16, or with
`quantization` in as few bits as each engine makes of it. GGUF files run as they are, here, in llama.cpp and, where it
reads them, in OpenVINO; transformers gets their weights in bfloat16. Engines are loaded before the first run, only
llama.cpp's server starts for each, and take turns prompt by prompt, because a shared machine is faster in one minute
than in the next; each prompt begins with another engine. Only one engine may work at any time: the processor time of
those that wait is printed. peer_process.py talks to a peer, peer_results.py computes the numbers; peer_forwards.py
compares single passes instead.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
import typer
from rich.console import Console

from benchmarks.peer_process import INSTALL, PROMPTS_WORKER, Outcome, PeerError, PeerProcess, Question, has, python_flag
from benchmarks.peer_results import (
    OWN,
    OWN_LENGTHS,
    PLAIN,
    TABLE,
    Runs,
    Variant,
    lines_of,
    print_kinds,
    print_notes,
    rates_by_kind,
)
from benchmarks.start import start
from forerun import native
from forerun.bench import latency, suites
from forerun.bench.methods import conversation_ids, read_work
from forerun.bench.plans import SHAPE_NAMES, WORK, MethodsPlan, Plan, prompt_file, shape
from forerun.bench.results import print_ceiling, record_of
from forerun.bench.tables import table
from forerun.bench.widen import describe, draft_options, load_beside, num_parameters, shape_named, write_widened
from forerun.blocks import Spec
from forerun.cli import flags
from forerun.cli.bench import JsonFile, keep
from forerun.cli.signatures import Fields, Given
from forerun.config import AUTO, EngineConfig
from forerun.drafters import WITHOUT_MODEL
from forerun.engine.llm import LLM
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET, Opened
from forerun.engine.prompts import Message
from forerun.errors import BadOption, CapacityError, shown
from forerun.models.hub import locate
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.opened import OpenedCheckpoint, spec_of
from forerun.models.packings import layout_of
from forerun.models.saving import save_checkpoint
from forerun.models.widening import wide_config
from forerun.ops.model import LoadedModel
from forerun.ops.torch_tensors import HostWeights
from forerun.registry import option
from forerun.text.terminal import make_console
from forerun.types import SamplingParams

WARM_UP_TOKENS = 16
LOOKUP_MAX_N = 3  # for all engines; it is lookup's default
GGUF_POSITIONS = 4096  # of llama.cpp's cache, prompt and output
# A working folder has the weights twice, as the checkpoint and as a peer's conversion, and small files.
DISK_COPIES = 2.2


@dataclass(frozen=True)
class PeersPlan(Plan):
    """The options of the benchmark. pythons: interpreter of each peer's environment, None = this one."""

    shape: str | None = shape(
        None,
        f"the target is widened to it in a folder: {SHAPE_NAMES}, or none",
        usual="llama-3.2-1b for the shipped target",
    )
    folder: Path | None = option(
        None, "keeps the widened model and what peers convert it to, about 4 GB", usual="a temporary one"
    )
    spec_lengths: tuple[int, ...] = option((5,), "tokens drafted per step (K)", flag="--spec-length", min=1, usual="5")
    num_prompts: int = option(
        5,
        "chats for a target that answers them, one of each kind in turn, else held-out beginnings of code",
        flag="--prompts",
        min=1,
        usual="5",
    )
    max_tokens: int = option(64, "tokens per prompt", min=2, usual="64")
    num_repeats: int = option(
        1, "times every prompt is run, or every pass", flag="--repeats", min=1, usual="1, of passes 15"
    )
    prompt_file: Path | None = prompt_file(f'"id" and "text", or for a target that answers {WORK}')
    suite: str | None = option(None, f"public benchmark to ask: {', '.join(suites.names())}", usual="none")
    prompts_per_kind: int | None = option(
        None, "of a suite the first so many of each kind, in place of --prompts", flag="--per-kind", min=1, usual="none"
    )
    num_threads: int | None = option(None, "of every engine", min=1, max=1024, usual="FORERUN_NUM_THREADS")
    llama_server: Path | None = option(None, "llama.cpp's llama-server, for GGUF files", usual="the one on the path")
    pythons: Mapping[str, Path | None] = field(default_factory=dict)


class Engine(Protocol):
    """forerun or a peer. about: what runs there. idle_cpu_s: processor time that it took while it had to wait."""

    name: str
    about: str
    idle_cpu_s: float


class Generating(Engine, Protocol):
    """An engine that continues prompts."""

    configurations: list[str]

    def generate(self, configuration: str, ids: list[int], max_tokens: int) -> Outcome: ...


Group = Seq[tuple[list[int], int]]  # prompts, with the new tokens of each


@runtime_checkable
class Batching(Generating, Protocol):
    """An engine that continues the prompts of a group at once."""

    def together(self, configuration: str, group: Group) -> list[Outcome]: ...


def run(config: EngineConfig, plan: PeersPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON. Raises UserError for what cannot be measured."""
    console = make_console()
    config = checked(config, plan.pythons)
    if plan.llama_server is not None and not plan.llama_server.is_file():
        raise BadOption(f"--llama-server {plan.llama_server} is not possible: there is no such file; name the program")
    num_threads = set_num_threads(plan.num_threads)
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        work = plan.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forerun-peers-")))
        own, question = open_own(config, plan, work, num_threads)
        model = own.checkpoint.model
        console.print(f"target: {num_parameters(model.config):,} parameters ({describe(model.config)}), {own.weights}")
        ceiling = print_ceiling(model, console)
        names, kinds, prompts = own.read_prompts(plan)
        engines: list[Generating] = [own, *start_peers(plan.pythons, question, left_out, stack)]
        lengths = [own.answer_length(ids, plan.max_tokens) for ids in prompts] * plan.num_repeats
        names, kinds, ids = names * plan.num_repeats, kinds * plan.num_repeats, prompts * plan.num_repeats
        measured = measure(engines, ids, lengths, left_out)
    busy_s = sum(outcome.seconds for outcomes in measured.values() for outcome in outcomes)
    print_engines(engines, left_out, busy_s, console)
    lines = lines_of(measured, lambda i, position: own.top2_gap(ids[i], position))
    console.print(table(lines, TABLE))
    by_kind = rates_by_kind(measured, kinds)
    if plan.suite is not None:
        print_kinds(by_kind, console)
    print_notes(lines, measured, names, console)
    drafts = [] if own.draft is None else [own.draft.model]
    return {
        "bench": "peers",
        "target": own.checkpoint.name,
        "plan": plan.record("folder", "pythons", "llama_server"),
        "engines": {engine.name: engine.about for engine in engines},
        "left_out": left_out,
        "idle_cpu_s": {engine.name: engine.idle_cpu_s for engine in engines},
        "prompts": names,
        "kinds": kinds,
        "by_kind": [asdict(line) for line in by_kind],
        "prompt_tokens": [len(one) for one in ids],
        "new_tokens": lengths,
        **record_of([], model, drafts, ceiling),
        "lines": [asdict(line) for line in lines],
    }


def print_engines(engines: Seq[Engine], left_out: Mapping[str, str], busy_s: float, console: Console) -> None:
    """Print which engines ran, which did not, and the processor time of waiting ones. busy_s: seconds of all runs."""
    for engine in engines:
        console.print(f"{engine.name}: {engine.about}")
    for name, why in left_out.items():
        console.print(f"{name} is left out: {why}")
    waiting = ", ".join(f"{engine.name} {engine.idle_cpu_s:.2f} s" for engine in engines)
    console.print(f"processor time of engines while another one ran: {waiting}, in {busy_s:.1f} s of runs")


def set_num_threads(wanted: int | None) -> int:
    """Set and return the threads of every engine, forerun's and torch's operators included. wanted: None = default."""
    if wanted is not None:
        os.environ["FORERUN_NUM_THREADS"] = str(wanted)
    num_threads = native.num_threads()
    torch.set_num_threads(num_threads)
    return num_threads


def checked(config: EngineConfig, pythons: Mapping[str, Path | None]) -> EngineConfig:
    """Return the configuration in bfloat16 on a CPU, as all engines compute. Raises BadOption and NotFound."""
    for name, allowed in (("dtype", "bfloat16"), ("device", "cpu")):
        if getattr(config, name) not in ("auto", allowed):
            value = getattr(config, name)
            raise BadOption(f"{name}={shown(value)} is not possible: engines are compared in bfloat16 on a CPU")
    for name, python in pythons.items():
        if python is not None and not python.is_file():
            raise BadOption(f"{python_flag(name)} {python} is not possible: there is no such file; name an interpreter")
    return replace(config, dtype="bfloat16", device="cpu")


# ----------------------------------------------------------------------------------------------------------- models


def open_own(config: EngineConfig, plan: PeersPlan, work: Path, num_threads: int) -> tuple[OwnEngine, Question]:
    """Open forerun on the target that all engines read, and return it with the models that the others are to load.

    Only the shipped target has a draft model that need not be named. Raises UserError, CapacityError.
    """
    draft = None
    if config.draft != "auto":
        name, quantization = draft_options(config.draft if config.draft != "none" else "auto")
        if quantization not in (None, AUTO):
            raise BadOption("other engines' draft models are not quantised here: drop quantization from --draft")
        draft = locate(name).resolve()
    elif config.target is None:
        draft = SHIPPED_DRAFT
    path, checkpoint = open_target(config, plan.shape, work)
    question = Question(
        target=path,
        draft=draft,
        work=work.resolve(),
        num_threads=num_threads,
        spec_lengths=plan.spec_lengths,
        lookup_max_n=LOOKUP_MAX_N,
        weights=config.quantization,
        num_positions=min(GGUF_POSITIONS, checkpoint.model.config.max_positions),
        server=server_of(plan),
    )
    return OwnEngine(checkpoint, config, draft, plan.spec_lengths, weights_of(config, path)), question


def server_of(plan: PeersPlan) -> Path | None:
    """Return the llama-server that is named, or the one on the path."""
    found = plan.llama_server or shutil.which("llama-server")
    return None if found is None else Path(found).resolve()


def open_target(config: EngineConfig, shape: str | None, work: Path) -> tuple[Path, Checkpoint]:
    """Load the target that all engines read, in forerun; shape as in PeersPlan. Returns its path, too.

    Raises UserError, CapacityError.
    """
    source = locate(config.target) if config.target is not None else SHIPPED_TARGET
    shape = shape or ("llama-3.2-1b" if config.target is None else "none")
    if spec_of(source).encoder is not None:
        raise BadOption(f"{source} is an encoder-decoder: `python -m benchmarks.peers_t5` compares those")
    own = unpacked(source, work) if source.is_dir() else source  # a folder of integers that not all of them read
    path = (own if shape == "none" else widened(source, shape, work)).resolve()
    say(f"loading {path.name} ...")
    return path, Opened.of(replace(config, target=str(path))).load()


def widened(source: Path, shape: str, work: Path) -> Path:
    """Return the folder of the widened target below `work`; it is written where it does not exist.

    Raises BadOption where the folder has another model, CapacityError where the disk has no room.
    """
    config = spec_of(source)
    wide = shape_named(shape, config)
    folder = work / shape
    if folder.is_dir() and any(folder.iterdir()):
        if spec_of(folder) != wide_config(config, wide):
            raise BadOption(f"{folder} is not {source.name} widened to {shape}: name another --folder, or delete it")
        return folder
    return written(folder, wide_config(config, wide), lambda new: write_widened(source, new, wide))


def unpacked(source: Path, work: Path) -> Path:
    """Return a checkpoint folder that every engine reads: the source, or what a quantised one stands for in bfloat16.

    The latter is written below `work` once. Raises CapacityError where the disk has no room.
    """
    if source.is_dir() and layout_of(OpenedCheckpoint.of(source, config_only=True).raw) is None:
        return source
    folder = work / (f"{source.name}-dense" if source.is_dir() else f"{source.stem}-{source.stat().st_size}")

    def write(new: Path) -> None:
        checkpoint = load_checkpoint(source, dtype="bfloat16")
        save_checkpoint(
            new,
            checkpoint.model.config,
            HostWeights(checkpoint.tensors),
            end_ids=checkpoint.end_ids,
            bos_id=checkpoint.config.get("bos_token_id"),
            tokenizer_folder=checkpoint.folder,
        )

    return folder if folder.is_dir() else written(folder, spec_of(source), write)


def written(folder: Path, config: Spec, write: Callable[[Path], object]) -> Path:
    """Write a model's folder as a whole, and return it. Raises CapacityError where the disk has no room."""
    work = folder.parent
    work.mkdir(parents=True, exist_ok=True)
    needed = int(num_parameters(config) * 2 * DISK_COPIES)
    if (free := shutil.disk_usage(work).free) < needed:
        raise CapacityError(
            f"{work} has {free / 1e9:.1f} GB free and the models take {needed / 1e9:.1f} GB: name a --folder with room"
        )
    say(f"writing {folder} ...")
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=work) as partial:  # an interruption leaves no files
        write(Path(partial) / folder.name)
        (Path(partial) / folder.name).rename(folder)
    return folder


def weights_of(config: EngineConfig, path: Path) -> str:
    """Return the type of the target's weights, for reports."""
    return config.quantization or (path.name if path.is_file() else "bfloat16")


def about_own(model: LoadedModel, weights: str) -> str:
    """Describe the operators that forerun runs."""
    return f"{model.ops.build}, {model.ops.num_threads} threads, {weights}"


def say(text: str) -> None:
    """Print progress on standard error, without animation, which would take time from the engine that runs."""
    make_console(stderr=True).print(text)


# ---------------------------------------------------------------------------------------------------------- engines


class OwnEngine:
    """forerun in this process, with one LLM per configuration over the same weights.

    Beside those of fixed lengths there are the two that need no option: with the draft model, and with none.
    batch_size: requests that may run at once.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        draft: Path | None,
        spec_lengths: Seq[int],
        weights: str,
        batch_size: int = 1,
    ) -> None:
        model = checkpoint.model
        self.name = OWN
        self.idle_cpu_s = 0.0
        self.checkpoint = checkpoint
        self.weights = weights
        self.draft: Checkpoint | None = None
        # The prefix cache is off, because the other engines have none, and a repeated prompt would be found in it.
        options = {**config.options(), "max_batch_size": batch_size, "prefix_caching": False}
        drafts: dict[str, str | Checkpoint] = {"lookup": f"lookup:max_n={LOOKUP_MAX_N}"}
        free: dict[str, str | Checkpoint] = {"no model": WITHOUT_MODEL}
        if draft is not None:
            # As it is usual, where the weights are not all alike.
            self.draft = load_beside(model, draft, quantization=AUTO if draft.is_file() else None)
            drafts["draft"] = free["draft"] = self.draft
        self._llms = {PLAIN: LLM(checkpoint, **{**options, "draft": "none"})}
        for method, value in drafts.items():
            for spec_length in spec_lengths:
                llm = LLM(checkpoint, **{**options, "draft": value, "spec_length": spec_length})
                self._llms[f"{method} K={spec_length}"] = llm
        for method, value in free.items():
            self._llms[f"{method} {OWN_LENGTHS}"] = LLM(checkpoint, **{**options, "draft": value})
        for llm in self._llms.values():
            llm.measure_passes()
        self.configurations, self._num_runs = list(self._llms), 0
        self._answers = config.target is not None and self._llms[PLAIN].answers_texts  # the shipped one continues texts
        self.about = about_own(model, weights)

    def encode(self, text: str) -> list[int]:
        """Return a prompt as the ids that all engines get."""
        return self._llms[PLAIN].tokenizer.encode(text)

    def read_prompts(self, plan: PeersPlan) -> tuple[list[str], list[str], list[list[int]]]:
        """Return names, kinds and ids of the prompts: chats where the target answers them, else texts to continue.

        Each turn of a suite's conversation is a prompt of its own, with the plain answers to the turns before it.
        """
        llm = self._llms[PLAIN]
        if plan.suite is not None:
            return self._turns(plan)
        if not self._answers:
            texts = latency.read_prompts(plan.num_prompts, plan.prompt_file)
            return [name for name, _ in texts], ["text"] * len(texts), [self.encode(text) for _, text in texts]
        work = read_work(MethodsPlan(prompts_per_kind=plan.num_prompts, prompt_file=plan.prompt_file))
        work = work[: plan.num_prompts]
        ids = [conversation_ids(llm, prompt.messages) for prompt in work]
        return [prompt.id for prompt in work], [prompt.kind for prompt in work], ids

    def _turns(self, plan: PeersPlan) -> tuple[list[str], list[str], list[list[int]]]:
        llm = self._llms[PLAIN]
        names, kinds, prompts = list[str](), list[str](), list[list[int]]()
        suite = suites.read(str(plan.suite), plan.prompt_file)
        num = plan.num_prompts if plan.prompts_per_kind is None else None
        for conversation in suite.first(num, plan.prompts_per_kind).conversations:
            messages = list[Message]()
            for number, turn in enumerate(conversation.turns, 1):
                messages += turn
                names.append(f"{conversation.id}, turn {number}")
                kinds.append(conversation.kind)
                prompts.append(conversation_ids(llm, messages, conversation.tools))
                if number < len(conversation.turns):
                    params = SamplingParams(max_tokens=plan.max_tokens, temperature=0)
                    (output,) = llm.generate([prompts[-1]], params)
                    messages.append({"role": "assistant", "content": output.text})
        return names, kinds, prompts

    def answer_length(self, ids: list[int], max_tokens: int) -> int:
        """Return the tokens of an answer, at least two. All engines write as many, and none ends before.

        What a model writes behind its answer is no work that anybody waits for.
        """
        return self.natural_length(ids, max_tokens) if self._answers else max_tokens

    def natural_length(self, ids: list[int], max_tokens: int) -> int:
        """Return the tokens of the target's own answer, at least two."""
        (output,) = self._llms[PLAIN].generate([ids], SamplingParams(max_tokens=max_tokens, temperature=0))
        return max(2, len(output.token_ids))

    def params(self, max_tokens: int) -> SamplingParams:
        """Decode greedily and past the end of sequence, without the texts of earlier runs, which would be found."""
        self._num_runs += 1
        salt = f"run {self._num_runs}"
        return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, cache_salt=salt)

    def generate(self, configuration: str, ids: list[int], max_tokens: int) -> Outcome:
        """Continue one prompt."""
        output, took = latency.answered(self._llms[configuration], ids, self.params(max_tokens))
        return Outcome(output.token_ids, took.seconds, took.first_s, took.num_first)

    def top2_gap(self, ids: list[int], position: int) -> tuple[float, int]:
        """Return the gap of the two best logits at one position of the plain output, and the id of the second best."""
        params = SamplingParams(max_tokens=position + 1, temperature=0, ignore_eos=True, logprobs=2)
        (output,) = self._llms[PLAIN].generate([ids], params)
        assert output.logprobs is not None
        (_, best), (second, next_best) = output.logprobs[position].top
        return best - next_best, second


def start_peers(
    pythons: Mapping[str, Path | None], question: Question, left_out: dict[str, str], stack: ExitStack
) -> list[PeerProcess]:
    """Start every peer that can be started. `left_out` gets the reasons of the others; the stack ends them all."""
    peers = []
    for name in INSTALL:
        say(f"loading {name} ...")
        python, asked = pythons.get(name) or Path(sys.executable), question
        if name != "llama.cpp" and question.worker == PROMPTS_WORKER and has(python, name):
            draft = None if question.draft is None else unpacked(question.draft, question.work)
            asked = replace(question, folders=(unpacked(question.target, question.work), draft))
        try:
            peer = PeerProcess(name, python, asked)
        except PeerError as error:
            left_out[name] = str(error)
            continue
        stack.callback(peer.close)
        peers.append(peer)
    return peers


# -------------------------------------------------------------------------------------------------------- measuring


def measure(
    engines: Seq[Generating], prompts: Seq[list[int]], lengths: Seq[int], left_out: dict[str, str], group_size: int = 1
) -> Runs:
    """Run all configurations of all engines, first to warm up, then in turns group by group of prompts.

    lengths: new tokens of each prompt. Each group begins with another configuration. A peer's configuration that fails
    is dropped, and the reason is put into `left_out`. group_size: prompts that an engine has before the next one's
    turn, at once if it is Batching.
    """
    runs: dict[Variant, list[Outcome]] = {(e.name, name): [] for e in engines for name in e.configurations}
    by_name = {engine.name: engine for engine in engines}

    def attempt(variant: Variant, group: Group, keep: Callable[[list[Outcome]], object]) -> None:
        cpu_s, engine = time.process_time(), by_name[variant[0]]
        try:
            if isinstance(engine, Batching):
                keep(engine.together(variant[1], group))
            else:
                keep([engine.generate(variant[1], ids, num_tokens) for ids, num_tokens in group])
        except PeerError as error:
            del runs[variant]
            left_out[f"{variant[0]}, {variant[1]}"] = str(error)
        if isinstance(engine, PeerProcess):
            by_name[OWN].idle_cpu_s += time.process_time() - cpu_s

    say("warming up ...")
    for variant in list(runs):
        attempt(variant, [(prompts[0], min(lengths[0], WARM_UP_TOKENS))], lambda outcomes: None)
    for engine in engines:
        engine.idle_cpu_s = 0.0
    asked = list(zip(prompts, lengths, strict=True))
    for i, first in enumerate(range(0, len(asked), group_size)):
        group = asked[first : first + group_size]
        num_tokens = sum(length for _, length in group)
        say(f"run {first + 1} of {len(prompts)}: {len(runs)} configurations x {num_tokens} tokens ...")
        for variant in latency.rotated(list(runs), i):
            attempt(variant, group, runs[variant].extend)
    return runs


def command(
    engine: Annotated[Given, flags.engine("target", "draft", "quantization", "ops", "kv_cache_backend", "config")],
    plan: Annotated[Given, Fields(PeersPlan, is_plan=True)],
    forward: Annotated[
        list[int] | None,
        typer.Option(
            help="instead of prompts, measure single passes of this many tokens with all their logits; may be repeated",
            min=1,
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="tokens before a pass of --forward; may be repeated [default: 256]", min=1, show_default=False
        ),
    ] = None,
    transformers_python: Annotated[
        Path | None, typer.Option(help="interpreter that can import transformers [default: this one]")
    ] = None,
    openvino_python: Annotated[
        Path | None,
        typer.Option(help="interpreter that can import openvino_genai and optimum.intel [default: this one]"),
    ] = None,
    llama_cpp_python: Annotated[
        Path | None, typer.Option(help="interpreter that can import llama_cpp, for --forward [default: this one]")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run the same models, prompts and threads in forerun, transformers, OpenVINO and llama.cpp, greedily."""
    config = flags.engine_config(engine)
    plan["pythons"] = {"transformers": transformers_python, "openvino": openvino_python, "llama.cpp": llama_cpp_python}
    if forward:
        from benchmarks import peer_forwards

        keep(peer_forwards.run(config, peer_forwards.planned(forward, context, plan, engine["draft"])), json_file)
    elif context:
        raise BadOption(f"--context {context[0]} is not possible without --forward: drop it, or say --forward 8")
    elif llama_cpp_python is not None:
        raise BadOption("--llama-cpp-python is for --forward alone: prompts run in llama.cpp's --llama-server")
    else:
        keep(run(config, PeersPlan(**plan)), json_file)


if __name__ == "__main__":
    start(command)
