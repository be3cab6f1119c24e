"""`forerun doctor` shows this machine's hardware, the software that runs on it, and ways to make forerun faster.

numpy is imported when the command runs, not to print help. torch is imported only to report on torch and its device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import native
from forerun.cli.folding import folded

if TYPE_CHECKING:
    from forerun.bench.bandwidth import Bandwidth

EXAMPLE_PARAMETERS = 1_235_814_400  # the shape of Llama 3.2 1B
LABEL_WIDTH, MAX_WIDTH = 18, 100  # columns
VARIABLES = ("FORERUN_ISA", "FORERUN_NUM_THREADS", "OMP_NUM_THREADS")
_OPENMP = re.compile(r"/(lib(?:gomp|iomp5|omp)\b[^/\s]*)$")


@dataclass(frozen=True)
class Operators:
    """The operators that run on this machine's processor."""

    backend: str  # "native" or "torch"
    isa: str  # the active instruction set; "reference" = torch
    available_isas: list[str]  # what FORERUN_ISA could choose, best first
    problem: str | None  # why the extension is missing or does not match its sources, and what to do
    num_threads: int
    default_dtype: str


@dataclass(frozen=True)
class Torch:
    """The version and threads of torch, and the libraries that it loads into the process."""

    version: str
    num_threads: int
    openmp: list[str]  # file names of the OpenMP runtimes that are loaded, one per file
    gpu: Card | None = None


@dataclass(frozen=True)
class Card:
    """The CUDA device that torch sees first."""

    name: str
    capability: str
    num_bytes: int
    free_bytes: int
    problem: str | None  # why the kernels of ops/cuda/operators.py do not run on it; None = they do


@dataclass(frozen=True)
class Facts:
    """The facts about this machine that `forerun doctor` prints. Sizes are in bytes."""

    version: str
    python: str
    processor: str
    processor_isas: list[str]  # instruction sets that the processor has and kernels were compiled for
    cores: native.Cores
    load_average: float | None  # processes that wanted to run, over the last minute
    operators: Operators
    torch: Torch | None
    available_bytes: int | None
    huge_pages: str | None  # "always", "madvise" or "never"
    bandwidth: Bandwidth
    variables: Mapping[str, str]  # the set ones among VARIABLES

    @property
    def example_bytes(self) -> int:
        """The bytes that the example model reads per token: every weight once, in bfloat16."""
        return 2 * EXAMPLE_PARAMETERS

    @property
    def example_tokens_per_s(self) -> float:
        """The most tokens per second that plain decoding of the example model can reach."""
        return self.bandwidth.bytes_per_s / self.example_bytes


@dataclass(frozen=True)
class Computed:
    """The operators that would compute a model on this machine.

    slower_because: for each faster backend, why it cannot compute the model.
    """

    model: str
    backend: str
    slower_because: Mapping[str, str]


def doctor(
    models: Annotated[
        list[str] | None, typer.Argument(help="models: say which operators compute each, and why none that are faster")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show this machine's hardware and software, and what would make forerun faster."""
    answers = [computed(name) for name in models or ()]  # a model that is not here is refused at once
    facts = examine()
    if as_json:
        typer.echo(json.dumps(as_dict(facts) | {"models": [dataclasses.asdict(answer) for answer in answers]}))
    else:
        _print(facts, answers)


# --------------------------------------------------------------------------------------------------------- the facts


def examine(root: Path = Path("/")) -> Facts:
    """Examine this machine and process, and measure the memory's bandwidth. root: the folder that holds proc and sys.

    Raises BadOption for an environment variable that is wrong.
    """
    from forerun.text.waiting import Waiting

    load = _load_average()  # before the measurements add to it
    operators = _operators()
    with Waiting("measuring"):
        from forerun.bench.bandwidth import measure
        from forerun.memory.machine import available_bytes
        from forerun.version import __version__

        available = available_bytes("cpu", root)
        bandwidth = measure("cpu")
    return Facts(
        version=__version__,
        python=platform.python_version(),
        processor=f"{native.processor_name(root) or platform.processor() or 'unknown'} ({platform.machine()})",
        processor_isas=native.processor_isas(),
        cores=native.cores(root),
        load_average=load,
        operators=operators,
        torch=_torch(root),
        available_bytes=available,
        huge_pages=_chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        bandwidth=bandwidth,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _torch(root: Path) -> Torch | None:
    """Return the facts about torch; None where it is not installed."""
    if native.torch_version() is None:
        return None
    import torch

    openmp = openmp_runtimes(_read(root / "proc/self/maps"))
    return Torch(torch.__version__, torch.get_num_threads(), openmp, _card())


def _card() -> Card | None:
    """Return the facts about the CUDA device, and why our kernels cannot run on it; None where torch sees no device."""
    import torch

    from forerun.ops import cuda

    if not torch.cuda.is_available():
        return None
    free, whole = torch.cuda.mem_get_info()
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return Card(torch.cuda.get_device_name(), capability, whole, free, cuda.usable("cuda"))


def computed(name: str) -> Computed:
    """Return which operators would compute a model on the CPU, by its config.json. Raises UserError if none would."""
    from forerun import ops
    from forerun.models.opened import spec_of

    spec = spec_of(name)
    backend = ops.resolve("auto", "cpu", spec)
    return Computed(name, backend, dict(ops.faster(backend, "cpu", spec)))


def openmp_runtimes(maps: str) -> list[str]:
    """Return the sorted file names of the OpenMP runtimes in the text of /proc/self/maps, each file once."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    return sorted(match[1] for match in map(_OPENMP.search, paths) if match)


def as_dict(facts: Facts) -> dict[str, Any]:
    """Return the facts for `--json`, with the numbers and the advice that follow from the facts."""
    example = {
        "num_parameters": EXAMPLE_PARAMETERS,
        "dtype": "bfloat16",
        "bytes_per_token": facts.example_bytes,
        "max_tokens_per_s": facts.example_tokens_per_s,
    }
    cores = dataclasses.asdict(facts.cores) | {"num_usable": facts.cores.num_usable}
    return {**dataclasses.asdict(facts), "cores": cores, "example": example, "faster": list(advice(facts))}


def _operators() -> Operators:
    isa = native.isa()
    return Operators(
        backend="native" if isa != "reference" else "none" if native.torch_version() is None else "torch",
        isa=isa,
        available_isas=native.available_isas(),
        problem=native.why_not(),
        num_threads=native.num_threads(),
        default_dtype="float32" if isa == "reference" else "bfloat16",
    )


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):  # Windows has none
        return None


def _chosen(text: str) -> str | None:
    """Return the word in brackets, such as madvise in "always [madvise] never"; None where there is none."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------- what would make it faster


def advice(facts: Facts) -> Iterator[str]:
    """Yield one sentence for each thing that the user could change, the most important first."""
    operators, cores = facts.operators, facts.cores
    if operators.problem is not None:
        yield f"{operators.problem[0].upper()}{operators.problem[1:]}."
    best = operators.available_isas[0]
    if operators.isa != best:
        yield f"FORERUN_ISA={operators.isa} keeps the {best} kernels from running: unset it."
    yield from _advice_on_threads(facts)
    if cores.quota is not None and cores.quota < cores.num_physical:
        yield f"A control group grants the time of {cores.quota:g} of {cores.num_physical} cores: raise its CPU limit."
    if cores.num_allowed < cores.num_logical:
        yield (
            f"This process may run on {cores.num_allowed} of {cores.num_logical} logical processors: widen its "
            "affinity (taskset, cpuset)."
        )
    if facts.load_average is not None and facts.load_average > cores.num_logical:
        yield (
            f"Other processes are busy (load average {facts.load_average:.1f} on {cores.num_logical} logical "
            "processors) and take their share of the memory's bandwidth: run when they are done."
        )
    if facts.huge_pages == "never":
        yield (
            "Transparent huge pages are off, and streaming weights through small pages costs address look-ups: as "
            "root, echo madvise > /sys/kernel/mm/transparent_hugepage/enabled."
        )
    if facts.torch is not None and len(facts.torch.openmp) > 1:
        yield (
            f"{len(facts.torch.openmp)} OpenMP runtimes are loaded ({', '.join(facts.torch.openmp)}), each with "
            "threads of its own that wait for work on the same cores: install torch and numpy from one source."
        )


def _advice_on_threads(facts: Facts) -> Iterator[str]:
    num_threads, usable = facts.operators.num_threads, facts.cores.num_usable
    # The first of these variables that is set decides (native.num_threads).
    name = next((name for name in ("FORERUN_NUM_THREADS", "OMP_NUM_THREADS") if name in facts.variables), None)
    if name is None or num_threads == usable:
        return
    setting = f"{name}={facts.variables[name]}"
    if num_threads > usable:
        yield f"{setting} makes {num_threads} threads share {_count(usable, 'core')}: set it to {usable}."
    else:
        other = "" if name == "FORERUN_NUM_THREADS" else f", or set FORERUN_NUM_THREADS={usable}"
        yield f"{setting} leaves {usable - num_threads} of {usable} cores idle: unset it{other}."


# ------------------------------------------------------------------------------------------------------- what is shown


def _print(facts: Facts, models: Sequence[Computed] = ()) -> None:
    from rich.text import Text

    from forerun.text.terminal import make_console

    console = make_console()
    width = min(console.width, MAX_WIDTH)
    for label, text in (*_lines(facts), *map(_line_of, models)):
        lines = folded(text, width - LABEL_WIDTH).splitlines()
        console.print(Text(f"{label:{LABEL_WIDTH}}", style="bold"), lines[0], sep="", soft_wrap=True)
        for line in lines[1:]:
            console.print(" " * LABEL_WIDTH + line, soft_wrap=True)
    console.print(Text("\nwhat would make it faster", style="bold"))
    for sentence in list(advice(facts)) or ["Nothing was found."]:
        console.print(folded(sentence, width, "  - ", "    "), soft_wrap=True)


def _lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each fact, in the order in which they are printed."""
    operators, torch = facts.operators, facts.torch
    yield "forerun", f"{facts.version}, Python {facts.python}"
    yield "processor", facts.processor
    yield "cores", _cores(facts.cores)
    active = "" if operators.isa == "reference" else f"; active: {operators.isa}"
    yield "instruction sets", f"{', '.join(facts.processor_isas) or 'none were compiled for'}{active}"
    threads = _count(operators.num_threads, "thread")
    if operators.backend == "native":
        yield "operators", f"native kernels ({operators.isa}), {threads}; dtype auto is {operators.default_dtype}"
    else:
        reason = "there is no extension" if len(operators.available_isas) == 1 else native.why_reference()
        which = "none" if operators.backend == "none" else "torch's"
        yield "operators", f"{which}, because {reason}; dtype auto is {operators.default_dtype}"
    if torch is None:
        yield "torch", "not installed; training, a CUDA device and the reference operators would need it"
    else:
        openmp = f"; OpenMP: {', '.join(torch.openmp)}" if torch.openmp else ""
        yield "torch", f"{torch.version}, {_count(torch.num_threads, 'thread')}{openmp}"
        if torch.gpu is not None:
            yield "GPU", _of_card(torch.gpu)
    yield "memory", _memory(facts)
    yield "bandwidth", f"{facts.bandwidth.bytes_per_s / 1e9:.1f} GB/s ({facts.bandwidth.probe})"
    yield (
        "",
        f"a model of {EXAMPLE_PARAMETERS / 1e9:.2f} B parameters in bfloat16 reads {facts.example_bytes / 1e9:.2f} GB "
        f"per token: at most {facts.example_tokens_per_s:.1f} tokens/s without speculation",
    )


def _of_card(card: Card) -> str:
    """Return a sentence about a CUDA device, and about the operators that compute on it."""
    about = f"{card.name}, compute capability {card.capability}, {card.free_bytes / 1e9:.1f} GB of "
    about += f"{card.num_bytes / 1e9:.1f} GB free; "
    if card.problem is None:
        about += "--device cuda computes on it, with own kernels (docs/use/gpu.md)"
        return f"{about}; all else here is for device cpu"
    return f"{about}--device cuda computes on it with torch's operators alone, since ops='cuda' {card.problem}"


def _line_of(result: Computed) -> tuple[str, str]:
    reasons = "; ".join(result.slower_because.values())
    return "model", f"{result.model}: {result.backend} operators" + (f" ({reasons})" if reasons else "")


def _cores(cores: native.Cores) -> str:
    parts = [f"{cores.num_physical} physical", f"{cores.num_allowed} of {cores.num_logical} logical available"]
    parts.append("no quota" if cores.quota is None else f"quota {cores.quota:g}")
    return ", ".join(parts)


def _memory(facts: Facts) -> str:
    free = "" if facts.available_bytes is None else f"{facts.available_bytes / 1e9:.1f} GB available; "
    return f"{free}transparent huge pages: {facts.huge_pages or 'not here'}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
