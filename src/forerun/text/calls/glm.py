"""Calls as keys and values, as GLM 4.5 and later write them.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>

The tool's schema decides whether a value is a plain text or JSON. Since GLM 4.7 there are no line breaks.
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema, in_turn, literal, tag_value
from forerun.text.calling import behind, tool_name, value_until
from forerun.text.parts import CallArguments, CallBegin, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools, inside

NAME = "glm"
SIGNS = (("<tool_call>", "<arg_key>", "<arg_value>"),)
KEY, VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
MARKS = ("<tool_call>", "</tool_call>", *KEY, *VALUE)
ENDS_THOUGHT = True


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls."""
    while (yield from scan.until(MARKS[:1], Text)) is not None:
        yield from behind(scan, (yield from _call(scan, tools)), MARKS[1:2], MARKS[:1])


def _call(scan: Scanner, tools: Tools) -> Steps:
    """Read a call's name and arguments. Returns True for a complete call, None for an incomplete call, else False."""
    scan.begin()
    name = yield from tool_name(scan)
    mark = yield from scan.skip(KEY[0], MARKS[1])
    if not name or mark is None:
        return False
    yield CallBegin(name)
    before = "{"
    while mark == KEY[0]:
        key, end = yield from scan.collect(KEY[1:])
        yield from scan.space()
        if end is None or not (yield from scan.skip(VALUE[0])):
            return None
        yield CallArguments(f'{before}"{inside(key.strip())}": ')
        if (yield from value_until(scan, VALUE[1:], tools.types(name, key.strip()))) is None:
            return None
        before = ", "
        yield from scan.space()
        mark = yield from scan.skip(KEY[0], MARKS[1])
    if mark is None:
        return None
    scan.put_back(mark)
    yield CallArguments("{}" if before == "{" else "}")
    yield CallEnd()
    return True


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""

    def one(key: str, value_schema: Schema) -> str:
        value = tag_value(rules, value_schema, tools, name, key, VALUE[1], "")
        named = f"{rules.mark(KEY[0])} {literal(key)} {rules.mark(KEY[1])} {line}"
        return f"{named} {rules.mark(VALUE[0])} {value} {line}"

    line = literal(between(rules))
    head = f"{literal(name)} {line}"
    return f"{rules.mark(MARKS[0])} {head} {in_turn(rules, schema, one, '')} {rules.mark(MARKS[1])}"


def between(rules: Rules) -> str:
    """Return the text between tags and calls: a line break, or nothing since GLM 4.7."""
    return "\n" if any(f"{line}{KEY[0]}" in rules.template for line in ("\n", "\\n")) else ""
