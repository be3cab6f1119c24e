"""Reads text files, and makes the errors for files that cannot be read: what the file is, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from forerun.errors import BadOption, NotFound, UnsupportedModel, UserError, program

LFS_POINTER = b"version https://git-lfs"
HTML = (b"<!doctype html", b"<html")
BEGINNING_BYTES = 1024
AGAIN = "fetch it again"


def read_text_file(file: Path, what: str) -> str:
    """Read a text file. Raises BadOption if it is not UTF-8, and NotFound if it is unreadable.

    what: the word for the file in errors.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadOption(f"the {what} {str(file)!r} is not UTF-8 text: convert it first") from error
    except OSError as error:
        raise NotFound(f"the {what} {str(file)!r} cannot be read ({error.strerror}): check its name") from error


def unreadable(path: Path, problem: object, what: str = "") -> UserError:
    """Return the error for a file that could not be read, or that is not the kind of file it should be.

    problem: the reader's error. what: the kind of file that was expected, with its article, such as "a GGUF file".
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(BEGINNING_BYTES)
    except OSError as error:
        return NotFound(f"{path} {_of_the_system(path, error)}")
    if beginning.startswith(LFS_POINTER):
        return UnsupportedModel(
            f"{path} is a pointer of git-lfs and not the file: run git lfs pull in its folder, or fetch it with "
            f"{program('hf')} download"
        )
    if beginning.lstrip().lower().startswith(HTML):
        return UnsupportedModel(
            f"{path} is a web page and not the file, as a link to the page about a file gives it: fetch it with "
            f"{program('hf')} download, or from the page's download link"
        )
    if not beginning:
        return UnsupportedModel(f"{path} is empty: {AGAIN}")
    return UnsupportedModel(f"{path} is not {what or 'readable'} ({problem}): {AGAIN}")


def _of_the_system(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a link that leads back to itself: remove it and fetch the file again"
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"is a link to {os.readlink(path)}, which is not there: {AGAIN}, or copy what it leads to"
    if isinstance(error, PermissionError):
        return f"may not be read by this user ({error.strerror}): give yourself the right with chmod, or ask its owner"
    return f"cannot be read ({error.strerror}): check the name and the disk"
