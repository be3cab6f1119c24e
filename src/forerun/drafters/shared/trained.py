"""Heads that `auto` finds by the fingerprint of their target.

`forerun train head --keep` stores a head in the cache. Other heads ship with forerun, and name their target in
config.json. `auto` uses the head of its target, and searches the text, too. Where the head's guess can be weighed
against the search's, the guess that promises more is drafted. Elsewhere the head drafts if the search finds nothing.
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
    """Return the spec of the drafter with the target's head: the head that is kept, else one that ships; None if none.

    weighs_searches: whether a drafter's own search (drafters/shared/searching.py) works in the engine.
    """
    if not target.has_files:
        return None
    try:
        shipped = _shipped(target)
        if shipped:
            (target.original or target).fetch_weights()  # the fingerprint is in them
        folder = _kept(target) or (shipped.get(target.fingerprint) if shipped else None)
        if folder is None:
            return None
        method = read_json(folder / head_files.CONFIG)["forerun"]["method"]
        has_search = "search" in load("forerun.drafters", method, "drafter").Options.__dataclass_fields__
    except (UserError, OSError, KeyError, TypeError):  # loading the target or the head reports more
        return None
    spec = f"{method}:path={folder}"
    return spec if has_search and weighs_searches else f"mixed:of=({WITHOUT_MODEL})+({spec})"


def _kept(target: OpenedCheckpoint) -> Path | None:
    room = cache_folder() / ROOM
    if not room.is_dir():
        return None
    folder = room / target.fingerprint
    return folder if (folder / head_files.CONFIG).is_file() else None


def _shipped(target: OpenedCheckpoint) -> dict[str, Path]:
    """Return the folders of the shipped heads for models as wide as the target, by their targets' fingerprints."""
    configs = {folder: read_json(folder / head_files.CONFIG) for folder in head_files.shipped_folders().values()}
    return {
        config["forerun"]["target"]: folder
        for folder, config in configs.items()
        if config["hidden_size"] == target.spec.hidden_size and "target" in config["forerun"]
    }


def keep(target: OpenedCheckpoint, head: Path) -> Path:
    """Copy a head's folder to the place in the cache where `find` looks, and return the new folder.

    A head that is already there is replaced. Raises CapacityError if the folder cannot be written.
    """
    folder = cache_folder() / ROOM / target.fingerprint
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
