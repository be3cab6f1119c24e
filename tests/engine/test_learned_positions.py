"""A model with few learned positions: passes are tried, drafted and rounded within them."""

from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams, native
from forerun.blocks import weight_shapes
from forerun.models.opened import read_config
from saved import save_checkpoint
from tiny import byte_tokenizer

NATIVE = pytest.mark.skipif(native.isa() == "reference", reason=f"no native operators: {native.why_not()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 of 64 positions."""
    made = tmp_path_factory.mktemp("gpt2")
    raw = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    spec, generator = read_config(raw), torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(spec).items()}
    byte_tokenizer("<|end|>").save(str(made / "tokenizer.json"))
    save_checkpoint(made, spec, weights, torch.float32, end_ids=[0], tokenizer_folder=made)
    return made


@pytest.mark.parametrize("ops", [pytest.param("native", marks=NATIVE), "reference"])
def test_drafts_within_the_positions(folder: Path, ops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration reads no position that the table lacks, and a rounded copy has the table as well."""
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))  # so that passes are measured
    texts = []
    for draft in ("none", "lookup", "self:quantization=int8:group=16"):
        with LLM(str(folder), draft=draft, ops=ops, dtype="float32") as llm:
            (out,) = llm.generate(["abcabcabc"], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
        texts.append(out.token_ids)
        assert draft == "none" or out.report.num_drafted > 0
    assert texts[0] == texts[1] == texts[2]
