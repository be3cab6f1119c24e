"""Llama 1 to 3.x: grouped-query attention, rotary positions (default, linear, llama3), gated SiLU feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.configs import decoder_config, flag, full_attention_only
from forerun.models.layers import Decoder, DecoderConfig

Model = Decoder


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """config.json -> DecoderConfig. Raises UnsupportedModel for a key that would change the function."""
    full_attention_only(raw)
    bias = flag(raw, "attention_bias")
    return decoder_config(
        raw,
        honoured={"attention_bias", "mlp_bias"},
        defaults={"max_position_embeddings": 2048},
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(raw, "mlp_bias"),
    )
