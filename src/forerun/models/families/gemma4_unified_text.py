"""Text model of Gemma 4 12B: like Gemma 4's other text models, but without experts and per-layer embeddings."""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw, flag
from forerun.models.families import gemma4_text

NAMES = gemma4_text.NAMES
USUAL = {"max_position_embeddings": 262144, "sliding_window": 1024, gemma4_text.INPUT: 0}
LACKING = ("enable_moe_block", gemma4_text.INPUT)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    configs.require(not flag(raw, LACKING[0]), raw, LACKING[0], "false")
    configs.require(not raw.get(LACKING[1]), raw, LACKING[1], "0")
    said = {key: value for key, value in raw.items() if value is not None or key not in USUAL}
    return replace(gemma4_text.read({**USUAL, **said}), model_type="gemma4_unified_text")


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    raw = {key: value for key, value in gemma4_text.write(spec).items() if key not in LACKING}
    return {**raw, "architectures": ["Gemma4UnifiedForCausalLM"]}
