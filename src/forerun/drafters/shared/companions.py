"""Finds drafters that were published for a target and are stored beside it, by their names.

The assistant of a folder some-model-it is the folder some-model-it-assistant. For a GGUF file, the drafter is another
GGUF file in the same folder: an assistant, or an EAGLE-3 or DFlash head. A word in the file's name tells its kind
(WORDS). For a target of the hub, only drafters in the hub's cache are found.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from forerun.drafters.shared import head_gguf
from forerun.errors import UserError
from forerun.models.families import run_by
from forerun.models.gguf.header import read_model
from forerun.models.gguf.pieces import models_of
from forerun.models.hub import is_hub_id
from forerun.models.opened import OpenedCheckpoint
from forerun.models.refusals import SINGLE

ENDING = "-assistant"
NUM_ALIKE = 4  # first letters of a target's file name that its drafter's name contains
WORDS = ("assistant", "mtp", "eagle", "dflash")  # a drafter's file has one of them in its name


def find(target: OpenedCheckpoint) -> str | None:
    """Return the spec of a drafter that is stored beside a target and fits it; None if no drafter is found.

    If the target was made in memory from another checkpoint, a drafter for that checkpoint is returned.
    """
    target = target.original or target
    return next((spec for name in _candidates(target) if (spec := _spec(name, target)) is not None), None)


def _candidates(target: OpenedCheckpoint) -> list[str]:
    """Return the paths or hub ids of possible drafters. Names that are most like the target's name come first."""
    if target.source is None:
        return []
    if is_hub_id(target.asked) and not target.path.is_file():
        beside = f"{str(target.asked).partition('@')[0]}{ENDING}"  # in the default revision
        return [beside] if _is_cached(beside) else []
    named = dict.fromkeys((target.path.absolute(), target.path.resolve()))  # a link and its file may lie apart
    return [name for path in named for name in _beside(path)]


def _beside(path: Path) -> list[str]:
    """Return the folder or the files beside a target that are named like a drafter."""
    if path.is_dir():
        beside = path.with_name(path.name + ENDING)
        return [str(beside)] if beside.is_dir() else []
    names = models_of(sorted(file.name for file in path.parent.glob("*.gguf") if file.name != path.name))
    begins = path.name[:NUM_ALIKE].lower()
    said = [name for name in names if begins in name.lower() and any(word in name.lower() for word in WORDS)]
    return [str(path.with_name(name)) for name in sorted(said, key=lambda name: (-_alike(name, path.name), name))]


def _alike(name: str, other: str) -> int:
    """Return the length of the common prefix of two names, ignoring case."""
    pairs = zip(name.lower(), other.lower(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return all(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", SINGLE))
    except ValueError:  # huggingface_hub takes no id with a revision or a file
        return False


def _spec(name: str, target: OpenedCheckpoint) -> str | None:
    """Return the spec of the drafter at a path or hub id; None if it is no drafter, or does not fit the target."""
    try:
        if head_gguf.is_file(name) and (method := head_gguf.method_of(read_model(Path(name)))) is not None:
            is_plain = re.search(r"[,+()]", name) is None  # these characters mean something in a spec
            return f"{method}:path={name}" if is_plain and head_gguf.fits(name, target.spec) else None
        opened = OpenedCheckpoint.of(name, config_only=True)
    except (UserError, OSError):
        return None
    features = opened.spec.features
    if features is None or run_by(opened.raw) is None:
        return None
    fits = (features.size, opened.spec.vocab_size) == (target.spec.hidden_size, target.spec.vocab_size)
    return name if fits else None
