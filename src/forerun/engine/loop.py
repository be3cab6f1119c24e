"""One engine for several threads and tasks: whoever waits for a token steps the whole batch, one at a time."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself looks handlers up in an enum: 30 us of each step
import threading
from collections import deque
from collections.abc import Callable, Sequence as Seq
from types import FrameType
from typing import TypeVar

from forerun.engine.engine import Engine
from forerun.engine.request import Chunk, Request
from forerun.errors import BadOption
from forerun.types import SamplingParams

T = TypeVar("T")


class SharedEngine:
    """Guards an Engine with a lock, and never waits for that lock to end a request.

    A generator that nobody holds any more is closed by the garbage collector, at any moment and in any thread: also
    in the middle of a step, by the very thread that runs it. So a request that is to end is put down here, and ended by
    whoever holds the engine, before or after its step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that holds the lock
        self._ended: deque[Request] = deque()

    def add(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Request]:
        """Queue all of these prompts, or none: raises UserError for the first that cannot be honoured."""
        added: list[Request] = []

        def work() -> None:
            for prompt, param in zip(prompts, params, strict=True):
                added.extend(self._engine.add_all(prompt, param))

        try:
            self._hold(work)
        except BaseException:
            self.end(added)
            raise
        return added

    def step(self) -> None:
        """One step for everybody."""
        self._hold(self._engine.step)

    def advance(self, request: Request) -> Chunk:
        """What is new of a request; a step where nothing is. Others may step, and finish, it too.

        Raises the error that ended it, if one did.
        """

        def work() -> Chunk:
            if request.seq.finish_reason is None and not request.has_news:
                self._engine.step()
            return request.chunk()

        chunk = self._hold(work)
        if request.error is not None:
            raise request.error
        return chunk

    def end(self, requests: Seq[Request]) -> None:
        """End requests and free what they hold: at once, or when the step that runs is over. Ended ones are left."""
        self._ended.extend(requests)
        self._settle()

    def _hold(self, work: Callable[[], T]) -> T:
        """Do what needs the engine to oneself. Not a context manager of Python's: a step would take 5 us longer."""
        if self._owner == threading.get_ident():
            raise BadOption("a listener runs inside a step and cannot call the engine: keep what it heard, call later")
        with _Uninterrupted():
            try:
                with self._lock:
                    self._owner = threading.get_ident()
                    try:
                        if self._ended:
                            self._end_all()
                        return work()
                    finally:
                        self._owner = None
                        if self._ended:
                            self._end_all()
            finally:
                if self._ended:  # somebody may have put a request down after the last look
                    self._settle()

    def _settle(self) -> None:
        if not self._ended:
            return
        with _Uninterrupted():
            while self._ended and self._lock.acquire(blocking=False):
                try:
                    self._end_all()
                finally:
                    self._lock.release()

    def _end_all(self) -> None:
        while self._ended:
            self._engine.abort(self._ended.popleft())


class _Uninterrupted:
    """Let Ctrl-C wait for the end of the block: torn in two, a step would leave locks held and texts without a token.

    Only the main thread is interrupted, and only by a handler written in Python.
    """

    def __enter__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._handler: Callable[[int, FrameType | None], object] | None = None
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler) and not isinstance(handler, _Uninterrupted):
            try:
                _signal.signal(_signal.SIGINT, self)
                self._handler = handler
            except BaseException:  # which the handler of another signal has raised
                _signal.signal(_signal.SIGINT, handler)
                raise

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """As the handler: remember the signal."""
        self._came = (number, frame)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            try:
                _signal.signal(_signal.SIGINT, self._handler)
            except BaseException:  # as above; what came of this signal is answered by that
                _signal.signal(_signal.SIGINT, self._handler)
                raise
            if self._came is not None:
                self._handler(*self._came)
