"""A folder of the cache that is written once, whole or not at all: another process may write the same one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from forerun.errors import CapacityError
from forerun.native import cache_folder


def kept_folder(name: str, files: Collection[str], write: Callable[[Path], None], what: str) -> Path:
    """Return the folder `name` of the cache; `write` fills a new one where it lacks one of its files.

    what: its content in words, for the error. Raises CapacityError where the folder cannot be written.
    """
    folder = cache_folder() / name
    if _is_whole(folder, files):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        started = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            write(started)
            started.chmod(0o755)
            try:
                started.rename(folder)
            except OSError:
                if not _is_whole(folder, files):  # what a cleaner of caches left of it; else another process was faster
                    shutil.rmtree(folder, ignore_errors=True)
                    started.rename(folder)
        finally:
            shutil.rmtree(started, ignore_errors=True)
    except OSError as error:
        raise CapacityError(
            f"{what} cannot be written to {folder.parent} ({error.strerror}): set FORERUN_CACHE_DIR to a folder with "
            "room that may be written to"
        ) from error
    return folder


def _is_whole(folder: Path, files: Collection[str]) -> bool:
    return all((folder / name).is_file() for name in files)
