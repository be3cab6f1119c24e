"""Qwen 3.5 as published, with vision: only the text model is read."""

from __future__ import annotations

from collections.abc import Callable

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw
from forerun.models.families import qwen3_5_text
from forerun.models.naming import nested_at

NAMES = nested_at(qwen3_5_text.names_at, ("visual",))
TOKENS = {f"{token}_token_id" for token in ("image", "video", "vision_start", "vision_end")}
KEYS = {"model_type", "text_config", "vision_config", "tie_word_embeddings", "torch_dtype", "dtype",
        "language_model_only", *TOKENS}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    return read_text(raw, "qwen3_5_text", qwen3_5_text.read)


def read_text(raw: Raw, model_type: str, read: Callable[[Raw], Spec]) -> Spec:
    """Return the spec of the text model in a checkpoint with vision.

    model_type: the model_type that the text model must have. read: the function that reads the text model's config.
    """
    is_tied = configs.flag(raw, "tie_word_embeddings")  # transformers takes a missing key as false
    text = configs.text_of({**raw, "tie_word_embeddings": is_tied}, KEYS, model_type, {})
    return read(text)


write = qwen3_5_text.write  # of the text model by itself
