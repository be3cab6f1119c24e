"""Encoder-decoders on the CUDA backend: what `transformers` computes, and the bits of a row whatever is beside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.kv.cache import BlockCache
from forerun.models.loading import load_checkpoint
from forerun.models.runner import Run, Runner
from forerun.ops import cuda
from models.test_encoder_decoders import by_transformers, in_chunks, published, reading
from ops.native_cases import same_bits
from ops.test_cuda import DEVICE, needs_triton, operators
from ops.test_cuda_experts import graphs

SOURCES = {0: [*range(3, 27)], 1: [5, 4, 96]}
TEXTS = {0: [0, 7, 9], 1: [0, 90, 4, 4, 4, 17, 8]}
CHUNKS = [(0, 2), (2, 5), (5, 7)]
__all__ = ["graphs", "operators", "published"]  # fixtures


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("published", names, indirect=True)


def runner_of(folder: Path, ops: cuda.CudaOps, dtype: str = "float32") -> Runner:
    """A runner whose cache has no windows, as on a card."""
    model: Any = load_checkpoint(folder, dtype=dtype, ops=ops, device=str(DEVICE)).model
    shape = replace(model.config.cache_shape, windows=None)
    return Runner(model, BlockCache.of(model, "paged", max_batch_size=8, max_seq_len=64, shape=shape))


@needs_triton
@of("t5 1.1", "bart", "t5gemma 9b-2b")
def test_logits_are_those_of_transformers(operators: cuda.CudaOps, published: tuple[Any, Path], graphs: None) -> None:
    """Of chunks of three texts side by side, in passes of fixed sizes."""
    module, folder = published
    found = in_chunks(reading(runner_of(folder, operators), SOURCES), TEXTS, CHUNKS)
    for (slot, text), source in zip(TEXTS.items(), SOURCES.values(), strict=True):
        wanted = by_transformers(module, source, text)
        assert torch.allclose(found[slot], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@needs_triton
@of("t5", "t5gemma")
def test_a_rows_bits_are_its_own(operators: cuda.CudaOps, published: tuple[Any, Path]) -> None:
    """Of sources that are read together or alone, of chunks, of a tree's rows and of rows alone, in bfloat16."""
    module, folder = published
    together, alone = (runner_of(folder, operators, "bfloat16") for _ in range(2))
    for slot, source in SOURCES.items():
        reading(alone, {slot: source})
    found = in_chunks(reading(together, SOURCES), TEXTS, CHUNKS)
    for (slot, text), source in zip(TEXTS.items(), SOURCES.values(), strict=True):
        wanted = by_transformers(module, source, text)
        assert float((found[slot] - wanted).norm()) <= 0.06 * float(wanted.norm())
        rows = []
        for token in text[:5]:
            rows.append(torch.from_numpy(alone.forward([Run(slot, [token])]).logits[0]))
            alone.cache.keep({slot: range(1)})
        assert same_bits(torch.cat(rows), found[slot][:5])
    tree, parents = [TEXTS[1][5], 60, TEXTS[1][6], 62], [-1, -1, 0, 2]
    rows = torch.from_numpy(alone.forward([Run(1, tree, parents=parents), Run(0, [9])]).logits[0])
    assert same_bits(rows[0], found[1][5])
    assert same_bits(rows[2], found[1][6])


@needs_triton
@of("t5")
def test_a_run_ahead_reads_its_source(operators: cuda.CudaOps, published: tuple[Any, Path], graphs: None) -> None:
    module, folder = published
    runner = reading(runner_of(folder, operators), SOURCES)
    for lengths in ([3, 2], [2, 3]):
        found = runner.run_ahead([Run(0, [0, 7]), Run(1, [0])], lengths).ids
        for text, source, own in ([0, 7], SOURCES[0], found[0]), ([0], SOURCES[1], found[1]):
            for _ in own:
                text = [*text, int(by_transformers(module, source, text)[-1].argmax())]
            assert text[-len(own) :] == own
