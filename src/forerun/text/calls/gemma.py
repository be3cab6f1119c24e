"""Calls with unquoted keys, and with marks in place of quotes, as Gemma 4 and FunctionGemma write them.

<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>
"""

from __future__ import annotations

import json

from forerun.text.call_grammars import Rules, Schema, in_turn, literal
from forerun.text.calling import behind
from forerun.text.parts import CallArguments, CallBegin, CallEnd, Reasoning, Scanner, Steps, Text
from forerun.text.tools import Tools, choices_of, inside, json_of, several

NAME = "gemma"
SIGNS = (("<|tool_call>", "call:"), ("<start_function_call>", "call:"))
OPENING = ("<|tool_call>", "<start_function_call>")
CLOSING = ("<tool_call|>", "<end_function_call>")
QUOTES = ('<|"|>', "<escape>")
CHANNEL = ("<|channel>", "<channel|>")  # around reasoning, which may also stand after the answer, mostly empty
MARKS = (*OPENING, *CLOSING, *QUOTES, *CHANNEL)
READS_ALWAYS = True  # because answers without tools have channels, too


def read(scan: Scanner, tools: Tools) -> Steps:
    """Yield an answer as pieces of text, reasoning and tool calls."""
    opening = OPENING if tools.schemas else ()
    while (mark := (yield from scan.until((*opening, *CHANNEL), Text))) is not None:
        if mark in CHANNEL:
            if mark == CHANNEL[0]:
                yield from _thought(scan)
            continue
        yield from behind(scan, (yield from _call(scan)), CLOSING, (*OPENING, *CHANNEL))


def _call(scan: Scanner) -> Steps:
    """Read a call's name and arguments. Returns True for a complete call, None for an incomplete call, else False."""
    scan.begin()
    yield from scan.space()
    name, end = yield from scan.collect(("{", *MARKS))
    if end != "{" or not name.startswith("call:"):
        return False
    yield CallBegin(name.removeprefix("call:").strip())
    scan.put_back(end)
    if not (yield from _value(scan)):
        return None
    yield CallEnd()
    return True


def _thought(scan: Scanner) -> Steps:
    """Yield the text up to the end of a channel as reasoning. Marks of further channels inside the text are dropped."""
    yield from scan.skip("thought\n", "thought")
    while (yield from scan.until(CHANNEL, Reasoning)) == CHANNEL[0]:
        yield from scan.skip("thought\n", "thought")


def _value(scan: Scanner) -> Steps:
    """Read one value, and yield the value as JSON. Returns whether the value was complete."""
    yield from scan.space()
    if (quote := (yield from scan.skip(*QUOTES, '"'))) is not None:
        yield CallArguments('"')
        end = yield from scan.until((quote,), lambda text: CallArguments(inside(text)))
        if end is not None:
            yield CallArguments('"')
        return end is not None
    if (bracket := (yield from scan.skip("{", "["))) is not None:
        return (yield from _several(scan, bracket, "}" if bracket == "{" else "]"))
    word = ""
    while (char := (yield from scan.next())) not in ("", ",", "}", "]"):
        word += scan.take(len(char))
    if not char:
        return False
    yield CallArguments(json_of(word.strip(), frozenset()))
    return True


def _several(scan: Scanner, opening: str, closing: str) -> Steps:
    """Read values between brackets, or keys and values between braces. Returns whether the closing bracket came."""
    yield CallArguments(opening)
    separator = ""
    while True:
        yield from scan.space()
        if (yield from scan.skip(closing)):
            yield CallArguments(closing)
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
        yield CallArguments(f"{separator}{key}")
        separator = ", "
        if not (yield from _value(scan)):
            return False


BETWEEN = ""


def call(rules: Rules, tools: Tools, name: str, schema: Schema) -> str:
    """Return the grammar of one call."""
    n = 0 if OPENING[0] in rules.template or OPENING[0] in rules.special else 1
    head = f"{rules.mark(OPENING[n])} {literal(f'call:{name}')}"
    return f"{head} {_object(rules, schema, QUOTES[n])} {rules.mark(CLOSING[n])}"


def _object(rules: Rules, schema: Schema, quote: str) -> str:
    def one(key: str, value_schema: Schema) -> str:
        return f"{literal(f'{key}:')} {_written(rules, value_schema, quote)}"

    return f'"{{" {in_turn(rules, schema, one, ",")} "}}"'


def _written(rules: Rules, schema: Schema, quote: str) -> str:
    """Return the grammar of a value that a schema allows. A schema without a type allows any value.

    quote: the mark that the model writes in place of quotes.
    """
    ways = [*several(schema.get("anyOf")), *several(schema.get("oneOf"))]
    choices = choices_of(schema)
    kind = schema.get("type")
    if not ways and not choices and kind is None:
        return _any(rules, quote, "value")
    if ways:
        return f"({' | '.join(_written(rules, one, quote) for one in ways)})"
    if choices:
        texts = (f"{rules.mark(quote)} {literal(one)} {rules.mark(quote)}" for one in choices if isinstance(one, str))
        others = (literal(json.dumps(one)) for one in choices if not isinstance(one, str))
        return f"({' | '.join([*texts, *others])})"
    if isinstance(kind, list):
        return f"({' | '.join(_written(rules, {**schema, 'type': one}, quote) for one in kind)})"
    if kind == "object" and not schema.get("properties") and schema.get("additionalProperties") is not False:
        return _any(rules, quote, "object")
    if kind == "object":
        return _object(rules, schema, quote)
    if kind == "array":
        item = rules.add(_written(rules, schema.get("items") or {}, quote))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {more} "]"' if least else f'"[" ({more})? "]"'
    if kind == "string":
        return f"{rules.mark(quote)} {rules.up_to(quote, schema=schema)}"
    return rules.json(schema)


def _any(rules: Rules, quote: str, kind: str) -> str:
    """Return the name of the rule for any JSON value of a kind: "value" (all kinds), "object", "array" or "text".

    quote: the mark that the model writes in place of quotes.
    """
    if "any_value" not in rules.rules:
        number = r"/-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?/"
        rules.rules |= {
            "any_value": f'any_object | any_array | any_text | {number} | "true" | "false" | "null"',
            "any_text": f"{rules.mark(quote)} {rules.up_to(quote)}",
            "any_object": '"{" (any_pair ("," any_pair)*)? "}"',
            "any_pair": '/[A-Za-z_][A-Za-z0-9_]*/ ":" any_value',
            "any_array": '"[" (any_value ("," any_value)*)? "]"',
        }
    return f"any_{kind}"
