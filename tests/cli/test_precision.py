"""What is said of a model's weights: the bits of a mixed file, and what they have become under float32."""

from pathlib import Path

import pytest
import torch

from forerun import LLM
from forerun.blocks import Plain, weight_shapes
from forerun.cli.words import precision
from models.gguf_files import write_model
from ops.native_cases import needs_native

CONFIG = Plain("llama", 258, 64, 2, 4, 4, 16, 128, 1e-5, 256).spec
KINDS = {"o_proj": "Q5_0", "v_proj": "Q8_0", "lm_head": "BF16"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 4, 5 and 8 bits with a head of bfloat16; 8 bits beside 4 in one product."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    shapes, generator = weight_shapes(CONFIG), torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    write_model(path, CONFIG, weights, lambda name: next((k for n, k in KINDS.items() if n in name), "Q4_0"))
    return path


def said(target: Path, **options: str) -> str:
    return precision(LLM(target, draft="none", max_batch_size=1, max_seq_len=64, **options))


@needs_native
def test_a_mixed_file(mixed: Path) -> None:
    assert said(mixed, ops="native") == "4-bit, 5-bit, 8-bit and bfloat16 weights"


def test_a_mixed_file_that_is_dequantised(mixed: Path) -> None:
    assert said(mixed, ops="reference", dtype="float32") == "float32 (the file has 4-bit, 5-bit, 8-bit and bfloat16)"


def test_weights_that_were_rounded_and_are_computed_with_in_float32(checkpoints: Path) -> None:
    rounded = said(checkpoints / "llama", ops="reference", dtype="float32", quantization="int8:group=16")
    assert rounded == "float32 (rounded to int8:group=16)"
