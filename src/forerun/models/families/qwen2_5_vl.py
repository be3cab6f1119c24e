"""Qwen 2.5 VL, which sees images and videos: only its text model, which is the same as in Qwen 2 VL."""

from __future__ import annotations

from forerun.blocks import Spec
from forerun.models.configs import Raw
from forerun.models.families import qwen2_vl

NAMES = qwen2_vl.NAMES  # its GGUF files have the architecture of Qwen 2 VL


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json. Raises UnsupportedModel for a key that would change the function."""
    return qwen2_vl.read(raw)


def write(spec: Spec) -> Raw:
    """Return the config.json of the text model by itself."""
    return qwen2_vl.write(spec)
