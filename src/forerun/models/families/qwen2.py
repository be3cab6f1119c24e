"""Qwen 2 and 2.5: Llama with biases on q, k and v. The last layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from forerun.blocks import Plain, Spec
from forerun.models.configs import LAYER_KINDS, Raw, flag, plain_config, plain_spec, size, windows
from forerun.models.naming import Gguf, Metadata


def window_of(metadata: Metadata) -> dict[str, Any]:
    """Return the entries of config.json for the sliding window and the activation, from a GGUF file."""
    window = metadata.get("attention.sliding_window")
    keys = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    return {**keys, "hidden_act": "silu"}


GGUF = Gguf("qwen2", more=lambda metadata, tensors: window_of(metadata))
WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    defaults = {"max_position_embeddings": 32768}
    return plain_spec(raw, honoured=WINDOW_KEYS, defaults=defaults, qkv_bias=True, windows=qwen_windows(raw))


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    return {**plain_config(spec, "Qwen2ForCausalLM"), **window_keys(spec)}


def qwen_windows(raw: Raw) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, as `configs.windows` does.

    With `use_sliding_window`, the layers from `max_window_layers` on have a window of `sliding_window` tokens.
    """
    window = None
    if flag(raw, "use_sliding_window") and raw.get("sliding_window", 4096) is not None:
        window = size({"sliding_window": 4096, **raw}, "sliding_window")
    first = size({"max_window_layers": raw.get("max_window_layers", 28) or 0}, "max_window_layers", least=0)
    return windows(raw, size(raw, "num_hidden_layers"), window, first)


def window_keys(spec: Spec) -> Raw:
    """Return the entries of config.json that `qwen_windows` reads."""
    windows = Plain.of(spec).windows or (None,) * spec.num_layers
    kinds = [LAYER_KINDS[window is not None] for window in windows]
    first = next((i for i, window in enumerate(windows) if window is not None), spec.num_layers)
    return {
        "use_sliding_window": first < spec.num_layers,
        "sliding_window": next((window for window in windows if window is not None), None),
        "max_window_layers": first,
        "layer_types": kinds,
    }
