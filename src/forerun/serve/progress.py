"""The progress bar of a batch on standard error: requests done, tokens per second, time left; lines in a pipe."""

from __future__ import annotations

import time
from types import TracebackType

from rich import progress

from forerun.text.progress import Bar

INTERVAL_S = 0.1  # between two drawings


class Progress:
    """The progress bar of num_lines requests.

    num_before: the number of requests that an earlier run has answered. These requests count as done, but the estimate
    of the time left ignores them.
    """

    def __init__(self, num_lines: int, num_before: int) -> None:
        columns = (
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, auto_refresh=False)
        self._task = self._bar.add_task("requests", total=num_lines, completed=num_before, rate="")
        self._drawn_s = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Write a line to standard error. If a bar is shown, the line stands above the bar."""
        self._bar.console.print(text, soft_wrap=not self._bar.console.is_terminal)

    def show(self, num_done: int, tokens_per_s: float) -> None:
        """Update the bar, which is drawn at most every INTERVAL_S seconds.

        The last update is drawn when the `with` block ends.
        """
        now_s = time.perf_counter()
        is_due = now_s - self._drawn_s >= INTERVAL_S
        self._drawn_s = now_s if is_due else self._drawn_s
        self._bar.update(self._task, completed=num_done, rate=f"{tokens_per_s:.1f} tokens/s", refresh=is_due)
