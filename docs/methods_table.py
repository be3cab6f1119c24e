"""Writes docs/methods/README.md, the table of all methods: `python docs/methods_table.py`.

The methods are those that a scan of their rooms finds, each with the first sentence of its file and what it declares. A
test compares the page with the code.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from forerun.config import EngineConfig
from forerun.drafters import Target
from forerun.engine.opened import Opened
from forerun.errors import UserError
from forerun.registry import names
from forerun.verify import beams

PAGE = Path(__file__).resolve().parent / "methods" / "README.md"

HEAD = """# Methods

Every method is one file of the package, exact unless its line says otherwise. A request has a drafter, a verification
rule and a pacing policy, in any combination that fits. `forerun bench methods` compares all drafters on six kinds of
work; each page has its numbers. This page is written by `python docs/methods_table.py`.
"""


SEARCH = """## Search

It finds the likeliest texts instead of drawing one: a request asks for it by `num_beams`, with a drafter that can say
what follows several texts.

| name | in a sentence |
|---|---|
| [beam](beam.md) | {} |
"""


def first_sentence(module: ModuleType) -> str:
    """Return the first sentence of a file's docstring; a full stop inside of one, as in "et al. 2023", ends none."""
    paragraph = " ".join((module.__doc__ or "").split("\n\n")[0].split())
    found = re.match(r".*?[.](?=\s+[A-Z]|$)", paragraph)
    return (found[0] if found else paragraph).replace("|", "\\|")


def drafter_facts(module: ModuleType) -> tuple[str, str]:
    """Return shape and draws of a drafter with its default options, "-" where it cannot be built of these alone."""
    try:
        drafter = module.build(module.Options(), shipped_target())
    except UserError:
        return "-", "-"
    return drafter.shape, drafter.draws


@functools.cache
def shipped_target() -> Target:
    """Return the shipped target, for which there is a draft model."""
    opened = Opened.of(EngineConfig(target="shipped", ops="reference", max_batch_size=1, max_seq_len=256))
    return Target.of(opened.load().model, opened)


def rule_facts(module: ModuleType) -> tuple[str, str, str]:
    """Return whether a rule is lossless, and the shapes and draws that it judges."""
    return "yes" if module.LOSSLESS else "**no**", ", ".join(module.SHAPES), ", ".join(module.DRAWS)


Facts = Callable[[ModuleType], tuple[str, ...]]
ROOMS: list[tuple[str, str, str, tuple[str, ...], Facts]] = [
    (
        "drafters",
        "Drafters",
        "They guess how a text goes on. Drafts and siblings: with default options; - where those need a file.",
        ("drafts", "siblings"),
        drafter_facts,
    ),
    (
        "verify",
        "Verification rules",
        "They decide which guesses are kept.",
        ("lossless", "judges", "siblings"),
        rule_facts,
    ),
    ("pacing", "Pacing policies", "They decide how far to guess.", (), lambda module: ()),
]


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for room, title, what, columns, facts in ROOMS:
        header = ("name", *columns, "in a sentence")
        rows = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        for name in names(f"forerun.{room}"):
            module = importlib.import_module(f"forerun.{room}.{name}")
            rows.append("| " + " | ".join((f"[{name}]({name}.md)", *facts(module), first_sentence(module))) + " |")
        parts.append(f"## {title}\n\n{what}\n\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, SEARCH.format(first_sentence(beams))])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
