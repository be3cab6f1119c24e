"""A GPT-2 is trained by the same loop as a llama: it resumes exactly, and its checkpoint is what transformers loads."""

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from forerun.errors import BadOption
from forerun.train import lm
from forerun.train.config import TrainConfig
from forerun.train.model import initial_weights
from forerun.train.shape import ModelShape
from refusals import refusal
from train.conftest import (
    Interrupt,
    Make,
    check_command,
    check_deepened,
    check_exported,
    check_resumed,
    read_log,
    tiny_config,
)

SHAPE = ModelShape(32, 2, 4, 4, 64, 300, max_positions=32, family="gpt2")
SMALL = ModelShape(16, 1, 2, 2, 32, 300, max_positions=32, family="gpt2")


@pytest.fixture(scope="module")
def trained(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run of some steps."""
    config = tiny_config(tmp_path_factory.mktemp("gpt2") / "target", sources, shape=SHAPE)
    lm.train(config, quiet=True)
    return config


def test_the_checkpoint_is_a_gpt2_for_transformers_and_the_engine(trained: TrainConfig) -> None:
    """Its weights have all moved, so that a bias or norm that one side leaves out shows in the logits."""
    ours, output = check_exported(trained, "GPT2LMHeadModel", 1e-5)
    assert ours.config.tied
    for name, weight in ours.weights.items():
        still = 0.0 if name.endswith(".bias") else 1.0
        assert (weight != still).float().mean() > 0.5, f"{name} was not trained"
    assert output.report.acceptance_rate == 1, "a model is its own best draft"


def test_the_file_has_the_published_names(trained: TrainConfig) -> None:
    raw = json.loads((trained.out / "model" / "config.json").read_text())
    wanted = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}
    wanted |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "n_positions": 32, "tie_word_embeddings": True}
    assert {key: raw[key] for key in wanted} == wanted
    with safe_open(trained.out / "model" / "model.safetensors", "pt") as file:
        shapes = {name.removeprefix("transformer."): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert shapes["wpe.weight"] == [32, 32]
    assert shapes["h.1.attn.c_attn.weight"] == [32, 3 * 32], "fused, and inputs first"
    assert shapes["h.1.attn.c_attn.bias"] == [3 * 32]
    assert "lm_head.weight" not in shapes, "tied"
    assert sum(math.prod(shape) for shape in shapes.values()) == SHAPE.num_parameters


def test_a_resumed_run_equals_an_uninterrupted_one(tiny: Make, interrupt: Interrupt) -> None:
    whole, parts = (tiny(name, shape=SHAPE, steps=20, autocast="bf16") for name in ("whole", "parts"))
    check_resumed(whole, parts, interrupt, 11)
    with pytest.raises(BadOption, match="shape"):
        lm.train(replace(parts, shape=ModelShape(32, 2, 4, 4, 64, 300)), resume=True, quiet=True)


def test_first_weights_are_those_of_gpt2() -> None:
    weights = initial_weights(replace(SHAPE, hidden_size=64, ffn_size=256), 0)

    def of(ending: str) -> Tensor:
        return torch.cat([weight.flatten() for name, weight in weights.items() if name.endswith(ending)])

    assert of("norm.weight").eq(1).all()
    assert of(".bias").eq(0).all()
    for name in ("embed_tokens.weight", "embed_positions.weight", "q_proj.weight", "up_proj.weight"):
        assert float(of(name).std()) == pytest.approx(0.02, rel=0.05), name
    for name in ("o_proj.weight", "down_proj.weight"):
        assert float(of(name).std()) == pytest.approx(0.02 / 2, rel=0.05), f"{name}: by the root of 2 x 2 layers"


def test_a_deepened_model_computes_the_same() -> None:
    weights = initial_weights(SHAPE, 0)
    for name, weight in weights.items():
        if name.endswith(".bias"):
            weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    check_deepened(weights, SHAPE, replace(SHAPE, num_layers=4))


def test_drafts_learn_their_teacher_one_after_another(tiny: Make, trained: TrainConfig) -> None:
    teacher = str(trained.out / "model")
    small: dict[str, Any] = {"shape": SMALL, "teacher": teacher, "loss": "kl", "steps": 40, "lr": 2e-2}
    small["validation_windows"] = 8
    first = tiny("first", **small)
    numbers = lm.train(first, quiet=True)
    assert numbers["alpha"] > read_log(first)[0]["alpha"] + 0.2
    numbers = lm.train(tiny("second", **{**small, "seed": 1}, after=(str(first.out / "model"),)), quiet=True)
    assert numbers["coverage"] > numbers["coverage_before"]
    llama = tiny("llama", **{**small, "shape": ModelShape(16, 1, 2, 1, 32, 300), "steps": 2})
    lm.train(llama, quiet=True)
    assert "alpha" in read_log(llama)[-1], "a draft need not be of its target's family"


def test_what_is_not_possible_is_refused(tiny: Make, trained: TrainConfig) -> None:
    model = trained.out / "model"
    with pytest.raises(BadOption, match="--family 'gpt3' is not possible: it must be one of llama, gpt2"):
        replace(SHAPE, family="gpt3")
    assert "leave --kv-heads out" in refusal(BadOption, replace, SHAPE, num_kv_heads=2)
    with pytest.raises(BadOption, match="--seq-len-tokens 33 is more than the 32 positions"):
        tiny(shape=SHAPE, seq_len_tokens=33)
    longer = tiny("other", teacher=str(model), loss="kl", seq_len_tokens=40)
    assert "reads 32 tokens at most: give --seq-len-tokens 32, or fewer" in refusal(BadOption, lm.prepare, longer)
    with pytest.raises(BadOption, match="only layers can be added"):
        lm.prepare(tiny("other", shape=ModelShape(32, 2, 4, 4, 64, 300), init_from=model))
    with pytest.raises(BadOption, match="only layers can be added"):
        lm.prepare(tiny("other", shape=replace(SHAPE, max_positions=64), init_from=model))


def test_a_state_from_before_there_were_families_is_of_a_llama() -> None:
    shape = ModelShape(16, 1, 2, 1, 32, 300)
    old = pickle.loads(pickle.dumps(shape))
    del old.__dict__["family"]
    assert pickle.loads(pickle.dumps(old)) == shape != replace(shape, num_kv_heads=2, family="gpt2")


def test_the_command_trains_one(sources: Path, tmp_path: Path) -> None:
    """All heads have keys and values of their own, and there are as many positions as a sequence has."""
    sizes = "--family gpt2 --hidden-size 32 --layers 1 --heads 4 --ffn-size 64"
    check_command(sizes, sources, tmp_path / "run", replace(SHAPE, num_layers=1))
