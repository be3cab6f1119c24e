"""The names of a model in several GGUF files: NAME-00001-of-00003.gguf and so on. Nothing here imports numpy."""

from __future__ import annotations

import re
from collections.abc import Iterable

PIECE = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>(?!00000)\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def pieces_of(name: str) -> list[str]:
    """Return the names of all pieces of a model, the first one first, by the name of any; of a whole file its own."""
    found = PIECE.fullmatch(name)
    if found is None:
        return [name]
    model, count, suffix = found["model"], found["count"], found["suffix"]
    return [f"{model}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that stand for one model each, first pieces and whole files, with all files that it needs."""
    found = [pieces_of(name) for name in names]
    return {pieces[0]: pieces for pieces in found}
