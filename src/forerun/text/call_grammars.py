"""Builds grammars that allow only tool calls with valid arguments, in llguidance's form (a kind of Lark).

A dialect defines how one call is written and how several calls are joined. This file has the pieces from which a
dialect builds its grammar. In a grammar, marks that are special tokens of the model are written as ids, and all other
marks as texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forerun.params import telling
from forerun.text.tools import Tools, choices_of, kinds, several

Schema = Mapping[str, Any]
ANY: Schema = {"type": "object"}
TEXT = "/(?s:.*)/"
# As templates print the arguments of earlier calls: one blank after commas and colons.
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# By the value of SamplingParams.json_whitespace.
WRITTEN: Mapping[str, Mapping[str, Any]] = {
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "spaced": _SPACED,
    "free": {"whitespace_flexible": True, "whitespace_pattern": r"\x20|\n[\x20\t]{0,64}"},
}


class Thought(NamedTuple):
    """The marks around the reasoning of an answer, and the marks between the reasoning and the rest of the answer.

    opening: the marks and texts that open the reasoning, in order; () if the prompt has opened the reasoning. closing:
    the mark that closes the reasoning. rest: the marks and texts after the closing mark, in order; () if only optional
    white space follows the closing mark.
    """

    opening: tuple[str, ...]
    closing: str
    rest: tuple[str, ...] = ()


@dataclass
class Rules:
    """The rules of one grammar. special: the ids of special tokens, by text. template: the chat template's text."""

    special: Mapping[str, int]
    template: str = ""
    rules: dict[str, str] = field(default_factory=dict)

    def add(self, body: str, about: str = "") -> str:
        """Add a rule, and return its name. about: the rule's options in brackets, such as [suffix="..."]."""
        name = f"r{len(self.rules)}"
        self.rules[name + about] = body
        return name

    def mark(self, text: str) -> str:
        """Return the grammar of a mark. A special token at the mark's beginning is written as an id."""
        token = self.begins(text)
        rest = [literal(text[len(token) :])] if text != token else []
        return " ".join([*([f"<[{self.special[token]}]>"] if token else []), *rest])

    def begins(self, mark: str) -> str:
        """Return the longest special token with which a mark begins; '' if it begins with no special token."""
        return max((name for name in self.special if name and mark.startswith(name)), key=len, default="")

    def up_to(self, mark: str, before: str = "", schema: Schema | None = None) -> str:
        """Return the grammar of a text that is followed by the mark that ends the text.

        before: a text that comes directly before the mark, such as a line break. schema: the schema of the text.
        """
        limited = text_of(schema or {})
        if mark in self.special or limited != TEXT:
            end = f"{literal(before)} {self.mark(mark)}" if before else self.mark(mark)
            return f"{limited} {end}"
        return self.add(TEXT, f"[suffix={literal(before + mark)}]")

    def text_without(self, marks: tuple[str, ...], bare: str) -> str:
        """Add a rule for texts that contain none of `marks`, and return the rule's name.

        bare: characters with which the texts do not begin, not even after white space.
        """
        name = f"SAID{len(self.rules)}"
        no = "".join(f" & ~/(?s:.*){re.escape(mark).replace('/', chr(92) + '/')}(?s:.*)/" for mark in marks)
        first = f" & ~/\\s*[{re.escape(bare)}](?s:.*)/" if bare else ""
        self.rules[name] = f"{TEXT}{no}{first}"
        return name

    def json(self, schema: Schema, written: Mapping[str, Any] = _SPACED) -> str:
        """Add a rule for the JSON values that a schema allows, and return the rule's name.

        written: options for the white space in the value; by default one blank after commas and colons.
        """
        text = json.dumps({**_without_words(schema), "x-guidance": written}, ensure_ascii=False)
        return self.add(f"%json {text}")

    def json_call(self, name: str, schema: Schema, arguments: str = "arguments", end: str = "") -> str:
        """Return the grammar of a call of the tool `name` as one JSON object.

        arguments: the key of the arguments in the object. end: a rule for entries after the arguments.
        """
        head = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": ')
        return f'{head} {self.json(schema)} {end} "}}"'

    def text(self) -> str:
        """Return the text of the whole grammar. The sign ::= is escaped, because it would mark llama.cpp's form."""
        return "\n".join(f"{name}: {body}" for name, body in self.rules.items()).replace("::=", r"\u003a:=")


def _without_words(schema: Any) -> Any:
    """Return a schema without its descriptions, titles, examples and the like, which may be long."""
    if isinstance(schema, list):
        return [_without_words(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in telling(schema).items():
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, Mapping):
            kept[key] = {name: _without_words(one) for name, one in value.items()}
        elif key in ("enum", "const", "required"):
            kept[key] = value
        elif key not in ("description", "title", "examples", "default", "$comment", "$schema"):
            kept[key] = _without_words(value)
    return kept


def text_of(schema: Schema) -> str:
    """Return a regex for the texts that a schema allows by its pattern, or else by its minLength and maxLength."""
    if isinstance(pattern := schema.get("pattern"), str):
        before, after = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if pattern.endswith("$") else "(?s:.*)")
        inner = pattern.removeprefix("^").removesuffix("$").replace(r"\/", "/").replace("/", r"\/")
        return f"/{before}({inner}){after}/"
    counted = telling(schema)
    least, most = counted.get("minLength", 0), counted.get("maxLength", "")
    return TEXT if least == 0 and most == "" else f"/(?s:.{{{least},{most}}})/"


def literal(text: str) -> str:
    """Return a text as a quoted string in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def parameters(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Return a tuple (name, schema, is_required) for each parameter of a tool, required parameters first."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = [name for name in several(schema.get("required")) if isinstance(name, str)]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def whole(one: Any) -> Schema:
        return {**shared, **one} if isinstance(one, Mapping) else {}

    first = [(name, whole(properties.get(name)), True) for name in required]
    return [*first, *((name, whole(one), False) for name, one in properties.items() if name not in required)]


def in_turn(rules: Rules, schema: Schema, one: Callable[[str, Schema], str], between: str) -> str:
    """Return the grammar of a call's parameters in a fixed order. Parameters that are not required may be left out.

    one(name, schema): returns the grammar of one parameter. between: the text between two parameters.
    """
    written = [(rules.add(one(name, parameter)), needed) for name, parameter, needed in parameters(schema)]
    if not written:
        return '""'
    if not between:
        return " ".join(name if needed else f"{name}?" for name, needed in written)
    sep = literal(between)
    first = [name for name, needed in written if needed]
    rest = [name for name, needed in written if not needed]
    if first:
        return " ".join([f" {sep} ".join(first), *(f"({sep} {name})?" for name in rest)])
    ways = [" ".join([name, *(f"({sep} {other})?" for other in rest[i + 1 :])]) for i, name in enumerate(rest)]
    return f"({' | '.join(f'({way})' for way in ways)})?"


def tag_value(rules: Rules, schema: Schema, tools: Tools, tool: str, parameter: str, closing: str, before: str) -> str:
    """Return the grammar of a value of the parameter `parameter` of `tool`, followed by the tag `closing`.

    A value that can only be a string, or a string or null, is written without quotes. Any other value is written as
    JSON. schema: the value's schema. before: a text directly before the tag.
    """
    types = tools.types(tool, parameter)
    end = f"{literal(before)} {rules.mark(closing)}" if before else rules.mark(closing)
    if "string" not in types or types - {"string", "null"}:
        return f"{rules.json(schema)} {end}"
    ways = (*several(schema.get("anyOf")), *several(schema.get("oneOf")), schema)
    text = next(one for one in ways if "string" in kinds(one))
    choices = choices_of(text)
    written = f"({' | '.join(literal(str(one)) for one in choices)}) {end}" if choices else ""
    written = written or rules.up_to(closing, before, text)
    may_be_null = "null" in types and (bool(choices) or text_of(text) != TEXT)
    return f'({written} | "null" {end})' if may_be_null else written
