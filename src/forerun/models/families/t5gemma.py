"""T5Gemma: an encoder and a decoder with Gemma 2's layers, separate token embeddings, and separate hidden sizes.

Scores and logits are capped. Half of the layers have a window. In the encoder, a window extends to both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

from forerun.blocks import Attention, Block, Mlp, Norm, Spec
from forerun.models import configs
from forerun.models.configs import LAYER_KINDS, SHARED_KEYS, Filled, Raw, flag, number, size
from forerun.models.naming import Names

PROJECTIONS = [f"{part}_proj" for part in "qkvo"]
SELF = {f"self_attn.{name}": f"self_attn.{name}" for name in PROJECTIONS}
SELF |= {"pre_self_attn_layernorm": "input_layernorm", "post_self_attn_layernorm": "post_attention_layernorm"}
CROSS = {f"cross_attn.{name}": f"encoder_attn.{name}" for name in PROJECTIONS}
CROSS |= {"pre_cross_attn_layernorm": "input_layernorm", "post_cross_attn_layernorm": "post_attention_layernorm"}
FEED_FORWARD = {name: name for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
FEED_FORWARD |= {name: name for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")}
NAMES = Names(
    {
        "decoder.embed_tokens": "model.embed_tokens",
        "decoder.norm": "model.norm",
        "encoder.embed_tokens": "encoder.embed_tokens",
        "encoder.norm": "encoder.norm",
        "lm_head.out_proj": "lm_head",
    },
    "decoder.layers.{}.",
    SELF,
    prefix="model.",
    step=2,
    more=(
        Names({}, "decoder.layers.{}.", CROSS | FEED_FORWARD, step=2, first=1),
        Names({}, "encoder.layers.{}.", SELF | FEED_FORWARD, ours_at="encoder.layers.{}."),
    ),
)

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
INERT = {"dropout_rate", "classifier_dropout_rate", "is_decoder"}
KEYS = {"model_type", "encoder", "decoder", "vocab_size", "tie_word_embeddings", "is_encoder_decoder", "torch_dtype",
        "dtype"}  # fmt: skip
AGAIN = {"sliding_window_size": "sliding_window"}  # as Gemma 2 has it
PART_KEYS = {"hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window", *CAPS,
             "cross_attention_hidden_size"}  # fmt: skip
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256, "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
            CAPS[0]: 50.0, CAPS[1]: 30.0}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    configs.refuse_unknown(raw, KEYS | INERT)
    vocab, parts = size(raw, "vocab_size"), dict[str, Filled]()
    for name in ("encoder", "decoder"):
        own = raw.get(name)
        configs.require(isinstance(own, Mapping), raw, name, "a mapping")
        parts[name] = _part(own or {}, vocab)
    encoder, c = parts["encoder"], parts["decoder"]
    width = size(encoder, "hidden_size")
    other = c.get("cross_attention_hidden_size") or width
    configs.require(other == width, c, "cross_attention_hidden_size", f"{width}, as the encoder's hidden_size")
    norm = _norm(c)
    mlp = Mlp(size(c, "intermediate_size"), "gelu_tanh")
    says = _attentions(c, "past")
    own = replace(
        says[0], window=None, rope=None, sees="encoder", reads=None if width == size(c, "hidden_size") else width
    )
    reads = Block(norm, own, post_attention=norm, pre_mlp=norm, mlp=mlp, post_mlp=norm)
    tied = flag({"tie_word_embeddings": True, **raw}, "tie_word_embeddings")
    return replace(
        _spec(c, [block for a in says for block in (Block(norm, a, post_attention=norm), reads)]),
        tied=tied,
        logit_softcap=None if c.get(CAPS[1]) is None else number(c, CAPS[1]),
        encoder=_encoder(encoder),
    )


def _part(raw: Raw, vocab: int) -> Filled:
    """Return the config of the encoder or the decoder (`raw`), with default values for missing keys.

    vocab: the vocabulary size of the whole model, which the config must repeat or leave out.
    """
    usual = {**DEFAULTS, "vocab_size": vocab}
    c = configs.understood(raw, SHARED_KEYS | PART_KEYS | INERT, usual, AGAIN, nullable=CAPS)
    configs.gelu_only(c)
    configs.require(size(c, "vocab_size") == vocab, c, "vocab_size", f"{vocab}, as that of the whole")
    return c.also(layer_types=[LAYER_KINDS[(i + 1) % 2] for i in range(size(c, "num_hidden_layers"))])


def _attentions(c: Filled, sees: Any) -> list[Attention]:
    """Return the self-attention of each layer. sees: "all" for the encoder, "past" for the decoder.

    In the encoder, a token attends to itself and to `sliding_window` tokens on either side. Attention.window counts the
    token itself, too, so it is `sliding_window` + 1.
    """
    bias = flag(c, "attention_bias")
    window = size(c, "sliding_window") + (sees == "all")
    attention = Attention(
        *configs.head_sizes(c),
        scale=number(c, "query_pre_attn_scalar") ** -0.5,
        rope=configs.rope_of(c),
        qkv_bias=bias,
        o_bias=bias,
        softcap=None if c.get(CAPS[0]) is None else number(c, CAPS[0]),
        sees=sees,
    )
    num = size(c, "num_hidden_layers")
    return [replace(attention, window=width) for width in configs.windows(c, num, window) or (None,) * num]


def _encoder(c: Filled) -> Spec:
    norm = _norm(c)
    mlp = Mlp(size(c, "intermediate_size"), "gelu_tanh")
    layers = [Block(norm, a, post_attention=norm, pre_mlp=norm, mlp=mlp, post_mlp=norm) for a in _attentions(c, "all")]
    return replace(_spec(c, layers), head=False, own_embedding=True)


def _spec(c: Filled, layers: Seq[Block]) -> Spec:
    scale = math.sqrt(size(c, "hidden_size"))
    return configs.spec_of(c, "t5gemma", layers, _norm(c), embed_scale=scale, tied=False)


def _norm(c: Raw) -> Norm:
    return Norm(eps=number(c, "rms_norm_eps"), offset=1.0)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    encoder = spec.encoder or spec
    return {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": 2,  # a text begins with it; these ids are the same in all published checkpoints
        "eos_token_id": 1,
        "pad_token_id": 0,
        "encoder": _written(encoder, encoder.blocks),
        "decoder": {
            **_written(spec, spec.blocks[::2]),
            CAPS[1]: spec.logit_softcap,
            "cross_attention_hidden_size": encoder.hidden_size,
        },
    }


def _written(spec: Spec, blocks: Seq[Block]) -> Raw:
    """Return the config of the encoder or the decoder.

    spec: the spec of the encoder or the decoder. blocks: the blocks of `spec` that have self-attention.
    """
    attentions = [block.attention for block in blocks if block.attention is not None]
    first = attentions[0]
    window = next((a.window for a in attentions if a.window is not None), None)
    turned = first.rope and {"rope_theta": first.rope.theta, **(configs.rope_scaling(first.rope) or {})}
    said = configs.usual_config(spec, "")
    return {
        **{key: value for key, value in said.items() if key != "architectures"},
        "model_type": "t5_gemma_module",
        "num_hidden_layers": len(attentions),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": first.o_bias,
        "rope_parameters": {"rope_type": "default", **(turned or {})},
        "layer_types": [LAYER_KINDS[a.window is not None] for a in attentions],
        "sliding_window": 4096 if window is None else window - (first.sees == "all"),
        "query_pre_attn_scalar": round((first.scale or 0.0625) ** -2),
        CAPS[0]: first.softcap,
    }
