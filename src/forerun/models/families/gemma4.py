"""Gemma 4 as published, with vision, or with vision and audio: only the text model is read."""

from __future__ import annotations

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw
from forerun.models.families import gemma4_text
from forerun.models.naming import nested_at

NAMES = nested_at(gemma4_text.names_at, ("vision_tower", "embed_vision", "audio_tower", "embed_audio"))
TOKENS = {f"{token}_token_id" for token in ("boi", "eoi", "image", "video", "boa", "eoa", "audio")}
KEYS = {"model_type", "text_config", "vision_config", "audio_config", "tie_word_embeddings", "torch_dtype", "dtype",
        "eoa_token_index", "vision_soft_tokens_per_image", "audio_ms_per_token", *TOKENS}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    return gemma4_text.read(configs.text_of(raw, KEYS, "gemma4_text", {"tie_word_embeddings": True}))


write = gemma4_text.write  # of the text model by itself
