"""Mistral Small 3.1, Ministral 3 and similar models as published, with vision: only the text model is read."""

from __future__ import annotations

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw
from forerun.models.families import family
from forerun.models.naming import nested

NAMES = nested(beside=("vision_tower", "multi_modal_projector"))
KEYS = {"model_type", "text_config", "vision_config", "image_token_index", "image_token_id", "projector_hidden_act",
        "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size", "tie_word_embeddings",
        "torch_dtype", "dtype"}  # fmt: skip
TEXTS = ("mistral", "ministral3")


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    configs.refuse_unknown(raw, KEYS)
    text = configs.text_part(raw, {"model_type": "mistral"})
    configs.require(text["model_type"] in TEXTS, text, "model_type", f"one of {list(TEXTS)} in text_config")
    return family(text["model_type"]).read(text)


def write(spec: Spec) -> Raw:
    """Return the config.json of the text model alone."""
    return family(spec.model_type).write(spec)
