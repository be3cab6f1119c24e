"""Exact enumeration of the real engine (forerun.testing.engines), with the drafters that need a file (methods.py)."""

from __future__ import annotations

import functools

from forerun.testing import engines
from forerun.testing.engines import (
    HORIZON,
    PROMPT,
    SPACE_TOKENS,
    TARGET,
    Outputs,
    V,
    drafter_for,
    engine_for,
    error,
    every_way,
    is_whole,
    letters,
    plain_outputs,
    resembling,
    runner_for,
    second_pipeline,
    spoken,
    summed,
    total_variation,
)
from support import needed

__all__ = [
    "HORIZON",
    "PROMPT",
    "SPACE_TOKENS",
    "TARGET",
    "Case",
    "Outputs",
    "V",
    "drafter_for",
    "engine_for",
    "error",
    "every_way",
    "is_whole",
    "letters",
    "plain_outputs",
    "resembling",
    "runner_for",
    "second_pipeline",
    "spoken",
    "summed",
    "total_variation",
]

Case = functools.partial(engines.Case, needs=needed)
