"""GLM-4 of 2025 (GLM-4-9B-0414 and similar models): neighbouring dimensions rotate as pairs, in one half of each head.

There are norms before and after attention, and before and after feed-forward. The files join the gate and up matrices.
The older glm-4-9b-chat-hf belongs to another family, glm, which has no norms after attention and feed-forward.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Attention, Block, Mlp, Norm, Spec
from forerun.models import configs
from forerun.models.configs import SHARED_KEYS, Raw, flag, full_attention_only, number, size
from forerun.models.naming import GATE_UP, INNER, NORMS_BEHIND, OUTER, Gguf, Names, has_bias

NAMES = Names(
    {},
    "model.layers.{}.",
    {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp.gate_up_proj": GATE_UP,
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
)

GGUF = Gguf(
    "glm4",
    more=lambda metadata, tensors: {"attention_bias": has_bias(tensors, "attn_q")},
    names=Names(OUTER, "blk.{}.", {**INNER, **NORMS_BEHIND, "ffn_up": GATE_UP}),
    turned_part="partial_rotary_factor",
)
DEFAULTS = {"rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "head_dim": 128, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "attention_bias": True}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = configs.understood(raw, SHARED_KEYS | {"attention_bias"}, DEFAULTS, nullable={"partial_rotary_factor"})
    full_attention_only(c)
    configs.require(configs.is_silu(c.get("hidden_act", "silu")), c, "hidden_act", "'silu'")
    heads, kv_heads, head_dim = configs.head_sizes(c)
    rope = replace(configs.rope_of(c, head_dim), pairs="adjacent")
    attention = Attention(heads, kv_heads, head_dim, rope=rope, qkv_bias=flag(c, "attention_bias"))
    norm = Norm(eps=number(c, "rms_norm_eps"))
    mlp = Mlp(size(c, "intermediate_size"))
    block = Block(norm, attention, post_attention=norm, pre_mlp=norm, mlp=mlp, post_mlp=norm)
    return configs.spec_of(c, "glm4", (block,) * size(c, "num_hidden_layers"), norm)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    a = spec.blocks[0].attention
    assert a is not None
    return {
        **configs.usual_config(spec, "Glm4ForCausalLM"),
        **configs.rope_config(a.rope, a.head_dim),
        **configs.UNPADDED,
        "hidden_act": "silu",
        "attention_bias": a.qkv_bias,
    }
