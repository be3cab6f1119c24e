"""The dialects of tool calls: how each family of models writes a call into its text, one family per file.

A file states NAME; SIGNS: texts of which all stand in a chat template of this dialect, in one or more versions; MARKS:
texts of special tokens that carry the calls; and `read(scan, tools)`, the parts of an answer. THOUGHT, READS_ALWAYS and
what else a file may state are the fields of Dialect.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from forerun.registry import stated
from forerun.text.parts import Scanner, Steps
from forerun.text.tools import Tools

USUAL = "hermes"  # for a template with tools of no known dialect: it knows calls without marks, too


@dataclass(frozen=True)
class Dialect:
    """One of them. reads_always: whether answers without tools have marks, too."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    marks: tuple[str, ...]
    read: Callable[[Scanner, Tools], Steps]
    reads_always: bool = False


@cache
def dialect(name: str) -> Dialect:
    """The dialect of a file."""
    module = importlib.import_module(f"{__name__}.{name}")
    return Dialect(module.NAME, module.SIGNS, module.MARKS, module.read, getattr(module, "READS_ALWAYS", False))


@cache
def dialects() -> tuple[Dialect, ...]:
    """All of them, by name."""
    return tuple(dialect(name) for name in sorted(stated(__name__, "NAME")))


def of_template(source: str) -> Dialect | None:
    """The dialect with the most signs in the text of a chat template, the longest of them; None where there is none."""
    found = [
        (len(signs), sum(map(len, signs)), one.name)
        for one in dialects()
        for signs in one.signs
        if all(sign in source for sign in signs)
    ]
    return dialect(max(found)[2]) if found else None
