"""LFM2 (LFM2-350M, -1.2B, -2.6B): most layers are short convolutions between two gates, the others are attention.

In older files, the feed-forward width of the model is about two thirds of the width in config.json, and a list has the
indices of the layers with attention. The norm after the last layer is called `embedding_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from forerun.blocks import Attention, Block, Mlp, Norm, Recurrence, Spec
from forerun.errors import UnsupportedModel
from forerun.models import configs
from forerun.models.configs import LARGEST, SHARED_KEYS, Filled, Raw, flag, number, size
from forerun.models.families.qwen3_5_text import heads_of_layers, layers_of_two_kinds
from forerun.models.naming import INNER, OUTER, SIZES, Fused, Gguf, Metadata, Names

FULL, CONV = "full_attention", "conv"
NUMBERS, LENGTH, BIAS = "full_attn_idxs", "conv_L_cache", "conv_bias"
ADJUSTS, TIMES, MULTIPLE = "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
# Keys that repeat another key -> that key.
AGAIN = {"block_norm_eps": "norm_eps", "rms_norm_eps": "norm_eps", "conv_dim": "hidden_size",
         "conv_dim_out": "hidden_size", "block_dim": "hidden_size", "num_heads": "num_attention_heads"}  # fmt: skip
# Keys with only one possible value; and keys about weights before training.
FIXED = ("block_use_swiglu", "use_pos_enc")
UNREAD = {"block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"}
CONV_KEYS = {"norm_eps", NUMBERS, LENGTH, BIAS, "tie_embedding", "theta", *FIXED, *UNREAD}
OWN_KEYS = CONV_KEYS | {"block_ff_dim", ADJUSTS, TIMES, MULTIPLE}
CONV_DEFAULTS = {"vocab_size": 65536, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "max_position_embeddings": 128000, "norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e6,
                 LENGTH: 3, BIAS: False}  # fmt: skip
DEFAULTS: Raw = {
    **CONV_DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    ADJUSTS: True,
    TIMES: 1.0,
    MULTIPLE: 256,
}
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
INNER_NAMES: Mapping[str, str | Fused] = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "conv.conv": Fused(("conv.conv",), squeezed=True),
    **{f"feed_forward.{w}": f"mlp.{part}" for w, part in PARTS.items()},
}
OUTER_NAMES = {"model.embedding_norm": "model.norm"}
NAMES = Names(OUTER_NAMES, "model.layers.{}.", INNER_NAMES)

GGUF_OUTER = {"token_embd_norm": OUTER["output_norm"], **OUTER}  # some writers have the usual name
GGUF_INNER: Mapping[str, str | Fused] = {
    **INNER,
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
GGUF_KEYS = {
    **{name: key for name, key in SIZES.items() if key not in ("num_key_value_heads", "rms_norm_eps")},
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "shortconv.l_cache": LENGTH,
}


def conv_keys(kind: str, metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of config.json for the kinds of layers and for key-value heads, from a GGUF file.

    kind: the architecture's name, for error messages.
    """
    num = metadata.get("block_count")
    if type(num) is not int or not 0 < num <= LARGEST["num_hidden_layers"]:
        raise UnsupportedModel(f"a GGUF file of {kind} has no possible number of layers: fetch it again")
    kinds = [CONV if f"blk.{i}.shortconv.conv.weight" in tensors else FULL for i in range(num)]
    return {"layer_types": kinds, "num_key_value_heads": heads_of_layers(kind, metadata, [k == FULL for k in kinds])}


GGUF = Gguf(
    "lfm2",
    keys=GGUF_KEYS,
    more=lambda metadata, tensors: {**conv_keys("lfm2", metadata, tensors), ADJUSTS: False},
    by_more=frozenset({"attention.head_count_kv"}),
    names=Names(GGUF_OUTER, "blk.{}.", GGUF_INNER),
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = understood(raw, OWN_KEYS, DEFAULTS)
    if "block_ff_dim" in c:
        configs.agree(c, "intermediate_size", c["block_ff_dim"], "block_ff_dim")
    mlp = Mlp(_feed_forward_size(c))
    return convolved(c, "lfm2", lambda i: Block(mlp=mlp))


def _feed_forward_size(c: Filled) -> int:
    inner = size({**c, "intermediate_size": c.get("block_ff_dim", c["intermediate_size"])}, "intermediate_size")
    if not flag(c, ADJUSTS):
        return inner
    inner = int(2 * inner / 3)
    if c[TIMES] is not None:
        multiple = size(c, MULTIPLE)
        inner = -(-int(number(c, TIMES) * inner) // multiple) * multiple
    most = LARGEST["intermediate_size"]
    configs.require(0 < inner <= most, {"intermediate_size": inner}, "intermediate_size", f"an integer in 1 .. {most}")
    return inner


def understood(raw: Raw, own_keys: Collection[str], usual: Raw) -> Filled:
    """Return config.json (`raw`) with the default values in `usual` for missing keys.

    Raises UnsupportedModel for keys other than SHARED_KEYS and `own_keys`, and for impossible values of FIXED keys.
    """
    c = configs.understood(raw, (SHARED_KEYS - {"rms_norm_eps"}) | set(own_keys), usual, AGAIN, nullable={TIMES})
    configs.require(configs.is_silu(c.get("hidden_act", "silu")), c, "hidden_act", "'silu'")
    for key in FIXED:
        configs.require(c.get(key, True) is True, c, key, "true")
    return c


def layer_kinds(c: Filled) -> list[str]:
    """Return the kind of each layer, from `layer_types` or from the list of indices of the layers with attention.

    Where both are missing, all layers have full attention.
    """
    num = size(c, "num_hidden_layers")
    numbers = c.get(NUMBERS, list(range(num)))
    fits = isinstance(numbers, list) and all(type(i) is int and 0 <= i < num for i in numbers)
    configs.require(fits, c, NUMBERS, f"a list of layers below {num}")
    usual = [FULL if i in numbers else CONV for i in range(num)]
    kinds = configs.layer_kinds(c, usual, (FULL, CONV))
    configs.require(NUMBERS not in c.said or kinds == usual, c, "layer_types", f"as {NUMBERS} says, or without that")
    return kinds


def convolved(c: Filled, model_type: str, fed: Callable[[int], Block]) -> Spec:
    """Return the spec of a model with convolution layers and attention layers.

    fed(i): returns a block that has only the feed-forward part, or the experts, of layer i.
    """
    heads = configs.head_sizes(c)
    eps = number(c, "norm_eps")
    rope = configs.rope_of(c)
    configs.agree(c, "theta", rope.theta, "rope_theta")
    norm, per_head = Norm(eps=eps), Norm(eps=eps, span="head")
    attention = Attention(*heads, rope=rope, q_norm=per_head, k_norm=per_head)
    recurrence = Recurrence("short_conv", size(c, LENGTH, least=2), biases=flag(c, BIAS))
    tied = flag(c, "tie_embedding" if "tie_embedding" in c else "tie_word_embeddings")
    blocks = layers_of_two_kinds(layer_kinds(c), norm, attention, recurrence, fed)
    return configs.spec_of(c, model_type, blocks, norm, tied=tied)


def convolved_config(spec: Spec, architecture: str) -> dict[str, Any]:
    """Return the config.json of a model with convolution and attention layers, without the feed-forward entries."""
    a = next(block.attention for block in spec.blocks if block.attention is not None)
    usual = Recurrence("short_conv", 3)
    r = next((block.recurrence for block in spec.blocks if block.recurrence is not None), usual)
    return {
        **configs.sizes_config(spec, architecture, a, "norm_eps"),
        "layer_types": [CONV if block.recurrence is not None else FULL for block in spec.blocks],
        LENGTH: r.conv,
        BIAS: r.biases,
        **configs.rope_config(a.rope),
        **configs.UNTRAINED,
        **configs.UNPADDED,
    }


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec. Its intermediate_size is the feed-forward width that the model uses."""
    mlp = spec.blocks[0].mlp
    width = {"intermediate_size": 0 if mlp is None else mlp.size, ADJUSTS: False}
    return {**convolved_config(spec, "Lfm2ForCausalLM"), **width}
