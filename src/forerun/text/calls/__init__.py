"""The dialects of tool calls: how each family of models writes a call into its text, one family per file.

A file states NAME; SIGNS: texts that all stand in a chat template of this dialect, in one or more versions; MARKS:
texts of special tokens that carry the calls; `read(scan, tools)`, the parts of an answer; and `call(rules, tools, name,
schema)`, the grammar of one call. It may state the other fields of Dialect, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from forerun.registry import stated
from forerun.text.call_grammars import Rules, Schema, Thought, literal
from forerun.text.parts import Scanner, Steps
from forerun.text.tools import Tools

USUAL = "hermes"  # for a template with tools of no known dialect: it knows calls without marks, too


def _as_they_are(rules: Rules, calls: str) -> str:
    return calls


@dataclass(frozen=True)
class Dialect:
    """One dialect. reads_always: whether answers without tools have marks, too.

    call, around, between: grammars of one call and of all calls together, and the text between two. opening: marks that
    begin a call; bare: characters that begin a call without marks. says: the grammar of text in a call's place, where
    that has marks, too. thought: the dialect's marks of reasoning. ends_thought: whether a call ends the reasoning, for
    models that leave the closing mark out.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    marks: tuple[str, ...]
    read: Callable[[Scanner, Tools], Steps]
    call: Callable[[Rules, Tools, str, Schema], str]
    around: Callable[[Rules, str], str] = _as_they_are
    between: Callable[[Rules], str] | str = "\n"
    most_calls: int | None = None
    reads_always: bool = False
    opening: tuple[str, ...] = ()
    bare: str = ""
    says: Callable[..., str] | None = None
    thought: Thought | None = None
    ends_thought: bool = False

    def grammar(self, rules: Rules, tools: Tools, *, parallel: bool, may_say: bool, answer: str = "") -> str:
        """Return the rule of one call of these tools, or of several.

        may_say: text may stand before the calls, or in their place. answer: a rule for the only text in their place.
        """
        one = rules.add(" | ".join(rules.add(self.call(rules, tools, name, tools.schemas[name])) for name in tools))
        between = self.between if isinstance(self.between, str) else self.between(rules)
        more = f"({literal(between)} {one})*" if between else f"{one}*"
        calls = f"{one} {more}" if parallel and self.most_calls != 1 else one
        if may_say and self.says is not None:
            said = self.says(rules, answer) if answer else self.says(rules)
            return self.around(rules, f"({calls} | {said})")
        calls = self.around(rules, calls)
        if answer:
            return f"({calls}) | {answer}"
        if not may_say:
            return calls
        said = rules.text_without(self.opening, self.bare)
        return f"{said} ({calls})?" if self.is_marked(rules) else f"({calls}) | {said}"

    def is_marked(self, rules: Rules) -> bool:
        """Return whether calls begin with a mark, as the model of these rules writes them."""
        return any(mark in rules.special or mark in rules.template for mark in self.opening)


@cache
def dialect(name: str) -> Dialect:
    """Return the dialect of a file."""
    module = importlib.import_module(f"{__name__}.{name}")
    return Dialect(
        module.NAME,
        module.SIGNS,
        module.MARKS,
        module.read,
        module.call,
        getattr(module, "around", _as_they_are),
        getattr(module, "between", getattr(module, "BETWEEN", "\n")),
        getattr(module, "MOST_CALLS", None),
        getattr(module, "READS_ALWAYS", False),
        getattr(module, "OPENING", module.MARKS[:1]),
        getattr(module, "BARE", ""),
        getattr(module, "says", None),
        getattr(module, "THOUGHT", None),
        getattr(module, "ENDS_THOUGHT", False),
    )


@cache
def dialects() -> tuple[Dialect, ...]:
    """Return all dialects, by name."""
    return tuple(dialect(name) for name in sorted(stated(__name__, "NAME")))


def of_template(source: str) -> Dialect | None:
    """Return the dialect with the most, then longest, signs in a chat template's text; None where none has all."""
    matches = [
        (len(signs), sum(map(len, signs)), one.name)
        for one in dialects()
        for signs in one.signs
        if all(sign in source for sign in signs)
    ]
    return dialect(max(matches)[2]) if matches else None
