"""A list of calls as JSON after <|tool_call|>, as Granite 3 writes it (Granite 4 writes the dialect hermes).

<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema
from forerun.text.calling import behind, json_calls
from forerun.text.parts import Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "granite"
SIGNS = (("<|tool_call|>",),)
MARKS = ("<|tool_call|>",)
SPELLED = "<tool_call>"  # the mark as the smaller models spell it
OPENING = (*MARKS, SPELLED)


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls."""
    while (yield from scan.until(OPENING, Text)) is not None:
        yield from behind(scan, (yield from json_calls(scan)), (), OPENING)


BETWEEN = ", "


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    return rules.json_call(name, schema)


def around(rules: Rules, calls: str) -> str:
    """Return the grammar of the calls with the marks around them."""
    return f'{rules.mark(MARKS[0])} "[" {calls} "]"'
