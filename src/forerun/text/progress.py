"""A progress bar in a terminal, and lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.progress import Progress, ProgressColumn

from forerun.text.terminal import make_console
from forerun.text.waiting import Waiting


class Bar(Progress):
    """A progress bar of rich on standard error. Where that is no terminal, lines say the same, as those of `Waiting`.

    is_quiet: whether nothing is shown. options: further options of rich's Progress.
    """

    def __init__(self, *columns: ProgressColumn, is_quiet: bool = False, **options: Any) -> None:
        console = make_console(stderr=True)
        is_drawn = console.is_terminal and not console.is_dumb_terminal
        super().__init__(*columns, console=console, disable=is_quiet or not is_drawn, **options)
        self._lines = None if is_quiet or is_drawn else Waiting(self._line)

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

    def _line(self) -> str:
        """Return the progress of the newest visible task as a text."""
        task = next((task for task in reversed(self.tasks) if task.visible), None)
        if task is None:
            return ""
        done = "" if task.total is None else f": {task.completed:,.0f} of {task.total:,.0f}"
        return ", ".join([f"{task.description}{done}", *(str(value) for value in task.fields.values() if value)])
