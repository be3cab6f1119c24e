"""Calls between marks, as DeepSeek V3, R1 and V3.1 write them. The older models put the arguments into a code block.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema, literal
from forerun.text.calling import FENCES, arguments, behind
from forerun.text.parts import CallBegin, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "deepseek"
SIGNS = (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),)
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
MARKS = (*CALLS, *CALL, SEPARATOR)
OPENING = (CALLS[0], CALL[0])


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls."""
    while (mark := (yield from scan.until((*CALLS, CALL[0]), Text))) is not None:
        if mark != CALL[0]:
            continue
        yield from behind(scan, (yield from _call(scan)), CALL[1:], (*CALLS, CALL[0]))
        yield from scan.space()


def _call(scan: Scanner) -> Steps:
    """Read a call's name and arguments. Returns True for a complete call, None for an incomplete call, else False."""
    scan.begin()
    name, end = yield from scan.collect(MARKS)
    if end != SEPARATOR:
        return False
    if name.strip() == "function":  # the kind of call comes first, and then the function's name
        name, end = yield from scan.collect(("\n", "{", *MARKS))
        scan.put_back(end or "")
    yield CallBegin(name.strip())
    yield from scan.space()
    fence = yield from scan.skip(*FENCES)
    if not (yield from arguments(scan, (*MARKS, FENCES[-1]))):
        return None
    yield CallEnd()
    yield from scan.space()
    if fence:
        yield from scan.skip(FENCES[-1])
    return True


BETWEEN = ""


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    head, sep, end = (rules.mark(text) for text in (CALL[0], SEPARATOR, CALL[1]))
    if FENCES[0] in rules.template:
        named = literal(f"{name}\n{FENCES[0]}\n")
        return f'{head} "function" {sep} {named} {rules.json(schema)} "\\n```" {end}'
    return f"{head} {literal(name)} {sep} {rules.json(schema)} {end}"


def around(rules: Rules, calls: str) -> str:
    """Return the grammar of the calls with the marks around them."""
    return f"{rules.mark(CALLS[0])} {calls} {rules.mark(CALLS[1])}"
