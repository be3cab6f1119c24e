"""One body's requests in the engine, seen from the event loop: what is new, and its text.

The engine's thread notes how far a request has come and wakes the event loop once per step. Texts are made when a
stream's reader has taken the piece before: a slow reader gets fewer, longer pieces, and only tokens are kept for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence as Seq
from contextlib import suppress
from math import inf

from forerun.engine.request import Chunk, Mark, Reader, Request, RequestOutput
from forerun.errors import ForerunError


class News:
    """Carries news from the engine's thread into the event loop. on_news is called there, before anyone hears them.

    The loop is woken by `ring` alone: a wake-up costs both threads more than a request's share of the rest.
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        self._loop, self._on_news = asyncio.get_running_loop(), on_news
        self._told: deque[Generation] = deque()
        self._is_rung = False

    def tell(self, generation: Generation) -> None:
        """Note news about a generation. Any thread. Raises RuntimeError where the event loop was closed."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop was closed")
        self._told.append(generation)

    def ring(self) -> None:
        """Wake the event loop, once all news of a step is noted. Any thread."""
        if self._told and not self._is_rung:
            self._is_rung = True
            with suppress(RuntimeError):  # the event loop was closed: nobody listens
                self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        self._is_rung = False  # before anything is taken: later news rings again
        self._on_news()
        while self._told:
            self._told.popleft().is_told.set()


class Generation:
    """The requests of one body, params.n for each prompt, in order. is_streamed: each step is news, else the end alone.

    error: why all of them ended, unless one of the requests holds the error.
    """

    def __init__(self, news: News, requests: Seq[Request], *, is_streamed: bool) -> None:
        self.requests, self._news, self._is_streamed = list(requests), news, is_streamed
        self.is_told = asyncio.Event()
        self.error: ForerunError | None = None
        self._place = {request: i for i, request in enumerate(self.requests)}
        self._marks: list[Mark | None] = [None] * len(self.requests)
        self._read: list[Mark | None] = [None] * len(self.requests)
        self._readers: list[Reader] = []
        for request in self.requests:
            request.hear = self._hear

    def _hear(self, request: Request) -> None:
        """Note a request's progress: in the engine's thread, behind each step and at the end."""
        mark = request.mark()
        if self._is_streamed or mark.finish_reason is not None:
            self._marks[self._place[request]] = mark
            self._news.tell(self)

    def fail(self, error: ForerunError) -> None:
        """Let whoever waits go on with an error."""
        self.error = self.error or error
        self.is_told.set()

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will come."""
        return self.error is not None or all(
            mark is not None and mark.finish_reason is not None for mark in self._marks
        )

    @property
    def failure(self) -> ForerunError | None:
        """Return why it failed, if it did."""
        return self.error or next((r.error for r in self.requests if r.error is not None), None)

    def num_new_tokens(self) -> float:
        """Return how many tokens `chunks` would make texts of.

        inf where it does more than that: in the beginning, at the end of a choice, and with log-probabilities.
        """
        if not self._readers or self.error is not None or self.requests[0].seq.params.logprobs is not None:
            return inf
        num = 0
        for mark, read in zip(self._marks, self._read, strict=True):
            if mark is not None and mark is not read:
                if mark.finish_reason is not None:
                    return inf
                num += mark.num_tokens - (0 if read is None else read.num_tokens)
        return num

    def chunks(self) -> list[tuple[int, Chunk]]:
        """Return the new chunks by the index of their choice. Raises the error that ended them.

        Text is made here: in the event loop only where `num_new_tokens` is small.
        """
        if not self._readers:
            self._readers = [Reader(request) for request in self.requests]
        if self.error is not None:
            raise self.error
        new = []
        for i, mark in enumerate(self._marks):
            if mark is not None and mark is not self._read[i]:
                self._read[i] = mark
                chunk = self._readers[i].chunk(mark)
                if chunk.token_ids or chunk.finish_reason is not None:
                    new.append((i, chunk))
        return new

    def outputs(self) -> list[RequestOutput]:
        """Return all outputs when they are over, in order. Raises the error that ended one. Text is made here, too."""
        if (failure := self.failure) is not None:
            raise failure
        return [request.output() for request in self.requests]
