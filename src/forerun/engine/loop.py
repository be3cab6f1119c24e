"""One thread steps the engine for all requests; callers give it work through a queue and wait on queues of their own.

A step is never interrupted: Ctrl-C and cancelled tasks reach the thread that waits, not the one that steps.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence as Seq
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import BadOption

T = TypeVar("T")
LOG = logging.getLogger(__name__)


class Loop:
    """Owns an Engine: whatever touches it runs in one thread, between two steps.

    The thread starts with the first request and sleeps while there is none. failure: what the last step that failed
    as a whole has raised; the requests that ran are ended then, and the thread goes on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A SimpleQueue may be written to by a destructor that the garbage collector runs in any thread at any moment.
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._going: list[Request] = []
        self.failure: BaseException | None = None
        self.behind: tuple[Callable[[], object], ...] = ()  # called when a step or a command has told all that it tells
        self._process, self._is_busy = os.getpid(), False

    def add(self, requests: Seq[Request]) -> None:
        """Queue requests; each one's `hear` tells how they go on. Raises BadOption where the engine cannot run."""

        def queue() -> None:
            self._engine.queue(requests)
            self._going += requests

        self._post(queue)

    def end(self, requests: Seq[Request]) -> None:
        """End requests and free what they hold when the step that runs is over. Ended ones are left. Never waits."""
        left = [request for request in requests if request.seq.finish_reason is None]

        def abort() -> None:
            for request in left:
                self._engine.abort(request)

        if left:
            self._commands.put(abort)

    def call(self, work: Callable[[], T]) -> T:
        """Do `work` between two steps, behind all that was asked for before, and wait for its result."""
        done = Future[T]()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._post(run)
        return done.result()

    def end_all(self) -> None:
        """End all requests, and wait until what they held is free."""

        def abort() -> None:
            for request in self._unfinished():
                self._engine.abort(request)

        self.call(abort)

    def close(self) -> None:
        """Let the thread end behind the step that runs; what is queued stays."""
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            self._commands.put(None)
            thread.join()

    def _post(self, command: Callable[[], object]) -> None:
        if self._thread is threading.current_thread():
            raise BadOption("a listener runs inside a step and cannot call the engine: keep what it heard, call later")
        if self._process != os.getpid():
            self._take_over()
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
                self._thread.start()
        self._commands.put(command)

    def _take_over(self) -> None:
        """Go on in a child of fork(2), which copied no threads: possible where no step was running."""
        if self._is_busy:
            raise BadOption(
                "this process was forked while its parent's engine was running requests, which cannot go on here: "
                "make an LLM of its own in the child, or fork while no request runs"
            )
        self._commands, self._starting, self._process = SimpleQueue(), threading.Lock(), os.getpid()

    def _run(self) -> None:
        while True:
            while not (going := self._unfinished()) or not self._commands.empty():
                self._is_busy = bool(going)
                command = self._commands.get()
                self._is_busy = True
                if command is None:
                    return
                try:
                    command()
                except BaseException:  # the thread goes on: others wait for it
                    LOG.exception("requests could not be queued or ended as they should")
                del command  # what it holds is not to live until the next one comes
                self._call_behind()
            try:
                self._engine.step()
            except BaseException as error:  # a SystemExit, too, and what a tokenizer's Rust code calls a panic
                LOG.exception("a step failed: the requests that ran are ended")
                self.failure = error
                self._engine.recover(going, error)
            self._call_behind()

    def _call_behind(self) -> None:
        for call in self.behind:
            try:
                call()
            except Exception:
                LOG.exception("what is called behind each step failed")

    def _unfinished(self) -> list[Request]:
        self._going = [request for request in self._going if request.seq.finish_reason is None]
        return self._going
