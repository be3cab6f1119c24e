"""config.json: what is honoured, what is inert, and what is refused by name."""

import itertools
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from forerun.blocks import Plain, Rope
from forerun.errors import UnsupportedModel
from forerun.models.configs import SHARED_KEYS
from forerun.models.families import family, gpt_oss, model_types, run_by, t5gemma
from forerun.models.opened import read_config
from forerun.models.saving import config_to_dict
from forerun.ops.rotary import Rotations, rotations
from models.test_encoder_decoders import BART, T5
from models.test_parity import GPT2, SEEING, WHOLE
from models.test_published import PUBLISHED
from refusals import refusal

Raw = dict[str, Any]
KINDS: Raw = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 1e3}}
LOOKING, MIXED = SEEING["qwen3_vl"], SEEING["qwen3_vl_moe"]
# What is said of the text model in a part of its own, and beside it as well.
TEXT_APART: Raw = SEEING["qwen2_5_vl"] | {
    "text_config": {key: value for key, value in SEEING["qwen2_5_vl"].items() if key != "vision_config"}
    | {"model_type": "qwen2_5_vl_text"}
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_the_folder_is_the_list_of_architectures() -> None:
    """Every family of a decoder has a case that is compared with transformers."""
    decoders = {"llama", "mistral", "qwen2", "qwen3", *(raw["model_type"] for raw in WHOLE.values())}
    models = tuple(name for name in model_types() if run_by({"model_type": name}) is None)
    assert models == tuple(sorted({*decoders, *SEEING, "bart", "marian", "t5", "t5gemma"}))


def test_both_spellings_of_rotary_positions_mean_the_same(llama_raw: Raw) -> None:
    theta = llama_raw.pop("rope_theta")
    rope = Rope(theta, "llama3", 8.0, 1.0, 4.0, 64)
    spellings: list[Raw] = [
        {"rope_theta": theta, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": theta, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": theta, "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": theta, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    ]
    assert {Plain.of(read_config(llama_raw | spelling)).rope for spelling in spellings} == {rope}
    assert Plain.of(read_config(llama_raw)).rope == Rope(10000.0)


def test_llama3_without_its_trained_length_takes_max_position_embeddings(llama_raw: Raw) -> None:
    numbers = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    rope = Plain.of(read_config(llama_raw | {"rope_scaling": {"rope_type": "llama3", **numbers}})).rope
    assert rope.original_max_positions == llama_raw["max_position_embeddings"]


def test_the_way_out_for_a_key_that_is_not_known(llama_raw: Raw) -> None:
    """Bookkeeping under a leading underscore is inert; any other key is refused, and the refusal says what to write."""
    assert read_config(llama_raw | {"_model_name_or_path": "old/name", "_x": {"y": 1}}) == read_config(llama_raw)
    assert refusal(UnsupportedModel, read_config, llama_raw | {"made_by": "us"}) == (
        "config.json sets made_by='us', which forerun does not compute for model_type='llama': use a checkpoint "
        "without it, or, where it changes nothing that is computed, --ignore-config-key made_by "
        "(ignore_config_keys= in Python)"
    )


def test_inert_and_neutral_keys_pass(llama_raw: Raw) -> None:
    more = {"pretraining_tp": 4, "attention_dropout": 0.1, "use_cache": False, "architectures": ["X"], "soft_cap": None}
    more |= {"transformers_version": "4.31.0", "rope_interleaved": False, "pruned_heads": {}, "rope_scaling": None}
    assert read_config(llama_raw | more) == read_config(llama_raw)


NEUTRAL: list[Raw] = [
    {"hidden_act": "swish"},
    {"rope_scaling": {"rope_type": "default", "factor": 1.0}},
    {"rope_scaling": {"type": "default", "factor": 1, "original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "attention_factor": 1.0}},
    {"max_sequence_length": 2048, "gradient_checkpointing": True, "model_max_length": 4096},
    {"is_causal": True, "is_decoder": True, "num_local_experts": 0, "logits_scaling": 1.0, "residual_multiplier": 1},
    {"llama.expert_count": 0, "llama.pooling_type": 0, "llama.attention.causal": True, "llama.logit_scale": 1.0},
]


@pytest.mark.parametrize("keys", NEUTRAL)
def test_values_that_mean_what_is_computed_anyway_pass(llama_raw: Raw, keys: Raw) -> None:
    assert read_config(llama_raw | keys) == read_config(llama_raw)


def test_sizes_may_be_written_as_floats(llama_raw: Raw) -> None:
    floats = {key: float(llama_raw[key]) for key in ("hidden_size", "intermediate_size", "vocab_size")}
    assert read_config(llama_raw | floats) == read_config(llama_raw)
    with pytest.raises(UnsupportedModel, match=r"hidden_size=64\.5, which is not supported: it must be an integer"):
        read_config(llama_raw | {"hidden_size": 64.5})


@pytest.mark.parametrize(
    "keys",
    [
        {"is_causal": 1},
        {"num_local_experts": 1},
        {"logits_scaling": True},
        {"llama.pooling_type": 1},
        {"llama.attention.causal": False, "llama.expert_count": False, "x": 1},
        {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "default", "factor": True}},
    ],
)
def test_other_values_of_these_keys_do_not(llama_raw: Raw, keys: Raw) -> None:
    assert "which forerun does not compute" in refusal(UnsupportedModel, read_config, llama_raw | keys)


def test_all_keys_are_refused_at_once(llama_raw: Raw) -> None:
    """What one has to know before looking for another checkpoint."""
    assert refusal(UnsupportedModel, read_config, llama_raw | {"made_by": "us", "num_local_experts": 8}) == (
        "config.json sets made_by='us', num_local_experts=8, which forerun does not compute for model_type='llama': "
        "use a checkpoint without them, or, where they change nothing that is computed, --ignore-config-key made_by "
        "--ignore-config-key num_local_experts (ignore_config_keys= in Python)"
    )
    said = r"k4=1 and 6 more, which .* --ignore-config-key k4 \(ignore_config_keys="
    with pytest.raises(UnsupportedModel, match=said):
        read_config(llama_raw | {f"k{i}": 1 for i in range(11)})
    rope = {"rope_type": "linear", "factor": 2.0, "beta_fast": 32, "short_factor": [1.0]}
    with pytest.raises(UnsupportedModel, match=r"sets beta_fast=32, short_factor=\[1\.0\] for .* without them"):
        read_config(llama_raw | {"rope_scaling": rope})


def test_what_published_files_say_besides_is_inert() -> None:
    """Keys of GPT-2's and Gemma 3's own files that change nothing."""
    more = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "n_special": 0, "predict_special_tokens": True}
    more |= {"output_past": True, "n_ctx": 256, "initializer_range": 0.02, "architectures": ["GPT2LMHeadModel"]}
    assert read_config(GPT2 | more) == read_config(GPT2)
    assert read_config(WHOLE["gemma3"] | {"cache_implementation": "hybrid"}) == read_config(WHOLE["gemma3"])


# What a file says twice, and what the same means said once; a family's usual values contradict nothing.
LONG: Raw = {"rope_theta": 5e6, "rope_type": "default"}
TWICE: list[tuple[Raw, Raw, Raw]] = [
    (WHOLE["mixtral"], {"rope_parameters": LONG}, {"rope_theta": 5e6}),
    (WHOLE["smollm3"], {"rope_parameters": LONG, "rope_theta": None}, {"rope_theta": 5e6}),
    (WHOLE["gpt_oss"], {"rope_theta": 1e4, "rope_parameters": None},
     {"rope_parameters": {**gpt_oss.USUAL_ROPE, "rope_theta": 1e4}}),
    (WHOLE["gpt_oss"], {"experts_per_token": 2, "initial_context_length": 32}, {}),
    (WHOLE["gemma2"], {"sliding_window_size": 6}, {}),
    (WHOLE["gemma3"], {"rope_parameters": KINDS, "rope_scaling": None, "rope_theta": 1e5}, {"rope_scaling": None}),
    (WHOLE["gpt_neox"], {"rope_theta": 1000, "partial_rotary_factor": 0.4}, {}),
    (WHOLE["gpt_neox"], {"rotary_emb_base": None, "rotary_pct": None, "rope_theta": 1e3, "rope_parameters":
     {"rope_theta": 1e3, "partial_rotary_factor": 0.4}}, {}),
    (WHOLE["starcoder2"], {"layer_norm_epsilon": 1e-4, "rms_norm_eps": 1e-5}, {}),
    (WHOLE["qwen3_moe"], {"num_local_experts": 5}, {}),
    (WHOLE["qwen3_moe"], {"num_local_experts": 5, "num_experts": None, "use_qk_norm": True}, {}),
    (WHOLE["phi3-5"], {"rope_parameters": {**WHOLE["phi3-5"]["rope_parameters"], "type": "su"}}, {}),
    ({**BART, "model_type": "bart"}, {"num_hidden_layers": 2}, {}),
    ({**T5, "model_type": "t5"}, {"decoder_layers": 3}, {}),
    (WHOLE["glm4"], {"partial_rotary_factor": None}, {"partial_rotary_factor": 1.0}),
    (SEEING["qwen2_vl"], {"rope_scaling": None}, {"rope_scaling": {"mrope_section": [5, 0, 0], "type": "default"}}),
    (SEEING["qwen2_vl"], {"rope_scaling": None, "rope_theta": None}, {"rope_theta": 1e6}),
    (SEEING["qwen2_vl"], {"rope_scaling": None, "rope_theta": None, "rope_parameters": LONG}, {"rope_theta": 5e6}),
    (SEEING["qwen2_5_vl"], TEXT_APART | {"text_config": None}, TEXT_APART),
    (TEXT_APART, {key: None for key in SEEING["qwen2_5_vl"] if key not in ("model_type", "tie_word_embeddings")}, {}),
    (TEXT_APART, {"text_config": TEXT_APART["text_config"] | {"tie_word_embeddings": True}},
     {"tie_word_embeddings": True}),
    (MIXED, {"text_config": MIXED["text_config"] | {"tie_word_embeddings": True}}, {}),
    (WHOLE["lfm2"], {"block_ff_dim": 52, "conv_dim": 60, "num_heads": 6, "block_norm_eps": 1e-5, "theta": 1e6}, {}),
    (WHOLE["lfm2"], {"tie_embedding": False}, {"tie_word_embeddings": False}),
    (WHOLE["gemma4-experts"], {"per_layer_config": {"02": {"head_dim": 20, "num_key_value_heads": 1}}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "twice", "once"), TWICE)
def test_what_is_said_twice(raw: Raw, twice: Raw, once: Raw) -> None:
    assert read_config(raw | twice) == read_config(raw | once)


def test_what_a_file_leaves_out_is_not_said_to_be_there(llama_raw: Raw) -> None:
    glm = {key: value for key, value in llama_raw.items() if key != "num_key_value_heads"} | {"model_type": "glm4"}
    assert refusal(UnsupportedModel, read_config, glm) == (
        "config.json leaves out num_key_value_heads, which is usually 2: here it must be a divisor of 15"
    )


def test_a_null_theta_is_the_usual_one() -> None:
    raw = {key: value for key, value in WHOLE["gemma3"].items() if not key.startswith("rope_")}
    assert read_config(raw | {"rope_parameters": {kind: {"rope_theta": None} for kind in KINDS}}) == read_config(raw)


SIDE: Raw = {"model_type": "t5_gemma_module", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
             "max_position_embeddings": 64, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default"},
             "is_decoder": True, "sliding_window": 4}  # fmt: skip
T5GEMMA: Raw = {"model_type": "t5gemma", "vocab_size": 97, "encoder": SIDE, "decoder": SIDE, "is_encoder_decoder": True}


def side(name: str, **keys: Any) -> Raw:
    """A T5Gemma with other keys on one side."""
    return {**T5GEMMA, name: {**SIDE, **keys}}


REFUSED: list[tuple[str, Raw, str]] = [
    ("llama", {"is_causal": False}, "is_causal=False"),
    ("llama", {"llama.attention.causal": False}, "llama.attention.causal=False"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "type='yarn'.*must be 'linear'"),
    ("qwen3", {"use_qk_norm": False}, "use_qk_norm=False.*must be true"),
    ("qwen3_moe", WHOLE["qwen3_moe"] | {"num_local_experts": 4}, "num_local_experts=4 where num_experts is 5"),
    ("qwen2_moe", WHOLE["qwen2_moe"] | {"use_sliding_window": True, "layer_types": None}, "layer_types does not say"),
    ("gemma2", WHOLE["gemma2"] | {"sliding_window_size": 7}, "sliding_window_size=7 where sliding_window is 6, which"),
    ("gpt_oss", WHOLE["gpt_oss"] | {"experts_per_token": 3}, "experts_per_token=3 where num_experts_per_tok is 2"),
    ("gpt_oss", WHOLE["gpt_oss"] | {"initial_context_length": 64}, "64 where original_max_position_embeddings is 32"),
    ("gpt_neox", WHOLE["gpt_neox"] | {"rope_theta": 500}, "rope_theta=500 where rotary_emb_base is 1000"),
    ("gpt_neox", WHOLE["gpt_neox"] | {"rope_parameters": {"rope_theta": 5}},
     "rotary_emb_base=1000 where rope_theta of"),
    ("starcoder2", WHOLE["starcoder2"] | {"layer_norm_epsilon": 1e-6}, "1e-06 where norm_epsilon is 0.0001"),
    ("phi3", {"rope_scaling": {"original_max_position_embeddings": 8}}, "must be 4096, as outside of rope_scaling"),
    ("bart", {**BART, "model_type": "bart", "num_hidden_layers": 3}, "num_hidden_layers=3 where encoder_layers is 2"),
    ("t5", {**T5, "model_type": "t5", "decoder_layers": 2}, "decoder_layers=2 where num_decoder_layers is 3"),
    ("gemma3_text", {**WHOLE["gemma3"], "attn_logit_softcapping": 0.5}, "attn_logit_softcapping=0.5.*must be null"),
    ("gemma3_text", {**WHOLE["gemma3"], "rope_scaling": {"type": "linear", "factor": 2}}, "called rope_type"),
    ("gemma3_text", {**WHOLE["gemma3-5"], "rope_theta": 7}, "rope_theta=7 where rope_theta of full_attention is"),
    ("gemma4_text", WHOLE["gemma4"] | {"rope_theta": 1e4}, "rope_theta=10000.0"),
    ("gemma4_text", WHOLE["gemma4"] | {"per_layer_config": {"last": {}}}, "per_layer_config=.*numbers of layers"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"attn_output_gate": False}, "attn_output_gate=False.*must be true"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'.*'float32'"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"linear_num_value_heads": 5}, "linear_num_value_heads=5.*a multiple of 2"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"linear_conv_kernel_dim": 17}, r"kernel_dim=17.*an integer in 2 \.\. 16"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"full_attention_interval": 2, "layer_types": ["full_attention"] * 4},
     "layer_types=.*as full_attention_interval=2 says"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"layer_types": ["linear_attention"] * 4}, "some layer has full_attention"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"layer_types": ["sliding_attention"] * 4}, "a list of 4 entries out of"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"linear_decay": "positive"}, "linear_decay='positive'.*one of"),
    ("qwen3_5_text", WHOLE["qwen3_5"] | {"rope_parameters": {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
     r"mrope_section=\[2, 1, 1\].*the 2 pairs of a head that are turned"),
    ("qwen3_5_moe_text", WHOLE["qwen3_5_moe"] | {"norm_topk_prob": False}, "norm_topk_prob=False.*must be true"),
    ("qwen3_5_moe_text", WHOLE["qwen3_5_moe"] | {"decoder_sparse_step": 2}, "decoder_sparse_step=2.*must be 1"),
    ("qwen3_5_moe_text", WHOLE["qwen3_5_moe"] | {"mlp_only_layers": [0]}, "mlp_only_layers="),
    ("qwen3_5_moe_text", WHOLE["qwen3_5_moe"] | {"num_experts_per_tok": 6}, "num_experts_per_tok=6.*at most 5"),
    ("lfm2", WHOLE["lfm2"] | {"full_attn_idxs": [0]}, "layer_types=.*as full_attn_idxs says"),
    ("lfm2", WHOLE["lfm2"] | {"layer_types": ["conv"] * 3}, "some layer has full_attention"),
    ("lfm2", WHOLE["lfm2"] | {"layer_types": None, "full_attn_idxs": [3]}, r"full_attn_idxs=\[3\].*layers below 3"),
    ("lfm2", WHOLE["lfm2"] | {"conv_L_cache": 17}, r"conv_L_cache=17.*an integer in 2 \.\. 16"),
    ("lfm2", WHOLE["lfm2"] | {"conv_dim": 64}, "conv_dim=64 where hidden_size is 60"),
    ("lfm2", WHOLE["lfm2"] | {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 where norm_eps is 1e-05"),
    ("lfm2", WHOLE["lfm2"] | {"block_ff_dim": 64}, "intermediate_size=52 where block_ff_dim is 64"),
    ("lfm2", WHOLE["lfm2"] | {"block_ff_dim": 1, "intermediate_size": None}, "intermediate_size=0"),
    ("lfm2", WHOLE["lfm2"] | {"block_use_swiglu": False}, "block_use_swiglu=False.*must be true"),
    ("lfm2", WHOLE["lfm2"] | {"theta": 5e5}, "theta=500000.0 where rope_theta is 1000000.0"),
    ("lfm2", WHOLE["lfm2"] | {"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
    ("lfm2_moe", WHOLE["lfm2_moe"] | {"routed_scaling_factor": 0}, "routed_scaling_factor=0.*must be a number"),
    ("lfm2_moe", WHOLE["lfm2_moe"] | {"num_dense_layers": -1}, "num_dense_layers=-1.*an integer in 0"),
    ("lfm2_moe", WHOLE["lfm2_moe"] | {"block_auto_adjust_ff_dim": True}, "sets block_auto_adjust_ff_dim=True"),
    ("lfm2_moe", WHOLE["lfm2_moe"] | {"num_experts_per_tok": 6}, "num_experts_per_tok=6.*at most 5"),
    ("qwen3_next", WHOLE["qwen3_next"] | {"mlp_only_layers": 3}, "mlp_only_layers=3.*a list of layers"),
    ("qwen3_next", WHOLE["qwen3_next"] | {"linear_key_head_dim": 1 << 13}, r"linear_key_head_dim=8192.*in 1 \.\. 4096"),
    ("qwen3_next", WHOLE["qwen3_next"] | {"use_sliding_window": True}, "sets use_sliding_window=True"),
    ("qwen3_5", SEEING["qwen3_5"] | {"text_config": {"model_type": "qwen3"}}, "model_type='qwen3'.*in text_config"),
    ("ministral3", {"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta=0.1"),
    ("gemma3_text", {**WHOLE["gemma3"], "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5.*must be 1"),
    ("gemma3_text", {**WHOLE["gemma3"], "hidden_act": "silu"}, "hidden_act='silu'"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ("llama", {"num_experts": 8}, "num_experts=8"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5.*must be 1"),
    ("llama", {"sliding_window": 8}, "sliding_window=8"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*must be 'full_attention'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'.*one of"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": "2"}}, "factor='2'.*must be a number in 0.001"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "short_factor": [1]}}, "sets short_factor="),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "truncate": 1}}, "truncate=1.*true or false"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}},
     "long_factor=.*must be a list of 4 numbers"),
    ("phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4.*an even part of a head's 8"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2.*must be 1"),
    ("phi3", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "does not mix"),
    ("gemma2", {"hidden_act": "silu"}, "hidden_act='silu'.*must be 'gelu_pytorch_tanh'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("ministral3", {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1"),
    ("granite", {"logits_scaling": 0}, "logits_scaling=0.*must be a number"),
    ("granite", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("smollm3", {"no_rope_layers": [0, 0]}, "no_rope_layers=.*a layer that has rotary positions"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=.*at least 2 numbers"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("glm4", {"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4.*even part"),
    ("starcoder2", {"rms_norm_eps": None, "norm_type": "rms_norm"}, "norm_type='rms_norm'.*must be 'layer_norm'"),
    ("starcoder2", {"rms_norm_eps": None, "hidden_act": "mish"}, "hidden_act='mish'.*one of"),
    ("gpt_neox", WHOLE["gpt_neox"] | {"head_dim": 12}, "head_dim=12.*hidden_size / num_attention_heads"),
    ("gpt_neox", WHOLE["gpt_neox"] | {"hidden_act": "mish"}, "hidden_act='mish'"),
    ("mistral3", SEEING["mistral3"] | {"hidden_size": 60}, "sets hidden_size=60"),
    ("gemma3", SEEING["gemma3"] | {"text_config": None}, "text_config=None.*must be a mapping"),
    ("gemma3", SEEING["gemma3"] | {"text_config": WHOLE["gemma3"]}, "final_logit_softcapping=3.0.*null in text_config"),
    ("mistral3", SEEING["mistral3"] | {"text_config": {"model_type": "qwen3"}}, "model_type='qwen3'.*in text_config"),
    ("qwen2_vl", SEEING["qwen2_vl"] | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, "add to 5, the"),
    ("qwen2_vl", SEEING["qwen2_vl"] | {"rope_scaling": {"type": "mrope", "mrope_section": [5]}}, "mrope_section=.5."),
    ("qwen2_vl", SEEING["qwen2_vl"] | {"rope_scaling": {"type": "mrope", "mrope_section": [6, -2, 1]}}, "three sizes"),
    ("qwen2_vl", SEEING["qwen2_vl"] | {"rope_scaling": {"mrope_interleaved": 1}}, "mrope_interleaved=1.*true or false"),
    ("qwen2_vl", SEEING["qwen2_vl"] | {"rope_scaling": {"type": "mrope", "rope_type": "yarn"}}, "type='default'"),
    ("qwen2_vl", SEEING["qwen2_vl"] | {"head_dim": 8, "rope_scaling": None}, "head_dim=8.*hidden_size / num_attent"),
    ("qwen2_vl", SEEING["qwen2_vl"] | {"made_by": "us"}, "made_by='us'.*model_type='qwen2_vl_text'"),
    ("qwen2_5_vl", TEXT_APART | {"num_hidden_layers": 3}, "another text model beside text_config than in it: blocks="),
    ("qwen2_5_vl", TEXT_APART | {"model_type": "qwen2_vl"}, "model_type='qwen2_5_vl_text'.*'qwen2_vl_text' in text"),
    ("qwen3_vl", LOOKING | {"text_config": LOOKING["text_config"] | {"use_sliding_window": True}}, "must be false"),
    ("qwen3_vl", LOOKING | {"text_config": LOOKING["text_config"] | {"layer_types": ["sliding_attention"] * 2}},
     "'full_attention' in every layer"),
    ("qwen3_vl_moe", MIXED | {"text_config": MIXED["text_config"] | {"norm_topk_prob": False}}, "must be true"),
    ("qwen3_vl_moe", MIXED | {"text_config": MIXED["text_config"] | {"num_local_experts": 4}}, "num_experts is 5"),
    ("gemma4_unified_text", WHOLE["gemma4_unified"] | {"hidden_size_per_layer_input": 8}, "input=8.*must be 0"),
    ("gemma4_unified_text", WHOLE["gemma4_unified"] | {"enable_moe_block": True}, "enable_moe_block=True.*be false"),
    ("gemma4_unified", SEEING["gemma4_unified"] | {"text_config": WHOLE["gemma4"]}, "'gemma4_unified_text' in text"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor=None.*must be a number in 0.001"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2, "mscale": 3}}, "sets mscale=3"),
    ("llama", {"rope_parameters": {"rope_theta": 5.0}},
     "rope_theta=10000.0 where rope_theta of rope_parameters is 5.0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
     "disagree: keep one"),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
     "one mapping for all layers"),
    ("llama", {"num_key_value_heads": 4}, "num_key_value_heads=4.*divisor of 15"),
    ("llama", {"head_dim": 7}, "head_dim=7.*even"),
    ("llama", {"head_dim": None, "num_attention_heads": 16, "num_key_value_heads": 4}, "divisor of 60"),
    ("llama", {"vocab_size": None}, "vocab_size=None.*must be an integer in 1 \\.\\. 16777216"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'.*true or false"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "full_attention in layer_types, which.*here 4096"),
    ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "no sliding_window in force"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding_window in force"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types=.*list of 2"),
    ("llama", {"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000.*must be an integer in 1 \.\. 1024"),
    ("qwen2", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
    ("llama", {"hidden_size": 1 << 18}, "hidden_size=262144"),
    ("llama", {"num_attention_heads": 1 << 13}, "num_attention_heads=8192"),
    ("llama", {"rms_norm_eps": math.inf}, r"rms_norm_eps=inf.*must be a number in 1e-20 \.\. 1"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps=0"),
    ("llama", {"rope_theta": 1e-300}, "rope_theta=1e-300.*must be a number in 1"),
    ("llama", {"rope_theta": 10**400}, "rope_theta=an integer of 1329 bits.*must be a number in 1"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": math.inf}}, "factor=inf"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
     "high_freq_factor=1.0.*abov"),
    ("mistral", {"sliding_window": 10**12}, "sliding_window=1000000000000"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers='all'"),
    ("bloom", {}, rf"model_type='bloom'.*{re.escape(str(list(model_types())))}"),
    ("../llama", {}, "is not supported"),
    ("t5", {**T5, "model_type": "t5", "dense_act_fn": "silu"}, "dense_act_fn='silu'.*'relu', as feed_forward_proj has"),
    ("t5", {**T5, "model_type": "t5", "is_gated_act": True}, "is_gated_act=True.*False, as feed_forward_proj has it"),
    ("bart", {**BART, "model_type": "bart", "normalize_embedding": False}, "normalize_embedding=False.*must be true"),
    ("marian", {**BART, "model_type": "marian", "normalize_embedding": True}, "normalize_embedding=True.*be false"),
    ("marian", {**BART, "model_type": "marian", "decoder_vocab_size": 96}, "vocab_size=96 where vocab_size is 97"),
    ("t5gemma", side("encoder", vocab_size=96), "vocab_size=96.*97, as that of the whole"),
    ("t5gemma", side("decoder", cross_attention_hidden_size=64), "attention_hidden_size=64.*32, as the encoder's"),
    ("t5gemma", side("decoder", hidden_activation="silu"), "hidden_activation='silu'.*'gelu_pytorch_tanh'"),
    ("t5gemma", side("encoder", norm_topk_prob=True), "norm_topk_prob=True"),
    ("t5gemma", {**T5GEMMA, "decoder": None}, "decoder=None.*must be a mapping"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "keys", "message"), REFUSED)
def test_refused_by_name(llama_raw: Raw, model_type: str, keys: Raw, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(keys if "model_type" in keys else llama_raw | {"model_type": model_type} | keys)


ODD: list[Any] = [
    *(None, True, -1, 0, 1, 3, 10**9, 10**400, 1.5, -0.0, 1e-300, math.inf, math.nan),
    *("", "x", "10", [], [1], [[]], ["full_attention"] * 3, {}, {"a": 1}, {"rope_type": []}, {"rope_type": "linear"}),
]


def num_refused(raws: Iterable[Raw]) -> int:
    """How many of these are refused, each in a sentence that is not long; the others are understood."""
    refused = []
    for raw in raws:
        try:
            read_config(raw)
        except UnsupportedModel as error:
            refused.append(str(error))
    assert max(map(len, refused)) < 400
    return len(refused)


@pytest.mark.parametrize("model_type", model_types())
def test_every_key_may_be_anything(llama_raw: Raw, model_type: str) -> None:
    """It is understood, or refused by name in one sentence; nothing else happens, and nothing takes long."""
    more = {"sliding_window", "max_window_layers", "use_sliding_window", "attention_bias", "auto_map"}
    module: Any = family(model_type)
    bases = {raw["model_type"]: raw for raw in WHOLE.values()} | {"t5": T5, "bart": BART, "marian": BART}
    bases |= {kind: raw for raw in PUBLISHED.values() if run_by({"model_type": (kind := raw["model_type"])})}
    llama_raw = {**bases, **SEEING, "t5gemma": T5GEMMA}.get(model_type, llama_raw)
    own = {*getattr(module, "KEYS", SHARED_KEYS | more), *getattr(module, "OWN_KEYS", ())}
    windows = ({}, {"use_sliding_window": True}) if model_type.startswith("qwen") else ({},)
    changes = itertools.product(sorted({*own, *llama_raw} - {"model_type"}), ODD, windows)
    raws = (llama_raw | {"model_type": model_type, **window, key: value} for key, value, window in changes)
    assert num_refused(raws) > 20


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_every_key_of_a_side_may_be_anything(name: str) -> None:
    assert num_refused(side(name, **{key: value}) for key in SHARED_KEYS | t5gemma.PART_KEYS for value in ODD) > 100


def test_a_side_has_its_usual_values() -> None:
    """As transformers fills in what config.json leaves out."""
    least = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8}
    found = read_config({"model_type": "t5gemma", "vocab_size": 97, "encoder": least, "decoder": least})
    both = [[a.window for b in own.blocks if (a := b.attention) is not None] for own in (found, found.encoder)]
    assert both == [[4096, None, None, None, 4096, None], [4097, None, 4097]]
    first = found.blocks[0].attention
    assert (first.kv_heads, first.head_dim, first.scale, first.softcap, found.logit_softcap) == (4, 256, 1 / 16, 50, 30)
    assert found.tied


def test_windows(llama_raw: Raw) -> None:
    assert Plain.of(read_config(llama_raw | {"model_type": "mistral"})).windows == (4096, 4096)
    assert Plain.of(read_config(llama_raw | {"model_type": "mistral", "sliding_window": None})).windows == ()
    qwen = llama_raw | {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}
    assert Plain.of(read_config(qwen)).windows == ()
    assert Plain.of(read_config(qwen | {"use_sliding_window": True})).windows == (None, 9)
    kinds = ["sliding_attention", "full_attention"]
    assert Plain.of(read_config(qwen | {"use_sliding_window": True, "layer_types": kinds})).windows == (9, None)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}}),
        ("qwen3", {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64, "truncate": False}}),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}),
        ("mistral", {"sliding_window": 12}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
        *((raw["model_type"], raw) for raw in WHOLE.values()),
    ],
)
def test_round_trip(llama_raw: Raw, model_type: str, keys: Raw) -> None:
    config = read_config(keys if keys.get("model_type") else llama_raw | {"model_type": model_type} | keys)
    assert read_config(json.loads(json.dumps(config_to_dict(config)))) == config


def test_rotations_reach_as_far_as_they_are_asked_for() -> None:
    """The table grows by blocks of 256 positions: native passes read rows of it without asking how many there are."""
    rope = Rotations(Rope(), 16)
    for end in (1, 256, 257, 1000, 513):
        table = rope.table(end)
        assert len(table) >= end
        assert np.array_equal(table[end - 1, :, 0], rotations(rope.inv_freq, 1.0, range(end - 1, end))[0])
