"""Limits the work of a server: the bodies that arrive, the choices that run or wait, and the time of each wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from forerun.serve.bodies import Refused

T = TypeVar("T")
MAX_RETRY_S = 60
_HALF_LIFE = 0.9  # the weight of the old mean duration of requests, when a request ends


class Arriving:
    """Counts the request bodies that have begun to arrive and are not complete. For the event loop's thread only.

    An arriving body takes no place in the Gate. most: the largest number of arriving bodies. most_bytes: the largest
    number of bytes of all arriving bodies together. If either limit is exceeded, the oldest body is refused. So clients
    that never end their bodies cannot block other clients.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = dict[asyncio.Timeout, int]()
        self.num_bytes = 0

    @property
    def num(self) -> int:
        """The number of bodies that are arriving."""
        return len(self._bytes)

    @asynccontextmanager
    async def body(self, timeout_s: float) -> AsyncIterator[Callable[[int], None]]:
        """Count one body while the `with` block reads the body.

        Yields a function that must be called for each part of the body, with the part's number of bytes. Raises Refused
        (408) after timeout_s seconds, or if the body is the oldest one when a limit is exceeded.
        """
        limit = asyncio.timeout(timeout_s)

        def came(num_bytes: int) -> None:
            if limit not in self._bytes:  # the body was given up meanwhile, and its reader does not know yet
                raise TimeoutError
            self._bytes[limit] += num_bytes
            self.num_bytes += num_bytes
            if self.num_bytes > self._most_bytes:
                self._give_up_oldest()

        try:
            async with limit:
                self._bytes[limit] = 0
                if self.num > self._most:
                    self._give_up_oldest()
                yield came
        except TimeoutError:
            late = f"the body did not come within {timeout_s:g} s: send it faster"
            if limit not in self._bytes:
                late = "the body did not come while there was room for it: send it faster"
            raise Refused(late, code="body_timeout", status=408) from None
        finally:
            self.num_bytes -= self._bytes.pop(limit, 0)

    def _give_up_oldest(self) -> None:
        oldest = next(iter(self._bytes))
        self.num_bytes -= self._bytes.pop(oldest)
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())


class Patience:
    """A cheaper replacement of asyncio.timeout for a task with many short waits. All waits share one timer.

    The timer is rarely set anew. A Patience belongs to the task that makes it. The task may wait for only one thing at
    a time.
    """

    def __init__(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._due_s, self._is_over = math.inf, False
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, awaited: Awaitable[T], at_most_s: float) -> T:
        """Return the result of `awaited`. After at_most_s seconds, cancel the wait and raise TimeoutError."""
        assert self._task is not None
        self._due_s = self._loop.time() + at_most_s
        self._is_over = False
        if self._timer is None or self._timer.when() > self._due_s:
            self._set_timer()
        try:
            return await awaited
        except asyncio.CancelledError:
            if self._is_over and self._task.uncancel() == 0:  # nobody else has cancelled the task
                raise TimeoutError from None
            raise
        finally:
            self._due_s = math.inf

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self.close()
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        """Handle the end of the timer, which may have been set for an earlier wait.

        If the task's present wait is overdue, cancel the task. If this wait ends later, set the timer anew.
        """
        self._timer = None
        if self._loop.time() < self._due_s < math.inf:
            self._set_timer()
        elif self._due_s < math.inf and self._task is not None:
            self._is_over = True
            self._task.cancel()


class Place:
    """The room that one request takes in a Gate. num: the request's number of choices; 1 until the number is known."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self.num, self.is_generating = gate, 1, False

    def grow(self, num: int) -> None:
        """Raise the request's number of choices to the total `num`, and mark the request as generating.

        Raises Refused if the Gate has no room for the additional choices.
        """
        self._gate.check(num - self.num)
        self._gate.num_taken += num - self.num
        self.num, self.is_generating = num, True


class Gate:
    """A limit on the number of choices that run or wait, over all requests. For the event loop's thread only.

    capacity: the most choices that run or wait. batch: the most choices that run at once.
    """

    def __init__(self, capacity: int, batch: int) -> None:
        self.capacity, self.batch = capacity, batch
        self.num_taken = 0
        self.is_draining = False
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self._mean_s = 1.0  # duration of a request that generates

    def look(self) -> None:
        """Raise Refused if `enter` would now raise Refused, so that a client learns this before sending its body."""
        if self.is_draining:
            raise Refused(
                "the server is shutting down: send the request to another one, or later",
                code="draining",
                status=503,
                retry_after_s=self.retry_after_s(),
            )
        self.check(1)

    @contextmanager
    def enter(self) -> Iterator[Place]:
        """Hold a place for one request while the `with` block runs.

        Raises Refused, with status 429 if no place is free, and with status 503 while the server shuts down. Enter only
        after the whole body has arrived, because an arriving body costs memory (see Arriving) but takes no place.
        """
        self.look()
        place = Place(self)
        started_s = asyncio.get_running_loop().time()
        self.num_taken += 1
        self.is_empty.clear()
        try:
            yield place
        finally:
            self.num_taken -= place.num
            if place.is_generating:  # refused requests and token counts would distort the mean
                took_s = asyncio.get_running_loop().time() - started_s
                self._mean_s = _HALF_LIFE * self._mean_s + (1 - _HALF_LIFE) * took_s
            if not self.num_taken:
                self.is_empty.set()

    def check(self, num: int) -> None:
        """Raise Refused (429) if there is no room for `num` more choices."""
        if self.num_taken + num > self.capacity:
            raise Refused(
                f"{self.num_taken} choices run or wait, of {self.capacity} that this server takes: try again later",
                code="queue_full",
                status=429,
                retry_after_s=self.retry_after_s(),
            )

    def retry_after_s(self) -> int:
        """Return an estimate of the seconds until a place is free, from 1 to MAX_RETRY_S.

        The estimate is the mean time of a request, multiplied by the number of batches that the running and waiting
        choices fill.
        """
        batches = max(1.0, self.num_taken / self.batch)
        return min(MAX_RETRY_S, max(1, math.ceil(self._mean_s * batches)))
