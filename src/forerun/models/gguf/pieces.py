"""The file names of a model in several GGUF files: NAME-00001-of-00003.gguf and so on. This file imports no numpy."""

from __future__ import annotations

import re
from collections.abc import Iterable

PIECE = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>(?!00000)\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def pieces_of(name: str) -> list[str]:
    """Return the names of all pieces of a model, in order. name: the name of any piece, or of a model in one file."""
    match = PIECE.fullmatch(name)
    if match is None:
        return [name]
    model, count, suffix = match["model"], match["count"], match["suffix"]
    return [f"{model}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Map each model to the names of all its files, as the piece count in a file name gives them.

    names: for each model, the name of at least one of its files. The key of a model is the name of its first piece, or
    of its only file.
    """
    return {pieces[0]: pieces for pieces in map(pieces_of, names)}
