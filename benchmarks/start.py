"""Runs a benchmark's command as `forerun` runs its own: the same help, errors and exit codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

from forerun.cli.help import App
from forerun.cli.main import main


def start(command: Callable[..., None], arguments: Seq[str] | None = None) -> None:
    """Run the command of a benchmark's module and exit. arguments: None = those of this process."""
    app = App("")
    app.command()(command)
    spec: Any = command.__globals__["__spec__"]
    main(arguments, app, f"python -m {spec.name}")
