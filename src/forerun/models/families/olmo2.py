"""OLMo 2: Llama with norms after attention and feed-forward instead of before.

The norm of queries spans all heads together, and so does the norm of keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from forerun.blocks import Block, Norm, Spec
from forerun.models import configs
from forerun.models.configs import Raw, flag, full_attention_only, plain_spec
from forerun.models.naming import INNER, OUTER, Gguf, Metadata, Names, biases_of

NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    return biases_of(tensors, attention_bias="attn_q")


GGUF = Gguf("olmo2", more=_more, names=Names(OUTER, "blk.{}.", {**INNER, **NORMS}))


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    full_attention_only(raw)
    bias = flag(raw, "attention_bias")
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    spec = plain_spec(raw, honoured={"attention_bias"}, defaults=defaults, qkv_bias=bias, o_bias=bias)
    norm = spec.final_norm or Norm()

    def behind(block: Block) -> Block:
        assert block.attention is not None
        attention = replace(block.attention, q_norm=norm, k_norm=norm)
        return Block(attention=attention, post_attention=norm, mlp=block.mlp, post_mlp=norm)

    return replace(spec, blocks=tuple(map(behind, spec.blocks)))


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    a = spec.blocks[0].attention
    assert a is not None
    more = {**configs.UNPADDED, "hidden_act": "silu", "attention_bias": a.o_bias}
    return {**configs.usual_config(spec, "Olmo2ForCausalLM"), **configs.rope_config(a.rope), **more}
