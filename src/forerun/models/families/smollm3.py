"""SmolLM3: Llama without rotary positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Block, Spec
from forerun.models import configs
from forerun.models.configs import LAYER_KINDS, Raw, flag, plain_spec, size
from forerun.models.naming import Gguf, biases_of

INTERVAL = 4  # one of so many layers has no rotary positions

GGUF = Gguf("smollm3", more=lambda metadata, tensors: biases_of(tensors, attention_bias="attn_q"), turned=True)
OWN_KEYS = frozenset({"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window",
                      "sliding_window", "max_window_layers"})  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    bias = flag(raw, "attention_bias")
    mlp_bias = flag(raw, "mlp_bias")
    num = size(raw, "num_hidden_layers")
    turned = _turned(raw, num)
    window = None
    if flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None:
        window = size(raw, "sliding_window")
    kinds = raw.get("layer_types") or [LAYER_KINDS[window is not None and not is_turned] for is_turned in turned]
    spec = plain_spec(
        raw,
        honoured=OWN_KEYS,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
                  "rope_theta": 2000000.0},
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=mlp_bias,
        windows=configs.windows({"layer_types": kinds}, num, window),
    )  # fmt: skip

    def kept(block: Block, is_turned: bool) -> Block:
        assert block.attention is not None
        return block if is_turned else replace(block, attention=replace(block.attention, rope=None))

    return replace(spec, blocks=tuple(map(kept, spec.blocks, turned)))


def _turned(raw: Raw, num: int) -> list[bool]:
    """Return for each of `num` layers whether the layer has rotary positions. In `no_rope_layers`, 1 means that it has.

    If that key is missing, every n-th layer has no rotary positions; n is `no_rope_layer_interval`, by default 4.
    """
    listed = raw.get("no_rope_layers")
    if listed is None:
        step = size({"no_rope_layer_interval": raw.get("no_rope_layer_interval") or INTERVAL}, "no_rope_layer_interval")
        return [(i + 1) % step > 0 for i in range(num)]
    fits = isinstance(listed, list) and len(listed) >= num and all(type(x) is int and x in (0, 1) for x in listed)
    configs.require(fits, raw, "no_rope_layers", f"a list of at least {num} numbers 0 or 1")
    fits = any(listed[:num])
    configs.require(fits, raw, "no_rope_layers", "a list with a layer that has rotary positions, which is 1")
    return [bool(x) for x in listed[:num]]


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    attentions = [block.attention for block in spec.blocks if block.attention is not None]
    mlp = spec.blocks[0].mlp
    windows = [a.window for a in attentions]
    return {
        **configs.usual_config(spec, "SmolLM3ForCausalLM"),
        **configs.rope_config(next((a.rope for a in attentions if a.rope is not None), None)),
        **configs.UNPADDED,
        "hidden_act": "silu",
        "attention_bias": attentions[0].o_bias,
        "mlp_bias": mlp is not None and mlp.bias,
        "no_rope_layers": [int(a.rope is not None) for a in attentions],
        "layer_types": [LAYER_KINDS[window is not None] for window in windows],
        "use_sliding_window": any(windows),
        "sliding_window": next((window for window in windows if window is not None), None),
    }
