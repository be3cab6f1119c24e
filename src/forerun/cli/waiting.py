"""Says on standard error what a command waits for, so that no screen is silent for longer than two seconds."""

from __future__ import annotations

import math
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from forerun.cli.words import counted
from forerun.models.hub import is_hub_id
from forerun.text.terminal import make_console, note

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from forerun.config import EngineConfig
    from forerun.engine.llm import LLM
    from forerun.engine.opened import Opened
    from forerun.types import StepReport

SILENT_S = 1.8  # between two lines, where there is no terminal
LOOK_S = 0.1  # between two looks whether the text is new
OPENING_S = 0.8  # before a terminal shows that a model is opened, which rarely takes long


class Waiting:
    """Shows what a command waits for, until `end` is called: in a terminal on one line, which is removed at the end.

    Elsewhere a new text is printed as a line after SILENT_S seconds of silence. Successive displays, such as opening,
    loading and reading, count the seconds of silence together. after_s: the seconds before a terminal shows the first
    text.
    """

    _silent_since_s = _ended_s = -math.inf  # since when nothing was printed, and when the last display ended

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        self._after_s, self._lock = after_s, threading.Lock()
        self._text, self._told = text, ""
        console = make_console(stderr=True)
        self._status = console.status(text) if console.is_terminal and not console.is_dumb_terminal else None
        self._over = threading.Event()

    def tell(self, text: str) -> None:
        """Show another text from now on. Any thread may call this."""
        self._text = text
        if self._status is not None:
            self._status.update(text)

    def end(self) -> None:
        """Stop showing. A second call does nothing."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                Waiting._ended_s = time.monotonic()
                if self._status is not None:
                    self._status.stop()

    def __enter__(self) -> Self:
        now_s = time.monotonic()
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
        while not self._over.wait(max(LOOK_S, Waiting._silent_since_s + SILENT_S - time.monotonic())):
            with self._lock:  # no line comes behind the end
                if not self._over.is_set() and self._text != self._told:
                    note(self._text)
                    self._told = self._text
                    Waiting._silent_since_s = time.monotonic()


class Answering(Waiting):
    """Shows how many tokens of the prompts were read, and then how many tokens were written.

    num_tokens: the number of tokens of all prompts; None = not known yet. writes: whether written tokens are shown.
    """

    def __init__(self, llm: LLM, num_tokens: int | None, *, writes: bool = True) -> None:
        super().__init__("reading" if num_tokens is None else f"reading {counted(num_tokens, 'token')}")
        self._num_tokens = num_tokens
        self._writes = writes
        self._num_read = 0
        self._num_written = 0
        self._unlisten = llm.listen(self._see)

    def end(self) -> None:
        if not self._over.is_set():
            self._unlisten()
        super().end()
        Waiting._ended_s = -math.inf  # the answer is printed now, which ends the silence

    def _see(self, report: StepReport) -> None:
        self._num_read += report.num_prefill_tokens
        self._num_written += report.num_committed
        if self._num_written and self._writes:
            self.tell(f"{counted(self._num_written, 'token')} written")
        elif self._num_tokens is None:
            self.tell(f"{counted(self._num_read, 'token')} read")
        else:
            self.tell(f"reading {self._num_read:,} of {counted(self._num_tokens, 'token')}")


def opened(config: EngineConfig) -> Opened:
    """Open the models of a configuration, and say meanwhile that they are being opened.

    A large tokenizer takes seconds the first time. Nothing is shown for models of the hub.
    """
    from forerun.engine.opened import Opened

    names = [name for name in (config.target, config.draft) if name is not None]
    is_of_hub = any(map(is_hub_id, names))
    with nullcontext() if is_of_hub else Waiting(f"opening {Path(config.target or 'the model').name}", OPENING_S):
        return Opened.of(config)


def loading(opened: Opened) -> AbstractContextManager[object]:
    """Return a display that says that a model is being loaded.

    Nothing is shown for models of the hub: downloads have progress bars, which a further line would make scroll.
    """
    if opened.files.is_of_hub or is_hub_id(opened.config.draft):
        return nullcontext()
    return Waiting(f"loading {opened.files.name}")
