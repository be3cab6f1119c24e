"""Lines of a given width. Nothing here imports more than the standard library, for the help texts need it."""

from __future__ import annotations

import textwrap


def folded(text: str, width: int, first: str = "", rest: str = "") -> str:
    """Break a text into lines of `width` columns, at spaces alone: a longer word, such as a path, keeps its line.

    first, rest: the beginnings of the first line and of the others.
    """
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
