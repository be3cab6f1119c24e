"""T5: an encoder and a decoder with RMS norms. A learned bias that depends on the tokens' distance is added to scores.

Scores are not scaled. Version 1.1 has a gated feed-forward part and an untied LM head. mT5 and Flan-T5 are built like
version 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from forerun.blocks import Act, Attention, Block, Buckets, Mlp, Norm, Spec
from forerun.models import configs
from forerun.models.configs import Raw, number, size
from forerun.models.naming import Names

ATTENTION = {part: f"{part}_proj" for part in "qkvo"}
BEFORE = {"layer_norm": "input_layernorm"}
SELF = {f"SelfAttention.{part}": f"self_attn.{ours}" for part, ours in ATTENTION.items()}
SELF |= {"SelfAttention.relative_attention_bias": "self_attn.relative_attention_bias", **BEFORE}
CROSS = {f"EncDecAttention.{part}": f"encoder_attn.{ours}" for part, ours in ATTENTION.items()} | BEFORE
# A copy of `shared` in every file; and a bias in early files that no model reads.
IGNORED = ("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight")


def names(spec: Spec) -> Names:
    """Return the map of published tensor names. A layer of the decoder becomes two of our blocks.

    The first block has the self-attention, and the second has the cross-attention and the feed-forward part.
    """
    mlp = next(block.mlp for block in spec.blocks if block.mlp is not None)
    inner = {"wi_0": "gate_proj", "wi_1": "up_proj"} if mlp.gated else {"wi": "up_proj"}
    feed_forward = {f"DenseReluDense.{part}": f"mlp.{ours}" for part, ours in {**inner, "wo": "down_proj"}.items()}
    feed_forward["layer_norm"] = "post_attention_layernorm"
    return Names(
        {
            "shared": "model.embed_tokens",
            "decoder.final_layer_norm": "model.norm",
            "encoder.final_layer_norm": "encoder.norm",
            "lm_head": "lm_head",
        },
        "decoder.block.{}.layer.0.",
        SELF,
        ignored=IGNORED,
        step=2,
        more=(
            Names({}, "decoder.block.{}.layer.1.", CROSS, step=2, first=1),
            Names({}, "decoder.block.{}.layer.2.", feed_forward, step=2, first=1),
            Names({}, "encoder.block.{}.layer.0.", SELF, ours_at="encoder.layers.{}."),
            Names({}, "encoder.block.{}.layer.1.", feed_forward, ours_at="encoder.layers.{}."),
        ),
    )


ACTS: Mapping[str, tuple[Act, bool, str]] = {  # by feed_forward_proj: activation, gated, dense_act_fn
    "relu": ("relu", False, "relu"),
    "gelu": ("gelu", False, "gelu"),
    "silu": ("silu", False, "silu"),
    "gated-gelu": ("gelu_tanh", True, "gelu_new"),
    "gated-silu": ("silu", True, "silu"),
}
SIZES = {"vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "n_positions",
         "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon"}  # fmt: skip
KEYS = {*SIZES, "model_type", "feed_forward_proj", "dense_act_fn", "is_gated_act", "tie_word_embeddings",
        "scale_decoder_outputs", "is_encoder_decoder", "torch_dtype", "dtype"}  # fmt: skip
# num_decoder_layers: without it transformers 5 makes a cache of as many layers as the encoder has.
AGAIN = "decoder_layers"
INERT = {"dropout_rate", "classifier_dropout", "initializer_factor", "is_decoder", AGAIN}
# Distances beyond the largest share one bucket, so that no text is too long; n_positions is the length in training.
MOST_POSITIONS = 1 << 15
USUAL = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
         "feed_forward_proj": "relu", "tie_word_embeddings": True}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = configs.understood(raw, KEYS | INERT, USUAL)
    configs.require(c["feed_forward_proj"] in list(ACTS), c, "feed_forward_proj", f"one of {list(ACTS)}")
    act, gated, name = ACTS[c["feed_forward_proj"]]
    for key, usual in (("dense_act_fn", name), ("is_gated_act", gated)):
        configs.require(c.get(key, usual) == usual, c, key, f"{usual!r}, as feed_forward_proj has it")
    hidden, num = size(c, "d_model"), size(c, "num_layers")
    norm = Norm(eps=number(c, "layer_norm_epsilon"))
    heads = size(c, "num_heads")
    width = size(c, "d_kv")
    mlp = Mlp(size(c, "d_ff"), act, gated)
    buckets = size(c, "relative_attention_num_buckets"), size(c, "relative_attention_max_distance")
    cross = Block(norm, Attention(heads, heads, width, scale=1.0, sees="encoder"), pre_mlp=norm, mlp=mlp)

    def attention(i: int, *, in_encoder: bool) -> Attention:
        bias = Buckets(*buckets, both_ways=in_encoder) if i == 0 else 0
        return Attention(heads, heads, width, scale=1.0, sees="all" if in_encoder else "past", bias=bias)

    layers = [Block(norm, attention(i, in_encoder=True), pre_mlp=norm, mlp=mlp) for i in range(num)]
    num_decoder = size(c.also(num_decoder_layers=num), "num_decoder_layers")
    configs.agree(c, AGAIN, num_decoder, "num_decoder_layers")
    blocks = [block for i in range(num_decoder) for block in (Block(norm, attention(i, in_encoder=False)), cross)]
    of_blocks = partial(Spec, "t5", size(c, "vocab_size"), hidden, MOST_POSITIONS)
    tied = configs.flag(c, "tie_word_embeddings")
    return of_blocks(
        tuple(blocks),
        norm,
        tied=tied,
        logit_scale=hidden**-0.5
        if configs.flag({"scale_decoder_outputs": tied, **c}, "scale_decoder_outputs")
        else 1.0,
        encoder=of_blocks(tuple(layers), norm, head=False),
    )


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    encoder = spec.encoder or spec
    first = encoder.blocks[0]
    mlp, a = first.mlp or Mlp(1), first.attention or Attention(1, 1, 1)
    buckets = a.bias if isinstance(a.bias, Buckets) else Buckets(32, 128)
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": spec.vocab_size,
        "d_model": spec.hidden_size,
        "d_kv": a.head_dim,
        "d_ff": mlp.size,
        "num_layers": encoder.num_layers,
        "num_decoder_layers": spec.num_layers // 2,
        AGAIN: spec.num_layers // 2,
        "num_heads": a.heads,
        "relative_attention_num_buckets": buckets.num,
        "relative_attention_max_distance": buckets.max_distance,
        "layer_norm_epsilon": (spec.final_norm or Norm()).eps,
        "feed_forward_proj": next(name for name, act in ACTS.items() if act[:2] == (mlp.act, mlp.gated)),
        "tie_word_embeddings": spec.tied,
        "scale_decoder_outputs": spec.logit_scale != 1,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }
