"""BART: an encoder and a decoder with learned positions, and biases everywhere.

Attention and feed-forward are each followed by a layer norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from forerun.blocks import Attention, Block, Mlp, Norm, Positions, Spec
from forerun.models import configs
from forerun.models.configs import Raw, size
from forerun.models.naming import Names

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
SELF = {f"self_attn.{theirs}": f"self_attn.{ours}" for theirs, ours in ATTENTION.items()}
SELF |= {"self_attn_layer_norm": "post_attention_layernorm"}
CROSS = {f"encoder_attn.{theirs}": f"encoder_attn.{ours}" for theirs, ours in ATTENTION.items()}
CROSS |= {"encoder_attn_layer_norm": "post_attention_layernorm"}
FEED_FORWARD = {"fc1": "mlp.up_proj", "fc2": "mlp.down_proj", "final_layer_norm": "post_feedforward_layernorm"}


def names_of_layers(outer: Mapping[str, str]) -> Names:
    """Return the map of published tensor names for BART's layers. One layer of the decoder becomes two of our blocks.

    outer: the map for modules outside of layers.
    """
    return Names(
        {"shared": "model.embed_tokens", **outer},
        "decoder.layers.{}.",
        SELF,
        prefix="model.",
        ignored=("coder.embed_tokens.weight", "coder.embed_positions.weight"),
        step=2,
        more=(
            Names({}, "decoder.layers.{}.", CROSS | FEED_FORWARD, step=2, first=1),
            Names({}, "encoder.layers.{}.", SELF | FEED_FORWARD, ours_at="encoder.layers.{}."),
        ),
        exact={"final_logits_bias": "lm_head.bias"},
    )


NAMES = names_of_layers(
    {
        "lm_head": "lm_head",
        "decoder.embed_positions": "model.embed_positions",
        "decoder.layernorm_embedding": "model.embed_norm",
        "encoder.embed_positions": "encoder.embed_positions",
        "encoder.layernorm_embedding": "encoder.embed_norm",
    }
)
ACTS = {name: configs.ACTS[name] for name in ("gelu", "gelu_new", "relu", "silu", "swish")}
PARTS = ("encoder", "decoder")
SIZES = {f"{part}_{what}" for part in PARTS for what in ("layers", "ffn_dim", "attention_heads")}
KEYS = {*SIZES, "model_type", "vocab_size", "d_model", "max_position_embeddings", "activation_function",
        "scale_embedding", "tie_word_embeddings", "is_encoder_decoder", "torch_dtype", "dtype"}  # fmt: skip
INERT = {"dropout", "activation_dropout", "classifier_dropout", "classif_dropout", "init_std", "encoder_layerdrop",
         "decoder_layerdrop", "gradient_checkpointing", "is_decoder", "normalize_before",
         "force_bos_token_to_be_generated", "normalize_embedding", "add_bias_logits", "add_final_layer_norm",
         "static_position_embeddings", "extra_pos_embeddings"}  # fmt: skip
AGAIN = {"num_hidden_layers": "encoder_layers"}
EPS = 1e-5
OFFSET = 2  # rows before the row of position 0


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    positions = Positions(size(raw, "max_position_embeddings"), OFFSET)
    return spec_of(raw, positions, Norm("layer", EPS, bias=True))


def spec_of(raw: Raw, positions: Positions, embed_norm: Norm | None, again: Mapping[str, str] | None = None) -> Spec:
    """Return the spec of a model with BART's layers. Raises as `read`.

    embed_norm: the norm after the embedding; None = no norm. again: maps each further key of config.json that only
    repeats another key to that other key, as AGAIN does.
    """
    norms = {"normalize_before": False, "normalize_embedding": embed_norm is not None, "add_final_layer_norm": False}
    for key, wanted in norms.items():
        configs.require(raw.get(key, wanted) is wanted, raw, key, str(wanted).lower())
    usual = {"activation_function": "gelu", "tie_word_embeddings": True}
    c = configs.understood(raw, KEYS | INERT, usual, {**AGAIN, **(again or {})})
    act = configs.act_of(c, "activation_function", ACTS)
    configs.require(configs.flag(c, "tie_word_embeddings"), c, "tie_word_embeddings", "true")
    hidden = size(c, "d_model")
    norm = Norm("layer", EPS, bias=True)
    of_blocks = partial(
        Spec,
        str(raw["model_type"]),
        size(c, "vocab_size"),
        hidden,
        positions.num,
        embed_scale=hidden**0.5 if configs.flag(c, "scale_embedding") else 1.0,
        embed_norm=embed_norm,
        positions=positions,
        final_norm=None,
    )

    def parts(part: str, **sees: Any) -> tuple[Attention, Mlp]:
        heads = size(c, f"{part}_attention_heads")
        configs.require(hidden % heads == 0, c, f"{part}_attention_heads", f"a divisor of {hidden}")
        mlp = Mlp(size(c, f"{part}_ffn_dim"), act, gated=False, bias=True)
        return Attention(heads, heads, hidden // heads, qkv_bias=True, o_bias=True, **sees), mlp

    attention, mlp = parts("encoder", sees="all")
    layer = Block(None, attention, post_attention=norm, mlp=mlp, post_mlp=norm, norm_at="sum")
    encoder = of_blocks(blocks=(layer,) * size(c, "encoder_layers"), head=False)
    attention, mlp = parts("decoder")
    says = Block(None, attention, post_attention=norm, norm_at="sum")
    attention, _ = parts("decoder", sees="encoder")
    reads = Block(None, attention, post_attention=norm, mlp=mlp, post_mlp=norm, norm_at="sum")
    num = size(c, "decoder_layers")
    return of_blocks(blocks=(says, reads) * num, tied=True, head_bias=True, encoder=encoder)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    ids = {"pad_token_id": 1, "decoder_start_token_id": 2}  # in all published checkpoints
    return {"architectures": ["BartForConditionalGeneration"], **sizes_of(spec), **ids}


def sizes_of(spec: Spec) -> dict[str, Any]:
    """Return the entries of config.json for a model with BART's layers."""
    raw: dict[str, Any] = {
        "model_type": spec.model_type,
        "is_encoder_decoder": True,
        "vocab_size": spec.vocab_size,
        "d_model": spec.hidden_size,
        "max_position_embeddings": spec.max_positions,
        "scale_embedding": spec.embed_scale != 1,
        "tie_word_embeddings": spec.tied,
    }
    for part, side in zip(PARTS, (spec.encoder or spec, spec), strict=True):
        mlp, a = side.blocks[-1].mlp or Mlp(1), side.blocks[-1].attention or Attention(1, 1, 1)
        raw[f"{part}_layers"] = side.num_layers // (2 if part == "decoder" else 1)
        raw[f"{part}_ffn_dim"], raw[f"{part}_attention_heads"] = mlp.size, a.heads
        raw["activation_function"] = configs.act_name(mlp.act)
    return raw
