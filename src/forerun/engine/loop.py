"""Runs an engine in one thread for all callers.

Callers put commands into a queue of this thread, and wait for results on queues of their own. A step is never
interrupted. Ctrl-C and cancelled tasks reach the thread that waits, not the thread that steps.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence as Seq
from queue import Empty, SimpleQueue
from typing import TypeVar

from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import BadOption

T = TypeVar("T")
LOG = logging.getLogger(__name__)
PAUSE_S = 1.0  # seconds without a request, after which the engine measures


class Loop:
    """Owns an engine and the thread that steps it. Commands to the engine run in this thread, between two steps.

    The thread starts when `add` or `call` first needs it. When no request is left, the thread lets the engine measure
    its pass times once, and then sleeps until the next command. failure: the error of the last step that failed as a
    whole. The requests that ran in this step are ended, and the thread goes on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A SimpleQueue may be written to by a destructor that the garbage collector runs in any thread at any moment.
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Held by the stepping thread for as long as it steps. Python cannot be trusted about whether a thread is alive
        # after a Ctrl-C: up to 3.12, is_alive() and join() call a running thread ended if Ctrl-C interrupts them.
        self._stepping = threading.Lock()
        self._posting = threading.Lock()
        self._going: list[Request] = []
        self.failure: BaseException | None = None
        self.behind: tuple[Callable[[], object], ...] = ()  # called after a step or a command has notified its requests
        self._process, self._is_busy = os.getpid(), False

    def add(self, requests: Seq[Request]) -> None:
        """Queue requests. The engine's thread will call their `hear`.

        Raises BadOption if called from the engine's thread, or in a fork of a process whose engine was busy.
        """

        def queue() -> None:
            self._engine.queue(requests)
            self._going += requests

        self._post(queue)

    def end(self, requests: Seq[Request]) -> None:
        """End requests and free their memory, once the running step is over. Returns without waiting.

        Requests that have already ended are not changed.
        """
        left = [request for request in requests if request.seq.finish_reason is None]

        def abort() -> None:
            for request in left:
                self._engine.abort(request)

        if left:
            self._commands.put(abort)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` between two steps, after all commands queued so far. Returns its result, or raises its error."""
        results, ended = list[T](), SimpleQueue[BaseException | None]()  # a Future's lock may be torn by Ctrl-C

        def run() -> None:
            try:
                results.append(work())
                ended.put(None)
            except BaseException as error:
                ended.put(error)

        self._post(run)
        error = ended.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        return results[0]

    def end_all(self) -> None:
        """End all requests, and wait until their memory is freed."""

        def abort() -> None:
            for request in self._unfinished():
                self._engine.abort(request)

        self.call(abort)

    def close(self) -> None:
        """End the engine's thread after the running step and all commands queued so far. Waits until it has ended."""
        thread = self._thread
        if thread is not None and self._stepping.locked() and thread is not threading.current_thread():
            self._commands.put(None)
            thread.join()

    def _post(self, command: Callable[[], object]) -> None:
        if self._thread is threading.current_thread():
            raise BadOption("a listener runs inside a step and cannot call the engine: keep what it heard, call later")
        if self._process != os.getpid():
            self._take_over()
        with self._posting:  # the thread does not end in between
            if not self._stepping.locked():
                begun = SimpleQueue[None]()
                threading.Thread(target=self._run, args=(begun,), name="forerun-engine", daemon=True).start()
                begun.get()
            self._commands.put(command)

    def _take_over(self) -> None:
        """Reset queue and locks in a child of fork(2), which has no copy of the parent's threads.

        Raises BadOption if the parent's engine was running requests or measuring passes.
        """
        if self._is_busy:
            raise BadOption(
                "this process was forked while its parent's engine was running requests or measuring its passes, which "
                "cannot go on here: make an LLM of its own in the child, or fork while no request runs and behind "
                "`measure_passes()`"
            )
        self._commands, self._process = SimpleQueue(), os.getpid()
        self._stepping, self._posting = threading.Lock(), threading.Lock()

    def _run(self, begun: SimpleQueue[None]) -> None:
        """Run commands and steps in this thread, unless another thread already runs them.

        There may be another thread if Ctrl-C interrupted `_post` just after `_post` had started that thread. begun: a
        queue that gets an item as soon as one of the threads runs commands and steps.
        """
        is_first = self._stepping.acquire(blocking=False)
        if is_first:
            self._thread = threading.current_thread()
        begun.put(None)
        while is_first:
            try:
                self._step_on()
            except BaseException:
                self._stepping.release()
                raise
            with self._posting:
                if self._commands.empty():
                    self._stepping.release()
                    return
                self._commands.put(None)  # end after the commands posted meanwhile, which started no thread

    def _step_on(self) -> None:
        """Run commands, and steps while requests are unfinished, until a command is None."""
        while True:
            while not (going := self._unfinished()) or not self._commands.empty():
                self._is_busy = bool(going)
                command = self._next()
                self._is_busy = True
                if command is None:
                    return
                try:
                    command()
                except BaseException:  # the thread goes on: others wait for it
                    LOG.exception("requests could not be queued or ended as they should")
                del command  # else it would keep its objects alive until the next command
                self._call_behind()
            try:
                self._engine.step()
            except BaseException as error:  # a SystemExit, too, and what a tokenizer's Rust code calls a panic
                LOG.exception("a step failed: the requests that ran are ended")
                self.failure = error
                self._engine.recover(going, error)
            self._call_behind()

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next command, and return it.

        If no command comes for PAUSE_S seconds, the engine measures pass times until a command comes.
        """
        try:
            return self._commands.get(timeout=PAUSE_S)
        except Empty:
            pass
        self._is_busy = True
        try:
            self._engine.rest(self._commands.empty)
        except BaseException:  # the thread goes on: others wait for it
            LOG.exception("the engine could not measure what passes take")
        finally:
            self._is_busy = False
        return self._commands.get()

    def _call_behind(self) -> None:
        for call in self.behind:
            try:
                call()
            except Exception:
                LOG.exception("what is called behind each step failed")

    def _unfinished(self) -> list[Request]:
        self._going = [request for request in self._going if request.seq.finish_reason is None]
        return self._going
