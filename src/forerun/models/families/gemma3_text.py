"""Text models of Gemma 3 (google/gemma-3-270m, -1b): GELU, and windows in five of six layers.

Layers with a window have other rotary positions than layers without a window. There are norms before and after
attention, and before and after feed-forward. Norms add 1 to their stored weights. Embeddings are scaled by the square
root of their width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from forerun.blocks import Attention, Block, Mlp, Norm, Spec
from forerun.models import configs
from forerun.models.configs import LAYER_KINDS, SHARED_KEYS, Raw, flag, number, size
from forerun.models.families import gemma2
from forerun.models.naming import SIZES

CAP, SCORE_CAP = "final_logit_softcapping", "attn_logit_softcapping"
THETAS = dict(zip(LAYER_KINDS, ("rope_theta", "rope_local_base_freq"), strict=True))
OWN_KEYS = {"hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern",
            *THETAS.values(), CAP, SCORE_CAP}  # fmt: skip
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "head_dim": 256, "tie_word_embeddings": True,
            "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "num_key_value_heads": 4,
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip


GGUF = replace(
    gemma2.GGUF,
    architecture="gemma3",
    keys={**SIZES, "rope.freq_base_swa": "rope_local_base_freq"},
    more=partial(gemma2.scale_and_window, 62),
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = configs.understood(raw, SHARED_KEYS | OWN_KEYS, DEFAULTS)
    configs.gelu_only(c)
    configs.require(c.get("partial_rotary_factor", 1) == 1, c, "partial_rotary_factor", "1")
    configs.require(SCORE_CAP not in c, c, SCORE_CAP, "null, because transformers caps no scores here")
    num, pattern = size(c, "num_hidden_layers"), size(c, "sliding_window_pattern")
    kinds = c.get("layer_types") or [LAYER_KINDS[(i + 1) % pattern > 0] for i in range(num)]
    windows = configs.windows({"layer_types": kinds}, num, size(c, "sliding_window")) or (None,) * num
    ropes = configs.ropes_by_kind(c, THETAS)
    norm = Norm(eps=number(c, "rms_norm_eps"), offset=1.0)
    bias = flag(c, "attention_bias")
    attention = Attention(
        *configs.head_sizes(c),
        scale=number(c, "query_pre_attn_scalar") ** -0.5,
        q_norm=replace(norm, span="head"),
        k_norm=replace(norm, span="head"),
        qkv_bias=bias,
        o_bias=bias,
    )
    both = [replace(attention, window=w, rope=ropes[LAYER_KINDS[w is not None]]) for w in windows]
    mlp = Mlp(size(c, "intermediate_size"), "gelu_tanh")
    blocks = tuple(Block(norm, a, post_attention=norm, pre_mlp=norm, mlp=mlp, post_mlp=norm) for a in both)
    scale = math.sqrt(size(c, "hidden_size"))
    cap = number(c, CAP) if CAP in c else None
    return configs.spec_of(c, "gemma3_text", blocks, norm, embed_scale=scale, logit_softcap=cap)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    attentions = [block.attention for block in spec.blocks if block.attention is not None]
    ropes = {LAYER_KINDS[a.window is not None]: a.rope for a in attentions if a.rope is not None}
    turned = {kind: {"rope_theta": r.theta, **(configs.rope_scaling(r) or {})} for kind, r in ropes.items()}
    return {
        **configs.usual_config(spec, "Gemma3ForCausalLM"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": attentions[0].o_bias,
        "rope_parameters": turned,
        "layer_types": [LAYER_KINDS[a.window is not None] for a in attentions],
        "sliding_window": next((a.window for a in attentions if a.window is not None), None),
        "query_pre_attn_scalar": configs.whole((attentions[0].scale or 0.0625) ** -2),
        CAP: spec.logit_softcap,
    }
