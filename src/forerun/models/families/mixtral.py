"""Mixtral: Mistral with experts. Each token runs through the experts with the largest scores, usually two.

The outputs of these experts are weighted by the softmax of the experts' scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.blocks import Experts, Mlp, Spec
from forerun.models.configs import Filled, Raw, full_attention_only, plain_config, plain_spec, size
from forerun.models.families.qwen3_moe import numbers_of, without_experts
from forerun.models.naming import Names

NUM, PER_TOKEN = "num_local_experts", "num_experts_per_tok"
TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MOE = "block_sparse_moe."
NAMES = Names(
    {},
    "model.layers.{}.",
    {f"{MOE}gate": "mlp.gate", **{f"{MOE}experts.{{}}.{w}": f"mlp.experts.{{}}.{part}" for w, part in PARTS.items()}},
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    full_attention_only(raw)
    c = Filled(raw, {NUM: 8, PER_TOKEN: 2})
    num = size(c, "num_hidden_layers")
    window = None if raw.get("sliding_window") is None else size(raw, "sliding_window")
    spec = plain_spec(
        raw,
        honoured=TRAINING | {NUM, PER_TOKEN, "sliding_window"},
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        windows=(window,) * num,
    )
    experts = Experts(*numbers_of(c, NUM), Mlp(size(c, "intermediate_size")), score="softmax_of_chosen")
    return replace(spec, blocks=tuple(replace(block, mlp=None, experts=experts) for block in spec.blocks))


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    dense, experts = without_experts(spec)
    attention = spec.blocks[0].attention
    window = None if attention is None else attention.window
    keys: dict[str, Any] = {NUM: experts.num, PER_TOKEN: experts.chosen, "sliding_window": window}
    return {**plain_config(dense, "MixtralForCausalLM"), **keys}
