"""Calls as JSON between tags, as Hermes, Qwen 2.5 and 3, Granite 4, SmolLM 3 and others write them.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Small models write the object without these tags: alone, as a code block, or between <tools>. If an answer begins with
such an object, and the object names a tool, then the object counts as a call, too.
"""

from __future__ import annotations

from forerun.text.call_grammars import Rules, Schema
from forerun.text.calling import bare, behind, json_call, json_calls
from forerun.text.parts import Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "hermes"
SIGNS = (("<tool_call>",),)
MARKS = ("<tool_call>", "</tool_call>")
BARE = "{`<"
SPELLED = "<tools>"
FENCES = {"```json": "```", "```": "```", SPELLED: "</tools>"}  # other marks around calls


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text and tool calls."""
    yield from _untagged(scan, tools)
    while (yield from scan.until(MARKS[:1], Text)) is not None:
        yield from behind(scan, (yield from json_calls(scan)), MARKS[1:], MARKS[:1])


def _untagged(scan: Scanner, tools: Tools) -> Steps:
    """Yield the calls without tags at the very beginning of an answer."""
    is_sure = False
    while True:
        before = yield from scan.space()
        fence = (yield from scan.skip(*FENCES)) or ""
        is_sure |= fence == SPELLED
        before += (fence if fence != SPELLED else "") + (yield from scan.space())
        if (yield from scan.next()) != "{":
            yield Text(before)
            return
        scan.begin()
        if not (is_call := (yield from json_call(scan, tools))):
            bare(scan, before, None if is_sure else is_call)
            return
        is_sure = True
        yield from scan.space()
        yield from scan.skip(*FENCES.values())


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    has_line = any(f"{line}{MARKS[1]}" in rules.template for line in ("\n", "\\n"))
    line = '"\\n"' if has_line else '"\\n"?'
    return f'{rules.mark(MARKS[0])} "\\n" {rules.json_call(name, schema)} {line} {rules.mark(MARKS[1])}'
