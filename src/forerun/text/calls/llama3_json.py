"""Calls as JSON that are the whole answer, as Llama 3.1 to 3.3 write them. Semicolons separate several calls.

{"name": "weather", "parameters": {"city": "Paris"}}
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema
from forerun.text.calling import bare, json_call
from forerun.text.parts import Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "llama3_json"
SIGNS = (("<|python_tag|>", '"parameters": dictionary'), ('"parameters": dictionary of argument name',))
MARKS = ("<|python_tag|>",)
OPENING, BARE = (), "{<"


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls. A call counts only at the beginning of the answer."""
    is_sure = False
    while True:
        before = yield from scan.space()
        is_sure |= (yield from scan.skip(*MARKS)) is not None
        before += yield from scan.space()
        if (yield from scan.next()) != "{":
            yield Text(before)
            break
        scan.begin()
        if not (is_call := (yield from json_call(scan, tools))):
            bare(scan, before, None if is_sure else is_call)
            break
        is_sure = True
        yield from scan.space()
        yield from scan.skip(";", ",")
    yield from scan.until((), Text)


BETWEEN = "; "


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    return rules.json_call(name, schema, "parameters")
