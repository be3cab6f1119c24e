"""Triton's interpreter without the work that it does again at each call of one kernel's function by another.

It puts its own functions into Triton's language when a kernel is launched, and looks through the language's modules for
those to replace at each call of a function that a kernel calls, too: a third of the time of these tests.
"""

from __future__ import annotations

import importlib
from typing import Any


def patch_once() -> None:
    """Let a launch look through each module that it meets once."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    look_through = interpreter._patch_lang
    launched: Any = None
    seen = set[int]()

    def patch_language(function: Any) -> Any:
        nonlocal launched
        module = id(function.__globals__)
        if launched is None or not launched._changes:  # a launch takes back its changes when it ends
            seen.clear()
            launched = look_through(function)
        elif module not in seen:
            look_through(function)
        seen.add(module)
        return launched

    interpreter._patch_lang = patch_language
