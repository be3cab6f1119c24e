"""Rows that are hard for a sampler, and the native sampler of each instruction set."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forerun import native
from forerun.sampling.pipeline import _probs
from forerun.sampling.random import _place, _race

BY_NUMPY = SimpleNamespace(place=_place, race=_race, probs=_probs)  # as a native sampler has them
ISAS = list(native.known_isas()) or ["none"]
Row = npt.NDArray[np.float32]


def sampler(isa: str) -> Any:
    """The native sampler of one instruction set; skips the test where none was built, fails where one must be there."""
    module = native.extension()
    if module is None:
        (pytest.fail if os.environ.get("FORERUN_REQUIRE_NATIVE") == "1" else pytest.skip)(str(native.why_not()))
    if isa not in module.supported_isas():
        pytest.skip(f"this processor has no {isa}")
    return module.Sampler(isa)


KINDS = ("flat", "peaked", "whole numbers", "halves and gaps", "all equal", "two values", "huge", "one left", "close")


def row(kind: str, size: int, seed: int) -> Row:
    """float32 logits [size]. Several kinds have ties everywhere, so that every threshold cuts through one."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size)
    if kind == "peaked":
        values = values * 3
        values[generator.integers(size)] += 14
    if kind == "whole numbers":
        values = np.round(values * 3)
    if kind == "halves and gaps":
        values = np.round(values * 2) / 2
        values[generator.random(size) < 0.4] = -np.inf
        values[generator.integers(size)] = 1
    if kind == "all equal":
        values[:] = values[0]
    if kind == "two values":
        values = np.where(generator.random(size) < 0.3, 1.0, 0.5)
    if kind == "huge":
        values = values * 1e37
    if kind == "one left":
        values[:] = -np.inf
        values[generator.integers(size)] = 2
    if kind == "close":  # neighbours in float32, that a temperature above 1 makes equal
        values = 5 + generator.integers(6, size=size) * 2.0**-21
    return values.astype(np.float32)
