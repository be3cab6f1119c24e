"""The display of an answer in a terminal while it grows: word by word, and as Markdown once a paragraph is complete."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from forerun.text.terminal import visible

REFRESH_S = 0.05  # between two drawings of the growing paragraph
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")


class Page:
    """An answer on a console: its complete paragraphs, and below them the growing paragraph, which is redrawn."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._growing = ""
        self._drawn_s = 0.0

    def write(self, text: str) -> None:
        """Add a piece of the answer."""
        self._growing += visible(text)
        while (whole := _first_paragraph(self._growing)) is not None:
            self._growing = self._growing[len(whole) :]
            self._live.update(Text(""))
            self._live.console.print(markdown(whole))
        now = time.monotonic()
        if now - self._drawn_s >= REFRESH_S:
            self._drawn_s = now
            self._live.update(self._tail(), refresh=True)

    def finish(self) -> None:
        """Show the last paragraph, which does not grow any more."""
        self._live.update(Text(""), refresh=True)
        if self._growing.strip():
            self._live.console.print(markdown(self._growing))
        self._growing = ""

    def _tail(self) -> Text:
        """Return the end of the growing paragraph, as much of it as a screen shows."""
        lines = Text(self._growing.strip("\n")).wrap(self._console, self._console.width)
        return Text("\n").join(lines[-max(self._console.height - 2, 1) :])


@contextmanager
def page(console: Console) -> Iterator[Page]:
    """Open a page. Its last paragraph is shown when the page is closed, even where Ctrl-C closes it."""
    with Live(
        console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as live:
        shown_page = Page(console, live)
        try:
            yield shown_page
        finally:
            shown_page.finish()


def markdown(text: str) -> Markdown:
    """Parse Markdown for a chat: line breaks are kept, addresses stay readable, and HTML is shown as text."""
    parts = re.split(r"(^ {0,3}(?:```|~~~).*?(?:^ {0,3}(?:```|~~~)[ \t]*$|\Z))", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(part if i % 2 else re.sub(r"(?<=\S)\n(?=\S)", "  \n", part) for i, part in enumerate(parts))
    document = Markdown("", hyperlinks=False)
    document.parsed = _PARSER.parse(lines)
    return document


def _first_paragraph(text: str) -> str | None:
    """Return the text up to the first empty line outside of code fences; None while the first paragraph grows."""
    for end in re.finditer(r"\n[ \t]*\n", text):
        if len(_FENCE.findall(text, 0, end.start() + 1)) % 2 == 0 and text[: end.start()].strip():
            return text[: end.end()]
    return None
