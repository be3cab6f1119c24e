"""Folders in the cache that are filled once. A folder is written atomically, because another process may write it, too.

Where the cache cannot be written, as in a read-only home, a temporary folder for this process takes its place.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

from forerun.errors import CapacityError, raising_os_errors
from forerun.native import cache_folder

LOG = logging.getLogger(__name__)


def kept_folder(name: str, files: Collection[str], write: Callable[[Path], None], what: str) -> Path:
    """Return the folder `name` of forerun's cache. If one of `files` is missing there, write(folder) fills it first.

    what: the content of the folder, in words, for messages. Raises CapacityError where neither the cache nor a
    temporary folder can be written.
    """
    folder = cache_folder() / name
    if _is_whole(folder, files):
        return folder
    try:
        return _written(folder, files, write)
    except OSError as error:
        way_out = "set FORERUN_CACHE_DIR to a folder with room that may be written to"
        reason = f"cannot be written to {folder.parent} ({error.strerror})"
        try:
            kept = _written(Path(_for_this_process().name) / name, files, write)
        except OSError:
            raise CapacityError(f"{what} {reason}: {way_out}") from error
        LOG.warning("%s %s: it is made anew in each process; %s", what, reason, way_out)
        return kept


@cache
def _for_this_process() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="forerun-cache-")


def _written(folder: Path, files: Collection[str], write: Callable[[Path], None]) -> Path:
    """Return `folder`. If one of `files` is missing there, write(folder) fills it first.

    Raises OSError where the folder cannot be written.
    """
    if _is_whole(folder, files):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with raising_os_errors(started):
            write(started)
        started.chmod(0o755)
        try:
            started.rename(folder)
        except OSError:
            if not _is_whole(folder, files):  # a cache cleaner left a part; a whole one is another process's
                shutil.rmtree(folder, ignore_errors=True)
                started.rename(folder)
    finally:
        shutil.rmtree(started, ignore_errors=True)
    return folder


def _is_whole(folder: Path, files: Collection[str]) -> bool:
    return all((folder / name).is_file() for name in files)
