"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with one stored matrix for q, k and v, and one for gate and up.

Phi-4-mini rotates three quarters of a head. Models for long contexts have longrope's two lists of factors.
`blocks.reaching` chooses one of the two lists when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from forerun.blocks import Plain, Spec
from forerun.errors import shown
from forerun.models import configs
from forerun.models.configs import Raw, plain_config, plain_spec, size
from forerun.models.naming import GATE_UP, INNER, OUTER, QKV, SIZES, Fused, Gguf, Names

NAMES = Names({}, "model.layers.{}.", {"self_attn.qkv_proj": Fused(QKV), "mlp.gate_up_proj": GATE_UP})
GGUF = Gguf(
    "phi3",
    keys={**SIZES, "rope.scaling.original_context_length": "original_max_position_embeddings"},
    more=lambda metadata, tensors: {"sliding_window": metadata.get("attention.sliding_window") or None},
    names=Names(OUTER, "blk.{}.", {**INNER, "attn_qkv": Fused(QKV), "ffn_up": GATE_UP}),
    turned_part="partial_rotary_factor",
)
CODE = "modeling_phi3.Phi3ForCausalLM"  # the class in published checkpoints is the same as in transformers
TRAINED = "original_max_position_embeddings"
OWN_KEYS = frozenset({"sliding_window", TRAINED, "full_attn_mod", "interpolate_factor"})


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    for key in ("full_attn_mod", "interpolate_factor"):
        configs.require(raw.get(key, 1) in (1, None), raw, key, "1")
    window = None if raw.get("sliding_window") is None else size(raw, "sliding_window")
    return plain_spec(
        _renamed(raw),
        honoured=OWN_KEYS,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        turns_parts=True,
        windows=configs.same_window(raw, window),
    )


def _renamed(raw: Raw) -> Raw:
    """Return config.json (`raw`), in which rotary positions of the kinds su and yarn get the kind longrope.

    The context length in training is copied into the longrope positions.
    """
    changed = dict(raw)
    trained = 4096 if raw.get(TRAINED) is None else raw[TRAINED]
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := raw.get(key), Mapping) and rope:
            kind = rope.get("rope_type", rope.get("type"))
            is_long = kind in ("su", "yarn", "longrope")
            configs.require(
                rope.get(TRAINED) in (None, trained), rope, TRAINED, f"{shown(trained)}, as outside of {key}"
            )
            named = {"type": None, "rope_type": "longrope", TRAINED: trained} if is_long else {TRAINED: None}
            changed[key] = {**rope, **named}
    return changed


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec, with rotary positions that every version of transformers reads."""
    plain = Plain.of(spec)
    raw = plain_config(spec, "Phi3ForCausalLM")
    trained = plain.rope.original_max_positions if plain.rope.kind == "longrope" else spec.max_positions
    if scaling := raw["rope_scaling"]:
        is_usual = scaling.get("factor") == spec.max_positions / trained
        kept = ("short_factor", "long_factor", *([] if is_usual else ["factor"]), "attention_factor")
        raw["rope_scaling"] = {"type": "longrope", **{key: scaling[key] for key in kept if key in scaling}}
    return {
        **raw,
        **configs.UNPADDED,
        TRAINED: trained,
        "partial_rotary_factor": configs.share(plain.rope.dims or plain.head_dim, plain.head_dim),
        "sliding_window": plain.windows[0] if plain.windows else None,
    }
