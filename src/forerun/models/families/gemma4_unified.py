"""Gemma 4 12B as published, with vision and audio, but without separate encoders: only the text model is read."""

from __future__ import annotations

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw
from forerun.models.families import gemma4, gemma4_text, gemma4_unified_text
from forerun.models.naming import nested_at

NAMES = nested_at(gemma4_text.names_at, ("vision_embedder", "embed_vision", "embed_audio"))


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    text = configs.text_of(raw, gemma4.KEYS, "gemma4_unified_text", {"tie_word_embeddings": True})
    return gemma4_unified_text.read(text)


write = gemma4_unified_text.write  # of the text model by itself
