"""Prepares output for a terminal: consoles that print text as it is, and text with visible control characters."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.text import Text

PIPE_WIDTH = 80  # columns, where there is no terminal to ask
# The control characters C0, DEL and C1 without tab and newline. They move the cursor, change text that was printed, or
# rename the window.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def visible(text: str, is_terminal: bool = True) -> str:
    """Return a text with control characters written as in JSON (\\u001b); tab and newline stay.

    is_terminal: whether the text goes to a terminal. Text for a pipe or file is returned unchanged. For headers, file
    names and error messages, callers leave is_terminal True, because a person will see them sooner or later.
    """
    return text.translate(_ESCAPES) if is_terminal else text


class _Console(Console):
    """A console that raises BrokenPipeError when the reader of a pipe has gone. rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string for a print or a table. Control characters in the string are made visible.

        A model's text never reaches this method as a `str`; see `cli.show.LiveText`.
        """
        return super().render_str(visible(text), **options)


def make_console(stderr: bool = False) -> Console:
    """Return a console that prints text as it is, without markup or highlighting; 80 columns in a pipe."""
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    elif console.is_dumb_terminal:  # rich takes 80 columns for each of these, however wide it is
        console.size = ConsoleDimensions(*shutil.get_terminal_size())
    return console


def redraws(console: Console) -> bool:
    """Return whether a console is a terminal that can draw a line again."""
    return console.is_terminal and not console.is_dumb_terminal


class _OpenLine:
    """The line of standard error that `note` left open for dots, if there is one."""

    lock = threading.RLock()
    is_open = False


def note(text: str, *, is_open: bool = False) -> None:
    """Write a line to standard error, wrapped at words in a terminal. Standard output is for the model's text.

    is_open: whether the line stays open, so that `dot` can continue it. The next call of `note` begins a new line.
    """
    console = make_console(stderr=True)
    with _OpenLine.lock:
        close_line()
        console.print(text, soft_wrap=not console.is_terminal, end="" if is_open else "\n")
        _OpenLine.is_open = is_open


def dot() -> None:
    """Write a dot to standard error, behind an open line or other dots."""
    with _OpenLine.lock:
        make_console(stderr=True).print(".", end="")
        _OpenLine.is_open = True


def close_line() -> None:
    """End the open line on standard error, if there is one."""
    with _OpenLine.lock:
        if _OpenLine.is_open:
            _OpenLine.is_open = False
            make_console(stderr=True).print()


@contextmanager
def unechoed() -> Iterator[None]:
    """Do not show typed keys on the screen while the `with` block runs. The next prompt reads these keys.

    Does nothing if standard input is no terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    after = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(keyboard, termios.TCSANOW, after)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)


def has_colour(console: Console) -> bool:
    """Return whether a console has colours: not with NO_COLOR, in a pipe, or in a terminal without colours."""
    return console.color_system is not None and not console.no_color
