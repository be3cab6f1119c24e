"""Heads that were trained on this machine, kept in the cache under the fingerprint of their target.

`forerun train head --keep` stores a head there. From then on `auto` uses the head for that target, and searches the
text, too. Where the head's guess can be weighed against the search's, the guess that promises more is drafted.
Elsewhere the head drafts if the search finds nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from forerun.drafters import WITHOUT_MODEL
from forerun.drafters.shared import head_files
from forerun.errors import CapacityError, UserError
from forerun.models.opened import OpenedCheckpoint
from forerun.native import cache_folder
from forerun.registry import load
from forerun.text.json_files import read_json

ROOM = "drafters"


def find(target: OpenedCheckpoint, weighs_searches: bool = False) -> str | None:
    """Return the spec of the drafter with the head that is kept for a target; None if no head is kept.

    weighs_searches: whether a drafter's own search (drafters/shared/searching.py) works in the engine.
    """
    room = cache_folder() / ROOM
    target = target.original or target
    if target.source is None or not room.is_dir():
        return None
    try:
        folder = room / target.fingerprint
        if not (folder / head_files.CONFIG).is_file():
            return None
        method = read_json(folder / head_files.CONFIG)["forerun"]["method"]
        has_search = "search" in load("forerun.drafters", method, "drafter").Options.__dataclass_fields__
    except (UserError, OSError, KeyError, TypeError):  # loading the target or the head reports more
        return None
    spec = f"{method}:path={folder}"
    return spec if has_search and weighs_searches else f"mixed:of=({WITHOUT_MODEL})+({spec})"


def keep(target: OpenedCheckpoint, head: Path) -> Path:
    """Copy a head's folder to the place in the cache where `find` looks, and return the new folder.

    A head that is already there is replaced. Raises CapacityError if the folder cannot be written.
    """
    folder = cache_folder() / ROOM / (target.original or target).fingerprint
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as begun:
            copy = Path(begun) / "head"
            shutil.copytree(head, copy)
            if folder.exists():
                folder.rename(Path(begun) / "before")
            copy.rename(folder)
    except OSError as error:
        raise CapacityError(
            f"the head cannot be kept in {folder.parent} ({error.strerror}): set FORERUN_CACHE_DIR to a folder with "
            "room that may be written to"
        ) from error
    return folder
