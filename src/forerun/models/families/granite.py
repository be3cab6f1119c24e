"""Granite 3 (dense): Llama with four factors, for embeddings, scores, logits, and the outputs of a layer's parts.

The parts of a layer are attention and feed-forward.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Block, Spec
from forerun.models import configs
from forerun.models.configs import Filled, Raw, flag, full_attention_only, number, plain_spec
from forerun.models.naming import SIZES, Gguf, biases_of

SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

GGUF = Gguf(
    "granite",
    keys={**SIZES, **dict(zip(("embedding_scale", "attention.scale", "residual_scale", "logit_scale"), SCALES,
                              strict=True))},
    more=lambda metadata, tensors: biases_of(tensors, attention_bias="attn_q", mlp_bias="ffn_gate"),
    turned=True,
)  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    full_attention_only(raw)
    bias, mlp_bias = flag(raw, "attention_bias"), flag(raw, "mlp_bias")
    honoured = {"attention_bias", "mlp_bias", *SCALES}
    defaults = {"max_position_embeddings": 2048}
    spec = plain_spec(raw, honoured=honoured, defaults=defaults, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    scales = {key: number(Filled(raw, {key: 1.0}), key) for key in SCALES}

    def scaled(block: Block) -> Block:
        assert block.attention is not None
        attention = replace(block.attention, scale=scales["attention_multiplier"])
        return replace(block, attention=attention, branch_scale=scales["residual_multiplier"])

    return replace(
        spec,
        blocks=tuple(map(scaled, spec.blocks)),
        embed_scale=scales["embedding_multiplier"],
        logit_scale=1 / scales["logits_scaling"],
    )


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    first = spec.blocks[0]
    a, mlp = first.attention, first.mlp
    assert a is not None
    assert mlp is not None
    return {
        **configs.usual_config(spec, "GraniteForCausalLM"),
        **configs.rope_config(a.rope),
        "hidden_act": "silu",
        "attention_bias": a.o_bias,
        "mlp_bias": mlp.bias,
        "embedding_multiplier": spec.embed_scale,
        "attention_multiplier": a.scale,
        "residual_multiplier": first.branch_scale,
        "logits_scaling": configs.whole(1 / spec.logit_scale),
    }
