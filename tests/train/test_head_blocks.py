"""Heads with layers are blocks of their target's kind, trained and run by the code of models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.drafters.shared import artifacts, head_files
from forerun.errors import BadOption
from forerun.models.loading import load_checkpoint
from forerun.ops.torch_tensors import HostWeights
from forerun.registry import load, make_options
from forerun.train.heads import Batch, Teacher, decayed
from forerun.train.narrowing import narrowed
from tiny import write_tiny

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
OPTIONS = {
    "mtp": {},
    "eagle": {"draft_vocab": 200, "layers": "1+2"},
    "dflash": {"draft_vocab": 200, "layers": "1+2", "block": 4},
}


def made(method: str, folder: Path, out: Path) -> Path:
    """A head as it is before its first step, written as a trained one is."""
    head, teacher = head_of(folder, method)
    for weight in head.weights.values():
        weight.requires_grad_(True)
    loss = head.loss(batch_of(teacher))
    loss.backward()
    assert bool(loss.isfinite())
    assert all(w.grad is not None and bool(w.grad.isfinite().all()) for w in head.weights.values())
    weights, sizes = head.files()
    tokenizer = artifacts.fingerprint(load_checkpoint(folder, with_tokenizer=True).tokenizer, 257)
    head_files.save(out, method, HostWeights(weights | {head_files.PROBE: teacher.probe}), sizes, tokenizer)
    return out


def batch_of(teacher: Teacher, seed: int = 3) -> Batch:
    """Two rows of random ids, with random features."""
    generator = torch.Generator().manual_seed(seed)
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
    assert json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"] == model_type
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


def head_of(folder: Path, method: str, change: Any = None, **options: Any) -> Any:
    """A head before its first step, and its target. change: is given the target's last layer."""
    checkpoint = load_checkpoint(folder, dtype="float32", with_tokenizer=True)
    teacher = Teacher.of(checkpoint.model, torch.arange(257.0).flip(0), num_ids=257)
    if change is not None:
        change(teacher.last)
    module = load("forerun.train.heads", method, "head")
    return module.Head(make_options(module.Options, {**OPTIONS[method], **options}, method), teacher, 0), teacher


@pytest.mark.parametrize("method", ["eagle", "mtp"])
@torch.no_grad()
def test_rows_that_go_on_are_computed_as_among_all_rows(tmp_path: Path, method: str) -> None:
    head, teacher = head_of(write_tiny(tmp_path / "target", "gemma3_text"), method, steps=4)
    batch = batch_of(teacher)
    going_on = torch.arange(12) % 3 == 1
    whole = list(head._steps(batch))
    for j, (learned, own, target) in enumerate(head._steps(batch, going_on)):
        among, all_own, all_target = whole[j]
        assert torch.equal(learned, among & going_on if j else among)
        assert learned.sum() >= 2
        torch.testing.assert_close(own, all_own[learned[among]])
        torch.testing.assert_close(target, all_target[learned[among]])


@pytest.mark.parametrize("ids", [0, 1, 2])
@torch.no_grad()
def test_one_row_of_several_goes_on_and_which_depends_on_the_batch(tmp_path: Path, ids: int) -> None:
    head, teacher = head_of(write_tiny(tmp_path / "target", "llama"), "eagle", steps=3, every=3)
    batch = batch_of(teacher)
    batch.ids[0, 0] += (ids - int(batch.ids.sum())) % 3
    going_on = torch.arange(12) % 3 == ids
    wanted = losses_of(head._steps(batch, going_on))
    assert head.loss(batch) == wanted
    assert wanted != losses_of(head._steps(batch))
    assert wanted != losses_of(head._steps(batch, going_on.roll(1)))


def losses_of(parts: Any) -> torch.Tensor:
    return decayed(parts, 0.8, "kl")


def test_without_the_rows_before_the_last_layer_the_part_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "target", "llama")
    monkeypatch.setattr("forerun.train.heads.eagle.narrowed", lambda decoder, size: narrowed(decoder, 12))
    head, teacher = head_of(folder, "eagle", layers="0+2")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(head.weights[name], teacher.last[name])
    with pytest.raises(BadOption, match="add 1 to layers, or leave mlp out"):
        head_of(folder, "eagle", layers="0+2", mlp=12)


@torch.no_grad()
def test_a_narrow_part_keeps_what_adds_something(tmp_path: Path) -> None:
    """Where half of the inner outputs add nothing, a part of the other half says what the whole one says."""
    idle = torch.arange(0, 48, 2)
    name = "model.layers.0.mlp.down_proj.weight"

    def rest(last: Any) -> None:
        last[name][:, idle] = 0

    folder = write_tiny(tmp_path / "target", "llama")
    (wide, teacher), (narrow, _) = (head_of(folder, "eagle", rest, mlp=size) for size in (48, 24))
    assert narrow.weights[name].shape == (teacher.config.hidden_size, 24)
    batches = [batch_of(teacher, seed) for seed in range(8)]
    for head in (wide, narrow):
        head.begin(iter(batches))
    (_, own, _), (_, wanted, _) = (next(head._steps(batches[0])) for head in (narrow, wide))
    assert float((own - wanted).pow(2).mean()) < 1e-3 * float(wanted.var())  # what the ridge takes


@torch.no_grad()
def test_the_last_matrix_is_fitted_to_what_is_left(tmp_path: Path) -> None:
    """It misses less of what all inner outputs add than the columns that were kept, and nothing that those can say."""
    name = "model.layers.0.mlp.down_proj.weight"
    head, teacher = head_of(write_tiny(tmp_path / "target", "llama"), "eagle", mlp=12)
    batches = [batch_of(teacher, seed) for seed in range(8)]
    inner = torch.cat([head._narrowing._inner(batch)[batch.inside.flatten()] for batch in batches])
    head.begin(iter(batches))
    up = teacher.last["model.layers.0.mlp.up_proj.weight"]
    kept = [int((up == row).all(1).nonzero()) for row in head.weights["model.layers.0.mlp.up_proj.weight"]]
    down = teacher.last[name]
    assert len(set(kept)) == 12
    missed, cut = (inner[:, kept] @ matrix.T - inner @ down.T for matrix in (head.weights[name], down[:, kept]))
    assert float(missed.pow(2).sum()) < 0.9 * float(cut.pow(2).sum())
    assert float((inner[:, kept].T @ missed).norm()) < 0.01 * float((inner[:, kept].T @ cut).norm())
