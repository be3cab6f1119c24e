"""Qwen 3.5 with experts as published, with vision: only its text model is read."""

from __future__ import annotations

from forerun.blocks import Spec
from forerun.models.configs import Raw
from forerun.models.families import qwen3_5_moe_text, qwen3_5_text
from forerun.models.families.qwen3_5 import KEYS as KEYS, read_text

NAMES = qwen3_5_text.nested_names(qwen3_5_moe_text.MORE, qwen3_5_moe_text.STACKED)


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json. Raises UnsupportedModel for a key that would change the function."""
    return read_text(raw, "qwen3_5_moe_text", qwen3_5_moe_text.read)


def write(spec: Spec) -> Raw:
    """Return the config.json of the text model by itself."""
    return qwen3_5_moe_text.write(spec)
