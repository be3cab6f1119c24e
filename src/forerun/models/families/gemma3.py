"""Gemma 3 with vision, as published for models of 4B parameters and more: only the text model is read."""

from __future__ import annotations

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw
from forerun.models.families import gemma3_text
from forerun.models.naming import NORMS_BEHIND, nested

NAMES = nested(NORMS_BEHIND.values(), beside=("vision_tower", "multi_modal_projector"))
KEYS = {"model_type", "text_config", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
        "image_token_index", "boi_token_id", "eoi_token_id", "image_token_id", "tie_word_embeddings", "torch_dtype",
        "dtype"}  # fmt: skip
# Keys that published files leave out of text_config.
USUAL = {"vocab_size": 262208, "num_attention_heads": 8, "tie_word_embeddings": True}


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    text = configs.text_of(raw, KEYS, "gemma3_text", USUAL)
    cap = gemma3_text.CAP  # transformers ignores it here, and computes it in the text model by itself
    configs.require(text.get(cap) is None, text, cap, "null in text_config")
    return gemma3_text.read(text)


write = gemma3_text.write  # of the text model by itself
