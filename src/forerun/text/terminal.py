"""Where text goes in a terminal: consoles that print it as it is."""

from __future__ import annotations

from rich.console import Console

PIPE_WIDTH = 80  # columns, where there is no terminal to ask


class _Console(Console):
    """rich ends the process with code 1 when the reader of a pipe has gone; the command line decides here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(stderr: bool = False) -> Console:
    """A console that prints text as it is: no markup, no highlighting; 80 columns in a pipe."""
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def has_colour(console: Console) -> bool:
    """False for NO_COLOR, a pipe, or a terminal without colours."""
    return console.color_system is not None and not console.no_color
