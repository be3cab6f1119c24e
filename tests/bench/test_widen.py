"""Widening keeps the function: same greedy tokens and log-probabilities as the trained model."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.bench.widen import (
    WideShape,
    bytes_per_pass,
    num_parameters,
    shape_named,
    widen,
    widen_checkpoint,
    write_widened,
)
from forerun.errors import BadOption, UnsupportedModel
from forerun.kv.cache import KVCache
from forerun.models.layers import Decoder, DecoderConfig, parameter_shapes
from forerun.models.loading import load_checkpoint
from forerun.models.runner import Run, Runner
from forerun.models.saving import save_checkpoint
from forerun.ops.reference import ReferenceOps

SMALL = DecoderConfig(
    model_type="llama",
    vocab_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    norm_eps=1e-5,
    max_positions=64,
    tie_embeddings=True,
)
WIDE = WideShape(hidden_size=128, num_layers=3, num_heads=16, num_kv_heads=4, ffn_size=100)
PROMPT = [5, 17, 3, 88, 41, 2, 60]


def random_weights(config: DecoderConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough that logits differ clearly, norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in parameter_shapes(config).items():
        made[name] = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 0.2)
        if name.endswith("norm.weight"):
            made[name] += 1
    return made


def run_greedy(config: DecoderConfig, weights: dict[str, torch.Tensor], steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after PROMPT and the log-probabilities [prompt + steps, V] behind them."""
    cache = KVCache.create(
        config.cache_shape, "paged", max_batch_size=1, max_seq_len=64, dtype=weights["model.norm.weight"].dtype
    )
    runner = Runner(Decoder(config, weights, ReferenceOps()), cache)
    cache.open(0)
    tokens, rows, new = [], [], PROMPT
    for _ in range(steps):
        logits = runner.forward([Run(0, new)]).logits[0]
        cache.keep(0, list(range(len(new))))
        rows.append(logits)
        tokens.append(int(logits[-1].argmax()))
        new = tokens[-1:]
    return tokens, torch.cat(rows).log_softmax(-1)


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "window": {"windows": (4, None)},
    "small_eps_matters": {"norm_eps": 0.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_function_in_float32(variant: str) -> None:
    config = dataclasses.replace(SMALL, **VARIANTS[variant])
    weights = random_weights(config)
    wide_config, wide = widen(config, weights, WIDE)
    tokens, logprobs = run_greedy(config, weights, 24)
    wide_tokens, wide_logprobs = run_greedy(wide_config, wide, 24)
    assert wide_tokens == tokens
    assert (wide_logprobs - logprobs).abs().max() < 1e-4


def test_every_weight_has_the_wide_shape_and_new_residual_dimensions_stay_zero() -> None:
    config, wide = widen(SMALL, random_weights(SMALL), WIDE)
    assert {name: tuple(tensor.shape) for name, tensor in wide.items()} == parameter_shapes(config)
    assert not wide["model.embed_tokens.weight"][:, 32:].any()
    assert not wide["model.layers.0.self_attn.o_proj.weight"][32:].any()
    assert not wide["model.layers.2.mlp.down_proj.weight"].any()


def test_the_rest_is_noise_no_larger_than_the_trained_weights() -> None:
    weights = random_weights(SMALL)
    _, wide = widen(SMALL, weights, WIDE)
    for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        tensor = wide[f"model.layers.0.{name}.weight"]
        assert (tensor != 0).float().mean() > 0.99
        new = wide[f"model.layers.2.{name}.weight"]
        assert new.abs().max() <= weights[f"model.layers.0.{name}.weight"].abs().max()


def test_norms_stay_exact_in_bfloat16_for_a_power_of_four() -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(SMALL).items()}
    config, wide = widen(SMALL, weights, WIDE)  # 32 -> 128
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(wide[name][:32].double() * 2, weights[name].double())
    assert config.norm_eps == SMALL.norm_eps / 4
    tokens, logprobs = run_greedy(SMALL, weights, 12)
    wide_tokens, wide_logprobs = run_greedy(config, wide, 12)
    # Sums over K of another length are rounded in another order: bfloat16 results agree to its precision only.
    same = next((i for i, (a, b) in enumerate(zip(tokens, wide_tokens, strict=True)) if a != b), len(tokens))
    assert (wide_logprobs - logprobs)[: len(PROMPT) + same].abs().max() < 0.25


def test_counts() -> None:
    weights = random_weights(SMALL)
    count = num_parameters(SMALL)
    assert count == sum(tensor.numel() for tensor in weights.values())
    assert bytes_per_pass(SMALL, weights) == 4 * count
    untied = dataclasses.replace(SMALL, tie_embeddings=False)
    assert bytes_per_pass(untied, random_weights(untied)) == 4 * count


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 16}, "hidden_size=16 is not possible: the model has 32"),
        ({"num_layers": 1}, "num_layers=1 is not possible"),
        ({"num_heads": 10}, "must be a multiple of 4"),
        ({"num_heads": 4}, "2 query heads share"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, int], sentence: str) -> None:
    with pytest.raises(BadOption, match=sentence):
        widen(SMALL, random_weights(SMALL), dataclasses.replace(WIDE, **change))


def test_qk_norm_is_refused() -> None:
    config = dataclasses.replace(SMALL, qk_norm=True)
    with pytest.raises(UnsupportedModel, match="QK norm"):
        widen(config, random_weights(config), WIDE)


def test_presets() -> None:
    assert shape_named("1b", SMALL).num_layers == 16
    assert shape_named("demo", dataclasses.replace(SMALL, num_layers=7)).num_layers == 7
    with pytest.raises(BadOption, match=r"there is no shape 'demoo' \(did you mean 'demo'\?\)"):
        shape_named("demoo", SMALL)


def test_written_folder_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights = random_weights(SMALL)
    save_checkpoint(tmp_path / "small", SMALL, weights, torch.float32, end_ids=[0])
    write_widened(tmp_path / "small", tmp_path / "wide", WIDE)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    tokens, logprobs = run_greedy(SMALL, weights, 12)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0].log_softmax(-1)
    assert (theirs - logprobs).abs().max() < 1e-4
    assert theirs.argmax(-1)[len(PROMPT) - 1 :].tolist() == tokens


def test_written_folder_keeps_its_type_and_is_not_overwritten(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(SMALL).items()}
    save_checkpoint(tmp_path / "small", SMALL, weights, torch.bfloat16)
    write_widened(tmp_path / "small", tmp_path / "wide", WIDE)
    assert load_checkpoint(tmp_path / "wide", dtype="bfloat16").config["torch_dtype"] == "bfloat16"
    with pytest.raises(BadOption, match="is not empty: name a new one"):
        write_widened(tmp_path / "small", tmp_path / "wide", WIDE)


def test_widening_in_memory_keeps_the_rest_of_the_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, SMALL, random_weights(SMALL), torch.float32, end_ids=[7])
    checkpoint = load_checkpoint(tmp_path)
    wide = widen_checkpoint(checkpoint, WIDE)
    assert wide.model.config.hidden_size == 128
    assert (wide.end_ids, wide.folder) == (checkpoint.end_ids, checkpoint.folder)
