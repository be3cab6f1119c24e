"""A model whose layers keep states is trained by the same loop, and transformers loads its checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.errors import BadOption
from forerun.train import lm
from forerun.train.config import TrainConfig
from forerun.train.model import initial_weights
from forerun.train.shape import ModelShape
from train.conftest import (
    Interrupt,
    check_command,
    check_deepened,
    check_resumed,
    computes_as_transformers,
    read_log,
)

SHAPE = ModelShape(32, 4, 4, 2, 64, 300, family="qwen3_5_text")
Make = Callable[..., TrainConfig]


def test_the_checkpoint_is_a_qwen3_5_for_transformers_and_the_engine(tiny: Make) -> None:
    config = tiny("target", shape=SHAPE)
    lm.train(config, quiet=True)
    computes_as_transformers(config, "Qwen3_5ForCausalLM", 1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(tiny: Make, interrupt: Interrupt) -> None:
    whole, parts = (tiny(name, shape=SHAPE, steps=12, autocast="bf16") for name in ("whole", "parts"))
    check_resumed(whole, parts, interrupt, 7)


def test_a_deepened_model_computes_the_same() -> None:
    check_deepened(initial_weights(SHAPE, 0), SHAPE, replace(SHAPE, num_layers=8))


def test_states_begin_as_published_ones_do() -> None:
    """Some forget at once and some hardly, and rows have the size that they have in other models."""
    weights = initial_weights(replace(SHAPE, hidden_size=256, num_heads=32), 0)
    decays = torch.cat([weight.exp() for name, weight in weights.items() if "A_log" in name])
    steps = torch.cat([torch.nn.functional.softplus(w) for name, w in weights.items() if "dt_bias" in name])
    assert 0.01 <= float(decays.min()) < 1
    assert 15 < float(decays.max()) <= 16
    assert 1e-3 * 0.99 <= float(steps.min()) < 2e-3
    assert 0.09 < float(steps.max()) <= 0.1 * 1.01
    norms = {name: float(w[0]) for name, w in weights.items() if w.ndim == 1 and "norm" in name}
    assert {value for name, value in norms.items() if "linear_attn" in name} == {1.0}
    assert {value for name, value in norms.items() if "linear_attn" not in name} == {0.0}


def test_a_hybrid_teaches_a_draft_and_learns_from_a_target(tiny: Make) -> None:
    target = tiny("target", shape=SHAPE)
    lm.train(target, quiet=True)
    for name, shape in {"llama": ModelShape(16, 1, 2, 1, 32, 300), "hybrid": SHAPE}.items():
        draft = tiny(name, shape=shape, teacher=str(target.out / "model"), loss="kl", steps=20)
        lm.train(draft, quiet=True)
        log = read_log(draft)
        assert log[-1]["alpha"] > log[0]["alpha"] + 0.1


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(BadOption, match="every 4th layer of a qwen3_5_text has attention, and 3 layers are fewer"):
        replace(SHAPE, num_layers=3)


def test_the_command_trains_one(sources: Path, tmp_path: Path) -> None:
    sizes = "--family qwen3_5_text --hidden-size 32 --layers 4 --heads 4 --ffn-size 64"
    check_command(sizes, sources, tmp_path / "run", SHAPE)
