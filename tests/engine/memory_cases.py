"""Helpers of the tests of the memory plan: shapes, a largest pass, and the operators of this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import native, ops as operators
from forerun.blocks import Plain, Spec, resized, weight_shapes
from forerun.config import EngineConfig
from forerun.kv.cache import BlockCache
from forerun.memory.plan import MemoryPlan
from forerun.models.runner import Run, Runner
from forerun.ops import load_model
from forerun.ops.quantised import QuantisedMatrix, Scheme
from forerun.ops.quantising import quantise, scheme_of
from forerun.ops.torch import empty_weights
from forerun.ops.torch_tensors import host_of, torch_dtype
from saved import save_checkpoint
from tensors import as_tensor

SHARED: dict[str, Any] = {"model_type": "llama", "norm_eps": 1e-5, "max_positions": 131072, "tied": True}
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64}
LLAMA_1B = Plain(vocab_size=128256, hidden_size=2048, num_layers=16, ffn_size=8192, **HEADS, **SHARED).spec
LLAMA_3B = resized(LLAMA_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128)
SMALL = resized(
    LLAMA_1B, vocab_size=2000, hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=32, ffn_size=768
)
BF16, F32 = "bfloat16", "float32"

HAS_NATIVE = native.isa() != "reference"
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="the native operators are not there, or off")
OPS = ["reference", pytest.param("native", marks=needs_native)]
# Of a child: nothing that could set an option of the engine.
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {name: value for name, value in os.environ.items() if name in ("FORERUN_ISA", "FORERUN_CACHE_DIR")}


def asked_cases(request: pytest.FixtureRequest) -> list[str]:
    """Return every `case` that some test of this run has, for a fixture that measures all of them at once."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    users = [test for test in tests if test.path == request.path and request.fixturename in test.fixturenames]
    return list(dict.fromkeys(test.callspec.params["case"] for test in users))


def said_by_a_child(source: str, *args: str, run: Any = subprocess.run, **environment: str) -> str:
    """Return what this code prints in a process of its own, which must end well."""
    command = [sys.executable, "-c", source, *args]
    done = run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bytes_by_name(plan: MemoryPlan) -> dict[str, int]:
    return {part.name: part.bytes for part in plan.parts}


def schemes_of(config: Spec, bits: int) -> dict[str, Scheme]:
    """Every matrix in groups of 32."""
    return {name: scheme_of(bits, 32) for name, shape in weight_shapes(config).items() if len(shape) == 2}


def one_pass(
    config: Spec, options: EngineConfig, dtype: str, num_taps: int = 0, schemes: Mapping[str, Scheme] | None = None
) -> Callable[[], object]:
    """Run the largest pass of these options: a prompt chunk, while all other requests verify at the context's end."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Any] = {**empty_weights(config, torch_dtype(dtype), "cpu")}
    for weight in weights.values():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    if options.ops == "native":
        weights = {name: host_of(weight) for name, weight in weights.items()}
    for name, scheme in (schemes or {}).items():
        rows = quantise(weights[name].float32(), scheme)
        weights[name] = QuantisedMatrix(scheme, rows.codes.shape, lambda rows=rows: iter([rows]))  # type: ignore[misc]
    model = load_model(config, weights, operators.make(options.ops, "cpu"))
    length, batch = options.max_seq_len or 0, options.max_batch_size
    sizes: dict[str, Any] = {"max_batch_size": batch, "max_seq_len": length, "dtype": dtype, "pools": model.make_pools}
    cache = BlockCache.create(config.cache_shape, options.kv_cache_backend, **sizes)  # type: ignore[arg-type]
    verified = 1 if options.draft == "none" else options.longest_draft + 1
    counts = [options.prefill_chunk_tokens] + [verified] * (batch - 1)
    for slot in range(batch):
        cache.open(slot)
    for at in range(0, length, 16):  # in turns, so that no sequence lies in one piece
        for slot, count in enumerate(counts):
            step = min(16, length - count - at)
            if step > 0:
                cache.reserve(slot, step)
                cache.keep({slot: range(step)})
    for pool in cache.pools.tensors():
        as_tensor(pool).zero_()
    wanted = ["none" if options.prefill_chunk_tokens > verified else "all"] + ["all"] * (batch - 1)
    runs = [Run(s, list(range(1, n + 1)), wanted[s]) for s, n in enumerate(counts)]
    runner = Runner(model, cache, taps=range(num_taps))
    return lambda: runner.forward(runs)


def write_random(folder: Path, config: Spec, tokenizer_folder: Path) -> Path:
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    weights = {
        name: noise.repeat(-(-torch.Size(shape).numel() // len(noise)))[: torch.Size(shape).numel()].view(shape)
        for name, shape in weight_shapes(config).items()
    }
    save_checkpoint(folder, config, weights, torch.float32, end_ids=[0], tokenizer_folder=tokenizer_folder)
    return folder
