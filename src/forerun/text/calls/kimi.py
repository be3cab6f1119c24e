"""Calls between marks, each with a numbered name, as Kimi K2 writes them.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from functools import partial

from forerun.text.call_grammars import Rules, Schema, literal
from forerun.text.calling import begin
from forerun.text.parts import CallArguments, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "kimi"
SIGNS = (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),)
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = (*SECTION, BEGIN, ARGUMENTS, END)
OPENING = (SECTION[0], BEGIN)


def read(scan: Scanner, tools: Tools) -> Steps:
    """The parts of an answer."""
    while (mark := (yield from scan.until((*SECTION, BEGIN), Text))) is not None:
        if mark != BEGIN:
            continue
        name, end = yield from scan.collect((ARGUMENTS,))
        if end is None:
            yield Text(mark + name)
            return
        started, index = begin(scan, name.strip().removeprefix("functions.").rpartition(":")[0] or name.strip())
        yield started
        if (yield from scan.json(partial(CallArguments, index))) is not None:
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
