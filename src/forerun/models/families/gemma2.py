"""Gemma 2 (google/gemma-2-2b, -9b, -27b): capped scores and logits, and a window in every other layer.

The first layer has a window, the second layer has no window, and so on. There are norms before and after attention, and
before and after feed-forward. Norms add 1 to their stored weights. Embeddings are scaled by the square root of their
width.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from forerun.blocks import Attention, Block, Mlp, Norm, Spec
from forerun.models import configs
from forerun.models.configs import LAYER_KINDS, SHARED_KEYS, Raw, flag, number, size
from forerun.models.naming import INNER, NORMS_BEHIND, OUTER, SIZES, Gguf, Metadata, Names

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
OWN_KEYS = {"hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window", *CAPS}
AGAIN = {"sliding_window_size": "sliding_window"}
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True,
            "sliding_window": 4096, "query_pre_attn_scalar": 256, "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh", CAPS[0]: 50.0, CAPS[1]: 30.0}  # fmt: skip


def scale_and_window(deepest: int, metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of config.json for the window and for the scale of scores, from a GGUF file.

    The file leaves out the scale, which follows from the head size. For the model with `deepest` layers, the scale
    follows from the hidden size divided by the number of heads instead.
    """
    of_rows = metadata.get("embedding_length", 0) // max(1, metadata.get("attention.head_count", 1))
    scalar = of_rows if metadata.get("block_count") == deepest else metadata.get("attention.key_length", 256)
    return {"query_pre_attn_scalar": scalar, "sliding_window": metadata.get("attention.sliding_window")}


GGUF = Gguf(
    "gemma2",
    keys={**SIZES, "attn_logit_softcapping": CAPS[0], "final_logit_softcapping": CAPS[1]},
    more=partial(scale_and_window, 46),
    names=Names(OUTER, "blk.{}.", {**INNER, **NORMS_BEHIND}),
    stored_offset=1.0,
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = configs.understood(raw, SHARED_KEYS | OWN_KEYS, DEFAULTS, AGAIN, nullable=CAPS)
    configs.gelu_only(c)
    num = size(c, "num_hidden_layers")
    bias = flag(c, "attention_bias")
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
    scale = math.sqrt(size(c, "hidden_size"))
    return configs.spec_of(c, "gemma2", blocks, norm, embed_scale=scale, logit_softcap=caps[1])


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    attentions = [block.attention for block in spec.blocks if block.attention is not None]
    a = attentions[0]
    windows = [layer.window for layer in attentions]
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
