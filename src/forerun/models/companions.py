"""Drafters that were published for a target and lie beside it, found by their names.

A folder org-model-it has its drafter in org-model-it-assistant, and a GGUF file in a file of its own folder whose name
says so. Of the hub what is in its cache is found, and nothing is fetched.
"""

from __future__ import annotations

import itertools

from forerun.errors import UserError
from forerun.models.families import run_by
from forerun.models.hub import is_hub_id
from forerun.models.opened import OpenedCheckpoint

ENDING = "-assistant"
WORDS = ("assistant", "mtp")  # of which a file's name has one


def find(target: OpenedCheckpoint) -> str | None:
    """Return the place of a drafter that lies beside a target and fits it; None where there is none."""
    return next((name for name in _candidates(target) if _fits(name, target)), None)


def _candidates(target: OpenedCheckpoint) -> list[str]:
    """Return the names that say so, those first that have most in common with the target's."""
    if target.source is None:
        return []
    if is_hub_id(target.asked):
        return [f"{target.asked}{ENDING}"] if _is_cached(f"{target.asked}{ENDING}") else []
    path = target.path.resolve()
    if path.is_dir():
        beside = path.with_name(path.name + ENDING)
        return [str(beside)] if beside.is_dir() else []
    files = [file for file in path.parent.glob("*.gguf") if file != path and _says(file.stem)]
    return [str(file) for file in sorted(files, key=lambda file: (-_alike(file.stem, path.stem), file.name))]


def _says(name: str) -> bool:
    return any(word in name.lower() for word in WORDS)


def _alike(name: str, other: str) -> int:
    """Return how many letters two names begin alike with."""
    pairs = zip(name.lower(), other.lower(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # what huggingface_hub takes for no id: a revision, or a file
        return False


def _fits(name: str, target: OpenedCheckpoint) -> bool:
    """Whether it is a drafter with rows as wide as the target's and as many ids."""
    try:
        opened = OpenedCheckpoint.of(name, config_only=True)
    except (UserError, OSError):
        return False
    features = opened.spec.features
    if features is None or run_by(opened.raw) is None:
        return False
    return (features.size, opened.spec.vocab_size) == (target.spec.hidden_size, target.spec.vocab_size)
