"""What dialects of tool calls have in common: calls written as JSON, as tags with values, and as Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from functools import partial

from forerun.text.parts import CallArguments, CallBegin, CallEnd, Scanner, Steps, Text
from forerun.text.tools import Tools, inside, json_of

NAME_KEYS, ARGUMENT_KEYS = ("name", "function"), ("arguments", "parameters")
FENCES = ("```json", "```")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")


def begin(scan: Scanner, name: str) -> tuple[CallBegin, int]:
    """The begin of the next call, and its number."""
    scan.num_calls += 1
    return CallBegin(scan.num_calls - 1, name), scan.num_calls - 1


def json_call(scan: Scanner, tools: Tools | None = None) -> Steps:
    """One object like {"name": "f", "arguments": {...}}, its keys in any order. Returns whether it was a call.

    tools: where only their calls count. Nothing was given where it is False.
    """
    index, arguments = -1, ""
    opening = yield from scan.skip("{", "{{")  # as the template of Qwen 2.5 spells it, and its small models with it
    if opening is None:
        return False
    while True:
        yield from scan.space()
        if (yield from scan.skip("}")):
            if opening == "{{":
                yield from scan.skip("}")
            break
        yield from scan.skip(",")
        key = _text_of((yield from scan.json()))
        yield from scan.space()
        if key is None or not (yield from scan.skip(":")):
            return index >= 0
        yield from scan.space()
        first = yield from scan.next()
        if key in ARGUMENT_KEYS:
            if index >= 0 and first == "{":
                arguments = "{"
                if (yield from scan.json(partial(CallArguments, index))) is None:
                    return True
                continue
            value = yield from scan.json()
            arguments = _object_of(value)
        else:
            value = yield from scan.json()
            if key in NAME_KEYS and index < 0 and (name := _text_of(value)) is not None:
                if tools is not None and name not in tools:
                    return False
                started, index = begin(scan, name)
                yield started
                if arguments:  # they came first
                    yield CallArguments(index, arguments)
                continue
        if value is None:
            return index >= 0
        if key in ARGUMENT_KEYS and index >= 0:
            yield CallArguments(index, arguments)
    if index < 0:
        return False
    if not arguments:
        yield CallArguments(index, "{}")
    yield CallEnd(index)
    return True


def _text_of(value: str | None) -> str | None:
    """A JSON text's value; None for any other."""
    try:
        found = None if value is None else json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _object_of(value: str | None) -> str:
    """Arguments that were written as a JSON text in a JSON text, or as null."""
    inner = _text_of(value)
    found = value if inner is None else inner
    return "{}" if found in (None, "null", "") else str(found)


def json_calls(scan: Scanner, tools: Tools | None = None) -> Steps:
    """One call, or a list of them. Returns whether there was one; `scan.log` has what was consumed where not."""
    scan.begin()
    yield from scan.space()
    if not (yield from scan.skip("[")):
        return (yield from json_call(scan, tools))
    found = False
    while True:
        yield from scan.space()
        if (yield from scan.skip("]")) or not (yield from scan.next()):
            return found
        yield from scan.skip(",")
        yield from scan.space()
        if not (yield from json_call(scan, tools)):
            if found:
                yield Text(scan.log)
            return found
        found = True
        scan.begin()


def marked(scan: Scanner, opening: tuple[str, ...], read: Callable[[str], Steps]) -> Steps:
    """Text, and what `read` makes of what follows an opening mark, again and again."""
    while (mark := (yield from scan.until(opening, Text))) is not None:
        yield from read(mark)


def value_until(scan: Scanner, index: int, closing: tuple[str, ...], types: frozenset[str]) -> Steps:
    """A value that is written as it is up to a mark, as JSON. Returns the mark; None where the text ends before.

    One that can only be a text is given piece by piece, any other when it is whole.
    """
    if types == {"string"}:
        yield CallArguments(index, '"')
        mark = yield from scan.until(closing, lambda text: CallArguments(index, inside(text)))
        if mark is not None:
            yield CallArguments(index, '"')
        return mark
    raw, mark = yield from scan.collect(closing)
    if mark is not None:
        yield CallArguments(index, json_of(raw, types))
    return mark


def python_calls(scan: Scanner, tools: Tools | None) -> Steps:
    """A list such as [f(city="Paris", days=[1, 2]), g()]. Returns whether its first call was one, as `json_calls`."""
    scan.begin()
    if not (yield from scan.skip("[")):
        return False
    found = False
    while True:
        yield from scan.space()
        if (yield from scan.skip("]")) or not (yield from scan.next()):
            return found
        yield from scan.skip(",")
        yield from scan.space()
        if not (yield from python_call(scan, tools)):
            if found:
                yield Text(scan.log)
            return found
        found = True
        scan.begin()


def python_call(scan: Scanner, tools: Tools | None) -> Steps:
    """One call such as f(city="Paris"). Returns whether it was one, of these tools where they are given."""
    name = yield from word(scan)
    if not name or (tools is not None and name not in tools) or not (yield from scan.skip("(")):
        return False
    started, index = begin(scan, name)
    yield started
    before = "{"
    while True:
        yield from scan.space()
        if (yield from scan.skip(")")):
            yield CallArguments(index, "{}" if before == "{" else "}")
            yield CallEnd(index)
            return True
        yield from scan.skip(",")
        yield from scan.space()
        key = yield from word(scan)
        yield from scan.space()
        if not key or not (yield from scan.skip("=")):
            return True
        raw = yield from _python_value(scan)
        if raw is None:
            return True
        yield CallArguments(index, f"{before}{json.dumps(key)}: {_json_of_python(raw)}")
        before = ", "


def word(scan: Scanner) -> Steps:
    """A name, which may have dots; '' where there is none."""
    while True:
        found = _WORD.match(scan.rest)
        if found is None and (scan.rest or scan.is_closed):
            return ""
        if found is not None and (found.end() < len(scan.rest) or scan.is_closed):
            return scan.take(found.end())
        yield None


def _python_value(scan: Scanner) -> Steps:
    """The text of a value up to the comma or bracket behind it; None where the text ends before."""
    while True:
        end = _end_of_python(scan.rest)
        if end is not None:
            return scan.take(end)
        if scan.is_closed:
            scan.take(len(scan.rest))
            return None
        yield None


def _end_of_python(text: str) -> int | None:
    depth, quote, i = 0, "", 0
    while i < len(text):
        char = text[i]
        if quote:
            if char == "\\":
                i += 1
            elif text.startswith(quote, i):
                i, quote = i + len(quote) - 1, ""
        elif char in "'\"":
            if len(text) < i + 3 and text[i:] == char * (len(text) - i):
                return None  # it may be the first of three quotes
            quote = char * 3 if text.startswith(char * 3, i) else char
            i += len(quote) - 1
        elif char in "([{":
            depth += 1
        elif char in ")]}" and depth:
            depth -= 1
        elif char in ",)" and not depth:
            return i
        i += 1
    return None


def _json_of_python(raw: str) -> str:
    """A Python literal as JSON; what is none is a text. What is JSON already stays as it is."""
    try:
        json.loads(raw)
    except ValueError:
        pass
    else:
        return raw.strip()
    try:
        return json.dumps(ast.literal_eval(raw.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json_of(raw.strip(), frozenset())
