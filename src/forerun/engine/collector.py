"""Python's garbage collector, which stops every stream while it looks for cycles."""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """Never look at what is alive now again: for a process of forerun's own, once its models are loaded.

    Torch and the other libraries are 180,000 objects, through which a full collection takes 50 to 100 ms, about once in
    800 requests. LLM does not do this by itself: cycles that are garbage at the moment, or become it later, stay.
    """
    gc.freeze()
