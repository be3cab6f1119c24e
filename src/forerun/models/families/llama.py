"""Llama 1 to 3.x: grouped-query attention, rotary positions (default, linear, llama3), gated SiLU feed-forward."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forerun.blocks import Plain, Spec
from forerun.models.configs import Raw, flag, full_attention_only, plain_config, plain_spec
from forerun.models.naming import Gguf, Metadata, biases_of


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return further entries of config.json: biases, the activation, and the window.

    GGUF files of Mistral models also name the architecture llama. A file with a sliding window gets the model_type
    mistral.
    """
    window = metadata.get("attention.sliding_window")
    kind = {"model_type": "mistral", "sliding_window": window} if window else {}
    biases = biases_of(tensors, attention_bias="attn_q", mlp_bias="ffn_gate")
    return {**kind, **biases, "hidden_act": "silu"}


GGUF = Gguf("llama", more=_more, turned=True)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    full_attention_only(raw)
    bias, mlp_bias = flag(raw, "attention_bias"), flag(raw, "mlp_bias")
    defaults = {"max_position_embeddings": 2048}
    honoured = {"attention_bias", "mlp_bias"}
    return plain_spec(raw, honoured=honoured, defaults=defaults, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    plain = Plain.of(spec)
    return {**plain_config(spec, "LlamaForCausalLM"), "attention_bias": plain.o_bias, "mlp_bias": plain.mlp_bias}
