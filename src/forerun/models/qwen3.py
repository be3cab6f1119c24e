"""Qwen 3 (dense): Qwen 2 with an RMS norm over each head of q and k; biases only where `attention_bias` says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.configs import decoder_config, flag
from forerun.models.layers import Decoder, DecoderConfig
from forerun.models.qwen2 import WINDOW_KEYS, qwen_windows

Model = Decoder


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """config.json -> DecoderConfig. Raises UnsupportedModel for a key that would change the function."""
    bias = flag(raw, "attention_bias")
    return decoder_config(
        raw,
        honoured=WINDOW_KEYS | {"attention_bias"},
        defaults={"max_position_embeddings": 32768, "head_dim": 128},
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=qwen_windows(raw),
    )
