"""config.json: what is honoured, what is inert, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.errors import UnsupportedModel
from forerun.models.layers import Rope, RopeConfig
from forerun.models.loading import model_types, read_config
from forerun.models.saving import config_to_dict

Raw = dict[str, Any]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_the_folder_is_the_list_of_architectures() -> None:
    assert model_types() == ("llama", "mistral", "qwen2", "qwen3")


def test_both_spellings_of_rotary_positions_mean_the_same(llama_raw: Raw) -> None:
    theta = llama_raw.pop("rope_theta")
    rope = RopeConfig(theta, "llama3", 8.0, 1.0, 4.0, 64)
    spellings: list[Raw] = [
        {"rope_theta": theta, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": theta, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": theta, "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": theta, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"full_attention": {"rope_theta": theta, "rope_type": "llama3", **LLAMA3}}},
    ]
    assert {read_config(llama_raw | spelling).rope for spelling in spellings} == {rope}
    assert read_config(llama_raw).rope == RopeConfig(10000.0)


def test_llama3_without_its_trained_length_takes_max_position_embeddings(llama_raw: Raw) -> None:
    numbers = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    rope = read_config(llama_raw | {"rope_scaling": {"rope_type": "llama3", **numbers}}).rope
    assert rope.original_max_positions == llama_raw["max_position_embeddings"]


def test_inert_and_neutral_keys_pass(llama_raw: Raw) -> None:
    more = {"pretraining_tp": 4, "attention_dropout": 0.1, "use_cache": False, "architectures": ["X"], "soft_cap": None}
    more |= {"transformers_version": "4.31.0", "rope_interleaved": False, "pruned_heads": {}, "rope_scaling": None}
    assert read_config(llama_raw | more) == read_config(llama_raw)


REFUSED: list[tuple[str, Raw, str]] = [
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ("llama", {"num_experts": 0}, "num_experts=0"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5.*must be 1"),
    ("llama", {"sliding_window": 8}, "sliding_window=8"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*must be 'full_attention'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'.*one of"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor=None.*positive number"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2, "mscale": 3}}, "sets mscale=3"),
    ("llama", {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta=10000.0.*must be 5.0"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
        "disagree: keep one",
    ),
    (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 2e4}}},
        "differ by layer",
    ),
    ("llama", {"num_key_value_heads": 4}, "num_key_value_heads=4.*divisor of 15"),
    ("llama", {"head_dim": 7}, "head_dim=7.*even"),
    ("llama", {"head_dim": None, "num_attention_heads": 16, "num_key_value_heads": 4}, "divisor of 60"),
    ("llama", {"vocab_size": None}, "vocab_size=None.*positive integer"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'.*true or false"),
    ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "does not mix"),
    ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "no sliding_window in force"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding_window in force"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types=.*list of 2"),
    ("gpt2", {}, r"model_type='gpt2'.*\['llama', 'mistral', 'qwen2', 'qwen3'\]"),
    ("../llama", {}, "is not supported"),
]


@pytest.mark.parametrize(("model_type", "keys", "message"), REFUSED)
def test_refused_by_name(llama_raw: Raw, model_type: str, keys: Raw, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(llama_raw | {"model_type": model_type} | keys)


def test_windows(llama_raw: Raw) -> None:
    assert read_config(llama_raw | {"model_type": "mistral"}).windows == (4096, 4096)
    assert read_config(llama_raw | {"model_type": "mistral", "sliding_window": None}).windows == ()
    qwen = llama_raw | {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}
    assert read_config(qwen).windows == ()
    assert read_config(qwen | {"use_sliding_window": True}).windows == (None, 9)
    kinds = ["sliding_attention", "full_attention"]
    assert read_config(qwen | {"use_sliding_window": True, "layer_types": kinds}).windows == (9, None)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("mistral", {"sliding_window": 12}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_round_trip(llama_raw: Raw, model_type: str, keys: Raw) -> None:
    config = read_config(llama_raw | {"model_type": model_type} | keys)
    assert read_config(config_to_dict(config)) == config


def test_rotations_reach_as_far_as_they_are_asked_for() -> None:
    """The table grows by blocks of 256 positions: native passes read rows of it without asking how many there are."""
    rope = Rope(RopeConfig(), 16, torch.device("cpu"), torch.float32)
    for end in (1, 256, 257, 1000, 513):
        table = rope.table(end)
        assert len(table) >= end
        angles = (end - 1) * rope.inv_freq
        assert torch.equal(table[end - 1, 0, 0], torch.cat((angles.cos(), angles.cos())))
        assert torch.equal(table[end - 1, 1, 0], torch.cat((-angles.sin(), angles.sin())))
