"""Qwen 3 VL (dense), which sees images and videos: only the text model is read; it is a Qwen 3 without windows."""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw, flag
from forerun.models.families import qwen2_vl, qwen3
from forerun.models.families.qwen2_vl import TIED, sections_of, text_model
from forerun.models.naming import Gguf

NAMES = qwen2_vl.NAMES
USUAL = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000}
THETA = 5e5
IMAGES = frozenset({"rope.dimension_sections", "n_deepstack_layers"})  # the latter matter to images alone
GGUF = Gguf("qwen3vl", more=lambda *file: {**qwen3.GGUF.more(*file), **sections_of(*file)}, by_more=IMAGES)


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    return text_model({**raw, TIED: flag(raw, TIED)}, USUAL, THETA, _read)


def _read(text: Raw) -> Spec:
    refuse_windows(text)
    return replace(qwen3.read(text), model_type="qwen3")


def refuse_windows(text: Raw) -> None:
    """Raise UnsupportedModel for a sliding window, because transformers ignores windows in this family."""
    configs.full_attention_only(text)
    configs.require(not flag(text, "use_sliding_window"), text, "use_sliding_window", "false")


write = qwen3.write  # of the text model by itself
