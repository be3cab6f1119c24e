"""Llama 1 to 3.x: grouped-query attention, rotary positions (default, linear, llama3), gated SiLU feed-forward."""

from __future__ import annotations

from forerun.blocks import Plain, Spec
from forerun.models.configs import Raw, flag, full_attention_only, plain_config, plain_spec


def read(raw: Raw) -> Spec:
    """config.json -> spec. Raises UnsupportedModel for a key that would change the function."""
    full_attention_only(raw)
    bias, mlp_bias = flag(raw, "attention_bias"), flag(raw, "mlp_bias")
    defaults, honoured = {"max_position_embeddings": 2048}, {"attention_bias", "mlp_bias"}
    return plain_spec(raw, honoured=honoured, defaults=defaults, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def write(spec: Spec) -> Raw:
    """Spec -> config.json."""
    own = Plain.of(spec)
    return {**plain_config(spec, "LlamaForCausalLM"), "attention_bias": own.o_bias, "mlp_bias": own.mlp_bias}
