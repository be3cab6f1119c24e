"""GPT-NeoX and Pythia: attention and feed-forward read the same input, and a quarter of each head is rotated.

The family has layer norms, biases everywhere, and GELU without a gate. In the files, one matrix joins q, k and v head
by head.
"""

from __future__ import annotations

from forerun.blocks import Attention, Block, Mlp, Norm, Rope, Spec
from forerun.models import configs
from forerun.models.configs import UNTRAINED, Filled, Raw, flag, number, size
from forerun.models.naming import NEOX_INNER, OUTER, QKV, Fused, Gguf, Names, has_bias

NAMES = Names(
    {"embed_in": "model.embed_tokens", "final_layer_norm": "model.norm", "lm_head": "lm_head", "embed_out": "lm_head"},
    "layers.{}.",
    {
        "input_layernorm": "input_layernorm",
        "attention.query_key_value": Fused(QKV, by_head=True),
        "attention.dense": "self_attn.o_proj",
        "post_attention_layernorm": "post_attention_layernorm",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    },
    prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)

GGUF = Gguf(
    "gptneox",
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "feed_forward_length": "intermediate_size",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
        "attention.key_length": "head_dim",
        "rope.freq_base": "rotary_emb_base",
    },
    more=lambda metadata, tensors: {"attention_bias": has_bias(tensors, "attn_qkv")},
    names=Names(OUTER, "blk.{}.", NEOX_INNER),
    turned_part="rotary_pct",
)
KEYS = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "head_dim", "max_position_embeddings", "layer_norm_eps", "hidden_act", "tie_word_embeddings",
        "use_parallel_residual", "attention_bias", "rotary_pct", "rotary_emb_base", "partial_rotary_factor",
        "rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype"}  # fmt: skip
INERT = {"classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "is_decoder"}
DEFAULTS = {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "hidden_act": "gelu", "attention_bias": True,
            "use_parallel_residual": True, "rotary_emb_base": 10000, "rotary_pct": 0.25}  # fmt: skip
NAMED_HERE = dict(zip(configs.TURNED, ("rotary_emb_base", "rotary_pct"), strict=True))


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = configs.understood(raw, KEYS | INERT, DEFAULTS)
    act = configs.act_of(c, "hidden_act")
    heads, kv_heads, head_dim = configs.head_sizes(c)
    configs.require(heads * head_dim == size(c, "hidden_size"), c, "head_dim", "hidden_size / num_attention_heads")
    bias = flag(c, "attention_bias")
    attention = Attention(heads, kv_heads, head_dim, rope=_rope(c, head_dim), qkv_bias=bias, o_bias=bias)
    mlp = Mlp(size(c, "intermediate_size"), act, gated=False, bias=True)
    norm = Norm("layer", number(c, "layer_norm_eps"), bias=True)
    block = Block(norm, attention, pre_mlp=norm, mlp=mlp, parallel=flag(c, "use_parallel_residual"))
    return configs.spec_of(c, "gpt_neox", (block,) * size(c, "num_hidden_layers"), norm)


def _rope(c: Filled, head_dim: int) -> Rope:
    """Return the rotary positions, from rotary_emb_base and rotary_pct.

    rope_theta may repeat rotary_emb_base, and partial_rotary_factor may repeat rotary_pct. Raises UnsupportedModel
    where the values disagree.
    """
    rope = configs.rope_of(c, head_dim, NAMED_HERE)
    said = c.get("rope_scaling") or c.get("rope_parameters") or {}
    for ours, theirs in NAMED_HERE.items():
        configs.agree(c, ours, said.get(ours, c[theirs]), theirs)
    return rope


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    first = spec.blocks[0]
    mlp, norm, a = first.mlp or Mlp(1), spec.final_norm or Norm(), first.attention or Attention(1, 1, 2)
    rope = configs.rope_config(a.rope, a.head_dim)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": a.heads,
        "max_position_embeddings": spec.max_positions,
        "layer_norm_eps": norm.eps,
        "hidden_act": configs.act_name(mlp.act),
        "attention_bias": a.o_bias,
        "use_parallel_residual": first.parallel,
        "rotary_emb_base": rope["rope_theta"],
        "rotary_pct": rope.get("partial_rotary_factor", 1.0),
        "rope_scaling": rope["rope_scaling"],
        "tie_word_embeddings": spec.tied,
        **UNTRAINED,
    }
