"""Qwen 2 and 2.5: Llama with biases on q, k and v; the upper layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.configs import decoder_config, flag, size, windows
from forerun.models.layers import Decoder, DecoderConfig

Model = Decoder

WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """config.json -> DecoderConfig. Raises UnsupportedModel for a key that would change the function."""
    return decoder_config(
        raw,
        honoured=WINDOW_KEYS,
        defaults={"max_position_embeddings": 32768},
        qkv_bias=True,
        windows=qwen_windows(raw),
    )


def qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer: `sliding_window` from layer `max_window_layers` on, where `use_sliding_window` says so at all."""
    window = None
    if flag(raw, "use_sliding_window") and raw.get("sliding_window", 4096) is not None:
        window = size({"sliding_window": 4096, **raw}, "sliding_window")
    first = size({"max_window_layers": raw.get("max_window_layers", 28) or 0}, "max_window_layers", least=0)
    return windows(raw, size(raw, "num_hidden_layers"), window, first)
