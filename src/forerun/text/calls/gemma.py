"""Calls with bare keys and marks around texts, as Gemma 4 and FunctionGemma write them.

<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>
"""

from __future__ import annotations

from forerun.text.calling import begin
from forerun.text.parts import CallArguments, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools, inside, json_of

NAME = "gemma"
SIGNS = (("<|tool_call>", "call:"), ("<start_function_call>", "call:"))
OPENING = ("<|tool_call>", "<start_function_call>")
CLOSING = ("<tool_call|>", "<end_function_call>")
QUOTES = ('<|"|>', "<escape>")
MARKS = (*OPENING, *CLOSING, *QUOTES)


def read(scan: Scanner, tools: Tools) -> Steps:
    """The parts of an answer."""
    while (mark := (yield from scan.until(OPENING, Text))) is not None:
        space = yield from scan.space()
        name, end = yield from scan.collect(("{",))
        if end is None or not name.startswith("call:"):
            yield Text(f"{mark}{space}{name}{end or ''}")
            continue
        started, index = begin(scan, name.removeprefix("call:").strip())
        yield started
        scan.rest = "{" + scan.rest
        if (yield from _value(scan, index)):
            yield CallEnd(index)
        yield from scan.space()
        yield from scan.skip(*CLOSING)


def _value(scan: Scanner, index: int) -> Steps:
    """One value as JSON. Returns whether it was whole."""
    yield from scan.space()
    if (quote := (yield from scan.skip(*QUOTES, '"'))) is not None:
        yield CallArguments(index, '"')
        end = yield from scan.until((quote,), lambda text: CallArguments(index, inside(text)))
        if end is not None:
            yield CallArguments(index, '"')
        return end is not None
    if (bracket := (yield from scan.skip("{", "["))) is not None:
        return (yield from _several(scan, index, bracket, "}" if bracket == "{" else "]"))
    word = ""
    while (char := (yield from scan.next())) not in ("", ",", "}", "]"):
        word += scan.take(len(char))
    if not char:
        return False
    yield CallArguments(index, json_of(word.strip(), frozenset()))
    return True


def _several(scan: Scanner, index: int, opening: str, closing: str) -> Steps:
    """What is between brackets; in braces each value has a key."""
    yield CallArguments(index, opening)
    separator = ""
    while True:
        yield from scan.space()
        if (yield from scan.skip(closing)):
            yield CallArguments(index, closing)
            return True
        yield from scan.skip(",")
        yield from scan.space()
        if (yield from scan.next()) in ("", "}", "]"):
            if scan.rest.startswith(closing):
                continue
            return False
        key = ""
        if opening == "{":
            quote = (yield from scan.skip(*QUOTES, '"')) or ""
            name, end = yield from scan.collect((f"{quote}:",))
            if end is None:
                return False
            key = f'"{inside(name.strip())}": '
        yield CallArguments(index, f"{separator}{key}")
        separator = ", "
        if not (yield from _value(scan, index)):
            return False
