"""`benchmarks.peers --forward M` measures one pass of M new tokens in forerun and in other engines.

The time of verification depends on t(M) / t(1) of an engine, and on how its passes compare with forerun's. Every engine
loads the target alone and computes the logits of all M tokens, behind a cache with the same tokens: one cache for each
context. In every round each engine runs each M behind each context in turn, a few times in a row, of which the last one
counts; the next round begins with another engine and another M.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol, cast

from rich.console import Console
from rich.table import Table

from benchmarks import peers
from benchmarks.peer_process import Pass, PeerError, Question
from benchmarks.peer_results import OWN, Range
from forerun import ops
from forerun.bench import latency
from forerun.bench.bandwidth import Probes
from forerun.bench.plans import Plan
from forerun.bench.results import print_ceiling, record_of
from forerun.bench.tables import Column, table
from forerun.bench.widen import describe, num_parameters
from forerun.blocks import read_share
from forerun.config import EngineConfig
from forerun.errors import BadOption
from forerun.kv.cache import Backend, BlockCache
from forerun.models.loading import Checkpoint
from forerun.models.runner import Run, Runner
from forerun.ops.cpu.model import CpuModel
from forerun.ops.model import LoadedModel
from forerun.registry import flag_of
from forerun.text.terminal import make_console

SPAN_TOKENS = 128  # passes follow each other in the text for so many tokens, then begin behind the context again,
SPAN_SHARE = 8  # ... or for this part of a shorter context
PASSES_BEFORE = 4  # llama.cpp's first pass of a turn took up to three times as long as its fifth, forerun's 1.3 times
PAUSE_S = 0.03  # before each turn, because threads of the previous engine may still be spinning
NUM_PROMPTS = 32  # prompts that the text of the passes repeats
WORKER = "forwards.py"


@dataclass(frozen=True)
class ForwardsPlan(Plan):
    """The options of the benchmark; shape, folder, num_threads and pythons as in PeersPlan.

    rows: ascending numbers of tokens of a pass; t(M) is divided by the time of the first. contexts: ascending, the
    least number of tokens before a pass; there are some more, see `span_tokens`.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...] = (256,)
    num_repeats: int = 15
    shape: str | None = None
    folder: Path | None = None
    num_threads: int | None = None
    pythons: Mapping[str, Path | None] = field(default_factory=dict)

    def span_tokens(self, context: int) -> int:
        """The tokens behind a context that its passes take, one after the other."""
        return max(self.rows[-1], min(SPAN_TOKENS, context // SPAN_SHARE))

    @property
    def num_tokens(self) -> int:
        """The tokens of the longest context and of the passes behind it."""
        return self.contexts[-1] + self.span_tokens(self.contexts[-1])


def planned(
    rows: Seq[int], contexts: Seq[int] | None, given: Mapping[str, Any], draft: str | None = None
) -> ForwardsPlan:
    """Make a plan of the options that were given for `peers`. draft: of the engine, None = not given.

    Raises BadOption for an option that has a meaning for prompts alone.
    """
    known = ForwardsPlan.__dataclass_fields__
    for name, value in {"draft": draft, **given}.items():
        if name not in known and value is not None:
            flag = "--draft" if name == "draft" else flag_of(peers.PeersPlan.__dataclass_fields__[name])
            raise BadOption(f"{flag} contradicts --forward, which runs single passes of the target: drop one")
    ascending: dict[str, Any] = {"contexts": tuple(sorted(set(contexts)))} if contexts else {}
    return ForwardsPlan(tuple(sorted(set(rows))), **given, **ascending)


class Forwarding(peers.Engine, Protocol):
    """An engine that runs single passes."""

    def forward(self, past: list[int], ids: list[int], place: int) -> Pass: ...


Key = tuple[str, int, int]  # engine, context, number of tokens
Passes = Mapping[Key, Seq[Pass]]  # one of each round


def run(config: EngineConfig, plan: ForwardsPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON. Raises UserError for what cannot be measured."""
    console = make_console()
    config = peers.checked(config, plan.pythons)
    num_threads = peers.set_num_threads(plan.num_threads)
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        work = plan.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forerun-peers-")))
        path, checkpoint = peers.open_target(config, plan.shape, work)
        model, weights = checkpoint.model, peers.weights_of(config, path)
        _refuse_too_long(plan, model)
        console.print(f"target: {num_parameters(model.config):,} parameters ({describe(model.config)}), {weights}")
        ceiling = print_ceiling(model, console)
        question = Question(
            path,
            None,
            work.resolve(),
            num_threads,
            (),
            lookup_max_n=0,
            weights=config.quantization,
            num_positions=plan.num_tokens,
            num_places=len(plan.contexts),
            worker=WORKER,
        )
        own = OwnForward(model, config, plan.num_tokens, len(plan.contexts), weights)
        engines: list[Forwarding] = [own, *peers.start_peers(plan.pythons, question, left_out, stack)]
        bandwidths: list[float] = []
        passes = measure(engines, text_of(checkpoint, plan.num_tokens), plan, left_out, bandwidths)
    peers.print_engines(engines, left_out, sum(one.seconds for some in passes.values() for one in some), console)
    lines = lines_of(passes)
    console.print(table_of(lines, plan))
    read = {m: bytes_of(model, median(own.num_experts[m])) for m in plan.rows}
    shares = {m: _share_of_bandwidth(passes[OWN, plan.contexts[0], m], bandwidths, read[m]) for m in plan.rows}
    share = shares[plan.rows[0]]
    _print_notes(plan, bandwidths, read[plan.rows[0]], share, console)
    if model.config.has_experts:
        chosen = ", ".join(f"{m}: {median(own.num_experts[m]):.1f} and {shares[m]:.2f}" for m in plan.rows)
        console.print(
            "by rows of forerun's passes, the experts of a layer that they chose, and the share of the memory's speed "
            f"at which they read these and all other weights: {chosen}"
        )
    return {
        "bench": "peer forwards",
        "target": checkpoint.name,
        "plan": plan.record("folder", "pythons"),
        "engines": {engine.name: engine.about for engine in engines},
        "left_out": left_out,
        "idle_cpu_s": {engine.name: engine.idle_cpu_s for engine in engines},
        "round_bandwidths_bytes_per_s": [round(b) for b in bandwidths],
        "own_share_of_bandwidth": share,
        "own_shares_of_bandwidth": shares,
        "own_num_experts": {m: median(own.num_experts[m]) for m in plan.rows},
        **record_of([], model, [], ceiling),
        "lines": [asdict(line) for line in lines],
    }


def _refuse_too_long(plan: ForwardsPlan, model: LoadedModel) -> None:
    longest, most = plan.contexts[-1], model.config.max_positions
    behind = plan.num_tokens - longest
    possible = [context for context in range(1, most) if context + plan.span_tokens(context) <= most]
    if not possible:
        raise BadOption(
            f"--forward {plan.rows[-1]} is not possible: passes take {behind} positions beside what is before them, "
            f"and the model has {most}"
        )
    if longest not in possible:
        raise BadOption(
            f"--context {longest} is not possible: passes reach {behind} tokens further, and the model has {most} "
            f"positions; {possible[-1]} is the longest"
        )


def text_of(checkpoint: Checkpoint, num_tokens: int) -> list[int]:
    """Return `num_tokens` ids of held-out prompts one after the other, repeated as often as needed."""
    ids = checkpoint.text_tokenizer.encode("\n".join(text for _, text in latency.read_prompts(NUM_PROMPTS)))
    return list(islice(cycle(ids), num_tokens))


# ---------------------------------------------------------------------------------------------------------- measuring


class OwnForward:
    """forerun in this process, which runs a pass as an engine's step does, with the logits of every token."""

    def __init__(
        self, model: LoadedModel, config: EngineConfig, num_tokens: int, num_places: int, weights: str
    ) -> None:
        self.name = OWN
        self.idle_cpu_s = 0.0
        self.about = peers.about_own(model, weights)
        cache = BlockCache.of(
            model,
            cast(Backend, config.kv_cache_backend),
            max_batch_size=num_places,
            max_seq_len=num_tokens,
            dtype=ops.kv_dtype(config.kv_cache_dtype, model),
        )
        for place in range(num_places):
            cache.open(place)
        self._runner = Runner(model, cache)
        self._held = [list[int]() for _ in range(num_places)]
        self.num_experts: dict[int, list[float]] = {}  # by rows of a pass: of a layer, that those rows chose

    def forward(self, past: list[int], ids: list[int], place: int) -> Pass:
        """Run one pass over `ids` behind `past`, which is written to the cache before the clock starts.

        None of its rows is kept, as if all were rejected: layers that keep a state have a way back from no other.
        """
        cache, held = self._runner.cache, self._held[place]
        same = len(held) if past[: len(held)] == held else len(past) if held[: len(past)] == past else 0
        kept = cache.truncate_to(place, same)
        if kept < len(past):
            self._runner.forward([Run(place, past[kept:], logits="none")])
            cache.keep({place: range(len(past) - kept)})
        start = time.perf_counter()
        scores = self._runner.forward([Run(place, ids)])
        seconds = time.perf_counter() - start
        cache.keep({place: range(0)})
        self._held[place] = past
        self.num_experts.setdefault(len(ids), []).append(scores.num_experts)
        return Pass(seconds, scores.logits[0].argmax(-1).tolist())


def measure(
    engines: Seq[Forwarding], text: list[int], plan: ForwardsPlan, left_out: dict[str, str], bandwidths: list[float]
) -> Passes:
    """Run a round to warm up, then the rounds that count; in each, all passes run in one engine after the other.

    All engines run a pass at the same place of the text. An engine that fails is dropped, and the reason is put into
    `left_out`. Appends the memory's bytes per second at the beginning of each round to `bandwidths`.
    """
    running, ends, round_passes = list(engines), list(plan.contexts), list[dict[Key, Pass]]()
    probes = Probes("cpu")
    passes = [(place, context, m) for m in plan.rows for place, context in enumerate(plan.contexts)]
    for i in range(1 + plan.num_repeats):
        peers.say(f"round {i} of {plan.num_repeats} ..." if i else "warming up ...")
        bytes_per_s, found = probes.read().bytes_per_s, dict[Key, Pass]()
        for place, context, num_rows in latency.rotated(passes, i):
            fits = ends[place] + num_rows <= context + plan.span_tokens(context)
            start = ends[place] if fits else context
            ends[place] = end = start + num_rows
            for engine in latency.rotated(running, i):
                try:
                    one = _turn(engine, text[:start], text[start:end], place, engines[0])
                    found[engine.name, context, num_rows] = one
                except PeerError as error:
                    left_out[engine.name] = str(error)
                    running.remove(engine)
        if i:
            round_passes.append(found)
            bandwidths.append(bytes_per_s)
        else:
            for engine in engines:
                engine.idle_cpu_s = 0.0
    keys = [(engine.name, context, m) for engine in running for context in plan.contexts for m in plan.rows]
    return {key: [found[key] for found in round_passes] for key in keys}


def _turn(engine: Forwarding, past: list[int], ids: list[int], place: int, own: Forwarding) -> Pass:
    """Run one pass, and note the processor time that forerun takes while another engine runs.

    The same passes before it wake the engine's threads and bring its weights back into the caches: in a text one pass
    follows the other.
    """
    time.sleep(PAUSE_S)
    cpu_s = time.process_time()
    try:
        for _ in range(PASSES_BEFORE):
            engine.forward(past, ids, place)
        return engine.forward(past, ids, place)
    finally:
        if engine is not own:
            own.idle_cpu_s += time.process_time() - cpu_s


# ------------------------------------------------------------------------------------------------------------ numbers


@dataclass(frozen=True)
class ForwardLine:
    """One row of the table and of the JSON: medians over the rounds, with least and largest.

    Ratios and differences are within one round. ratio: this engine's pass / forerun's of as many tokens behind the same
    context. growth: this engine's pass / its own of the fewest tokens. extra_s: this engine's pass - its own behind the
    shortest context. num_same: tokens of num_tokens after which forerun has the same best id.
    """

    engine: str
    context: int
    num_rows: int
    seconds: float
    ratio: float
    ratio_range: Range
    growth: float
    growth_range: Range
    extra_s: float
    num_same: int
    num_tokens: int


def lines_of(passes: Passes) -> list[ForwardLine]:
    """Return all rows. passes: of every engine, context and M, in the order of the rounds."""
    shortest, fewest = min(context for _, context, _ in passes), min(num_rows for _, _, num_rows in passes)
    return [
        _line(key, some, passes[OWN, *key[1:]], passes[*key[:2], fewest], passes[key[0], shortest, key[2]])
        for key, some in passes.items()
    ]


def _line(key: Key, passes: Seq[Pass], own: Seq[Pass], fewest: Seq[Pass], shortest: Seq[Pass]) -> ForwardLine:
    ratios, growths = (
        [one.seconds / other.seconds for one, other in zip(passes, others, strict=True)] for others in (own, fewest)
    )
    pairs = [pair for one, other in zip(passes, own, strict=True) for pair in zip(one.best, other.best, strict=True)]
    return ForwardLine(
        *key,
        seconds=median(one.seconds for one in passes),
        ratio=median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        growth=median(growths),
        growth_range=(min(growths), max(growths)),
        extra_s=median(one.seconds - other.seconds for one, other in zip(passes, shortest, strict=True)),
        num_same=sum(a == b for a, b in pairs),
        num_tokens=len(pairs),
    )


def table_of(lines: Seq[ForwardLine], plan: ForwardsPlan) -> Table:
    """Return the table with one row per engine, context and number of tokens; ranges are over the rounds."""

    def ends(name: str) -> Callable[[ForwardLine], str]:
        return lambda line: "({:.2f}..{:.2f})".format(*getattr(line, name))

    over_first = Column(f"ms over\n{plan.contexts[0]}", lambda line: 1e3 * line.extra_s, "{:.1f}")
    return table(
        lines,
        [
            Column("engine", "engine"),
            Column("behind", "context"),
            Column("rows", "num_rows"),
            Column("ms", lambda line: 1e3 * line.seconds, "{:.1f}"),
            Column("over\nours", "ratio", "{:.2f}x"),
            Column("(range)", ends("ratio_range"), is_text=False),
            Column(f"t(M)/\nt({plan.rows[0]})", "growth", "{:.2f}"),
            over_first if len(plan.contexts) > 1 else Column("(range)", ends("growth_range"), is_text=False),
            Column("same\nid", lambda line: f"{line.num_same}/{line.num_tokens}", is_text=False),
        ],
    )


def bytes_of(model: LoadedModel, num_experts: float) -> int:
    """Return the bytes of weights that a pass reads whose rows chose so many experts of each layer; 0 = there are none.

    Raises BadOption for a mixture that the native kernels do not run.
    """
    found = next((block.experts for block in model.config.blocks if block.experts is not None), None)
    if found is None:
        return model.bytes_per_pass
    if not isinstance(model, CpuModel):
        raise BadOption("what a mixture of experts reads is known of the native kernels: leave --ops out")
    all_experts = sum(m.nbytes for name, m in model.matrices.items() if read_share(model.config, name) < 1)
    return model.bytes_per_pass + round(all_experts * (num_experts - found.chosen) / found.num)


def _share_of_bandwidth(passes: Seq[Pass], bandwidths: Seq[float], num_bytes: int) -> float:
    """Return the part of the memory's speed at which these passes read their weights: the median over the rounds."""
    return median(num_bytes / one.seconds / b for one, b in zip(passes, bandwidths, strict=True))


def _print_notes(plan: ForwardsPlan, bandwidths: Seq[float], num_bytes: int, share: float, console: Console) -> None:
    """Print how to read the table, and the limit that memory sets. num_bytes: the bytes that a pass reads."""
    slowest, middle, fastest = (f(bandwidths) for f in (min, median, max))
    console.print(
        f"memory gave {middle / 1e9:.1f} GB/s at the beginning of the rounds, {slowest / 1e9:.1f} to "
        f"{fastest / 1e9:.1f}: reading all weights takes {1e3 * num_bytes / middle:.1f} ms; forerun's pass of "
        f"{plan.rows[0]} behind {plan.contexts[0]} reads them at {share:.2f} of that speed"
    )
    spans = ", ".join(f"{context} to {context + plan.span_tokens(context)}" for context in plan.contexts)
    console.print(
        f"rows: new tokens of a pass, with the logits of each, behind {spans} others; ms: median of {plan.num_repeats} "
        "rounds; over ours: this pass over forerun's of the same round, median (least..largest), above 1 forerun "
        "is faster; same id: of the largest logits, as forerun's"
        + (f"; ms over {plan.contexts[0]}: more than behind {plan.contexts[0]}" if len(plan.contexts) > 1 else "")
    )
