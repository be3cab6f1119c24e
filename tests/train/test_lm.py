"""The training loop learns, resumes exactly, and writes a llama checkpoint that transformers loads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from forerun.errors import BadOption
from forerun.text import tokenizer as text_tokenizer
from forerun.train import batches, card, lm, loop
from forerun.train.corpus import Document
from forerun.train.model import deepen, initial_weights
from forerun.train.samples import Sample, SampleWriter
from forerun.train.shape import ModelShape
from forerun.train.tokenizer import load_tokenizer
from refusals import refusal
from train.conftest import Interrupt, Make, check_deepened, check_exported, check_resumed, read_log, tiny_config
from train.written import write, writer_of

SMALL = ModelShape(16, 1, 2, 1, 32, 300)


@pytest.fixture(scope="module")
def teacher(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a target that has learned a little."""
    config = tiny_config(tmp_path_factory.mktemp("teacher"), sources, steps=60)
    lm.train(config, quiet=True)
    return config.out / "model"


def test_tiny_run_lowers_the_loss(tiny: Make, curves: None) -> None:
    config = tiny()
    numbers = lm.train(config, quiet=True)
    assert (config.out / "curves.png").stat().st_size > 5000
    first = read_log(config)[0]
    assert first["step"] == 0, "what it begins with"
    assert numbers["validation_loss"] < first["validation_loss"] - 2
    assert read_log(config)[-1]["final"] is True
    assert json.loads((config.out / "run.json").read_text())["num_parameters"] == config.shape.num_parameters


def test_resumed_run_equals_an_uninterrupted_one(tiny: Make, interrupt: Interrupt) -> None:
    check_resumed(tiny("whole"), tiny("parts"), interrupt, 17)


def test_a_card_says_what_the_runs_were_given(tiny: Make) -> None:
    runs = [tiny(f"run {seed}", seed=seed, steps=2, seq_len_tokens=16) for seed in (3, 5)]
    for config in runs:
        lm.train(config, quiet=True)
    target, draft = ([config.out] for config in runs)
    assert "| longest context, tokens (trained on 16) |" in card.model_table(target, draft)
    assert f"Seeds 3 and 5, torch {torch.__version__}, CPU, float32." in card.stage_section(target, draft)


def test_gradients_are_clipped_before_they_are_used(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = list[float]()
    said = list[float]()
    real_step = loop.train_step

    def watched_step(run: loop.Run) -> tuple[float, float]:
        def look(*_: Any) -> None:
            grads = [weight.grad.flatten() for weight in run.task.weights.values() if weight.grad is not None]
            norms.append(float(torch.cat(grads).norm()))

        hook = run.optimizer.register_step_pre_hook(look)
        loss, norm = real_step(run)
        hook.remove()
        said.append(norm)
        return loss, norm

    monkeypatch.setattr(loop, "train_step", watched_step)
    lm.train(tiny(steps=2, grad_clip=0.01), quiet=True)
    assert min(said) > 0.01, "as they were"
    assert norms == pytest.approx([0.01] * 2, rel=1e-3)


def test_state_of_another_run_is_refused(tiny: Make) -> None:
    lm.train(tiny(steps=2), quiet=True)
    assert "shape" in refusal(BadOption, lm.train, tiny(steps=2, shape=SMALL), resume=True, quiet=True)
    with pytest.raises(BadOption, match="seed='0', and asked for is '7'"):
        lm.train(tiny(steps=4, seed=7), resume=True, quiet=True)
    assert "go on with --resume" in refusal(BadOption, lm.train, tiny(steps=4), quiet=True)
    lm.train(tiny(steps=4), resume=True, quiet=True)
    assert read_log(tiny())[-1]["step"] == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_refused(tiny: Make) -> None:
    assert "no CUDA device" in refusal(BadOption, tiny, device="cuda")


def test_samples_of_another_tokenizer_are_refused_and_many_ids_are_not(tmp_path: Path) -> None:
    """Equal numbers of ids prove nothing; ids of more than 16 bits are those of today's large vocabularies."""
    words = {f"w{i}": i for i in range(70_000)}
    large, other = Tokenizer(models.WordLevel(words)), Tokenizer(models.WordLevel({f"v{i}": i for i in range(70_000)}))
    options = {"num_ids": 70_000, "tokenizer": text_tokenizer.Tokenizer(large, tmp_path).fingerprint}
    file = SampleWriter(tmp_path / "samples", options)
    assert file.append(Sample(1, "text", 0.0, 1, 1, np.array([3, 69_999, 65_536], dtype=np.uint32)))
    file.close()
    assert batches.load_samples(tmp_path / "samples", large, 69_998).tolist() == [3, 69_999, 65_536, 69_998]
    assert "of another tokenizer" in refusal(BadOption, batches.load_samples, tmp_path / "samples", other, 0)
    large.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert batches.encode_documents([Document("m", "w1 w69999")], large, 65_540).tolist() == [1, 69_999, 65_540]


@pytest.mark.parametrize("loss", ["kl", "alpha"])
def test_draft_learns_its_teacher(tiny: Make, teacher: Path, loss: str) -> None:
    config = tiny("draft", shape=SMALL, teacher=str(teacher), loss=loss, steps=100, lr=2e-2)
    numbers = lm.train(config, quiet=True)
    assert numbers["alpha"] > next(line for line in read_log(config) if "alpha" in line)["alpha"]
    assert numbers["alpha"] > 0.5
    assert 0 <= numbers["agreement"] <= 1


def test_a_draft_that_learns_after_another_covers_more(tiny: Make, teacher: Path) -> None:
    """SpecInfer: of two drafts, the second learns where the first and the target do not agree."""
    small: dict[str, Any] = {"shape": SMALL, "teacher": str(teacher)}
    small |= {"loss": "kl", "lr": 2e-2, "validation_windows": 16}
    lm.train(first := tiny("first", steps=25, **small), quiet=True)
    second = {**small, "steps": 40, "seed": 1}
    after = (str(first.out / "model"),)
    lm.train(alike := tiny("alike", **second), quiet=True)
    gained = lm.train(tiny("after", **second, after=after), quiet=True)
    alone = lm.prepare(tiny("both", **second, after=after, init_from=alike.out / "model")).validate()
    assert gained["coverage_before"] == alone["coverage_before"] < alone["coverage"] < gained["coverage"] - 0.02


def test_exported_folder_is_a_llama_for_transformers(tiny: Make) -> None:
    config = tiny()
    lm.train(config, quiet=True)
    check_exported(config, "LlamaForCausalLM", 1e-5)
    assert json.loads((config.out / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_draft_learns_from_what_its_target_wrote(tiny: Make, teacher: Path, sources: Path, tmp_path: Path) -> None:
    folder, path = teacher, tmp_path / "samples"
    writer = writer_of(folder, [path.read_text(encoding="utf-8") for path in sorted(sources.iterdir())])
    write(writer, path, 300)
    tokenizer = load_tokenizer(folder)
    assert len(batches.load_samples(path, tokenizer, 0)) >= 250
    draft = tiny("draft", teacher=str(folder), loss="kl", samples=path, samples_share=0.5, steps=3)
    assert lm.prepare(draft).data.batches.num_sample_rows == 2
    lm.train(draft, quiet=True)
    alone = tiny("alone", teacher=str(folder), loss="kl", samples=path, samples_share=1.0, steps=3, seq_len_tokens=16)
    numbers = lm.train(alone, quiet=True)  # no text of others is read, not even for validation
    assert 0 < numbers["alpha"] <= 1
    write(writer_of(folder, writer.texts, seed=5), tmp_path / "others", 300)
    with pytest.raises(BadOption, match="samples="):
        lm.train(replace(alone, samples=tmp_path / "others"), resume=True, quiet=True)
    data = lm.prepare(alone).data
    unseen = batches.load_samples(path, tokenizer, data.end_id or 0, held_out=True)
    assert data.validation.equal(batches.validation_windows(unseen, 16, alone.validation_windows))
    assert not set(map(tuple, data.validation.tolist())) & set(map(tuple, data.batches.batch(0).tolist()))


def test_first_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (initial_weights(SMALL, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert sum(w.numel() for w in first.values()) == SMALL.num_parameters


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"loss": "mse"}, "--loss 'mse' is not possible: it must be one of ce, kl, alpha"),
        ({"loss": "kl"}, "--loss kl learns from a target's distribution: give --teacher PATH"),
        ({"after": ("draft",)}, "--after learns where earlier drafts and a target do not agree: give --teacher PATH"),
        ({"steps": 0}, "--max-steps 0 is not possible: it must be at least 1"),
        ({"lr": 0.0}, "--lr 0 is not possible: it must be above 0"),
        ({"seq_len_tokens": 1}, "--seq-len-tokens 1 is not possible: it must be at least 2"),
        ({"tokens_per_step": 31}, "--tokens-per-step 31 is less than one sequence of --seq-len-tokens 32: give more"),
        ({"samples_share": 1.5}, "--samples-share 1.5 is not possible: it must be in [0, 1]"),
        ({"autocast": "fp8"}, "--autocast 'fp8' is not possible: it must be one of auto, bf16, off"),
        ({"validate_every_steps": 0}, "--validate-every-steps 0 is not possible: it must be at least 1"),
        ({"decay_share": 1.5}, "--decay-share 1.5 is not possible: it must be in [0, 1]"),
        ({"samples": Path("samples"), "samples_share": 0.1}, "of 4 rows is none"),
        ({"device": "gpu"}, "--device 'gpu' is not possible: it must be one of cpu, cuda"),
    ],
)
def test_impossible_options_are_refused_by_their_flags(tiny: Make, given: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(BadOption, tiny, **given)


def test_learning_rate_warms_up_and_ends_near_zero(tiny: Make) -> None:
    config = tiny(steps=100, warmup_steps=10, decay_share=0.5, lr=1.0)
    assert config.lr_at(0) == pytest.approx(0.1)
    assert config.lr_at(9) == config.lr_at(50) == 1.0
    assert config.lr_at(75) == pytest.approx(0.5)
    assert 0 < config.lr_at(99) < 0.05


def test_deepened_model_computes_the_same_and_only_depth_may_differ() -> None:
    deep = replace(SMALL, num_layers=3)
    weights = initial_weights(SMALL, 0)
    grown = check_deepened(weights, SMALL, deep)
    with pytest.raises(BadOption, match=r"stay as they are: give --hidden-size 16 --heads 2$"):
        deepen(weights, SMALL, ModelShape(32, 3, 4, 1, 32, 300), seed=1)
    with pytest.raises(BadOption, match="cannot be made shallower: give --layers 3, or more"):
        deepen(grown, deep, SMALL, seed=1)
