"""Writes docs/methods/README.md, the table of all methods: `python docs/methods_table.py`.

The methods are those that a scan of their rooms finds, each with the first sentence of its file and what it declares. A
test compares the page with the code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from forerun.drafters import Drafter
from forerun.registry import names

BY_OPTIONS = "by its options"
PAGE = Path(__file__).resolve().parent / "methods" / "README.md"

HEAD = """# Methods

Every method is one file of the package, exact unless its line says otherwise. A request has a drafter, a verification
rule and a pacing policy, in any combination that fits. `forerun bench methods` compares all drafters on six kinds of
work; each page has its numbers. This page is written by `python docs/methods_table.py`.
"""


def first_sentence(module: ModuleType) -> str:
    """Return the first sentence of a file's docstring; a full stop inside of one, as in "et al. 2023", ends none."""
    paragraph = " ".join((module.__doc__ or "").split("\n\n")[0].split())
    found = re.match(r".*?[.](?=\s+[A-Z]|$)", paragraph)
    return (found[0] if found else paragraph).replace("|", "\\|")


def drafter_facts(module: ModuleType) -> tuple[str, str]:
    """Return shape and draws of the drafters that a file defines, or takes from another where it defines none."""
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, Drafter) and c is not Drafter]
    own = [c for c in classes if c.__module__ == module.__name__] or classes
    return _declared(own, "shape"), _declared(own, "draws")


def rule_facts(module: ModuleType) -> tuple[str, str, str]:
    """Return whether a rule is lossless, and the shapes and draws that it judges."""
    return "yes" if module.LOSSLESS else "**no**", ", ".join(module.SHAPES), ", ".join(module.DRAWS)


def _declared(classes: list[type[Drafter]], name: str) -> str:
    """Return what drafters declare; one that declares it for each instance does so by its options."""
    said = dict.fromkeys(BY_OPTIONS if _is_set_later(c, name) else str(getattr(c, name)) for c in classes)
    return " or ".join(said) or BY_OPTIONS


def _is_set_later(drafter: type[Drafter], name: str) -> bool:
    """Whether a class or one that it is made of makes a property of an attribute, or sets it on `self`."""
    own = [c for c in drafter.__mro__ if c not in (Drafter, object)]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(c))) for c in own]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    is_set = any(node.attr == name and isinstance(node.ctx, ast.Store) for node in nodes)
    return is_set or not isinstance(getattr(drafter, name), str)


Facts = Callable[[ModuleType], tuple[str, ...]]
ROOMS: list[tuple[str, str, str, tuple[str, ...], Facts]] = [
    ("drafters", "Drafters", "They guess how a text goes on.", ("drafts", "siblings"), drafter_facts),
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
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
