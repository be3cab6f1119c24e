"""An answer that is a list of calls in Python, as Llama 3.2, Llama 4 and LFM 2 write them.

    [weather(city="Paris"), now()]

LFM 2 has marks around the list.
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema, in_turn, literal
from forerun.text.calling import bare, behind, python_calls
from forerun.text.parts import Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "pythonic"
SIGNS = (("[func_name1(",), ("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "<|im_start|>"))
MARKS = ("<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "<|python_end|>")
OPENING, CLOSING = MARKS[::2], MARKS[1::2]
BARE = "["
PYTHON = (("boolean", "True"), ("boolean", "False"), ("null", "None"))


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and calls. Calls without marks count only at the beginning of the answer."""
    before = yield from scan.space()
    if (yield from scan.next()) != "[":
        yield Text(before)
    elif not (is_call := (yield from python_calls(scan, tools))):
        bare(scan, before, is_call)
    while (yield from scan.until(OPENING, Text)) is not None:
        yield from scan.space()
        is_call = yield from python_calls(scan, None)
        is_empty = is_call is False and "".join(scan.log.split()) == "[]"
        yield from behind(scan, is_empty or is_call, CLOSING, OPENING)


BETWEEN = ", "


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call. Values are JSON, but true, false and null may also be written as in Python."""

    def one(key: str, value_schema: Schema) -> str:
        names = [name for kind, name in PYTHON if kind in _types(value_schema)]
        return f"{literal(f'{key}=')} ({' | '.join([rules.json(value_schema), *map(literal, names)])})"

    return f"{literal(f'{name}(')} {in_turn(rules, schema, one, ', ')} {literal(')')}"


def _types(schema: Schema) -> tuple[str, ...]:
    """Return the JSON types that a schema states; () where enum or const restricts the values."""
    kind = () if "enum" in schema or "const" in schema else schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def around(rules: Rules, calls: str) -> str:
    """Return the grammar of the calls with the marks around them."""
    if MARKS[0] in rules.template or MARKS[0] in rules.special:
        return f'{rules.mark(MARKS[0])} "[" {calls} "]" {rules.mark(MARKS[1])}'
    return f'"[" {calls} "]"'
