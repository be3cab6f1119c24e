"""Gemma 4 12B as published, with vision and audio but no towers: only its text model is read."""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw
from forerun.models.families import gemma4, gemma4_unified_text

PARTS = ("vision_embedder", "embed_vision", "embed_audio")
NAMES = replace(gemma4.NAMES, beside=tuple(f"{start}{part}." for part in PARTS for start in ("", "model.")))


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json. Raises UnsupportedModel for a key that would change the function."""
    configs.refuse_unknown(raw, gemma4.KEYS)
    kind = "gemma4_unified_text"
    text = configs.text_part(raw, {"model_type": kind, "tie_word_embeddings": True})
    configs.require(text["model_type"] == kind, text, "model_type", f"{kind!r} in text_config")
    return gemma4_unified_text.read(text)


def write(spec: Spec) -> Raw:
    """Return the config.json of the text model by itself."""
    return gemma4_unified_text.write(spec)
