"""GPT-2: layer norms, learned positions, biases everywhere, and GELU without a gate.

The files join the matrices of q, k and v, and store the matrices of layers transposed.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Attention, Block, Mlp, Norm, Positions, Spec
from forerun.models import configs
from forerun.models.configs import UNTRAINED, Raw, number, size
from forerun.models.naming import NEOX_INNER, OUTER, QKV, Fused, Gguf, Names

NAMES = Names(
    {"wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm", "lm_head": "lm_head"},
    "h.{}.",
    {
        "ln_1": "input_layernorm",
        "attn.c_attn": Fused(QKV, transposed=True),
        "attn.c_proj": Fused(("self_attn.o_proj",), transposed=True),
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": Fused(("mlp.up_proj",), transposed=True),
        "mlp.c_proj": Fused(("mlp.down_proj",), transposed=True),
    },
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
GGUF = Gguf(
    "gpt2",
    {
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "block_count": "n_layer",
        "attention.head_count": "n_head",
        "feed_forward_length": "n_inner",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    names=Names({**OUTER, "position_embd": "model.embed_positions"}, "blk.{}.", NEOX_INNER),
)
SIZES = {"vocab_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "layer_norm_epsilon"}
KEYS = {*SIZES, "model_type", "activation_function", "tie_word_embeddings", "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx", "torch_dtype", "dtype"}  # fmt: skip
INERT = {"n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
         "summary_proj_to_labels", "summary_first_dropout", "n_special", "predict_special_tokens"}  # fmt: skip
USUAL = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024, "scale_attn_weights": True,
         "tie_word_embeddings": True}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = configs.understood(raw, KEYS | INERT, USUAL)
    hidden, heads, num = size(c, "n_embd"), size(c, "n_head"), size(c, "n_layer")
    configs.require(hidden % heads == 0, c, "n_head", f"a divisor of {hidden}")
    act = configs.act_of(c, "activation_function")
    norm = Norm("layer", number(c, "layer_norm_epsilon"), bias=True)
    attention = Attention(heads, heads, hidden // heads, qkv_bias=True, o_bias=True)
    mlp = Mlp(size({"n_inner": 4 * hidden, **c}, "n_inner"), act, gated=False, bias=True)
    scales: list[float | None] = [None if configs.flag(c, "scale_attn_weights") else 1.0] * num
    if configs.flag(c, "scale_attn_by_inverse_layer_idx"):
        scales = [(scale or (hidden // heads) ** -0.5) / (i + 1) for i, scale in enumerate(scales)]
    blocks = tuple(Block(norm, replace(attention, scale=scale), pre_mlp=norm, mlp=mlp) for scale in scales)
    positions = size(c, "n_positions")
    tied = configs.flag(c, "tie_word_embeddings")
    return Spec(
        "gpt2", size(c, "vocab_size"), hidden, positions, blocks, norm, positions=Positions(positions), tied=tied
    )


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    first = spec.blocks[0]
    mlp, norm, a = first.mlp or Mlp(1), spec.final_norm or Norm(), first.attention or Attention(1, 1, 1)
    scales = [block.attention.scale for block in spec.blocks if block.attention is not None]
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": spec.vocab_size,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": a.heads,
        "n_inner": mlp.size,
        "n_positions": spec.max_positions,
        "n_ctx": spec.max_positions,
        "layer_norm_epsilon": norm.eps,
        "activation_function": configs.act_name(mlp.act),
        "scale_attn_weights": scales[0] != 1.0,
        "scale_attn_by_inverse_layer_idx": len({*scales}) > 1,
        "tie_word_embeddings": spec.tied,
        **UNTRAINED,
    }
