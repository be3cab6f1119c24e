"""Calls as JSON between <|tool_call|> and <|/tool_call|>, one or a list, as Phi 4 mini writes them.

<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
functools[{"name": "weather", "arguments": {"city": "Paris"}}]

The model writes the second form where its template does not say how calls are written.
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema
from forerun.text.calling import behind, json_calls
from forerun.text.parts import Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "phi"
SIGNS = (("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>"))
MARKS = ("<|tool_call|>", "<|/tool_call|>")
SPELLED = "functools["
OPENING = (MARKS[0], SPELLED)


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls."""
    while (mark := (yield from scan.until(OPENING, Text))) is not None:
        if mark == SPELLED:
            scan.put_back(SPELLED[-1])
        is_call = yield from json_calls(scan)
        if mark == SPELLED and is_call is False and not scan.is_over:
            yield Text(SPELLED[:-1])  # it may be a word of a text
        yield from behind(scan, is_call, MARKS[1:], OPENING)


BETWEEN = ", "


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    return rules.json_call(name, schema)


def around(rules: Rules, calls: str) -> str:
    """Return the grammar of the calls with the marks around them."""
    return f'{rules.mark(MARKS[0])} "[" {calls} "]" {rules.mark(MARKS[1])}'
