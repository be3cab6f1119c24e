"""Gemma 2 (google/gemma-2-2b, -9b, -27b): norms also behind both parts, capped scores and logits, alternating windows.

The first layer and every second after it have a window. Norms add 1 to their stored weights, and embeddings are scaled
by the square root of their width.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from forerun.blocks import Attention, Block, Mlp, Norm, Spec
from forerun.models import configs
from forerun.models.configs import LAYER_KINDS, SHARED_KEYS, Raw, flag, number, size
from forerun.models.naming import INNER, OUTER, SIZES, Gguf, Names, Own

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
OWN_KEYS = {"hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window", *CAPS}
AGAIN = {"sliding_window_size": "sliding_window"}
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True,
            "sliding_window": 4096, "query_pre_attn_scalar": 256, "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh", CAPS[0]: 50.0, CAPS[1]: 30.0}  # fmt: skip


def _more(own: Own, tensors: Collection[str]) -> dict[str, Any]:
    """Add the scale of scores, which llama.cpp's files leave out: by head size, except in the model of 46 layers."""
    of_rows = own.get("embedding_length", 0) // max(1, own.get("attention.head_count", 1))
    scalar = of_rows if own.get("block_count") == 46 else own.get("attention.key_length", 256)
    return {"query_pre_attn_scalar": scalar, "sliding_window": own.get("attention.sliding_window")}


NORMS = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
         "post_ffw_norm": "post_feedforward_layernorm"}  # fmt: skip
GGUF = Gguf(
    "gemma2",
    keys={**SIZES, "attn_logit_softcapping": CAPS[0], "final_logit_softcapping": CAPS[1]},
    more=_more,
    names=Names(OUTER, "blk.{}.", {**INNER, **NORMS}),
    stored_offset=1.0,
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for a key that would change the function."""
    c = configs.understood(raw, SHARED_KEYS | OWN_KEYS, DEFAULTS, AGAIN, nullable=CAPS)
    for key in ("hidden_activation", "hidden_act"):
        configs.require(c.get(key, "gelu_pytorch_tanh") == "gelu_pytorch_tanh", c, key, "'gelu_pytorch_tanh'")
    num, hidden, bias = size(c, "num_hidden_layers"), size(c, "hidden_size"), flag(c, "attention_bias")
    c = c.also(layer_types=[LAYER_KINDS[(i + 1) % 2] for i in range(num)])
    windows = configs.windows(c, num, size(c, "sliding_window")) or (None,) * num
    norm = Norm(eps=number(c, "rms_norm_eps"), offset=1.0)
    caps = [None if c[key] is None else number(c, key) for key in CAPS]
    attention = Attention(
        *configs.head_sizes(c),
        scale=number(c, "query_pre_attn_scalar") ** -0.5,
        rope=configs.rope_of(c),
        qkv_bias=bias,
        o_bias=bias,
        softcap=caps[0],
    )
    mlp = Mlp(size(c, "intermediate_size"), "gelu_tanh")
    blocks = tuple(
        Block(norm, replace(attention, window=window), post_attention=norm, pre_mlp=norm, mlp=mlp, post_mlp=norm)
        for window in windows
    )
    return Spec("gemma2", size(c, "vocab_size"), hidden, size(c, "max_position_embeddings"), blocks, norm,
                math.sqrt(hidden), tied=flag(c, "tie_word_embeddings"), logit_softcap=caps[1])  # fmt: skip


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    attentions = [block.attention for block in spec.blocks if block.attention is not None]
    a, windows = attentions[0], [layer.window for layer in attentions]
    return {
        **configs.usual_config(spec, "Gemma2ForCausalLM"),
        **configs.rope_config(a.rope),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": a.o_bias,
        "layer_types": [LAYER_KINDS[window is not None] for window in windows],
        "sliding_window": next((window for window in windows if window is not None), 4096),
        "query_pre_attn_scalar": configs.whole((a.scale or 0.0625) ** -2),
        **dict(zip(CAPS, (a.softcap, spec.logit_softcap), strict=True)),
    }
