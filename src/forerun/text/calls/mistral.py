"""Calls behind [TOOL_CALLS], as Mistral's models write them: a list as JSON, or since tokenizer v11 each by itself.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]
[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

from functools import partial

from forerun.text.calling import begin, json_calls
from forerun.text.parts import CallArguments, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "mistral"
SIGNS = (("[TOOL_CALLS]",),)
MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


def read(scan: Scanner, tools: Tools) -> Steps:
    """The parts of an answer."""
    while (mark := (yield from scan.until(MARKS[:1], Text))) is not None:
        yield from scan.space()
        if (yield from scan.next()) in ("[", "{"):
            if not (yield from json_calls(scan)):
                yield Text(mark + scan.log)
        else:
            yield from _call(scan)


def _call(scan: Scanner) -> Steps:
    """A name and its arguments. The id is left out: calls get their own here."""
    name, mark = yield from scan.collect((*MARKS[1:], "{"))
    if mark == MARKS[1]:
        _, mark = yield from scan.collect((MARKS[2], "{"))
    if mark is None:
        yield Text(MARKS[0] + name)
        return
    if mark == "{":
        scan.rest = mark + scan.rest
    started, index = begin(scan, name.strip())
    yield started
    if (yield from scan.json(partial(CallArguments, index))) is not None:
        yield CallEnd(index)
