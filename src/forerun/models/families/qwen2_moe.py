"""Qwen 1.5 and 2 with experts (Qwen1.5-MoE-A2.7B): every row also runs through a shared expert, which has a gate."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forerun.blocks import Experts, Mlp, Spec
from forerun.models.configs import Raw, flag, plain_config, plain_spec, require, size
from forerun.models.families.qwen2 import WINDOW_KEYS, qwen_windows, window_keys, window_of
from forerun.models.families.qwen3_moe import (
    EXPERT_KEYS,
    EXPERT_SIZES,
    LAYER_KEYS,
    expert_keys,
    mixed,
    numbers_of,
    without_experts,
)
from forerun.models.naming import EXPERTS, INNER, OUTER, SHARED_EXPERT, Gguf, Metadata, Names

SHARED = "shared_expert_intermediate_size"


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of config.json for the window, the activation and the size of the shared expert.

    Older files leave out the size of the shared expert, which then is the feed-forward size.
    """
    size = metadata.get("expert_shared_feed_forward_length", metadata.get("feed_forward_length"))
    return {**window_of(metadata), SHARED: size}


KEYS = {**EXPERT_SIZES, "expert_shared_feed_forward_length": SHARED}
GGUF = Gguf("qwen2moe", keys=KEYS, more=_more, names=Names(OUTER, "blk.{}.", {**INNER, **EXPERTS, **SHARED_EXPERT}))


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    given = raw.get("layer_types") is not None or not flag(raw, "use_sliding_window")
    require(given, raw, "use_sliding_window", "false where layer_types does not say which layers have a window")
    spec = plain_spec(
        raw,
        honoured=WINDOW_KEYS | EXPERT_KEYS | LAYER_KEYS | {SHARED, "qkv_bias"},
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 16},
        qkv_bias=flag({"qkv_bias": True, **raw}, "qkv_bias"),
        windows=qwen_windows(raw),
    )
    raw = {"num_experts": 60, "num_experts_per_tok": 4, **raw}
    each, shared = Mlp(size(raw, "moe_intermediate_size")), Mlp(size(raw, SHARED))
    normalise = flag(raw, "norm_topk_prob")
    return mixed(spec, raw, Experts(*numbers_of(raw), each, shared, shared_gate=True, normalise=normalise))


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    dense, experts = without_experts(spec)
    shared = experts.mlp.size if experts.shared is None else experts.shared.size
    attention = spec.blocks[0].attention
    return {
        **plain_config(dense, "Qwen2MoeForCausalLM"),
        **window_keys(dense),
        **expert_keys(spec, experts),
        SHARED: shared,
        "qkv_bias": attention is not None and attention.qkv_bias,
    }
