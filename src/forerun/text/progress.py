"""A progress bar in a terminal, and lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import Progress, ProgressColumn

from forerun.text.terminal import make_console, redraws
from forerun.text.waiting import Waiting


class Bar(Progress):
    """A progress bar of rich on standard error. In a pipe, lines show the progress, printed as `Waiting` prints lines.

    A task with a total of 1 is shown as a percentage there. is_quiet: whether nothing is shown. options: further
    options of rich's Progress.
    """

    def __init__(self, *columns: ProgressColumn, is_quiet: bool = False, **options: Any) -> None:
        console = make_console(stderr=True)
        super().__init__(*columns, console=console, disable=is_quiet or not redraws(console), **options)
        self._lines = None if redraws(console) else Waiting(self._line, is_quiet=is_quiet)

    def start(self) -> None:
        """Begin to show the progress."""
        super().start()
        if self._lines is not None:
            self._lines.__enter__()

    def stop(self) -> None:
        """Stop showing the progress."""
        if self._lines is not None:
            self._lines.end()
        super().stop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar off the terminal while a block prints lines, which the bar would send to standard error."""
        if self.disable:
            yield
            return
        self.live.stop()
        yield
        self.live.start(refresh=True)

    def _line(self) -> str:
        """Return the progress of the newest visible task as a text."""
        task = next((task for task in reversed(self.tasks) if task.visible), None)
        if task is None:
            return ""
        parts = [task.description, *(str(value) for value in task.fields.values() if value)]
        if task.total == 1:
            parts[0] += f": {task.percentage:.0f} %"
        elif task.total is not None:
            parts[0] += f": {task.completed:,.0f} of {task.total:,.0f}"
        return ", ".join(parts)
