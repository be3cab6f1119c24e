"""Widening: sizes, zeros and noise, refusals, presets, folders. Distributions are tested in test_widen_probs.py."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.widening import PROMPT, SMALL, TOLERANCE, WIDE, case, difference, random_weights, run_greedy, widen
from forerun import LLM, SamplingParams, ops as operators
from forerun.bench.plans import SHAPE_NAMES
from forerun.bench.widen import (
    SHAPES,
    describe,
    head_to_widen,
    num_parameters,
    shape_named,
    widen_checkpoint,
    write_widened,
    write_widened_head,
)
from forerun.blocks import Plain, resized, weight_shapes
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.host_tensor import dtype_name
from forerun.models.loading import load_checkpoint
from forerun.models.opened import read_config, spec_of
from forerun.models.widening import WideShape, wide_config
from forerun.ops.torch import TorchModel
from forerun.types import RoundDetail
from methods import random_head as head_of
from ops.native_cases import needs_native
from refusals import refusal
from saved import save_checkpoint
from tiny import write_tiny

GEMMA = {
    "model_type": "gemma3_text", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
MIXED = {
    **GEMMA, "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24, "mlp_only_layers": [1],
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tied": False},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "window": {"windows": (4, None)},
    "small_eps_matters": {"norm_eps": 0.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_function_in_float32(variant: str) -> None:
    config = resized(SMALL, **VARIANTS[variant])
    weights = random_weights(config)
    wider, wide = widen(config, weights, WIDE)
    tokens, logits = run_greedy(config, weights, 24)
    wide_tokens, wide_logits = run_greedy(wider, wide, 24)
    assert wide_tokens == tokens
    assert (wide_logits - logits).abs().max() < TOLERANCE


def test_every_weight_has_the_wide_shape_and_new_residual_dimensions_stay_zero() -> None:
    config, wide = widen(SMALL, random_weights(SMALL), WIDE)
    assert {name: tuple(tensor.shape) for name, tensor in wide.items()} == weight_shapes(config)
    assert not wide["model.embed_tokens.weight"][:, 32:].any()
    assert not wide["model.layers.0.self_attn.o_proj.weight"][32:].any()
    assert not wide["model.layers.2.mlp.down_proj.weight"].any()


def share_of_zeros(tensor: torch.Tensor) -> float:
    return float((tensor == 0).float().mean())


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_must_be_zero_is_zero(tied: bool) -> None:
    """The trained block in what writes into the residual stream, the new lanes of trained query heads, marks of ids."""
    config, shape = case(2, "4 to 3", tied=tied, grown=True)
    spec, wide = widen(config, random_weights(config), shape)
    config, wider = Plain.of(config), Plain.of(spec)
    layer, new_layer = "model.layers.1.", "model.layers.2."
    for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.v_proj"):
        assert share_of_zeros(wide[f"{layer}{name}.weight"]) < 0.001
        assert share_of_zeros(wide[f"{new_layer}{name}.weight"]) < 0.001
    new_lanes = config.num_heads * config.head_dim  # as many as trained ones: heads are twice as wide
    num_q_rows = wider.num_heads * wider.head_dim
    assert share_of_zeros(wide[f"{layer}self_attn.q_proj.weight"]) == pytest.approx(new_lanes / num_q_rows, abs=0.001)
    assert share_of_zeros(wide[f"{new_layer}self_attn.q_proj.weight"]) < 0.001
    assert int(wide[f"{layer}self_attn.o_proj.weight"].count_nonzero()) == config.hidden_size * new_lanes
    assert int(wide[f"{layer}mlp.down_proj.weight"].count_nonzero()) == config.hidden_size * config.ffn_size
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert not wide[f"{new_layer}{name}.weight"].any()
    num_trained, num_wide = config.vocab_size, wider.vocab_size
    assert int(wide["model.embed_tokens.weight"].count_nonzero()) == num_trained * config.hidden_size + num_wide
    if not tied:
        head = wide["lm_head.weight"]
        assert share_of_zeros(head[:num_trained, :-1]) < 0.001
        assert not head[:num_trained, -1].any()
        assert not head[num_trained:, : config.hidden_size].any()
        assert head[:, config.hidden_size : -1].all()


def test_noise_is_no_larger_than_the_trained_weights() -> None:
    weights = random_weights(SMALL)
    _, wide = widen(SMALL, weights, WIDE)
    for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        new = wide[f"model.layers.2.{name}.weight"]
        assert new.abs().max() <= weights[f"model.layers.0.{name}.weight"].abs().max()
        assert len(new.unique(dim=0)) == len(new)


def test_norms_stay_exact_in_bfloat16_for_a_power_of_four() -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(SMALL).items()}
    config, wide = widen(SMALL, weights, WIDE)  # 32 -> 128
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(wide[name][:32].double() * 2, weights[name].double())
    assert Plain.of(config).norm_eps == Plain.of(SMALL).norm_eps / 4
    tokens, logits = run_greedy(SMALL, weights, 12)
    wide_tokens, wide_logits = run_greedy(config, wide, 12)
    # Sums over K of another length are rounded in another order: bfloat16 results agree to its precision only.
    same = next((i for i, (a, b) in enumerate(zip(tokens, wide_tokens, strict=True)) if a != b), len(tokens))
    assert (wide_logits - logits)[: len(PROMPT) + same].abs().max() < 0.25


def test_counts() -> None:
    weights = random_weights(SMALL)
    count = num_parameters(SMALL)
    assert count == sum(tensor.numel() for tensor in weights.values())
    assert TorchModel(SMALL, weights).bytes_per_pass == 4 * count
    untied = resized(SMALL, tied=False)
    assert TorchModel(untied, random_weights(untied)).bytes_per_pass == 4 * count


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 16}, "hidden_size=16 is not possible: the model has 32"),
        ({"num_layers": 1}, "num_layers=1 is not possible"),
        ({"head_dim": 4}, "head_dim=4 is not possible: the model has 8"),
        ({"head_dim": 12}, "head_dim=12 is not possible: it must be a multiple of 8"),
        ({"vocab_size": 96}, "vocab_size=96 is not possible: the model has 97"),
        ({"vocab_size": 98, "hidden_size": 32}, "vocab_size=98 is not possible with hidden_size=32"),
        ({"num_heads": 10}, "must be a multiple of 4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, int], sentence: str) -> None:
    with pytest.raises(BadOption, match=sentence):
        widen(SMALL, random_weights(SMALL), dataclasses.replace(WIDE, **change))


def test_groups_that_need_more_key_value_heads_are_refused() -> None:
    config, shape = case(1, "4 to 3")
    too_few = dataclasses.replace(shape, num_heads=9, num_kv_heads=3)
    sentence = "num_kv_heads=3 is not possible: 4 query heads share .* in groups of 3, which takes 4 key-value heads"
    with pytest.raises(BadOption, match=sentence):
        wide_config(config, too_few)


def test_new_ids_in_a_type_of_too_small_a_range_are_refused() -> None:
    config, shape = case(grown=True)
    weights = {name: tensor.half() for name, tensor in random_weights(config).items()}
    weights["model.embed_tokens.weight"][3] *= 1000
    with pytest.raises(BadOption, match="vocab_size=301 is not possible in float16, whose range is too small"):
        widen(config, weights, shape)


def test_qk_norm_is_refused() -> None:
    config = resized(SMALL, qk_norm=True)
    assert "QK norm" in refusal(UnsupportedModel, widen, config, random_weights(config), WIDE)


def test_presets() -> None:
    assert shape_named("demo", resized(SMALL, num_layers=7)).num_layers == 7
    assert "there is no shape 'demoo' (did you mean 'demo'?)" in refusal(BadOption, shape_named, "demoo", SMALL)
    with pytest.raises(BadOption, match=r"there is no shape '1b': it must be one of demo, llama-3.2-1b, llama-3.2-3b"):
        shape_named("1b", SMALL)
    assert all(name in SHAPE_NAMES for name in SHAPES)  # what --help says


@pytest.mark.parametrize("folder", [SHIPPED_TARGET, SHIPPED_DRAFT])
@pytest.mark.parametrize(("name", "count"), [("llama-3.2-1b", 1_235_814_400), ("llama-3.2-3b", 3_212_749_824)])
def test_presets_have_the_size_of_the_published_models(folder: Path, name: str, count: int) -> None:
    config = spec_of(folder)
    assert num_parameters(wide_config(config, shape_named(name, config))) == count


def test_written_folder_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights = random_weights(SMALL)
    save_checkpoint(tmp_path / "small", SMALL, weights, torch.float32, end_ids=[0])
    write_widened(tmp_path / "small", tmp_path / "wide", WIDE)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    tokens, logits = run_greedy(SMALL, weights, 12)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0]
    assert difference(logits, theirs) < TOLERANCE
    assert theirs.argmax(-1)[len(PROMPT) - 1 :].tolist() == tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_written_folder_keeps_its_type_and_is_not_overwritten(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever types models are computed in."""
    save_checkpoint(tmp_path / "small", SMALL, random_weights(SMALL), dtype)
    write_widened(tmp_path / "small", tmp_path / "wide", WIDE)
    assert load_checkpoint(tmp_path / "wide", dtype="bfloat16").config["torch_dtype"] == dtype_name(dtype)
    assert {weight.dtype for weight in load_file(tmp_path / "wide" / "model.safetensors").values()} == {dtype}
    with pytest.raises(BadOption, match="is not empty: name a new one"):
        write_widened(tmp_path / "small", tmp_path / "wide", WIDE)


def test_a_widened_head_drafts_the_same_tokens_for_the_widened_target(tmp_path: Path) -> None:
    """A random one, in float32; a head does not know ids that widening adds, and is refused with them."""
    small = write_tiny(tmp_path / "small")
    c = Plain.of(spec_of(small))
    shape = WideShape(2 * c.hidden_size, c.num_layers, 2 * c.num_heads, 2 * c.num_kv_heads, 2 * c.ffn_size)
    write_widened(small, tmp_path / "wide", shape)
    head, rounds = head_of(LLM(str(small), draft="none", dtype="float32"), tmp_path), list[list[RoundDetail]]()
    write_widened_head(head_to_widen(head, shape, c.vocab_size), tmp_path / "wide" / "head", shape)
    for target, path in ((small, head), (tmp_path / "wide", tmp_path / "wide" / "head")):
        llm = LLM(str(target), draft=f"eagle:path={path}", dtype="float32", pacing="fixed", spec_length=3)
        rounds.append([])
        llm.listen(lambda report, found=rounds[-1]: found.extend(report.rounds), detail=True)  # type: ignore[misc]
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=16, temperature=0))
    same = [own.tokens == wide.tokens for own, wide in zip(*rounds, strict=True)]
    assert sum(same) >= len(same) - 2, "sums of another order may decide between two that are nearly tied"
    assert sum(len(own.tokens) for own in rounds[0]) > 10
    head_to_widen(head, dataclasses.replace(shape, vocab_size=c.vocab_size), c.vocab_size)
    with pytest.raises(BadOption, match="not possible with a head"):
        head_to_widen(head, dataclasses.replace(shape, vocab_size=c.vocab_size + 9), c.vocab_size)
    assert "there is no head" in refusal(NotFound, head_to_widen, "no-such-head", shape, c.vocab_size)


def test_widening_in_memory_keeps_the_rest_of_the_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, SMALL, random_weights(SMALL), torch.float32, end_ids=[7])
    checkpoint = load_checkpoint(tmp_path)
    wide = widen_checkpoint(checkpoint, WIDE)
    assert wide.model.config.hidden_size == 128
    assert (wide.end_ids, wide.folder) == (checkpoint.end_ids, checkpoint.folder)


def test_wide_weights_are_rounded_where_that_is_asked_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "small", SMALL, random_weights(SMALL), torch.float32)
    shape = dataclasses.replace(WIDE, ffn_size=128)  # whole groups of 32
    write_widened(tmp_path / "small", tmp_path / "wide", shape)
    written = load_checkpoint(tmp_path / "wide", quantization="int8").model
    made = widen_checkpoint(load_checkpoint(tmp_path / "small"), shape, quantization="int8")
    assert made.quantization == "int8"
    for name in weight_shapes(written.config):
        assert torch.equal(made.model.weights[name], written.weights[name]), name


@needs_native
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "float32 weights"), ("bfloat16", "8-bit weights")])
def test_rounded_wide_weights_are_of_the_type_that_was_asked_for(tmp_path: Path, dtype: str, precision: str) -> None:
    """Under float32 they are what the rounded ones stand for, as without a wider shape."""
    save_checkpoint(tmp_path, SMALL, random_weights(SMALL), torch.float32)
    shape = dataclasses.replace(WIDE, ffn_size=128)
    small = load_checkpoint(tmp_path, dtype=dtype)
    made = widen_checkpoint(small, shape, operators.make("native", "cpu"), "int8").model
    assert (made.weight_dtype, made.precision) == (dtype, precision)


GROWN = dataclasses.replace(WIDE, vocab_size=1000)


def test_written_folder_has_a_token_for_every_new_id(tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small")
    write_widened(small, tmp_path / "wide", GROWN)
    before, after = (load_checkpoint(folder, with_tokenizer=True) for folder in (small, tmp_path / "wide"))
    assert before.tokenizer is not None
    assert after.tokenizer is not None
    assert after.tokenizer.num_ids == after.model.config.vocab_size == 1000
    assert after.tokenizer.holes == frozenset()
    assert after.tokenizer.encode("def f(n):") == before.tokenizer.encode("def f(n):")
    assert after.end_ids == before.end_ids


def test_in_memory_the_tokenizer_grows_too(tmp_path: Path) -> None:
    small = load_checkpoint(write_tiny(tmp_path / "small"), with_tokenizer=True)
    wide = widen_checkpoint(small, GROWN)
    assert wide.tokenizer is not None
    assert wide.tokenizer.num_ids == wide.model.config.vocab_size == 1000
    assert widen_checkpoint(small, WIDE).tokenizer is small.tokenizer


def test_padding_rows_stay_without_a_token(tmp_path: Path) -> None:
    """Matrices of 300 rows over 257 tokens: rows 257 to 299 were never drawn, and must not be after growing."""
    folder = write_tiny(tmp_path / "small")
    config = dataclasses.replace(spec_of(folder), vocab_size=300)
    save_checkpoint(folder, config, random_weights(config), torch.float32, end_ids=[0], tokenizer_folder=folder)
    wide = widen_checkpoint(load_checkpoint(folder, with_tokenizer=True), GROWN)
    assert wide.tokenizer is not None
    assert wide.tokenizer.holes == frozenset(range(257, 300))


def test_every_familys_shape_has_words() -> None:
    """A benchmark says them, so that one that knows Llama's like alone would refuse all other models."""
    assert describe(spec_of(SHIPPED_TARGET)) == "hidden 512, 6 layers, ffn 1536, 8/2 heads of 64, 4096 ids"
    assert describe(read_config(GEMMA)) == "hidden 32, 2 layers, ffn 48, 4/1 heads of 8, 99 ids"
    assert describe(read_config(MIXED)) == "hidden 32, 2 layers, ffn 48, 2 of 8 experts of 16, 4/1 heads of 8, 99 ids"
