"""The event loop of a server, in which connections take turns.

asyncio handles every socket that is ready before it hears what other threads have told it. So 900 connections that
begin at once would hold up each stream for more than a second. Here it handles a few, hears of the next tokens, and
goes on with those whose turn it is.
"""

from __future__ import annotations

import asyncio
import selectors

MOST_AT_ONCE = (
    2  # sockets between two looks at what threads have told: a request takes a millisecond or two of the loop
)


class Turns(selectors.DefaultSelector):
    """Tells of a few sockets at a time. The others are still ready when it is asked again, and come first then."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As any selector, but for the number."""
        ready = super().select(timeout)
        if len(ready) <= MOST_AT_ONCE:
            return ready
        first = self._next % len(ready)
        self._next = first + MOST_AT_ONCE
        return [*ready, *ready][first : self._next]


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of this kind."""
    return asyncio.SelectorEventLoop(Turns())
