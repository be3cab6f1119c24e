"""A mixture of experts is trained by the same loop: all its experts are used, and transformers loads its checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.errors import BadOption
from forerun.train import lm, losses
from forerun.train.config import TrainConfig
from forerun.train.model import run_windows
from forerun.train.shape import ModelShape
from train.conftest import Interrupt, check_command, check_resumed, computes_as_transformers

SHAPE = ModelShape(32, 2, 4, 2, 32, 300, family="qwen3_moe", num_experts=4, num_chosen=2)
Make = Callable[..., TrainConfig]


def test_the_checkpoint_is_a_qwen3_moe_for_transformers_and_the_engine(tiny: Make) -> None:
    config = tiny("target", shape=SHAPE)
    lm.train(config, quiet=True)
    computes_as_transformers(config, "Qwen3MoeForCausalLM", 1e-5)


def test_a_resumed_run_equals_an_uninterrupted_one(tiny: Make, interrupt: Interrupt) -> None:
    whole, parts = (tiny(name, shape=SHAPE, steps=12, autocast="bf16") for name in ("whole", "parts"))
    check_resumed(whole, parts, interrupt, 7)


def test_imbalance_by_hand() -> None:
    even = torch.full((4, 2), 0.5)
    assert float(losses.imbalance(even, torch.tensor([[0], [1], [0], [1]]))) == pytest.approx(1.0)
    assert float(losses.imbalance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0]]))) == pytest.approx(2.0)
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.1, 0.4]])
    # The first is chosen twice of four times, the others once each: 3 (0.5 x 0.6 + 0.25 x 0.15 + 0.25 x 0.25).
    assert float(losses.imbalance(scores, torch.tensor([[0, 1], [0, 2]]))) == pytest.approx(1.2)


def test_each_router_is_balanced_by_the_loss_of_a_step(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the text teaches, the loss of a step is that of the routers of all layers."""
    task = lm.prepare(tiny(shape=SHAPE))
    gates = [name for name in task.weights if name.endswith("mlp.gate.weight")]
    assert len(gates) == SHAPE.num_layers
    windows = task.data.batches.batch(0)
    task.ops.imbalances.clear()
    run_windows(task.model, windows[:, :-1])
    assert len(task.ops.imbalances) == SHAPE.num_layers
    imbalance = sum(task.ops.imbalances, torch.zeros(()))
    task.validate()
    assert len(task.ops.imbalances) == SHAPE.num_layers, "what only looks on is not balanced"
    expected = torch.autograd.grad(imbalance, [task.weights[name] for name in gates])
    with_loss = lm.prepare(tiny("other", shape=SHAPE))
    monkeypatch.setattr(losses, "loss_of", lambda *_: torch.zeros(()))
    found = torch.autograd.grad(with_loss.loss(0), [with_loss.weights[name] for name in gates])
    for ours, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 0
        assert torch.allclose(ours, lm.BALANCE * wanted, rtol=1e-4, atol=1e-9)


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(BadOption, match="give --experts 8 --experts-per-token 2"):
        ModelShape(32, 2, 4, 2, 32, 300, family="qwen3_moe")
    with pytest.raises(BadOption, match="not 5 of 4"):
        replace(SHAPE, num_chosen=5)
    with pytest.raises(BadOption, match="say --family qwen3_moe"):
        ModelShape(32, 2, 4, 2, 32, 300, num_experts=4, num_chosen=2)


def test_the_command_trains_one(sources: Path, tmp_path: Path) -> None:
    sizes = "--family qwen3_moe --experts 4 --experts-per-token 2 --hidden-size 32 --layers 2 --heads 4 --ffn-size 32"
    check_command(sizes, sources, tmp_path / "run", SHAPE)
