"""Gemma 4 as published, with vision, or vision and audio: only its text model is read."""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw
from forerun.models.families import gemma4_text

NAMES = replace(
    gemma4_text.names_at("language_model.model."),
    outer={**gemma4_text.names_at("language_model.model.").outer, "language_model.lm_head": "lm_head"},
    more=(gemma4_text.names_at("model.language_model."),),
    beside=tuple(
        f"{start}{part}."
        for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        for start in ("", "model.")
    ),
)
TOKENS = {f"{token}_token_id" for token in ("boi", "eoi", "image", "video", "boa", "eoa", "audio")}
KEYS = {"model_type", "text_config", "vision_config", "audio_config", "tie_word_embeddings", "torch_dtype", "dtype",
        "eoa_token_index", "vision_soft_tokens_per_image", "audio_ms_per_token", *TOKENS}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json. Raises UnsupportedModel for a key that would change the function."""
    configs.refuse_unknown(raw, KEYS)
    text = configs.text_part(raw, {"model_type": "gemma4_text", "tie_word_embeddings": True})
    configs.require(text["model_type"] == "gemma4_text", text, "model_type", "'gemma4_text' in text_config")
    return gemma4_text.read(text)


def write(spec: Spec) -> Raw:
    """Return the config.json of the text model by itself."""
    return gemma4_text.write(spec)
