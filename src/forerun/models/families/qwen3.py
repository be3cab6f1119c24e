"""Qwen 3 (dense): Qwen 2 with an RMS norm over each head of q and k. It has biases only if `attention_bias` is true."""

from __future__ import annotations

from forerun.blocks import Plain, Spec
from forerun.models.configs import Raw, flag, plain_config, plain_spec, require
from forerun.models.families.qwen2 import WINDOW_KEYS, qwen_windows, window_keys, window_of
from forerun.models.naming import Gguf, biases_of

GGUF = Gguf(
    "qwen3", more=lambda metadata, tensors: {**window_of(metadata), **biases_of(tensors, attention_bias="attn_q")}
)
NORMED = "use_qk_norm"  # always true


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    bias = flag(raw, "attention_bias")
    require(raw.get(NORMED) in (None, True), raw, NORMED, "true")
    return plain_spec(
        raw,
        honoured=WINDOW_KEYS | {"attention_bias", NORMED},
        defaults={"max_position_embeddings": 32768, "head_dim": 128},
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=qwen_windows(raw),
    )


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    bias = Plain.of(spec).o_bias
    return {**plain_config(spec, "Qwen3ForCausalLM"), "attention_bias": bias, **window_keys(spec)}
