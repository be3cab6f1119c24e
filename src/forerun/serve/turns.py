"""The event loop of a server, in which connections take turns.

asyncio handles every ready socket before it looks for news from other threads. So 900 connections that begin at once
would hold up each stream for more than a second. This loop handles a few sockets, looks for new tokens, and then
continues with the next sockets.
"""

from __future__ import annotations

import asyncio
import selectors

MOST_AT_ONCE = 2  # sockets between two looks at news of threads: a request takes a millisecond or two of the loop


class Turns(selectors.DefaultSelector):
    """A selector that returns a few ready sockets at a time. The next call begins after the last returned socket."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return at most MOST_AT_ONCE ready sockets."""
        ready = super().select(timeout)
        if len(ready) <= MOST_AT_ONCE:
            return ready
        first = self._next % len(ready)
        self._next = first + MOST_AT_ONCE
        return [*ready, *ready][first : self._next]


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop in which connections take turns."""
    return asyncio.SelectorEventLoop(Turns())
