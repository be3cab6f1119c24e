"""`benchmarks.kernels` measures each operator of a pass of M rows, and compares it with the memory's bandwidth.

Verifying M tokens reads the same weights as decoding one; t(M) / t(1) says how much longer it takes. The memory of a
shared machine is faster in one minute than in the next, so in every repeat bandwidth probes run before and after each
operator, ratios are taken within a repeat, and the median of the repeats is shown with their range. The limit of an
operator is the mean of two readings, before and after it, of the probe that reads fastest over the whole run; the best
of many noisy readings would be more than any program can reach. Weights are random numbers, packed. Each operator runs
through all layers in turn, so that it does not find weights in a cache that a whole pass would have replaced.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import kernel_operators
from benchmarks.peers import set_num_threads
from benchmarks.start import start
from forerun import native
from forerun.bench.bandwidth import Probes
from forerun.bench.plans import Plan, repeats
from forerun.bench.results import print_ceiling, record_of
from forerun.bench.tables import Column, table
from forerun.bench.widen import describe, num_parameters, shape_named
from forerun.blocks import Plain, Rope, Spec, resized
from forerun.cli.bench import JsonFile, keep
from forerun.cli.signatures import Fields, Given
from forerun.config import HOW_QUANTISED, Quantization
from forerun.engine.opened import SHIPPED_TARGET
from forerun.errors import BadOption, shown
from forerun.models.gguf.blocks import TYPES, TensorType
from forerun.models.loading import DTYPES
from forerun.models.opened import spec_of
from forerun.models.widening import wide_config
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel
from forerun.ops.torch_tensors import torch_dtype
from forerun.registry import option, unknown
from forerun.text.terminal import make_console

# The sizes of Llama 3.2 1B.
RANDOM_1B = Plain(
    model_type="llama",
    vocab_size=128256,
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    norm_eps=1e-5,
    max_positions=131072,
    rope=Rope(500000.0, "llama3", 32.0),
    tied=True,
).spec
# Two of its layers and a small head: large enough that weights come from memory, small enough for slow sets.
TWO_LAYERS = resized(RANDOM_1B, vocab_size=8192, num_layers=2)
SHAPES = ("random-1.24b", "two-layers", "demo")
MEMORY_BOUND_ROWS = 16  # more rows are limited by arithmetic, so their bytes per second are not shown
NUM_SAMPLES = 3  # runs of each number of rows within a repeat, in turn; the median is taken


@dataclass(frozen=True)
class KernelsPlan(Plan):
    """The options of the benchmark.

    rows: numbers of rows of a pass; ratios are over the first one. prefill_tokens: rows of a prompt chunk. context:
    tokens in the cache before a pass. contexts: the same for attention alone. isa: None = FORERUN_ISA, else the best.
    num_threads: None = FORERUN_NUM_THREADS, else as many as the machine has cores.
    """

    config: Spec = RANDOM_1B
    dtype: str = option("bfloat16", "bfloat16, float32, int8, int4[:group=N], or a type of GGUF files")
    isa: str | None = option(None, "avx512, avx_vnni, avx2 or baseline", usual="the best")
    num_threads: int | None = option(None, "of the kernels", min=1, max=1024, usual="FORERUN_NUM_THREADS")
    num_repeats: int = repeats(5, "rounds, each with a bandwidth of its own")
    rows: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 32, 64)
    prefill_tokens: int = 512
    context: int = 256
    contexts: tuple[int, ...] = option(
        (256, 4096), "tokens in front of the rows of attention alone, in each kind of cache", flag="--context"
    )


@dataclass
class Samples:
    """The measurements of one operator at one number of rows, with an entry for each repeat."""

    seconds: list[float] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)  # index of the round of probes just before; the next one is after
    ratios: list[float] = field(default_factory=list)  # over the time of the first number of rows in the same repeat


@dataclass(frozen=True)
class Line:
    """One row of the table: medians over the repeats, with least and largest."""

    operator: str
    num_rows: int
    seconds: float  # of one layer
    bytes_per_s: float | None
    fraction: float | None
    fraction_range: tuple[float, float] | None
    ratio: float
    ratio_range: tuple[float, float]


@dataclass(frozen=True)
class Prefill:
    """A prompt chunk in forerun compared with torch's products of the same shapes: medians, and the ratios' range."""

    num_tokens: int
    seconds: float
    torch_seconds: float
    torch_dtype: str
    ratio: float  # torch / forerun: above 1 forerun is faster
    ratio_range: tuple[float, float]


def config_named(name: str) -> Spec:
    """Return the sizes of a shape: random-1.24b, two-layers, or the widened pair of demo. Raises BadOption."""
    if name in (made := {"random-1.24b": RANDOM_1B, "two-layers": TWO_LAYERS}):
        return made[name]
    if name != "demo":
        raise BadOption(unknown("shape", name, SHAPES))
    shipped = spec_of(SHIPPED_TARGET)
    return wide_config(shipped, shape_named("demo", shipped))


def run(plan: KernelsPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON. Raises BadOption for what cannot be measured."""
    console = make_console()
    ops, quantization = _make_ops(plan), _quantization(plan.dtype)
    dtype = "bfloat16" if quantization else plan.dtype
    kind = _kind(plan.dtype)
    weights = kernel_operators.random_weights(plan.config, dtype, quantization=quantization, kind=kind)
    model = CpuModel(ops, plan.config, weights, consume=True)
    console.print(
        f"{num_parameters(plan.config):,} random weights ({describe(plan.config)}), "
        f"{plan.dtype if kind else quantization or plan.dtype}, "
        f"{ops.isa}, {ops.num_threads} thread{'s' * (ops.num_threads > 1)}"
    )
    with torch.inference_mode():
        ceiling = print_ceiling(model, console)
        torch.set_num_threads(1)  # torch's threads would spin beside those that are measured
        bandwidths: list[float] = []
        most_rows = max(*plan.rows, plan.prefill_tokens)
        lines = measure(
            kernel_operators.operators(model, ops, most_rows, plan.context, plan.contexts), plan, bandwidths
        )
        console.print(table_of(lines, plan.rows[0]))
        prefill = measure_prefill(model, plan, ops.num_threads)
    _print_notes(prefill, bandwidths, plan, console)
    return {
        "bench": "kernels",
        "isa": ops.isa,
        "plan": plan.record("config"),
        **record_of([], model, [], ceiling),
        "num_threads": ops.num_threads,
        "repeat_bandwidths_bytes_per_s": [round(b) for b in bandwidths],
        "prefill": asdict(prefill),
        "lines": [asdict(line) for line in lines],
    }


def _quantization(dtype: str) -> Quantization | None:
    """Return the quantization that a type of weights is, None for float32 and bfloat16. Raises BadOption for others.

    Of a type of GGUF files it is the one whose matrices of 4 bits have that type instead.
    """
    if dtype in DTYPES:
        return None
    if _kind(dtype):
        return Quantization(4, 32)
    try:
        return Quantization.parse(dtype)
    except BadOption as error:
        raise BadOption(
            f"dtype={shown(dtype)} is not possible: it must be one of {', '.join(DTYPES)}; or "
            f"{', '.join(kind.name for kind in TYPES.values() if kind.scheme)}; or {HOW_QUANTISED}"
        ) from error


def _kind(dtype: str) -> TensorType | None:
    return next((kind for kind in TYPES.values() if kind.scheme and kind.name == dtype), None)


def _make_ops(plan: KernelsPlan) -> CpuOps:
    _quantization(plan.dtype)
    possible = native.available_isas()
    isa = plan.isa or native.isa()
    if isa not in possible or isa == "reference":
        why = native.why_not() or f"it must be one of {', '.join(possible[:-1])}"
        raise BadOption(f"native operators for isa={shown(isa)} cannot be measured: {why}")
    return CpuOps(isa, set_num_threads(plan.num_threads))


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(found: Seq[kernel_operators.Operator], plan: KernelsPlan, bandwidths: list[float]) -> list[Line]:
    """Measure every operator at every number of rows.

    Appends the readings of the fastest probe to `bandwidths`, in bytes per second.
    """
    probes, first = Probes("cpu", with_torch=False), plan.rows[0]
    samples: dict[tuple[str, int], Samples] = {}
    rounds: list[dict[str, float]] = []
    for repeat in range(plan.num_repeats):
        rounds.append(probes.read_each())
        for operator in found:
            _say(f"{operator.name}, repeat {repeat + 1} of {plan.num_repeats}")
            seconds = _time_rows(operator, plan)
            for num_rows, taken in seconds.items():
                sample = samples.setdefault((operator.name, num_rows), Samples())
                sample.seconds.append(taken)
                sample.probes.append(len(rounds) - 1)
                sample.ratios.append(taken / seconds[first])
            rounds.append(probes.read_each())
    _say("")
    bandwidths += _of_the_fastest(rounds)
    return [_line(o, m, samples[o.name, m], bandwidths) for o in found for m in plan.rows + _prefill_rows(o, plan)]


def _say(text: str) -> None:
    """Show progress on a terminal's standard error, between two measurements."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _of_the_fastest(rounds: Seq[Mapping[str, float]]) -> list[float]:
    """Return the readings of the probe with the largest median, round by round."""
    best = max(rounds[0], key=lambda name: median(read[name] for read in rounds))
    return [read[best] for read in rounds]


def _prefill_rows(operator: kernel_operators.Operator, plan: KernelsPlan) -> tuple[int, ...]:
    return (plan.prefill_tokens,) if operator.prefill else ()


def _time_rows(operator: kernel_operators.Operator, plan: KernelsPlan) -> dict[int, float]:
    """Return the median seconds of one run for each number of rows, which take turns; a prompt runs once."""
    calls = {num_rows: operator.prepare(num_rows) for num_rows in plan.rows}
    for call in calls.values():
        call()
    taken: dict[int, list[float]] = {num_rows: [] for num_rows in calls}
    for _ in range(NUM_SAMPLES):
        for num_rows, call in calls.items():
            taken[num_rows].append(_seconds(call))
    for num_rows in _prefill_rows(operator, plan):
        call = operator.prepare(num_rows)
        call()  # a first run pays for page faults
        taken[num_rows] = [_seconds(call)]
    return {num_rows: median(values) for num_rows, values in taken.items()}


def _seconds(call: kernel_operators.Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _line(operator: kernel_operators.Operator, num_rows: int, samples: Samples, bandwidths: Seq[float]) -> Line:
    one = median(samples.seconds) / operator.num_parts
    around = [(bandwidths[i] + bandwidths[i + 1]) / 2 for i in samples.probes]
    fractions = [operator.num_bytes / s / b for s, b in zip(samples.seconds, around, strict=True)]
    counted = operator.num_bytes > 0
    return Line(
        operator=operator.name,
        num_rows=num_rows,
        seconds=one,
        bytes_per_s=operator.num_bytes / operator.num_parts / one if counted else None,
        fraction=median(fractions) if counted else None,
        fraction_range=(min(fractions), max(fractions)) if counted else None,
        ratio=median(samples.ratios),
        ratio_range=(min(samples.ratios), max(samples.ratios)),
    )


def measure_prefill(model: CpuModel, plan: KernelsPlan, num_threads: int) -> Prefill:
    """Measure a prompt chunk on an empty cache, in turn with torch's products of the same shapes and threads.

    Where the weights are smaller than float32, torch computes in the faster of bfloat16 and float32: without bfloat16
    instructions its bfloat16 is far behind.
    """
    config, num = model.config, plan.prefill_tokens
    batch, cache = kernel_operators.batch_of(config, 0, num), kernel_operators.cache_behind(model, 0, num)

    def own() -> None:
        torch.set_num_threads(1)
        model.forward(batch, cache)

    def of_torch(products: kernel_operators.Call) -> kernel_operators.Call:
        def call() -> None:
            torch.set_num_threads(num_threads)
            products()

        call()  # a first run pays for page faults
        return call

    dtypes = dict.fromkeys((torch_dtype(model.weight_dtype), torch.float32))
    calls = {dtype: of_torch(kernel_operators.torch_products(config, dtype, num)) for dtype in dtypes}
    dtype = min(calls, key=lambda dtype: _seconds(calls[dtype]))
    own()
    pairs = [(_seconds(own), _seconds(calls[dtype])) for _ in range(plan.num_repeats)]
    ratios = [b / a for a, b in pairs]
    return Prefill(
        num_tokens=num,
        seconds=median(a for a, _ in pairs),
        torch_seconds=median(b for _, b in pairs),
        torch_dtype=str(dtype).removeprefix("torch."),
        ratio=median(ratios),
        ratio_range=(min(ratios), max(ratios)),
    )


# ------------------------------------------------------------------------------------------------------------- output


def table_of(lines: Seq[Line], first: int) -> Table:
    """Return the table with one row for each operator and number of rows; ranges are over the repeats."""

    def counted(name: str) -> Callable[[Line], Any]:
        """A number of the memory, where it is what a pass waits for."""
        return lambda line: (
            None if line.bytes_per_s is None or line.num_rows > MEMORY_BOUND_ROWS else getattr(line, name)
        )

    return table(
        lines,
        [
            Column("operator", "operator", is_once=True),
            Column("rows", "num_rows"),
            Column("ms", lambda line: 1e3 * line.seconds, "{:.3f}"),
            Column("GB/s", counted("bytes_per_s"), lambda number: f"{number / 1e9:.1f}"),
            Column("of the\nprobes", counted("fraction"), "{:.2f}"),
            Column("(range)", counted("fraction_range"), "{:.2f}", absent=""),
            Column(f"t(M)/\nt({first})", "ratio", "{:.2f}"),
            Column("(range)", "ratio_range", "{:.2f}"),
        ],
    )


def _print_notes(prefill: Prefill, bandwidths: Seq[float], plan: KernelsPlan, console: Console) -> None:
    slowest, middle, fastest = (f(bandwidths) / 1e9 for f in (min, median, max))
    console.print(
        f"ms of one layer where an operator is part of it, medians of {plan.num_repeats} repeats; GB/s of weights (of "
        f"keys and values for attention); probes beside them read {middle:.1f} GB/s, {slowest:.1f} to {fastest:.1f}; "
        f"all layers and the whole pass (with all logits) run behind {plan.context} tokens"
    )
    console.print(
        f"prefill of {prefill.num_tokens} tokens: {1e3 * prefill.seconds:.0f} ms, torch's products alone in "
        f"{prefill.torch_dtype} {1e3 * prefill.torch_seconds:.0f} ms: {prefill.ratio:.2f}x of torch's speed "
        f"({prefill.ratio_range[0]:.2f} to {prefill.ratio_range[1]:.2f})"
    )


def command(
    plan: Annotated[Given, Fields(KernelsPlan, is_plan=True)],
    shape: Annotated[
        str, typer.Option(help="random-1.24b (Llama 3.2 1B), two-layers of it, or demo; random weights")
    ] = "random-1.24b",
    json_file: JsonFile = None,
) -> None:
    """Measure each operator at 1 to 64 rows: time, bytes per second, share of the bandwidth, and t(M)/t(1)."""
    keep(run(KernelsPlan(config=config_named(shape), **plan)), json_file)


if __name__ == "__main__":
    start(command)
