"""Calls between marks, each with a numbered name, as Kimi K2 writes them.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema, literal
from forerun.text.calling import arguments, behind
from forerun.text.parts import CallBegin, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "kimi"
SIGNS = (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),)
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = (*SECTION, BEGIN, ARGUMENTS, END)
OPENING = (SECTION[0], BEGIN)
ENDS_THOUGHT = True


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls."""
    while (mark := (yield from scan.until((*SECTION, BEGIN), Text))) is not None:
        if mark != BEGIN:
            continue
        yield from behind(scan, (yield from _call(scan, tools)), (END,), (*SECTION, BEGIN))
        yield from scan.space()


def _call(scan: Scanner, tools: Tools) -> Steps:
    """Read a call's name and arguments. Returns True for a complete call, None for an incomplete call, else False."""
    scan.begin()
    name, end = yield from scan.collect(MARKS)
    if end != ARGUMENTS:
        return False
    name = name.strip().removeprefix("functions.")
    name = name.rpartition(":")[0] or name
    if name.isdecimal() and len(tools.schemas) == 1:  # the model wrote only the number
        (name,) = tools
    yield CallBegin(name)
    if not (yield from arguments(scan, MARKS)):
        return None
    yield CallEnd()
    return True


BETWEEN = ""


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    named = f"{literal(f'functions.{name}:')} /[0-9]/"
    return f"{rules.mark(BEGIN)} {named} {rules.mark(ARGUMENTS)} {rules.json(schema)} {rules.mark(END)}"


def around(rules: Rules, calls: str) -> str:
    """Return the grammar of the calls with the marks around them."""
    return f"{rules.mark(SECTION[0])} {calls} {rules.mark(SECTION[1])}"
