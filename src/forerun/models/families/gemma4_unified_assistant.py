"""The assistants of Gemma 4 12B (google/gemma-4-12B-it-assistant), built like the other Gemma 4 assistants."""

from __future__ import annotations

from forerun.blocks import Spec
from forerun.models.configs import Raw
from forerun.models.families import gemma4_assistant

NAMES, RUN_BY = gemma4_assistant.NAMES, gemma4_assistant.RUN_BY


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for a key that would change the function."""
    return gemma4_assistant.read(raw)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    return gemma4_assistant.write(spec)
