"""Calls as tags within tags, as Qwen 3 Coder and 3.5 write them.

<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

The tool's schema decides whether a value is a plain text or JSON.
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema, in_turn, literal, tag_value
from forerun.text.calling import behind, tool_name, value_until
from forerun.text.parts import CallArguments, CallBegin, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools, inside

NAME = "qwen3_coder"
SIGNS = (("<tool_call>", "<function=", "<parameter="),)
MARKS = ("<tool_call>", "</tool_call>")
FUNCTION, PARAMETER = ("<function=", "</function>"), ("<parameter=", "</parameter>")
OPENING = (MARKS[0], FUNCTION[0])
ENDS_THOUGHT = True


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls. The tag <tool_call> may be missing, as models often omit it."""
    while (mark := (yield from scan.until(OPENING, Text))) is not None:
        scan.begin()
        if mark == MARKS[0]:
            yield from scan.space()
        is_call = False
        if mark == FUNCTION[0] or (yield from scan.skip(FUNCTION[0])):
            is_call = yield from _call(scan, tools)
        yield from behind(scan, is_call, MARKS[1:], OPENING)


def _call(scan: Scanner, tools: Tools) -> Steps:
    """Read a call's name and arguments. Returns True for a complete call, None for an incomplete call, else False."""
    name = yield from tool_name(scan)
    if not name or not (yield from scan.skip(">")):
        return False
    yield CallBegin(name)
    before = "{"
    while True:
        yield from scan.space()
        if not (yield from scan.skip(PARAMETER[0])):
            break
        key, end = yield from scan.collect((">",))
        if end is None:
            return None
        yield from scan.skip("\n")
        yield CallArguments(f'{before}"{inside(key)}": ')
        closing = (f"\n{PARAMETER[1]}", PARAMETER[1])
        if (yield from value_until(scan, closing, tools.types(name, key))) is None:
            return None
        before = ", "
    if not ((yield from scan.skip(FUNCTION[1])) or (yield from scan.starts(MARKS[1]))):
        return None
    yield CallArguments("{}" if before == "{" else "}")
    yield CallEnd()
    return True


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""

    def one(key: str, value_schema: Schema) -> str:
        value = tag_value(rules, value_schema, tools, name, key, PARAMETER[1], "\n")
        return f'{literal(f"{PARAMETER[0]}{key}>")} "\\n" {value} "\\n"'

    head, end = literal(f"\n{FUNCTION[0]}{name}>\n"), literal(f"{FUNCTION[1]}\n")
    return f"{rules.mark(MARKS[0])} {head} {in_turn(rules, schema, one, '')} {end} {rules.mark(MARKS[1])}"
