"""Qwen 3.5 as published, with vision: only its text model is read."""

from __future__ import annotations

from collections.abc import Callable

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw
from forerun.models.families import qwen3_5_text

NAMES = qwen3_5_text.nested_names()
TOKENS = {f"{token}_token_id" for token in ("image", "video", "vision_start", "vision_end")}
KEYS = {"model_type", "text_config", "vision_config", "tie_word_embeddings", "torch_dtype", "dtype",
        "language_model_only", *TOKENS}  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json. Raises UnsupportedModel for a key that would change the function."""
    return read_text(raw, "qwen3_5_text", qwen3_5_text.read)


def read_text(raw: Raw, model_type: str, read: Callable[[Raw], Spec]) -> Spec:
    """Return the spec of the text model in a checkpoint with vision. model_type, read: of its family."""
    configs.refuse_unknown(raw, KEYS)
    is_tied = configs.flag(raw, "tie_word_embeddings")  # transformers takes a missing key as false
    text = configs.text_part({**raw, "tie_word_embeddings": is_tied}, {"model_type": model_type})
    configs.require(text["model_type"] == model_type, text, "model_type", f"{model_type!r} in text_config")
    return read(text)


def write(spec: Spec) -> Raw:
    """Return the config.json of the text model by itself."""
    return qwen3_5_text.write(spec)
