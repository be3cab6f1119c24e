"""What a look computes with: in C++ where the kernels run, else in Python.

A look lies between two passes that have just read all weights, so that its code and data come from memory again: numpy
takes five times as long there as in a loop, and a look in Python a millisecond, which is a step of a small model.
csrc/pacing_*.cpp are twins of the classes here, equal but for rounding (tests/pacing/test_twins.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from forerun import native
from forerun.pacing._acceptance import Acceptance
from forerun.pacing._costs import PassTime
from forerun.pacing._drafts import DraftTime


@cache
def _native() -> Any:
    """The module with the twins; None = Python does it."""
    return None if native.isa() == "reference" else native.extension()


def pass_time() -> PassTime:
    """A new PassTime."""
    module = _native()
    return PassTime() if module is None else module.PassTime()


def draft_time() -> DraftTime:
    """A new DraftTime."""
    module = _native()
    return DraftTime() if module is None else module.DraftTime()


def acceptance(memory_rounds: float, parent: Acceptance | None = None) -> Acceptance:
    """A new Acceptance."""
    module = _native()
    return (Acceptance if module is None else module.Acceptance)(memory_rounds, parent)
