"""Calls after [TOOL_CALLS], as Mistral's models write them: a JSON list, or since tokenizer v11 each call by itself.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]
[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema, literal
from forerun.text.calling import behind, json_calls, tool_name
from forerun.text.parts import CallArguments, CallBegin, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "mistral"
SIGNS = (("[TOOL_CALLS]",),)
MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls."""
    while (yield from scan.until(MARKS[:1], Text)) is not None:
        yield from scan.space()
        read_calls = json_calls if (yield from scan.next()) in ("[", "{") else _call
        yield from behind(scan, (yield from read_calls(scan)), (), MARKS[:1])


def _call(scan: Scanner) -> Steps:
    """Read a call's name and arguments. Returns True for a complete call, None for an incomplete call, else False.

    The id that the model wrote is dropped, because every ToolCall gets a new id.
    """
    scan.begin()
    name = yield from tool_name(scan)
    if (yield from scan.skip(MARKS[1])):
        yield from tool_name(scan)
    if not name or not ((yield from scan.skip(MARKS[2])) or (yield from scan.next()) == "{"):
        return False
    yield CallBegin(name)
    if (yield from scan.json(CallArguments)) is None:
        return None
    yield CallEnd()
    return True


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    if _is_new(rules):
        has_id = MARKS[1] in rules.special or MARKS[1] in rules.template
        numbered = f"({rules.mark(MARKS[1])} /[A-Za-z0-9]{{9}}/)?" if has_id else ""
        return f"{rules.mark(MARKS[0])} {literal(name)} {numbered} {rules.mark(MARKS[2])} {rules.json(schema)}"
    before, after = literal(', "id": "'), literal('"')
    return rules.json_call(name, schema, end=f"({before} /[A-Za-z0-9]{{9}}/ {after})?")


def around(rules: Rules, calls: str) -> str:
    """Return the grammar of the calls with the marks around them."""
    return calls if _is_new(rules) else f'{rules.mark(MARKS[0])} "[" {calls} "]"'


def between(rules: Rules) -> str:
    """Return the text between two calls."""
    return "" if _is_new(rules) else ", "


def _is_new(rules: Rules) -> bool:
    return MARKS[2] in rules.special or MARKS[2] in rules.template
