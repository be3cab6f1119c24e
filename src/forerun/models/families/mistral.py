"""Mistral 7B and similar models: Llama with the same sliding window in every layer, or without a window."""

from __future__ import annotations

from forerun.blocks import Plain, Spec
from forerun.models.configs import Raw, plain_config, plain_spec, same_window, size

DEFAULT_WINDOW = 4096  # tokens; the first release's window, whose config leaves the key out. null = no window


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    window = DEFAULT_WINDOW
    is_off = raw.get("sliding_window", window) is None
    per_layer = same_window(raw, None if is_off else size({"sliding_window": window, **raw}, "sliding_window"))
    defaults = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
    return plain_spec(raw, honoured={"sliding_window"}, defaults=defaults, windows=per_layer)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    windows = Plain.of(spec).windows
    return {**plain_config(spec, "MistralForCausalLM"), "sliding_window": windows[0] if windows else None}
