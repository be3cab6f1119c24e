"""An answer that is a call as JSON, as Llama 3.1 to 3.3 write it; several stand behind one another, with semicolons.

{"name": "weather", "parameters": {"city": "Paris"}}
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema
from forerun.text.calling import json_call
from forerun.text.parts import Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "llama3_json"
SIGNS = (("<|python_tag|>", '"parameters": dictionary'), ('"parameters": dictionary of argument name',))
MARKS = ("<|python_tag|>",)
OPENING, BARE = (), "{<"


def read(scan: Scanner, tools: Tools) -> Steps:
    """The parts of an answer: a call counts where the answer begins with it."""
    while True:
        before = yield from scan.space()
        before += (yield from scan.skip(*MARKS)) or ""
        before += yield from scan.space()
        if (yield from scan.next()) != "{":
            yield Text(before)
            break
        scan.begin()
        if not (yield from json_call(scan, tools)):
            yield Text(before + scan.log)
            break
        yield from scan.space()
        yield from scan.skip(";", ",")
    yield from scan.until((), Text)


BETWEEN = "; "


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """One call, as a grammar."""
    return rules.json_call(name, schema, "parameters")
