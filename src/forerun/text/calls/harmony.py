"""Messages in channels, as gpt-oss writes them: channel `analysis` is reasoning, a message to a function is a call.

    <|channel|>analysis<|message|>Weather is asked for.<|end|><|start|>assistant<|channel|>commentary
    to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The format is OpenAI's "harmony response format". The library of that name is not used: it is compiled for the tokens of
one vocabulary, and a few lines of code do its work without a further dependency.
"""

from __future__ import annotations

import re

from forerun.text.call_grammars import TEXT, Rules, Schema, Thought, literal
from forerun.text.calling import arguments
from forerun.text.parts import CallBegin, CallEnd, Reasoning, Scanner, Steps, Text
from forerun.text.tools import Tools

NAME = "harmony"
SIGNS = (("<|channel|>", "<|message|>", "<|start|>"),)
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
START = "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (CHANNEL, MESSAGE, START, "<|constrain|>", *ENDS)
THOUGHT = Thought((CHANNEL, "analysis", MESSAGE), ENDS[0], (START, "assistant"))
READS_ALWAYS = True  # every answer is in channels, with tools or without
_RECIPIENT, _CHANNEL = re.compile(r"\bto=(?:functions\.)?([\w.-]+)"), re.compile(r"<\|channel\|>\s*(\w+)")


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text, reasoning and tool calls."""
    yield from scan.space()
    if not (yield from scan.starts(CHANNEL, START, " to=", "to=")):
        yield from scan.until((), Text)
        return
    while (yield from scan.next()):
        header, mark = yield from scan.collect((MESSAGE,))
        if mark is None:
            return
        channels = _CHANNEL.findall(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] != "assistant":
            yield CallBegin(recipient[1])
            yield from _arguments(scan)
        elif channels[-1:] == ["analysis"]:
            yield from _body(scan, Reasoning)
        else:
            yield from _body(scan, Text)


def _body(scan: Scanner, piece: type[Text] | type[Reasoning]) -> Steps:
    _put_back(scan, (yield from scan.until((*ENDS, START), piece)))


def _arguments(scan: Scanner) -> Steps:
    """Read a call's arguments, a JSON object. A message that is no JSON object, such as code for a tool, is no call."""
    if (yield from arguments(scan, (*ENDS, START))):
        yield CallEnd()
    _, mark = yield from scan.collect((*ENDS, START))
    _put_back(scan, mark)


def _put_back(scan: Scanner, mark: str | None) -> None:
    if mark == START:  # it begins the next message
        scan.put_back(mark)


MOST_CALLS = 1  # the call ends the answer


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    to = literal(f"to=functions.{name}")
    channel = rules.mark(CHANNEL)
    heads = f'({channel} "commentary " {to} | " " {to} {channel} ("commentary" | "analysis"))'
    kind = f'(" " {rules.mark("<|constrain|>")} "json")?'
    return f"{heads} {kind} {rules.mark(MESSAGE)} {rules.json(schema)}"


def says(rules: Rules, text: str = TEXT) -> str:
    """Return the grammar of an answer without calls: a text in the channel final."""
    return f'{rules.mark(CHANNEL)} "final" {rules.mark(MESSAGE)} {text}'
