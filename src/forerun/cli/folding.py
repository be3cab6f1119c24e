"""Breaks texts into lines of a given width. Help texts need this file, so it imports only the standard library."""

from __future__ import annotations

import textwrap


def folded(text: str, width: int, first: str = "", rest: str = "") -> str:
    """Break a text into lines of `width` columns, at spaces only. A longer word, such as a path, is not broken.

    first: the beginning of the first line. rest: the beginning of each other line.
    """
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
