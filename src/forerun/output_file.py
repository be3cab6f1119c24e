"""Atomic writes of output files: a write that fails leaves the old file unchanged."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path

# Where a file can be written and not replaced: in a folder that others own, or mounted by itself into a container.
FIXED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def write_whole(file: Path, text: str) -> None:
    """Write a text to a file. If this fails, the old file stays as it was. Raises OSError, which names the file.

    A pipe, a device, and a file that can be written but not replaced are written in place, without this guarantee.
    """
    try:
        if not file.exists() or file.is_file():
            try:
                _replace(file.resolve(), text)  # a link stays one
                return
            except OSError as error:
                if not (error.errno in FIXED and file.exists()):
                    raise
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = str(file)
        raise


def _replace(file: Path, text: str) -> None:
    """Put a new file in the place of a file. Raises OSError."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.touch()
        if file.exists():
            shutil.copymode(file, partial)  # what others may not read stays so
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
