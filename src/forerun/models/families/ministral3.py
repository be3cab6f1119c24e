"""Ministral 3, Devstral 2 and similar: Llama with YaRN, and a factor for queries that grows with the position."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from forerun.blocks import Block, Spec
from forerun.models import configs
from forerun.models.configs import Raw, number, plain_spec, same_window, size
from forerun.models.naming import Gguf, Metadata

BETA = "llama_4_scaling_beta"  # how fast queries grow; a key of the rotary positions
AGAIN = "max_position_embeddings"  # rotary positions may repeat it
USUAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
              "mscale_all_dim": 1.0, "mscale": 1.0, BETA: 0.1}  # fmt: skip
DEFAULTS = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8}


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of config.json for the window and the rotary positions.

    GGUF files of Mistral Small 3 name the same architecture, but have no YaRN. For such a file, the entries set plain
    rotary positions, and no factor for queries.
    """
    window = metadata.get("attention.sliding_window")
    plain = {"rope_parameters": {"rope_type": "default"}} if "rope.scaling.type" not in metadata else {}
    return {**plain, **({"sliding_window": window} if window else {})}


GGUF = Gguf("mistral3", more=_more, turned=True, yarn={"attention.temperature_scale": BETA})


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    keys = ("rope_parameters", "rope_scaling")
    if not any(raw.get(key) for key in keys):
        raw = {**raw, "rope_parameters": USUAL_ROPE}
    ropes = {key: part for key in keys if isinstance(part := raw.get(key), Mapping) and part}
    plain = {key: {k: v for k, v in part.items() if k not in (BETA, AGAIN)} for key, part in ropes.items()}
    spec = plain_spec(
        {**raw, **plain},
        honoured={"sliding_window"},
        defaults=DEFAULTS,
        windows=same_window(raw, None if raw.get("sliding_window") is None else size(raw, "sliding_window")),
    )
    beta = max((number(part, BETA) for part in ropes.values() if part.get(BETA) is not None), default=0.0)

    def growing(block: Block) -> Block:
        a = block.attention
        assert a is not None
        assert a.rope is not None
        configs.require(a.rope.kind == "yarn", {BETA: beta}, BETA, "left out where rope_type is not yarn")
        return replace(block, attention=replace(a, position_scale=(beta, a.rope.original_max_positions)))

    return replace(spec, blocks=tuple(map(growing, spec.blocks))) if beta else spec


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    a = spec.blocks[0].attention
    assert a is not None
    assert a.rope is not None
    turned = {"rope_theta": a.rope.theta, **(configs.rope_scaling(a.rope) or {"rope_type": "default"})}
    return {
        **configs.usual_config(spec, "Ministral3ForCausalLM"),
        **configs.UNPADDED,
        "hidden_act": "silu",
        "rope_parameters": {**turned, **({} if a.position_scale is None else {BETA: a.position_scale[0]})},
        "sliding_window": a.window,
    }
