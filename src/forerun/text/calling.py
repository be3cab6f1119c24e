"""Readers that dialects of tool calls share: for calls written as JSON, as tags with values, and as Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from functools import partial

from forerun.text.parts import CallArguments, CallBegin, CallEnd, Scanner, Steps
from forerun.text.tools import Tools, inside, json_of, no_number

NAME_KEYS, ARGUMENT_KEYS = ("name", "function"), ("arguments", "parameters")
FENCES = ("```json", "```")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_PADDED = re.compile(r"-?0\d+")
_NAME = re.compile(r"[\w.:/-]+")


def json_call(scan: Scanner, tools: Tools | None = None) -> Steps:
    """Read a call written as one object, such as {"name": "f", "arguments": {...}}, with the keys in any order.

    Returns True for a complete call, and None for an incomplete call. Returns False, without yielding a piece, for any
    other text. tools: if given, only calls of these tools count as calls.
    """
    has_name, arguments = False, ""
    opening = yield from scan.skip("{", "{{")  # "{{" stands in the template of Qwen 2.5, so its small models write it
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
            return None if has_name else False
        yield from scan.space()
        first = yield from scan.next()
        if key in ARGUMENT_KEYS:
            if has_name and first == "{":
                arguments = "{"
                if (yield from scan.json(CallArguments)) is None:
                    return None
                continue
            value = yield from scan.json()
            arguments = _object_of(value)
        else:
            value = yield from scan.json()
            if key in NAME_KEYS and not has_name and (name := _text_of(value)) is not None:
                if tools is not None and name not in tools:
                    return False
                has_name = True
                yield CallBegin(name)
                if arguments:  # the arguments came before the name
                    yield CallArguments(arguments)
                continue
        if value is None:
            return None if has_name else False
        if key in ARGUMENT_KEYS and has_name:
            yield CallArguments(arguments)
    if not has_name:
        return False
    if not arguments:
        yield CallArguments("{}")
    yield CallEnd()
    return True


def _text_of(value: str | None) -> str | None:
    """Return the value of a JSON string; None for any other JSON."""
    try:
        parsed = None if value is None else json.loads(value)
    except ValueError:
        return None
    return parsed if isinstance(parsed, str) else None


def _object_of(value: str | None) -> str:
    """Return a call's arguments as the text of a JSON object.

    An object inside a JSON string is taken out of the string. Null and missing arguments become an empty object.
    """
    inner = _text_of(value)
    text = value if inner is None or inner.strip()[:1] not in ("", "{") else inner.strip()
    return "{}" if text in (None, "null", "") else str(text)


def json_calls(scan: Scanner, tools: Tools | None = None) -> Steps:
    """Read one call, or a list of calls, written as JSON. Returns True, None or False, as `json_call` does.

    Afterwards `scan.log` contains the text that was read since the last complete call.
    """
    scan.begin()
    yield from scan.space()
    if not (yield from scan.skip("[")):
        return (yield from json_call(scan, tools))
    return (yield from _several(scan, partial(json_call, scan, tools)))


def _several(scan: Scanner, call: Callable[[], Steps]) -> Steps:
    """Read a list of calls after its opening bracket. call: reads one call.

    Returns True for a complete list of calls, None for an incomplete list, and False for a list without calls.
    """
    has_calls = False
    while True:
        yield from scan.space()
        if (yield from scan.skip("]")):
            return has_calls
        yield from scan.skip(",")
        yield from scan.space()
        is_call = yield from call()
        if not is_call:
            return None if has_calls else is_call
        has_calls = True
        scan.begin()


def arguments(scan: Scanner, closing: tuple[str, ...]) -> Steps:
    """Read a call's arguments, a JSON object. Returns whether the object is complete.

    closing: marks that may follow the arguments. If such a mark comes at once, the arguments are {}.
    """
    yield from scan.space()
    if (yield from scan.starts(*closing)):
        yield CallArguments("{}")
        return True
    return (yield from scan.json(CallArguments)) is not None


def behind(scan: Scanner, is_call: bool | None, closing: tuple[str, ...], opening: tuple[str, ...]) -> Steps:
    """Finish reading a call between marks. is_call: the result of the function that has read the call.

    After a complete call, the closing mark is consumed. After an incomplete call (None), the text is consumed up to the
    next closing or opening mark, but an opening mark is not consumed. If the text was no call (False), `Scanner.undo`
    puts the text back.
    """
    if is_call:
        yield from scan.space()
        yield from scan.skip(*closing)
    elif is_call is None:
        _, mark = yield from scan.collect((*closing, *opening))
        scan.put_back(mark if mark in opening else "")
    else:
        scan.undo()


def bare(scan: Scanner, before: str, is_call: bool | None) -> None:
    """Put back text that was read as a call without marks around it, so that the text is read as text instead.

    before: the text consumed before the call. is_call: False = the text was no call; None = the text surely is a call,
    but incomplete. If the answer ends inside an incomplete call, nothing is put back.
    """
    if is_call is False or not scan.is_over:
        scan.put_back(before + scan.log)


def value_until(scan: Scanner, closing: tuple[str, ...], types: frozenset[str]) -> Steps:
    """Read a value that is written without quotes, up to one of the marks `closing`, and yield the value as JSON.

    types: the JSON types that the value may have. A value that can only be a string is yielded piece by piece, and any
    other value once it is complete. Returns the mark; None if the text ends before a mark.
    """
    if types == {"string"}:
        yield CallArguments('"')
        mark = yield from scan.until(closing, lambda text: CallArguments(inside(text)))
        if mark is not None:
            yield CallArguments('"')
        return mark
    raw, mark = yield from scan.collect(closing)
    if mark is not None:
        yield CallArguments(json_of(raw, types))
    return mark


def python_calls(scan: Scanner, tools: Tools | None) -> Steps:
    """Read a list such as [f(city="Paris", days=[1, 2]), g()]. Returns True, None or False, as `json_call` does."""
    scan.begin()
    if not (yield from scan.skip("[")):
        return False
    return (yield from _several(scan, partial(python_call, scan, tools)))


def python_call(scan: Scanner, tools: Tools | None) -> Steps:
    """Read one call such as f(city="Paris"). Returns True, None or False, as `json_call` does."""
    name = yield from word(scan)
    if not name or (tools is not None and name not in tools) or not (yield from scan.skip("(")):
        return False
    yield CallBegin(name)
    before = "{"
    while True:
        yield from scan.space()
        if (yield from scan.skip(")")):
            yield CallArguments("{}" if before == "{" else "}")
            yield CallEnd()
            return True
        yield from scan.skip(",")
        yield from scan.space()
        key = yield from word(scan)
        yield from scan.space()
        if not key or not (yield from scan.skip("=")):
            return None
        raw = yield from _python_value(scan)
        value = None if raw is None else _json_of_python(raw)
        if value is None:
            return None
        yield CallArguments(f"{before}{json.dumps(key)}: {value}")
        before = ", "


def tool_name(scan: Scanner) -> Steps:
    """Consume a tool's name and the white space around it, and return the name; '' where there is no name."""
    yield from scan.space()
    name = yield from word(scan, _NAME)
    yield from scan.space()
    return name


def word(scan: Scanner, pattern: re.Pattern[str] = _WORD) -> Steps:
    """Consume and return a name, which may have dots; '' where there is no name."""
    while True:
        match = pattern.match(scan.rest)
        if match is None and (scan.rest or scan.is_closed):
            return ""
        if match is not None and (match.end() < len(scan.rest) or scan.is_closed):
            return scan.take(match.end())
        yield None


def _python_value(scan: Scanner) -> Steps:
    """Consume and return the text of a Python value, up to the comma or bracket that follows the value.

    Returns None if the text ends before the comma or bracket.
    """
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


def _json_of_python(raw: str) -> str | None:
    """Convert the text of a Python literal to JSON. A set becomes a list. JSON is returned unchanged.

    Line breaks within quotes, and numbers with leading zeros, are accepted, because models write both. Any text that is
    no literal becomes a JSON string. But if such a text begins with a quote, return None: a quote inside the value was
    not escaped, so that the value's end was found too early.
    """
    word = raw.strip()
    try:
        json.loads(word, parse_constant=no_number)
    except ValueError:
        pass
    else:
        return word
    if _PADDED.fullmatch(word):
        return str(int(word))
    try:
        value = ast.literal_eval(word.replace("\n", "\\n").replace("\0", "\\0") if word[:1] in "'\"" else word)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_listed)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None if word[:1] in ("'", '"') else json_of(word, frozenset())


def _listed(value: object) -> list[object]:
    if isinstance(value, set):
        return sorted(value, key=repr)
    raise TypeError(value)
