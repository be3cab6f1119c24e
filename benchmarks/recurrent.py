"""`benchmarks.recurrent` measures passes over four layers of Qwen3.5-9B's shape, three of which keep a state.

Behind a state, the inputs of 8 tokens are gone through again before those of 1 or 8 rows; a prompt of 256 rows writes
its states. Weights are random numbers. What the recurrent part takes of a pass is told by `perf record` around this
command, if the module was linked with its symbols (without -Wl,-s).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import numpy as np
import typer

from benchmarks.kernel_operators import random_weights
from benchmarks.kernels import _quantization
from benchmarks.start import start
from forerun.blocks import STATE_TOKENS, Attention, Block, Mlp, Norm, Recurrence, Rope, Spec
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel

NORM = Norm(eps=1e-6, offset=1.0)
OF_HEADS = Norm(eps=1e-6, offset=1.0, span="head")
FULL = Attention(16, 4, 256, rope=Rope(1e7, dims=64), q_norm=OF_HEADS, k_norm=OF_HEADS, gate=True)
LINEAR = Recurrence("gated_delta", 4, 16, 32, 128, 128, Norm(eps=1e-6))
PARTS = [Block(NORM, recurrence=LINEAR, pre_mlp=NORM, mlp=Mlp(12288)), Block(NORM, FULL, pre_mlp=NORM, mlp=Mlp(12288))]
SPEC = Spec("qwen3_5", 256, 4096, 4096, (PARTS[0], PARTS[0], PARTS[0], PARTS[1]), NORM)
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
    dtype: Annotated[str, typer.Option(help="int4, int8, bfloat16 or float32")] = "int4",
    isa: Annotated[str | None, typer.Option(help="an instruction set; the best one by default")] = None,
    repeats: Annotated[int, typer.Option(help="passes of few rows; of a prompt a tenth of them")] = 60,
) -> None:
    """Measure passes of 1, 8 and 256 rows through layers that keep states."""
    quantization = _quantization(dtype)
    weights = random_weights(SPEC, "bfloat16" if quantization else dtype, quantization=quantization)
    model = CpuModel(CpuOps(isa), SPEC, weights)
    runner = Runner(model, BlockCache.of(model, "paged", max_batch_size=2, max_seq_len=SPEC.max_positions))
    tokens = np.random.default_rng(1).integers(0, SPEC.vocab_size, PROMPT).tolist()
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
