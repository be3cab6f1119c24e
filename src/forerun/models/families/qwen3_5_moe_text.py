"""Text models of Qwen 3.5 with experts (Qwen3.5-35B-A3B): each layer has many small experts and one shared expert.

Each token runs through the experts with the largest scores, and through the shared expert. Scores are a softmax, and
the scores of the chosen experts are scaled so that they sum to 1. Published files have one tensor for all experts.
Files that transformers writes have one tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from forerun.blocks import Block, Experts, Mlp, Spec
from forerun.models import configs
from forerun.models.configs import Filled, Raw, size
from forerun.models.families import qwen3_5_text
from forerun.models.families.qwen2_moe import SHARED
from forerun.models.families.qwen3_5_text import (
    GGUF_BARE,
    GGUF_INNER,
    GGUF_KEYS,
    LINEAR_DEFAULTS,
    LINEAR_KEYS,
    hybrid,
    hybrid_config,
    linear_keys,
    understood,
)
from forerun.models.families.qwen3_moe import EXPERT_KEYS, EXPERT_SIZES, numbers_of, without_experts
from forerun.models.naming import EXPERT_GATE_UP, EXPERTS, OUTER, SHARED_EXPERT, Fused, Names

OWN_KEYS = LINEAR_KEYS | EXPERT_KEYS | {SHARED, "decoder_sparse_step"}
DEFAULTS = {**LINEAR_DEFAULTS, "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
            "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            SHARED: 512, "norm_topk_prob": True}  # fmt: skip
GATE_UP = Fused(EXPERT_GATE_UP)
STACKED: Mapping[str, str | Fused] = {
    "mlp.experts.gate_up_proj.{}": GATE_UP,
    "mlp.experts.down_proj.{}": "mlp.experts.{}.down_proj",
}
MORE = {**STACKED, **{name: name for name in (*EXPERTS.values(), *SHARED_EXPERT.values())}}
names_at = partial(qwen3_5_text.names_at, more=MORE, bare=STACKED)
NAMES = replace(names_at("model."), more=(names_at("model.language_model."),))
GGUF_MORE: Mapping[str, str | Fused] = {**EXPERTS, **SHARED_EXPERT, "ffn_gate_up_exps.{}": GATE_UP}
GGUF_SIZES = {name: key for name, key in {**GGUF_KEYS, **EXPERT_SIZES}.items() if key != "num_key_value_heads"}

GGUF = replace(
    qwen3_5_text.GGUF,
    architecture="qwen35moe",
    keys={**GGUF_SIZES, "expert_shared_feed_forward_length": SHARED},
    more=lambda metadata, tensors: linear_keys("qwen35moe", metadata, tensors, "tiled"),
    names=Names(OUTER, "blk.{}.", {**GGUF_INNER, **GGUF_MORE}, bare=GGUF_BARE),
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = understood(raw, OWN_KEYS, DEFAULTS)
    configs.require(c["norm_topk_prob"] is True, c, "norm_topk_prob", "true")
    configs.require(c.get("decoder_sparse_step", 1) == 1, c, "decoder_sparse_step", "1")
    experts = experts_of(c)
    return hybrid(c, "qwen3_5_moe_text", lambda i: Block(experts=experts))


def experts_of(c: Filled) -> Experts:
    """Return the experts of a layer, including the shared expert."""
    each, shared = Mlp(size(c, "moe_intermediate_size")), Mlp(size(c, SHARED))
    return Experts(*numbers_of(c), each, shared, shared_gate=True, normalise=configs.flag(c, "norm_topk_prob"))


def expert_sizes(spec: Spec) -> dict[str, Any]:
    """Return the entries of config.json that `experts_of` reads, except norm_topk_prob."""
    experts = without_experts(spec)[1]
    return {
        "num_experts": experts.num,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.mlp.size,
        SHARED: experts.mlp.size if experts.shared is None else experts.shared.size,
    }


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    return {**hybrid_config(spec, "Qwen3_5MoeForCausalLM"), **expert_sizes(spec)}
