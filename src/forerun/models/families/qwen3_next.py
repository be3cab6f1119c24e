"""Qwen3-Next (Qwen3-Next-80B-A3B, Qwen3-Coder-Next): recurrent and attention layers as in Qwen 3.5, with experts.

For a recurrent layer, one tensor in the files joins q, k, v and z, and another tensor joins b and a. The rows of both
tensors are ordered by key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forerun.blocks import Block, Mlp, Spec
from forerun.models.configs import Raw, size
from forerun.models.families import qwen3_5_text
from forerun.models.families.qwen2_moe import SHARED
from forerun.models.families.qwen3_5_moe_text import GGUF_MORE, GGUF_SIZES, MORE, STACKED, experts_of
from forerun.models.families.qwen3_5_text import (
    AT,
    GGUF_BARE,
    GGUF_INNER,
    LINEAR_DEFAULTS,
    LINEAR_KEYS,
    hybrid,
    hybrid_config,
    linear_keys,
    names_at,
    understood,
)
from forerun.models.families.qwen3_moe import EXPERT_KEYS, LAYER_KEYS, expert_keys, mixed, without_experts
from forerun.models.naming import OUTER, Fused, Names

OWN_KEYS = LINEAR_KEYS | EXPERT_KEYS | LAYER_KEYS | {SHARED}
DEFAULTS = {**LINEAR_DEFAULTS, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
            "num_hidden_layers": 48, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, SHARED: 512, "norm_topk_prob": True}  # fmt: skip
QKVZ = Fused((f"{AT}in_proj_qkv", f"{AT}in_proj_z"), by_key_head=True)
BA = Fused((f"{AT}in_proj_b", f"{AT}in_proj_a"), by_key_head=True)
JOINED: Mapping[str, str | Fused] = {f"{AT}in_proj_qkvz": QKVZ, f"{AT}in_proj_ba": BA}
NAMES = names_at("model.", {**JOINED, **MORE}, STACKED)

GGUF = replace(
    qwen3_5_text.GGUF,
    architecture="qwen3next",
    keys={**GGUF_SIZES, "expert_shared_feed_forward_length": SHARED},
    more=lambda metadata, tensors: {"norm_topk_prob": True, **linear_keys("qwen3next", metadata, tensors, "grouped")},
    # The first files joined q, k, v and z as published checkpoints do (ssm_in).
    names=Names(OUTER, "blk.{}.", {**GGUF_INNER, **GGUF_MORE, "ssm_in": QKVZ, "ssm_ba": BA}, bare=GGUF_BARE),
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = understood(raw, OWN_KEYS, DEFAULTS)
    mlp = Mlp(size(c, "intermediate_size"))
    return mixed(hybrid(c, "qwen3_next", lambda i: Block(mlp=mlp)), c, experts_of(c))


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    dense, experts = without_experts(spec)
    mlp = dense.blocks[0].mlp
    return {
        **hybrid_config(spec, "Qwen3NextForCausalLM"),
        **expert_keys(spec, experts),
        "intermediate_size": experts.mlp.size if mlp is None else mlp.size,
        SHARED: experts.mlp.size if experts.shared is None else experts.shared.size,
    }
