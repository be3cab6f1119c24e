"""Calls as tags within tags, as Qwen 3 Coder and 3.5 write them; values are texts or JSON, by the tool's schema.

<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema, in_turn, literal, tag_value
from forerun.text.calling import begin, tool_name, value_until
from forerun.text.parts import CallArguments, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools, inside

NAME = "qwen3_coder"
SIGNS = (("<tool_call>", "<function=", "<parameter="),)
MARKS = ("<tool_call>", "</tool_call>")
FUNCTION, PARAMETER = ("<function=", "</function>"), ("<parameter=", "</parameter>")
OPENING = (MARKS[0], FUNCTION[0])
ENDS_THOUGHT = True


def read(scan: Scanner, tools: Tools) -> Steps:
    """The parts of an answer. The outer tag may be missing, as such models often leave it out."""
    while (mark := (yield from scan.until((MARKS[0], FUNCTION[0]), Text))) is not None:
        if mark == MARKS[0]:
            space = yield from scan.space()
            if not (yield from scan.skip(FUNCTION[0])):
                yield Text(mark + space)
                continue
        yield from _call(scan, tools)
        yield from scan.space()
        yield from scan.skip(MARKS[1])


def _call(scan: Scanner, tools: Tools) -> Steps:
    scan.begin()
    name = yield from tool_name(scan)
    if not name or not (yield from scan.skip(">")):
        yield Text(FUNCTION[0] + scan.log)
        return
    started, index = begin(scan, name)
    yield started
    before = "{"
    while True:
        yield from scan.space()
        if (yield from scan.skip(PARAMETER[0])):
            key, end = yield from scan.collect((">",))
            if end is None:
                return
            yield from scan.skip("\n")
            yield CallArguments(index, f'{before}"{inside(key)}": ')
            closing = (f"\n{PARAMETER[1]}", PARAMETER[1])
            if (yield from value_until(scan, index, closing, tools.types(started.name, key))) is None:
                return
            before = ", "
            continue
        if (yield from scan.skip(FUNCTION[1])) or (yield from scan.starts(MARKS[1])):
            yield CallArguments(index, "{}" if before == "{" else "}")
            yield CallEnd(index)
        return


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """One call, as a grammar."""

    def one(key: str, own: Schema) -> str:
        value = tag_value(rules, own, tools, name, key, PARAMETER[1], "\n")
        return f'{literal(f"{PARAMETER[0]}{key}>")} "\\n" {value} "\\n"'

    head, end = literal(f"\n{FUNCTION[0]}{name}>\n"), literal(f"{FUNCTION[1]}\n")
    return f"{rules.mark(MARKS[0])} {head} {in_turn(rules, schema, one, '')} {end} {rules.mark(MARKS[1])}"
