"""Calls between marks, each with a numbered name, as Kimi K2 writes them.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema, literal
from forerun.text.calling import arguments, begin
from forerun.text.parts import CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "kimi"
SIGNS = (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),)
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = (*SECTION, BEGIN, ARGUMENTS, END)
OPENING = (SECTION[0], BEGIN)
ENDS_THOUGHT = True


def read(scan: Scanner, tools: Tools) -> Steps:
    """The parts of an answer."""
    while (mark := (yield from scan.until((*SECTION, BEGIN), Text))) is not None:
        if mark != BEGIN:
            continue
        name, end = yield from scan.collect((ARGUMENTS,))
        if end is None:
            yield Text(mark + name)
            return
        name = name.strip().removeprefix("functions.")
        name = name.rpartition(":")[0] or name
        if name.isdecimal() and len(tools.schemas) == 1:  # its number alone
            (name,) = tools
        started, index = begin(scan, name)
        yield started
        if (yield from arguments(scan, index, MARKS)):
            yield CallEnd(index)
        yield from scan.space()
        yield from scan.skip(END)
        yield from scan.space()


BETWEEN = ""


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """One call, as a grammar."""
    named = f"{literal(f'functions.{name}:')} /[0-9]/"
    return f"{rules.mark(BEGIN)} {named} {rules.mark(ARGUMENTS)} {rules.json(schema)} {rules.mark(END)}"


def around(rules: Rules, calls: str) -> str:
    """What stands around the calls."""
    return f"{rules.mark(SECTION[0])} {calls} {rules.mark(SECTION[1])}"
