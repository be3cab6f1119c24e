"""Ctrl-C in a long run: what has been done is kept, and a later run goes on from there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(KeyboardInterrupt):
    """Ctrl-C in a run that has kept its work. Its text is where a later run goes on, such as "step 57"."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a `with` block that must not be left half done.

    Does nothing outside of the main thread, where Python raises no KeyboardInterrupt.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came = list[tuple[Any, Any]]()
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[-1])
