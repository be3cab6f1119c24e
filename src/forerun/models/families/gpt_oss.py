"""gpt-oss (gpt-oss-20b, -120b): experts with biases, a sink in each head's scores, and windows in every other layer.

Each token runs through the experts with the largest scores, whose outputs are weighted by the softmax of these scores.
An expert clamps the outputs of its gate and up matrices. In the files, rows of gate and rows of up alternate. As in
transformers, the range of dimensions in which YaRN blends frequencies is not rounded; llama.cpp rounds it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from forerun.blocks import Block, Experts, Mlp, Plain, Spec
from forerun.models import configs
from forerun.models.configs import LAYER_KINDS, Filled, Raw, flag, plain_config, plain_spec, size
from forerun.models.families.qwen3_moe import numbers_of, without_experts
from forerun.models.naming import EXPERT_GATE_UP, EXPERTS, INNER, OUTER, SIZES, Fused, Gguf, Metadata, Names

NUM, PER_TOKEN, LIMIT, ALPHA = "num_local_experts", "num_experts_per_tok", "swiglu_limit", "swiglu_alpha"
OWN_KEYS = {NUM, PER_TOKEN, LIMIT, ALPHA, "sliding_window", "attention_bias", "initial_context_length",
            "output_router_logits", "router_aux_loss_coef"}  # fmt: skip
USUAL_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
              "original_max_position_embeddings": 4096, "truncate": False}  # fmt: skip
DEFAULTS = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8,
            "num_attention_heads": 64, "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088,
            "rope_theta": 150000.0, "sliding_window": 128, "attention_bias": True, NUM: 128, PER_TOKEN: 4,
            "tie_word_embeddings": False}  # fmt: skip
NORM = "post_attention_layernorm"
BOUND, GAIN = 7.0, 1.702  # what `clamped_silu` computes
BARE: dict[str, str | Fused] = {
    "self_attn.sinks": "self_attn.sinks",
    "mlp.experts.gate_up_proj.{}": Fused(EXPERT_GATE_UP, transposed=True, in_turn=True),
    "mlp.experts.gate_up_proj_bias.{}": Fused(EXPERT_GATE_UP, in_turn=True),
    "mlp.experts.down_proj.{}": Fused(("mlp.experts.{}.down_proj",), transposed=True),
    "mlp.experts.down_proj_bias.{}": "mlp.experts.{}.down_proj",
    "mlp.experts.gate_up_proj_blocks.{}": Fused(EXPERT_GATE_UP, in_turn=True),  # MXFP4, stored as outputs x inputs
    "mlp.experts.down_proj_blocks.{}": "mlp.experts.{}.down_proj",
}
NAMES = Names({}, "model.layers.{}.", {"mlp.router": "mlp.gate", **BARE}, bare=frozenset(BARE))


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of config.json for the window and the rotary positions.

    Where a file sets no scaling, the entries set plain rotary positions, because the family's default is YaRN.
    """
    kind, factor = metadata.get("rope.scaling.type", "linear"), metadata.get("rope.scaling.factor", 1)
    is_plain = kind == "none" or (kind == "linear" and factor == 1)
    rope = {"rope_type": "default"} if is_plain else None
    return {"sliding_window": metadata.get("attention.sliding_window"), "rope_parameters": rope}


GGUF = Gguf(
    "gpt-oss",
    keys={**SIZES, "expert_count": NUM, "expert_used_count": PER_TOKEN},
    more=_more,
    by_more=frozenset({"attention.sliding_window", "expert_feed_forward_length"}),
    names=Names(OUTER, "blk.{}.", {**INNER, **EXPERTS, "post_attention_norm": NORM, "attn_sinks": "self_attn.sinks"}),
    rounds_yarn=False,
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = Filled(raw, DEFAULTS)
    for key, value in ((LIMIT, BOUND), (ALPHA, GAIN)):
        configs.require(c.get(key, value) == value, c, key, f"{value}, which is what is computed")
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = {**raw, "rope_parameters": USUAL_ROPE}
    bias = flag(c, "attention_bias")
    num = size(c, "num_hidden_layers")
    c = c.also(layer_types=[LAYER_KINDS[i % 2 == 0] for i in range(num)])
    spec = plain_spec(
        raw,
        honoured=OWN_KEYS,
        defaults=DEFAULTS,
        again={"experts_per_token": PER_TOKEN},
        qkv_bias=bias,
        o_bias=bias,
        windows=configs.windows(c, num, size(c, "sliding_window")),
    )
    rope = Plain.of(spec).rope
    trained = rope.original_max_positions if rope.kind == "yarn" else None
    configs.agree(c, "initial_context_length", trained, "original_max_position_embeddings")
    mlp = Mlp(size(c, "intermediate_size"), "clamped_silu", bias=True)
    experts = Experts(*numbers_of(c, NUM), mlp, score="softmax_of_chosen", router_bias=True)

    def mixed(block: Block) -> Block:
        assert block.attention is not None
        return replace(block, attention=replace(block.attention, sinks=True), mlp=None, experts=experts)

    return replace(spec, blocks=tuple(map(mixed, spec.blocks)))


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    attentions = [block.attention for block in spec.blocks if block.attention is not None]
    blocks = [block if (a := block.attention) is None else replace(block, attention=replace(a, sinks=False))
              for block in spec.blocks]  # fmt: skip
    dense, experts = without_experts(replace(spec, blocks=tuple(blocks)))
    plain = replace(experts.mlp, act="silu", bias=False)
    dense = replace(dense, blocks=tuple(replace(block, mlp=plain) for block in dense.blocks))
    raw = plain_config(dense, "GptOssForCausalLM")
    return {
        **raw,
        NUM: experts.num,
        PER_TOKEN: experts.chosen,
        LIMIT: BOUND,
        "attention_bias": attentions[0].o_bias,
        "layer_types": [LAYER_KINDS[a.window is not None] for a in attentions],
        "sliding_window": next((a.window for a in attentions if a.window is not None), DEFAULTS["sliding_window"]),
    }
