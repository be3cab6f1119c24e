"""Mistral 7B and its kin: Llama with a sliding window, here a mask over the whole cache, in every layer."""

from __future__ import annotations

from forerun.blocks import Plain, Spec
from forerun.errors import UnsupportedModel
from forerun.models.configs import Raw, plain_config, plain_spec, size, windows

DEFAULT_WINDOW = 4096  # tokens; what the first release meant by leaving the key out. null = no window


def read(raw: Raw) -> Spec:
    """config.json -> spec. Raises UnsupportedModel for a key that would change the function."""
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
    return plain_spec(raw, honoured={"sliding_window"}, defaults={"max_position_embeddings": 131072}, windows=per_layer)


def write(spec: Spec) -> Raw:
    """Spec -> config.json."""
    windows = Plain.of(spec).windows
    return {**plain_config(spec, "MistralForCausalLM"), "sliding_window": windows[0] if windows else None}
