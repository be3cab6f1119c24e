"""Triton's interpreter without the work that it does again at each call of one kernel's function by another.

It puts its own functions into Triton's language when a kernel is launched, and looks through the language's modules for
those to replace at each call of a function that a kernel calls, too: a third of the time of these tests.
"""

import importlib
from typing import Any

import numpy as np


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


class _InOrder:
    """numpy, but for products of matrices: these add their terms one behind another.

    So the bits of a row do not depend on its place in a tile, as on a card. Those of numpy's own do on processors for
    which OpenBLAS computes the rows of a tile in more ways than one (AVX2).
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        a, b = (values if dtype is None else values.astype(dtype) for values in (a, b))
        total = a[..., :1] * b[..., :1, :]
        for k in range(1, a.shape[-1]):
            total += a[..., k : k + 1] * b[..., k : k + 1, :]
        return total


def multiply_in_order() -> None:
    """Let the interpreter multiply matrices so that a row's bits are its own."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    interpreter.np = _InOrder()
