"""Heads with layers are blocks of their target's kind, trained and run by the code of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.drafters import artifacts, head_files
from forerun.errors import BadOption
from forerun.models.loading import load_checkpoint
from forerun.ops.torch_tensors import HostWeights
from forerun.registry import load, make_options
from forerun.train.heads import Batch, Teacher
from tiny import write_tiny

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
OPTIONS = {
    "mtp": {},
    "eagle": {"draft_vocab": 200, "layers": "1+2"},
    "dflash": {"draft_vocab": 200, "layers": "1+2", "block": 4},
}


def made(method: str, folder: Path, out: Path) -> Path:
    """A head as it is before its first step, written as a trained one is."""
    checkpoint = load_checkpoint(folder, dtype="float32", with_tokenizer=True)
    teacher = Teacher.of(checkpoint.model, torch.arange(257.0).flip(0), num_ids=257)
    module = load("forerun.train.heads", method, "head")
    head = module.Head(make_options(module.Options, OPTIONS[method], method), teacher, 0)
    for weight in head.weights.values():
        weight.requires_grad_(True)
    loss = head.loss(batch_of(teacher))
    loss.backward()
    assert bool(loss.isfinite())
    assert all(w.grad is not None and bool(w.grad.isfinite().all()) for w in head.weights.values())
    weights, sizes = head.files()
    tokenizer = artifacts.fingerprint(checkpoint.tokenizer, 257)
    tensors = HostWeights(weights | {head_files.PROBE: teacher.probe})
    head_files.save(out, method, tensors, sizes, tokenizer)
    return out


def batch_of(teacher: Teacher) -> Batch:
    """Two rows of random ids, with random features."""
    generator = torch.Generator().manual_seed(3)
    shape, width = (2, 12), teacher.config.hidden_size
    ids = torch.randint(1, 200, shape, generator=generator)
    layers = torch.randn(*shape, 2, width, generator=generator).bfloat16()
    hidden = torch.randn(*shape, width, generator=generator).bfloat16()
    at = torch.arange(12).expand(shape)
    logits = hidden.float() @ teacher.head.T
    whole = torch.zeros(shape, dtype=torch.int64), at, torch.ones(shape, dtype=torch.bool)
    return Batch(ids, *whole, layers, hidden, logits.argmax(-1), logits.logsumexp(-1))


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "qwen3_5_text"])
def test_a_head_is_made_for_a_family_and_drafts_for_it(tmp_path: Path, method: str, model_type: str) -> None:
    """Its weights all learn; the drafter reads the folder, and the text stays the target's."""
    folder = write_tiny(tmp_path / "target", model_type)
    path = made(method, folder, tmp_path / "head")
    kind = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
    assert kind == model_type
    options: dict[str, Any] = {"dtype": "float32", "pacing": "fixed", "spec_length": 3}
    prompts = [[5, 80, 3, 200, 17], list(range(40, 60))]
    plain = LLM(str(folder), draft="none", **options).generate(prompts, PARAMS)
    drafted = LLM(str(folder), draft=f"{method}:path={path}", **options).generate(prompts, PARAMS)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert sum(out.report.num_drafted for out in drafted) > 20


def test_learned_positions_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "target", "gpt2")
    with pytest.raises(BadOption, match="a head with layers cannot be trained for model_type='gpt2'"):
        made("eagle", folder, tmp_path / "head")


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_a_layer_norm_behind_the_blocks_is_refused(tmp_path: Path, method: str) -> None:
    folder = write_tiny(tmp_path / "target", "starcoder2")
    with pytest.raises(BadOption, match="eagle and mtp cannot be trained for model_type='starcoder2', whose last norm"):
        made(method, folder, tmp_path / "head")
