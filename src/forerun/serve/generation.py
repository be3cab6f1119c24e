"""Connects the engine requests of one body to the event loop: reports their progress and makes their texts.

The engine's thread notes how far each request has come, and wakes the event loop once per step. In a stream, the next
piece of text is made only when the client has taken the last piece. So a slow client gets fewer and longer pieces.
Until a piece is made, only its tokens are stored.
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
    """Tells the event loop, from the engine's thread, which generations have news.

    on_news: called in the event loop, before the waiting tasks are woken. Only `ring` wakes the loop, once for all
    requests of a step. One wake-up costs both threads more than all other work for the news of a request.
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_news = on_news
        self._pending: deque[Generation] = deque()
        self._is_rung = False

    def tell(self, generation: Generation) -> None:
        """Note that a generation has news. Any thread may call this.

        Raises RuntimeError if the event loop is closed.
        """
        if self._loop.is_closed():
            raise RuntimeError("the event loop was closed")
        self._pending.append(generation)

    def ring(self) -> None:
        """Wake the event loop. Any thread may call this, after it has noted all news of a step."""
        if self._pending and not self._is_rung:
            self._is_rung = True
            with suppress(RuntimeError):  # the event loop was closed: nobody listens
                self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        self._is_rung = False  # before any news is taken, so that later news rings again
        self._on_news()
        while self._pending:
            self._pending.popleft().has_news.set()


class Generation:
    """The engine requests of one body: params.n requests for each prompt, in the order of the prompts.

    is_streamed: whether each step of a request is reported, or only the request's end. error: the failure that ended
    all requests together; None = there was no such failure.
    """

    def __init__(self, news: News, requests: Seq[Request], *, is_streamed: bool) -> None:
        self.requests = list(requests)
        self._news = news
        self._is_streamed = is_streamed
        self.has_news = asyncio.Event()
        self.error: ForerunError | None = None
        self._place = {request: i for i, request in enumerate(self.requests)}
        self._marks: list[Mark | None] = [None] * len(self.requests)
        self._read: list[Mark | None] = [None] * len(self.requests)
        self._readers: list[Reader] = []
        for request in self.requests:
            request.hear = self._hear

    def _hear(self, request: Request) -> None:
        """Note a request's progress. The engine's thread calls this after each step of the request and at its end."""
        mark = request.mark()
        if self._is_streamed or mark.finish_reason is not None:
            self._marks[self._place[request]] = mark
            self._news.tell(self)

    def fail(self, error: ForerunError) -> None:
        """End the generation with an error, and wake the task that waits for the generation."""
        self.error = self.error or error
        self.has_news.set()

    @property
    def is_over(self) -> bool:
        """Whether all requests have ended, or the generation has failed."""
        return self.error is not None or all(
            mark is not None and mark.finish_reason is not None for mark in self._marks
        )

    @property
    def failure(self) -> ForerunError | None:
        """The error of the generation, or of one of its requests; None if there is no error."""
        return self.error or next((r.error for r in self.requests if r.error is not None), None)

    def num_new_tokens(self) -> float:
        """Return how many tokens the next call of `chunks` would turn into text.

        Returns inf if `chunks` would also have other work: at the beginning, at the end of a choice, with
        log-probabilities, and after an error.
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
        """Return the new chunks, each with the index of its choice. Raises the error that ended the generation.

        Making text takes time, so call this in the event loop only if `num_new_tokens` is small.
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
        """Return the outputs of all requests, in order. Raises the error that ended a request.

        Call this only after all requests have ended. Do not call this in the event loop, because making text takes
        time.
        """
        if (failure := self.failure) is not None:
            raise failure
        return [request.output() for request in self.requests]
