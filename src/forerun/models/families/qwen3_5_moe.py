"""Qwen 3.5 with experts as published, with vision: only the text model is read."""

from __future__ import annotations

from forerun.blocks import Spec
from forerun.models.configs import Raw
from forerun.models.families import qwen3_5_moe_text
from forerun.models.families.qwen3_5 import KEYS as KEYS, read_text
from forerun.models.naming import nested_at

NAMES = nested_at(qwen3_5_moe_text.names_at, ("visual",))


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    return read_text(raw, "qwen3_5_moe_text", qwen3_5_moe_text.read)


write = qwen3_5_moe_text.write  # of the text model by itself
