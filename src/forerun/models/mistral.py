"""Mistral 7B and its kin: Llama with a sliding window, here a mask over the whole cache, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import UnsupportedModel
from forerun.models.configs import decoder_config, size, windows
from forerun.models.layers import Decoder, DecoderConfig

Model = Decoder

DEFAULT_WINDOW = 4096  # tokens; what the first release meant by leaving the key out. null = no window


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """config.json -> DecoderConfig. Raises UnsupportedModel for a key that would change the function."""
    window = DEFAULT_WINDOW
    if raw.get("sliding_window", window) is None:
        per_layer = windows(raw, size(raw, "num_hidden_layers"), None)
    else:
        window = size({"sliding_window": window, **raw}, "sliding_window")
        per_layer = windows(raw, size(raw, "num_hidden_layers"), window)
        if any(w is None for w in per_layer) or not per_layer:
            # transformers ignores layer_types here and slides everywhere; the file asks for something else.
            raise UnsupportedModel(
                f"config.json has sliding_window={window} and full_attention in layer_types, which model_type="
                "'mistral' does not mix: set sliding_window to null, or slide in every layer"
            )
    return decoder_config(
        raw, honoured={"sliding_window"}, defaults={"max_position_embeddings": 131072}, windows=per_layer
    )
