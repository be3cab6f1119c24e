"""The dialects of tool calls: how models write a call into their text. Each file of this folder defines one dialect.

A file defines

    NAME                              the name of the dialect
    SIGNS                             sets of texts; a chat template of this dialect has all texts of at least one set
    MARKS                             the texts of the special tokens around and inside calls
    read(scan, tools)                 yields an answer as pieces of text, reasoning and calls
    call(rules, tools, name, schema)  returns the grammar of one call

and may define the other fields of Dialect, too.
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

USUAL = "hermes"  # for a template that knows tools but no dialect: hermes reads calls without marks, too


def _as_they_are(rules: Rules, calls: str) -> str:
    return calls


@dataclass(frozen=True)
class Dialect:
    """One dialect of tool calls, as a file of this folder defines it.

    reads_always: whether answers contain marks even if the request has no tools. call: returns the grammar of one call.
    around: returns the grammar of all calls together. between: the text between two calls. most_calls: the largest
    number of calls in an answer; None = no limit. opening: the marks that begin a call. bare: the characters that begin
    a call without marks. says: returns the grammar of an answer without calls, in a dialect that puts marks around such
    an answer; None in other dialects. thought: the dialect's marks of reasoning. ends_thought: whether a call ends the
    reasoning, for models that leave out the closing mark of reasoning.
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
        """Return the rule for an answer with one call of these tools, or with several calls if `parallel`.

        may_say: whether the answer may have text before the calls, or text without calls. answer: the rule for an
        answer without calls; '' = any text. If `answer` is given, no text may stand before the calls.
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
        """Return whether the model knows an opening mark of calls, as a special token or from its chat template."""
        return any(mark in rules.special or mark in rules.template for mark in self.opening)


@cache
def dialect(name: str) -> Dialect:
    """Return the dialect that the file `name`.py defines."""
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
    """Return all dialects, sorted by name."""
    return tuple(dialect(name) for name in sorted(stated(__name__, "NAME")))


def of_template(source: str) -> Dialect | None:
    """Return the dialect of a chat template, by its signs in the template's text; None if no dialect fits.

    If several dialects fit, return the dialect with the most signs. Among dialects with equally many signs, return the
    dialect whose signs have the most characters in total.
    """
    matches = [
        (len(signs), sum(map(len, signs)), one.name)
        for one in dialects()
        for signs in one.signs
        if all(sign in source for sign in signs)
    ]
    return dialect(max(matches)[2]) if matches else None
