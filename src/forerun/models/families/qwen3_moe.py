"""Qwen 3 with experts (Qwen3-30B-A3B): each row runs through a few of many small feed-forward experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from forerun.blocks import Experts, Mlp, Plain, Spec
from forerun.errors import UnsupportedModel
from forerun.models import configs
from forerun.models.configs import Filled, Raw, flag, plain_config, plain_spec, size
from forerun.models.families.qwen2 import WINDOW_KEYS, window_of
from forerun.models.families.qwen3 import NORMED
from forerun.models.naming import EXPERTS, INNER, OUTER, SIZES, Gguf, Metadata, Names

EXPERT_KEYS = frozenset({"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"})
NUM_TOO = "num_local_experts"  # the name of num_experts in transformers 5
# Keys that choose the layers with experts, and keys for training.
LAYER_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers", "output_router_logits", "router_aux_loss_coef"})
EXPERT_SIZES = {**SIZES, "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size"}  # fmt: skip


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    return {**window_of(metadata), "norm_topk_prob": True}


GGUF = Gguf("qwen3moe", keys=EXPERT_SIZES, more=_more, names=Names(OUTER, "blk.{}.", {**INNER, **EXPERTS}))


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    bias = flag(raw, "attention_bias")
    configs.require(raw.get(NORMED) in (None, True), raw, NORMED, "true")
    spec = plain_spec(
        raw,
        honoured=WINDOW_KEYS | EXPERT_KEYS | LAYER_KEYS | {"attention_bias", NORMED},
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "intermediate_size": 6144},
        again={NUM_TOO: "num_experts"},
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=_windows(raw),
    )
    num = raw.get(NUM_TOO) or 128
    c = Filled(raw, {"num_experts": num, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
    return mixed(
        spec, c, Experts(*numbers_of(c), Mlp(size(c, "moe_intermediate_size")), normalise=flag(c, "norm_topk_prob"))
    )


def _windows(raw: Raw) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens, None = no window. All layers have the same window.

    transformers ignores `max_window_layers` in this family, and so does this function.
    """
    has_window = flag(raw, "use_sliding_window") and raw.get("sliding_window", 4096) is not None
    window = size({"sliding_window": 4096, **raw}, "sliding_window") if has_window else None
    return (window,) * size(raw, "num_hidden_layers")


def numbers_of(raw: Raw, key: str = "num_experts") -> tuple[int, int]:
    """Return the number of experts in a layer, and the number of experts that are chosen for each token."""
    num, chosen = size(raw, key), size(raw, "num_experts_per_tok")
    configs.require(chosen <= num, raw, "num_experts_per_tok", f"at most {num}, the number of experts")
    return num, chosen


def mixed(spec: Spec, raw: Raw, experts: Experts) -> Spec:
    """Return the spec with `experts` in place of the feed-forward part in some layers.

    Layer i gets experts if i + 1 is a multiple of `decoder_sparse_step`, and i is not in `mlp_only_layers`.
    """
    dense = raw.get("mlp_only_layers") or []
    step = size(Filled(raw, {"decoder_sparse_step": 1}), "decoder_sparse_step")
    is_list = isinstance(dense, list) and all(isinstance(i, int) for i in dense)
    configs.require(is_list, raw, "mlp_only_layers", "a list of layers")
    blocks = [
        block if i in dense or (i + 1) % step else replace(block, mlp=None, experts=experts)
        for i, block in enumerate(spec.blocks)
    ]
    return replace(spec, blocks=tuple(blocks))


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    dense, experts = without_experts(spec)
    window = next(iter(Plain.of(dense).windows), None)
    return {
        **plain_config(dense, "Qwen3MoeForCausalLM"),
        **expert_keys(spec, experts),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "attention_bias": Plain.of(dense).o_bias,
    }


def without_experts(spec: Spec) -> tuple[Spec, Experts]:
    """Return the spec with a dense feed-forward part in every layer, and the experts that this part replaces.

    Raises UnsupportedModel if no layer has experts, or if layers have different experts.
    """
    kinds = {block.experts for block in spec.blocks if block.experts is not None}
    if len(kinds) != 1:
        raise UnsupportedModel(
            f"a {spec.model_type} checkpoint has experts of one size, and this model has {len(kinds)}"
        )
    [experts] = kinds
    mlp = next((block.mlp for block in spec.blocks if block.mlp is not None), experts.mlp)
    blocks = [replace(block, mlp=mlp, experts=None) for block in spec.blocks]
    return replace(spec, blocks=tuple(blocks)), experts


def expert_keys(spec: Spec, experts: Experts) -> Raw:
    """Return the entries of config.json for the experts and for the layers that have experts."""
    return {
        "num_experts": experts.num,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.mlp.size,
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, block in enumerate(spec.blocks) if block.experts is None],
    }
