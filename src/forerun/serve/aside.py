"""Reads long bodies in a separate process, so that no other request and no engine step waits for them.

Python runs one thread at a time. While a JSON parser or a tokenizer works, no other thread can run. The process is
started for the first long body. It reads short bodies before long ones. A second process compiles grammars on trial,
because compiling a grammar may take any amount of time and memory. The second process ends if a grammar takes more than
MOST_TRIED_S or MOST_TRIED_BYTES (texts.py).
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import PriorityQueue
from typing import Any

from forerun.errors import BadOption, ForerunError, InternalError
from forerun.serve.bodies import Job, Refused
from forerun.serve.texts import MOST_TRIED_BYTES, MOST_TRIED_S, Library, TextOptions, Texts

LONG_BYTES = 8 << 10  # the process reads longer bodies; a thread reads shorter ones sooner than they get there
MOST_SECONDS = 60.0  # for one body; the process is started anew after a longer one
_START_SECONDS = 300.0  # on a busy machine
_NICE = 5  # where all cores are busy, the engine's threads go first
# Exit statuses of a process that tries grammars -> the limit that it has exceeded.
_MUCH = {-signal.SIGPROF: f"{MOST_TRIED_S:g} s to compile", -signal.SIGABRT: f"{MOST_TRIED_BYTES >> 20} MiB of memory"}
_CODE = "import sys; sys.path[:] = sys.argv[2:]; from forerun.serve.aside import main; main(int(sys.argv[1]))"

_Job = tuple[str, tuple[Any, ...]]  # the name of a method of Library, and its arguments


class Aside:
    """A process that reads bodies or compiles grammars, together with the thread that sends jobs to the process.

    options: the TextOptions of all models, from which the process makes its Library.
    """

    def __init__(self, options: Seq[TextOptions]) -> None:
        self._options = tuple(options)
        self._jobs: PriorityQueue[tuple[float, int, _Job, Future[Any]]] = PriorityQueue()
        self._order, self._lock = itertools.count(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_closed = False

    def work(self, url: str, body: bytes) -> Future[Any]:
        """Return a future with the result of `Library.work` for a body. url: the path of the body's route.

        The future raises InternalError if the process ends twice in a row, and Refused if reading takes over
        MOST_SECONDS.
        """
        return self._put(("work", (url, body)), len(body))

    def attempt(self, name: str, key: tuple[str, str]) -> Future[Any]:
        """Compile a grammar for the model `name`. Return a future with the size of the grammar's memory in bytes.

        The future raises BadOption if compiling takes too much time or memory. key: the grammar, as in
        `SamplingParams.constraint`.
        """
        return self._put(("attempt", (name, key)), len(key[1]))

    def begin(self) -> None:
        """Start the process, unless it was started before. After an early start, the first request waits less."""
        if self._thread is None:
            self._put(("begin", ()), 0)

    def _put(self, job: _Job, size: int) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="forerun-aside", daemon=True)
                self._thread.start()
        # Short bodies first, but a long body lets later ones pass for at most a second per megabyte of its length.
        self._jobs.put((time.monotonic() + size / 1e6, next(self._order), job, future))
        return future

    @property
    def pid(self) -> int | None:
        """The id of the process; None while no process runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process, and cancel the waiting jobs."""
        self._is_closed = True
        self._jobs.put((-1.0, next(self._order), ("", ()), Future()))
        if (process := self._process) is not None:
            process.kill()  # the thread hears of it, and forgets it

    def _run(self) -> None:
        while True:
            _, _, job, future = self._jobs.get()
            if self._is_closed:
                self._end()
                future.cancel()
                while not self._jobs.empty():
                    self._jobs.get()[3].cancel()
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._ask(job))
            except BaseException as error:
                future.set_exception(error)

    def _ask(self, job: _Job) -> Any:
        """Send a job to the process and return the result. If the process ends, repeat the job once in a new process.

        Raises Refused if the job takes more than MOST_SECONDS. Raises BadOption if compiling a grammar takes too much
        CPU time or memory. Raises InternalError if the process ends a second time.
        """
        for is_again in (False, True):
            try:
                pipe = self._pipe or self._start()
                pipe.send(job)
                if not pipe.poll(MOST_SECONDS):
                    self._end()
                    message = f"the texts of the body took more than {MOST_SECONDS:g} s to be read: make them shorter"
                    raise Refused(message, code="timeout", status=504)
                is_made, answer = pickle.loads(pipe.recv_bytes())
                break
            except (EOFError, OSError) as error:
                if (much := _MUCH.get(self._end() or 0)) is not None and job[0] == "attempt":
                    raise BadOption(f"the grammar or schema takes more than {much}: make it simpler") from None
                if is_again or self._is_closed:
                    message = (
                        "the process that reads long bodies and grammars has ended, twice in a row: send a shorter body"
                    )
                    raise InternalError(message) from error
        if not is_made:
            raise answer
        return answer

    def _start(self) -> Connection:
        """Start the process, and return the pipe to it. Raises InternalError if the process does not start in time."""
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is meant for the server, which finishes what it has accepted
            )
        self._pipe = ours
        ours.send(self._options)
        if not ours.poll(_START_SECONDS):
            self._end()
            raise InternalError(f"the process that reads long bodies did not start in {_START_SECONDS:g} s")
        ours.recv_bytes()
        return ours

    def _end(self) -> int | None:
        """End the process, and return its exit status; None if no process was running."""
        process = self._process
        pipe = self._pipe
        self._process = None
        self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()  # a process that has ended keeps its exit status
        return None if process is None else process.wait()


def _packed(result: Any) -> Any:
    """Return a result in which token ids are packed as arrays.

    Unpickling a list of a million numbers would keep the server's other threads from running.
    """
    if not isinstance(result, tuple) or not isinstance(result[0], Job):
        return result
    with suppress(OverflowError):  # some are too large for ids, and the engine says so
        return result[0], [array("i", ids) for ids in result[1]]
    return result


def main(number: int) -> None:
    """Run the process: answer jobs until the server has gone. number: the file descriptor of the pipe to the server."""
    os.nice(_NICE)
    pipe = Connection(number)
    library = Library([Texts(options) for options in pipe.recv()])
    pipe.send_bytes(b"")
    while True:
        try:
            name, given = pipe.recv()
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _packed(getattr(library, name)(*given))))
        except ForerunError as error:
            answer = pickle.dumps((False, error))
        except BaseException as error:  # a panic of a tokenizer's Rust code is no Exception
            sys.excepthook(type(error), error, error.__traceback__)
            failed = InternalError(f"the text of the request or its answer could not be made: {error!r:.200}")
            answer = pickle.dumps((False, failed))
        pipe.send_bytes(answer)
