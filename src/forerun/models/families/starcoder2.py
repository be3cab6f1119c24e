"""StarCoder 2: layer norms, biases everywhere, GELU without a gate, rotary positions and a window in every layer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forerun.blocks import Attention, Block, Mlp, Norm, Spec
from forerun.models import configs
from forerun.models.configs import SHARED_KEYS, Raw, flag, number, size
from forerun.models.naming import SIZES, Gguf, Metadata, Names, has_bias

NAMES = Names({}, "model.layers.{}.", {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"})


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window")
    return {"use_bias": has_bias(tensors, "attn_q"), **({"sliding_window": window} if window else {})}


GGUF = Gguf("starcoder2", keys={**SIZES, "attention.layer_norm_epsilon": "norm_epsilon"}, more=_more)
OWN_KEYS = {"norm_epsilon", "use_bias", "sliding_window"}
# Keys of published files with the only value that is computed.
FIXED = {"norm_type": "layer_norm", "mlp_type": "default", "scale_attn_weights": True}
# rms_norm_eps is there, too, though the norms are of another kind.
INERT = {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "embedding_dropout", "residual_dropout",
         "activation_function"}  # fmt: skip
AGAIN = {"layer_norm_epsilon": "norm_epsilon"}
DEFAULTS = {"norm_epsilon": 1e-5, "max_position_embeddings": 4096, "num_key_value_heads": 2, "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = configs.understood(raw, SHARED_KEYS | OWN_KEYS | INERT | FIXED.keys(), {**DEFAULTS, **FIXED}, AGAIN)
    for key, value in FIXED.items():
        configs.require(c[key] == value and type(c[key]) is type(value), c, key, repr(value))
    act = configs.act_of(c, "hidden_act")
    num, bias = size(c, "num_hidden_layers"), flag(c, "use_bias")
    window = size(c, "sliding_window") if "sliding_window" in c else None
    configs.same_window(c, window)
    norm = Norm("layer", number(c, "norm_epsilon"), bias=True)
    attention = Attention(*configs.head_sizes(c), window=window, rope=configs.rope_of(c), qkv_bias=bias, o_bias=bias)
    mlp = Mlp(size(c, "intermediate_size"), act, gated=False, bias=bias)
    return configs.spec_of(c, "starcoder2", (Block(norm, attention, pre_mlp=norm, mlp=mlp),) * num, norm)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    first = spec.blocks[0]
    a, mlp = first.attention, first.mlp
    assert a is not None
    assert mlp is not None
    raw = {**configs.usual_config(spec, "Starcoder2ForCausalLM"), **configs.rope_config(a.rope)}
    return {
        **{("norm_epsilon" if key == "rms_norm_eps" else key): value for key, value in raw.items()},
        "hidden_act": configs.act_name(mlp.act),
        "use_bias": mlp.bias,
        "sliding_window": a.window,
    }
