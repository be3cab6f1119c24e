"""A model whose layers keep states and a mixture of experts are trained as a llama is; transformers loads both."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.errors import BadOption
from forerun.train import lm, losses
from forerun.train.model import initial_weights, run_windows
from forerun.train.shape import ModelShape
from refusals import refusal
from train.conftest import Interrupt, Make, check_command, check_deepened, check_exported, check_resumed, read_log

HYBRID = ModelShape(32, 4, 4, 2, 64, 300, family="qwen3_5_text")
MIXTURE = ModelShape(32, 2, 4, 2, 32, 300, family="qwen3_moe", num_experts=4, num_chosen=2)
either = pytest.mark.parametrize("shape", [HYBRID, MIXTURE], ids=["hybrid", "mixture"])


@either
def test_the_checkpoint_is_of_its_family_for_transformers_and_the_engine(tiny: Make, shape: ModelShape) -> None:
    config = tiny("target", shape=shape)
    lm.train(config, quiet=True)
    named, tolerance = ("Qwen3_5ForCausalLM", 1e-4) if shape is HYBRID else ("Qwen3MoeForCausalLM", 1e-5)
    check_exported(config, named, tolerance)


@either
def test_a_resumed_run_equals_an_uninterrupted_one(tiny: Make, interrupt: Interrupt, shape: ModelShape) -> None:
    whole, parts = (tiny(name, shape=shape, steps=12, autocast="bf16") for name in ("whole", "parts"))
    check_resumed(whole, parts, interrupt, 7)


def test_a_deepened_model_computes_the_same() -> None:
    check_deepened(initial_weights(HYBRID, 0), HYBRID, replace(HYBRID, num_layers=8))


def test_states_begin_as_published_ones_do() -> None:
    """Some forget at once and some hardly, and rows have the size that they have in other models."""
    weights = initial_weights(replace(HYBRID, hidden_size=256, num_heads=32), 0)
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
    target = tiny("target", shape=HYBRID)
    lm.train(target, quiet=True)
    for name, shape in {"llama": ModelShape(16, 1, 2, 1, 32, 300), "hybrid": HYBRID}.items():
        draft = tiny(name, shape=shape, teacher=str(target.out / "model"), loss="kl", steps=20)
        lm.train(draft, quiet=True)
        log = read_log(draft)
        assert log[-1]["alpha"] > log[0]["alpha"] + 0.1


def test_imbalance_by_hand() -> None:
    assert float(losses.imbalance(torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [1]]))) == pytest.approx(1.0)
    assert float(losses.imbalance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0]]))) == pytest.approx(2.0)
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.1, 0.4]])
    # The first is chosen twice of four times, the others once each: 3 (0.5 x 0.6 + 0.25 x 0.15 + 0.25 x 0.25).
    assert float(losses.imbalance(scores, torch.tensor([[0, 1], [0, 2]]))) == pytest.approx(1.2)


def test_each_router_is_balanced_by_the_loss_of_a_step(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the text teaches, the loss of a step is that of the routers of all layers."""
    task = lm.prepare(tiny(shape=MIXTURE))
    gates = [name for name in task.weights if name.endswith("mlp.gate.weight")]
    assert len(gates) == MIXTURE.num_layers
    windows = task.data.batches.batch(0)
    task.ops.imbalances.clear()
    run_windows(task.model, windows[:, :-1])
    assert len(task.ops.imbalances) == MIXTURE.num_layers
    imbalance = sum(task.ops.imbalances, torch.zeros(()))
    task.validate()
    assert len(task.ops.imbalances) == MIXTURE.num_layers, "what only looks on is not balanced"
    expected = torch.autograd.grad(imbalance, [task.weights[name] for name in gates])
    with_loss = lm.prepare(tiny("other", shape=MIXTURE))
    monkeypatch.setattr(losses, "loss_of", lambda *_: torch.zeros(()))
    found = torch.autograd.grad(with_loss.loss(0), [with_loss.weights[name] for name in gates])
    for ours, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 0
        assert torch.allclose(ours, lm.BALANCE * wanted, rtol=1e-4, atol=1e-9)


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(BadOption, match="every 4th layer of a qwen3_5_text has attention, and 3 layers are fewer"):
        replace(HYBRID, num_layers=3)
    with pytest.raises(BadOption, match="give --experts 8 --experts-per-token 2"):
        ModelShape(32, 2, 4, 2, 32, 300, family="qwen3_moe")
    assert "not 5 of 4" in refusal(BadOption, replace, MIXTURE, num_chosen=5)
    assert "say --family qwen3_moe" in refusal(BadOption, ModelShape, 32, 2, 4, 2, 32, 300, num_experts=4, num_chosen=2)


@either
def test_the_command_trains_one(sources: Path, tmp_path: Path, shape: ModelShape) -> None:
    sizes = f"--hidden-size 32 --layers {shape.num_layers} --heads 4 --ffn-size {shape.ffn_size}"
    experts = "--experts 4 --experts-per-token 2" if shape is MIXTURE else ""
    check_command(f"--family {shape.family} {sizes} {experts}", sources, tmp_path / "run", shape)
