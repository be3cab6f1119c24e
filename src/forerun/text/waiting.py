"""Says on standard error what a command waits for.

So no command is silent in its first half minute for longer than two seconds, and none later for longer than a small
share of its wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from forerun.text.terminal import make_console, note, redraws

SILENT_S = 1.5  # between two lines, where there is no terminal; a process starts in half a second
SHARE = 0.05  # of a long wait passes between two of its lines
LOOK_S = 0.1  # between two looks for a first text


class Waiting:
    """Shows what a command waits for, until `end` is called: in a terminal on one line, which is removed at the end.

    Elsewhere a line is printed after SILENT_S seconds of silence, and during a long wait after SHARE of its duration. A
    repeated text is printed with the seconds of the wait. Displays that follow each other, as of opening, loading and
    reading, share one silence. text: a text or, outside of a terminal, a function that returns the current text; no
    line is printed for an empty text. after_s: the seconds before a terminal shows the first text. is_quiet: whether
    nothing is shown.
    """

    _silent_since_s = _ended_s = -math.inf  # since when nothing was printed, and when the last display ended

    def __init__(self, text: str | Callable[[], str], after_s: float = 0.0, *, is_quiet: bool = False) -> None:
        self._after_s, self._lock = after_s, threading.Lock()
        self._text, self._told = text, ""
        self._begun_s = 0.0
        console = make_console(stderr=True)
        self._status = console.status("" if callable(text) else text) if redraws(console) else None
        self._over = threading.Event()
        if is_quiet:
            self._over.set()  # as if it had ended

    def tell(self, text: str) -> None:
        """Show another text from now on. Any thread may call this."""
        self._text = text
        if self._status is not None:
            self._status.update(text)

    @staticmethod
    def break_silence() -> None:
        """Let the next display measure silence anew, because the command prints something else now."""
        Waiting._ended_s = -math.inf

    def end(self) -> None:
        """Stop showing. A second call does nothing."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                Waiting._ended_s = time.monotonic()
                if self._status is not None:
                    self._status.stop()

    def __enter__(self) -> Self:
        self._begun_s = now_s = time.monotonic()
        if now_s > Waiting._ended_s + SILENT_S:
            Waiting._silent_since_s = now_s
        show = self._print_lines if self._status is None else self._start_status
        if self._status is not None and not self._after_s:
            show()
        else:
            threading.Thread(target=show, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def _start_status(self) -> None:
        self._over.wait(self._after_s)
        with self._lock:
            if not self._over.is_set() and self._status is not None:
                self._status.start()

    def _print_lines(self) -> None:
        while not self._over.wait(max(LOOK_S, self._still_silent_s())):
            with self._lock:  # no line comes behind the end
                text = self._text() if callable(self._text) else self._text
                if text and not self._over.is_set() and self._still_silent_s() <= 0:
                    now_s = time.monotonic()
                    note(text if text != self._told else f"{text}, {now_s - self._begun_s:.0f} s")
                    self._told = text
                    Waiting._silent_since_s = now_s

    def _still_silent_s(self) -> float:
        """Return the seconds until the next line is due."""
        now_s = time.monotonic()
        return Waiting._silent_since_s + max(SILENT_S, SHARE * (now_s - self._begun_s)) - now_s
