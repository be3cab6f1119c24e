"""Says on standard error what a command waits for, so that no command is silent for longer than two seconds.

In a pipe, lines alone would be thousands during a long wait. So a line comes only after a share of the wait, and dots
follow the line until then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from forerun.text.terminal import close_line, dot, make_console, note, redraws

SILENT_S = 1.2  # between two signs of life, where there is no terminal; a process starts in half a second
SHARE = 0.05  # of a long wait passes between two of its lines
SAME_LINE_S = 30.0  # at least, before a line repeats the text of the line before
LOOK_S = 0.1  # between two looks for a first text


class Waiting:
    """Shows what a command waits for, until `end` is called: in a terminal on one line, which is removed at the end.

    Elsewhere a line or a dot is printed after each SILENT_S seconds of silence: a line if the text is new and SHARE of
    the wait has passed since the last line; a line with the seconds of the wait if the text has stayed the same for
    long; otherwise a dot. Displays that follow each other, as of opening, loading and reading, share one silence.

    text: a text or, outside of a terminal, a function that returns the current text; nothing is printed for an empty
    text. after_s: the seconds before a terminal shows the first text. is_quiet: whether nothing is shown.
    """

    _silent_since_s = _ended_s = -math.inf  # since when nothing was printed, and when the last display ended

    def __init__(self, text: str | Callable[[], str], after_s: float = 0.0, *, is_quiet: bool = False) -> None:
        self._after_s, self._lock = after_s, threading.Lock()
        self._text, self._told = text, ""
        self._begun_s = self._told_s = 0.0
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
                elif self._told:
                    with suppress(OSError):  # the reader has gone, and the work that was waited for is worth more
                        close_line()

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
            with self._lock, suppress(OSError):  # no line comes behind the end; a reader may have gone
                text = self._text() if callable(self._text) else self._text
                if text and not self._over.is_set() and self._still_silent_s() <= 0:
                    now_s = time.monotonic()
                    if self._is_due(text, now_s):
                        note(text if text != self._told else f"{text}, {now_s - self._begun_s:.0f} s", is_open=True)
                        self._told, self._told_s = text, now_s
                    else:
                        dot()
                    Waiting._silent_since_s = now_s

    def _is_due(self, text: str, now_s: float) -> bool:
        """Return whether a line with the text is due now, in place of a dot."""
        share_s = SHARE * (now_s - self._begun_s)
        return not self._told or now_s - self._told_s >= max(share_s, SAME_LINE_S if text == self._told else 0.0)

    @staticmethod
    def _still_silent_s() -> float:
        """Return the seconds until the next line or dot is due."""
        return Waiting._silent_since_s + SILENT_S - time.monotonic()
