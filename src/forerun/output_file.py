"""Files that a command writes: whole, or as they were before."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a text to a file. Where that fails, the old file stays as it was. Raises OSError, which names the file."""
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")  # a pipe or a device, which nothing may replace
        return
    file = file.resolve()  # a link stays one
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.touch()
        if file.exists():
            shutil.copymode(file, partial)  # what others may not read stays so
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        error.filename = str(file)
        raise
