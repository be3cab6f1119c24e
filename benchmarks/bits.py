"""`benchmarks.bits` says which operators have the same bits on which instruction sets.

Every set that this processor runs computes the same random rows, through each operator by itself and through whole
passes of small models. A line for each tells what share of the numbers differs from those of the first set, and by how
many units in the last place at most.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, get_args

import numpy as np
import typer
from rich.table import Table

from benchmarks.kernel_operators import _random_rows, batch_of, random_weights
from benchmarks.kernels import _quantization
from benchmarks.start import start
from forerun import native
from forerun.blocks import Act, Attention, Block, Mlp, Norm, Plain, Recurrence, Rope, Spec
from forerun.errors import BadOption, shown
from forerun.host_tensor import Floats, HostTensor
from forerun.kv.cache import BlockCache
from forerun.kv.pool import Pool
from forerun.models.gguf.blocks import TYPES
from forerun.models.runner import Run, Runner
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows
from forerun.ops.quantising import quantise, scheme_of
from forerun.text.terminal import make_console
from forerun.types import CacheView

ROWS = (1, 8, 40)  # of a pass: decoding, verification, a prompt
NUM_IN, NUM_OUT, DIM, CONTEXT = 512, 96, 64, 300
NORM = Norm(eps=1e-6)
PLAIN = Plain("llama", 256, 128, 2, 4, 2, DIM, 256, 1e-5, 1024, Rope(1e4), tied=True)
BIASED = replace(PLAIN, model_type="qwen2", qkv_bias=True)  # whose keys in 8 bits are rounded twice
DELTA = Recurrence("gated_delta", 4, 2, 4, 32, 64, NORM)
SHORT = Recurrence("short_conv", 4)
FULL = Attention(4, 2, DIM, rope=Rope(1e4))
STATES = Spec(
    "qwen3_5",
    256,
    128,
    1024,
    tuple(
        Block(NORM, pre_mlp=NORM, mlp=Mlp(256), **part)
        for part in ({"recurrence": DELTA}, {"recurrence": SHORT}, {"attention": FULL})
    ),
    NORM,
)
MODELS = {
    "model": (BIASED.spec, ("float32", "bfloat16", "int8", "int4")),
    "model with states": (STATES, ("float32", "bfloat16", "int4")),
}


@dataclass(frozen=True)
class Case:
    """Something that every set computes: `compute(ops)` returns its numbers, float32."""

    name: str
    num_rows: int
    compute: Callable[[CpuOps], Floats]


def normal(seed: int, *shape: int) -> Floats:
    """Return random numbers of a shape."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def random_scales(rows: QuantisedRows) -> QuantisedRows:
    """Return the first rows of a matrix with random scales and minimums: of powers of two every product is exact."""
    changed: dict[str, Any] = {}
    for field in fields(rows):
        part = getattr(rows, field.name)
        if field.name != "scheme" and part is not None:
            changed[field.name] = part[:NUM_OUT]
        if isinstance(part, HostTensor) and part.dtype not in ("int8", "uint8") and not rows.scheme.powers:
            numbers = np.abs(normal(12, NUM_OUT, *part.shape[1:])) * np.float32(2**-9)
            changed[field.name] = HostTensor.of(numbers).to(part.dtype)
    return replace(rows, **changed)


def matrices() -> Iterator[tuple[str, HostTensor | QuantisedMatrix]]:
    """Yield a matrix [NUM_OUT, NUM_IN] of each type that is multiplied."""
    numbers = normal(1, NUM_OUT, NUM_IN) * np.float32(0.05)
    yield from ((dtype, HostTensor.of(numbers).to(dtype)) for dtype in ("float32", "bfloat16"))
    rows = {f"int{bits}, {group}": quantise(numbers, scheme_of(bits, group)) for bits in (8, 4) for group in (32, 128)}
    with np.errstate(invalid="ignore"):  # random bytes are numbers that are none, too, which are replaced
        rows |= {kind.name: random_scales(_random_rows(kind, NUM_IN)) for kind in TYPES.values() if kind.scheme}
    for name, made in rows.items():
        yield name, QuantisedMatrix(made.scheme, (NUM_OUT, NUM_IN), partial(iter, [made]))


def product(matrix: HostTensor | QuantisedMatrix, num_rows: int, ops: CpuOps) -> Floats:
    """Return a product of random rows."""
    return ops.linear(normal(2, num_rows, NUM_IN), ops.pack(matrix))


def attention(dtype: str, num_rows: int, ops: CpuOps) -> Floats:
    """Return attention of a chain of rows behind CONTEXT tokens, of four heads that share two."""
    num = CONTEXT + num_rows
    model = CpuModel(ops, PLAIN.spec, random_weights(PLAIN.spec, "bfloat16"))
    cache = BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=num, dtype=dtype)
    pool, rows = cache.pools[0], np.arange(num)
    plain = Pool(pool.keys, pool.values, DIM) if dtype != "int8" else pool
    plain.write(rows[:CONTEXT], *normal(3, 2, CONTEXT, 2, DIM))
    new = normal(4, 2, num_rows, 2, DIM)
    view = CacheView(batch_of(PLAIN.spec, CONTEXT, num_rows), rows[CONTEXT:], [rows])
    return ops.attention(normal(5, num_rows, 4, DIM), *new, pool=plain, view=view, window=None)


def whole_pass(spec: Spec, dtype: str, kept: str, num_rows: int, ops: CpuOps) -> Floats:
    """Return the logits of a run of rows, each of which is judged, behind CONTEXT tokens."""
    quantization = _quantization(dtype)
    weights = random_weights(spec, "bfloat16" if quantization else dtype, quantization=quantization)
    model = CpuModel(ops, spec, weights)
    cache = BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=spec.max_positions, dtype=kept)
    runner, tokens = Runner(model, cache), np.random.default_rng(6).integers(0, spec.vocab_size, 400).tolist()
    cache.open(0)
    runner.forward([Run(0, tokens[:CONTEXT], "none")])
    cache.keep({0: range(CONTEXT)})
    return np.asarray(runner.forward([Run(0, tokens[CONTEXT : CONTEXT + num_rows], "all")]).logits[0])


def cases() -> Iterator[Case]:
    """Yield what is compared: products, operators of rows, attention, whole passes."""
    for name, matrix in matrices():
        yield from (Case(f"product, {name}", num, partial(product, matrix, num)) for num in ROWS)
    x = 3 * normal(7, 64, NUM_IN)
    y = normal(8, 64, NUM_IN)
    weight = normal(9, NUM_IN)
    turns, heads = normal(10, 2, 64, 1, DIM), normal(11, 64, 4, DIM)
    yield Case("RMS norm", 64, lambda ops: ops.rms_norm(x, weight, 1e-5))
    yield Case("layer norm", 64, lambda ops: ops.layer_norm(x, weight, y[0], 1e-5))
    yield Case("rotation", 64, lambda ops: ops.rope(heads, *turns))
    for act in get_args(Act):
        yield Case(act, 64, lambda ops, act=act: ops.gated(act, x, y))  # type: ignore[misc]
    for dtype in ("float32", "bfloat16", "int8"):
        yield from (Case(f"attention, {dtype}", num, partial(attention, dtype, num)) for num in ROWS)
    for name, (spec, dtypes) in MODELS.items():
        for dtype in dtypes:
            for kept in ("float32",) if dtype == "float32" else ("bfloat16", "int8"):
                yield from (
                    Case(f"{name}, {dtype}, cache {kept}", num, partial(whole_pass, spec, dtype, kept, num))
                    for num in ROWS
                )


def difference(found: Floats, expected: Floats) -> str:
    """Say how far numbers are from others: what share has other bits, and the units in the last place at most."""
    bits = [part.view(np.int32).astype(np.int64) for part in (found, expected)]
    ordered = [np.where(part < 0, -(part & 0x7FFFFFFF), part) for part in bits]
    num = int((bits[0] != bits[1]).sum())
    if num == 0:
        return "equal"
    return f"{num / found.size:.0%}, up to {np.abs(ordered[0] - ordered[1]).max():,} units"


def table_of(found: Mapping[tuple[str, int], Seq[Floats]], isas: Seq[str]) -> Table:
    """Return a line for each case, of the sets behind the first one."""
    table = Table("operator", "rows", *isas[1:], title=f"Bits beside those of {isas[0]}")
    for (name, num_rows), results in found.items():
        table.add_row(name, str(num_rows), *(difference(result, results[0]) for result in results[1:]))
    return table


def command(
    isa: Annotated[str, typer.Option(help="instruction sets, the first of which the others are compared with")] = "",
    only: Annotated[str, typer.Option(help="cases whose name has this text")] = "",
) -> None:
    """Compare the bits of every operator on the instruction sets of this processor."""
    isas = isa.split(",") if isa else native.processor_isas()
    if unknown := [name for name in isas if name not in native.processor_isas()]:
        raise BadOption(f"isa={shown(unknown[0])} is not possible: this processor has {native.processor_isas()}")
    found: dict[tuple[str, int], list[Any]] = {
        (case.name, case.num_rows): [case.compute(CpuOps(name, 1)) for name in isas]
        for case in cases()
        if only in case.name
    }
    make_console().print(table_of(found, isas))


if __name__ == "__main__":
    start(command)
