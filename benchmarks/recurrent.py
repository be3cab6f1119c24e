"""`benchmarks.recurrent` measures passes over four layers of Qwen 3.5, three of which keep a state.

Behind a state, the inputs of 8 tokens are gone through again before those of 1 or 8 rows; a prompt of 256 rows writes
its states. Weights are random numbers. What the recurrent part takes of a pass is told by `perf record` around this
command, if the module was linked with its symbols (without -Wl,-s).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Annotated

import numpy as np
import typer

from benchmarks.kernel_operators import random_weights
from benchmarks.kernels import _quantization
from benchmarks.start import start
from forerun.blocks import STATE_TOKENS, Attention, Block, Experts, Mlp, Norm, Recurrence, Rope, Spec
from forerun.errors import BadOption
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel
from forerun.registry import unknown

NORM = Norm(eps=1e-6, offset=1.0)
OF_HEADS = Norm(eps=1e-6, offset=1.0, span="head")
LINEAR = Recurrence("gated_delta", 4, 16, 32, 128, 128, Norm(eps=1e-6))


def four_layers(hidden_size: int, kv_heads: int, fed: Block) -> Spec:
    """Return the shape of a model. fed: its feed-forward part or its experts."""
    full = Attention(16, kv_heads, 256, rope=Rope(1e7, dims=64), q_norm=OF_HEADS, k_norm=OF_HEADS, gate=True)
    normed = replace(fed, pre_attention=NORM, pre_mlp=NORM)
    state = replace(normed, attention=None, recurrence=LINEAR)
    return Spec("qwen3_5", 256, hidden_size, 4096, (state, state, state, replace(normed, attention=full)), NORM)


SHAPES = {
    "9b": four_layers(4096, 4, Block(mlp=Mlp(12288))),
    "35b-a3b": four_layers(2048, 2, Block(experts=Experts(256, 8, Mlp(512), Mlp(512), shared_gate=True))),
}
REPLAYED, PROMPT = 8, 256


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call."""
    times = list[float]()
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)


def recurrent(
    shape: Annotated[str, typer.Option(help=f"of Qwen 3.5: {' or '.join(SHAPES)}")] = "9b",
    dtype: Annotated[str, typer.Option(help="int4, int8, bfloat16 or float32")] = "int4",
    isa: Annotated[str | None, typer.Option(help="an instruction set; the best one by default")] = None,
    repeats: Annotated[int, typer.Option(help="passes of few rows; of a prompt a tenth of them")] = 60,
) -> None:
    """Measure passes of 1, 8 and 256 rows through layers that keep states."""
    if shape not in SHAPES:
        raise BadOption(unknown("shape", shape, SHAPES))
    spec, quantization = SHAPES[shape], _quantization(dtype)
    weights = random_weights(spec, "bfloat16" if quantization else dtype, quantization=quantization)
    model = CpuModel(CpuOps(isa), spec, weights, consume=True)
    runner = Runner(model, BlockCache.of(model, "paged", max_batch_size=2, max_seq_len=spec.max_positions))
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, PROMPT).tolist()
    before = tokens[: 4 * STATE_TOKENS + REPLAYED]
    runner.cache.open(0)
    runner.cache.open(1)
    runner.forward([Run(0, before, "none")])
    runner.cache.keep({0: range(len(before))})
    print(f"{model.ops.build}, {model.precision}, {model.bytes_per_pass / 1e6:.0f} MB")
    for num_rows in (1, 8):
        spent = milliseconds(lambda num=num_rows: runner.forward([Run(0, tokens[:num])]), repeats)  # type: ignore[misc]
        print(f"{num_rows} rows behind {REPLAYED} tokens: {spent:.1f} ms")
    spent = milliseconds(lambda: runner.forward([Run(1, tokens, "none")]), max(1, repeats // 10))
    print(f"{PROMPT} rows of a prompt: {spent:.0f} ms")


if __name__ == "__main__":
    start(recurrent)
