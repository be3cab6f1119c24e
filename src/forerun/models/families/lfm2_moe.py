"""LFM2 with experts (LFM2-8B-A1B): in all but the first layers, each row runs through a few of many small experts.

The scores of experts are sigmoids. For the choice of experts, a stored bias is added to each score. The chosen experts
are weighted by their scores without the bias.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from forerun.blocks import Block, Experts, Mlp, Spec
from forerun.errors import UnsupportedModel
from forerun.models.configs import Filled, Raw, flag, number, size
from forerun.models.families.lfm2 import (
    CONV_DEFAULTS,
    CONV_KEYS,
    GGUF_INNER,
    GGUF_KEYS,
    GGUF_OUTER,
    INNER_NAMES,
    OUTER_NAMES,
    PARTS,
    conv_keys,
    convolved,
    convolved_config,
    understood,
)
from forerun.models.families.qwen3_moe import EXPERT_KEYS, EXPERT_SIZES, numbers_of, without_experts
from forerun.models.naming import EXPERTS, Fused, Gguf, Metadata, Names

NUM_DENSE, USES_BIAS, SCALE = "num_dense_layers", "use_expert_bias", "routed_scaling_factor"
OWN_KEYS = CONV_KEYS | EXPERT_KEYS | {NUM_DENSE, USES_BIAS, SCALE}
DEFAULTS: Raw = {**CONV_DEFAULTS, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
                 "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, NUM_DENSE: 2, USES_BIAS: True,
                 SCALE: 1.0}  # fmt: skip
SUM_EPS = 1e-6  # added to the sum of the chosen scores, as published code has it
BIAS = "feed_forward.expert_bias"
MORE: Mapping[str, str | Fused] = {
    "feed_forward.gate": "mlp.gate",
    BIAS: "mlp.choice_bias",
    **{f"feed_forward.experts.{{}}.{w}": f"mlp.experts.{{}}.{part}" for w, part in PARTS.items()},
}
NAMES = Names(OUTER_NAMES, "model.layers.{}.", {**INNER_NAMES, **MORE}, bare=frozenset({BIAS}))
SIGMOID = 2  # expert_gating_func


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of config.json for layers, key-value heads and the choice of experts.

    norm_topk_prob is always true, because llama.cpp always scales the weights of the chosen experts so that they sum to
    1, whether or not a file says so.
    """
    if metadata.get("expert_gating_func") != SIGMOID:
        raise UnsupportedModel(
            f"a GGUF file of lfm2moe sets expert_gating_func={metadata.get('expert_gating_func')!r:.80}, which forerun "
            f"does not compute: it must be {SIGMOID}, as for a sigmoid"
        )
    raw = conv_keys("lfm2moe", metadata, tensors)
    kinds = {name.split(".", 2)[-1] for name in tensors}
    return {"norm_topk_prob": True, USES_BIAS: "exp_probs_b.bias" in kinds, **raw}


GGUF = Gguf(
    "lfm2moe",
    keys={**EXPERT_SIZES, **GGUF_KEYS, "leading_dense_block_count": NUM_DENSE},
    more=_more,
    by_more=frozenset({"attention.head_count_kv", "expert_gating_func"}),
    names=Names(
        GGUF_OUTER,
        "blk.{}.",
        {**GGUF_INNER, **EXPERTS, "exp_probs_b.bias": "mlp.choice_bias"},
        bare=frozenset({"exp_probs_b.bias"}),
    ),
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = understood(raw, OWN_KEYS, DEFAULTS)
    mlp = Mlp(size(c, "intermediate_size"))
    experts = _experts_of(c)
    num_dense = size(c, NUM_DENSE, least=0)
    return convolved(c, "lfm2_moe", lambda i: Block(mlp=mlp) if i < num_dense else Block(experts=experts))


def _experts_of(c: Filled) -> Experts:
    normalise = flag(c, "norm_topk_prob")
    return Experts(
        *numbers_of(c),
        Mlp(size(c, "moe_intermediate_size")),
        score="sigmoid",
        normalise=normalise,
        sum_eps=SUM_EPS if normalise else 0.0,
        scale=number(c, SCALE),
        choice_bias=flag(c, USES_BIAS),
    )


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    dense, experts = without_experts(spec)
    mlp = dense.blocks[0].mlp
    num_dense = next((i for i, block in enumerate(spec.blocks) if block.experts is not None), spec.num_layers)
    return {
        **convolved_config(spec, "Lfm2MoeForCausalLM"),
        "intermediate_size": experts.mlp.size if mlp is None else mlp.size,
        "num_experts": experts.num,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.mlp.size,
        "norm_topk_prob": experts.normalise,
        NUM_DENSE: num_dense,
        USES_BIAS: experts.choice_bias,
        SCALE: experts.scale,
    }
