"""Ctrl-C in a long run: what has been done is kept, and a later run goes on from there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """Ctrl-C in a run that has kept its work. at: the place from which a later run goes on, such as "step 57"."""

    def __init__(self, at: str) -> None:
        super().__init__(at)
        self.at = at


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a `with` block that must not be left half done.

    Does nothing outside of the main thread, where Python raises no KeyboardInterrupt.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    frames = list[FrameType | None]()
    signal.signal(signal.SIGINT, lambda number, frame: frames.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if frames:
        before(signal.SIGINT, frames[-1])
