"""Reads the text, reasoning and calls of an answer by the `response_template` of tokenizer_config.json.

A response template is transformers' declaration of how answers are read (utils/chat_parsing). It lists the fields of
the message. Each field has a beginning and an end, a format in which its text is parsed, and a transformation of the
result. A field without a beginning takes the text outside of all other fields. Only the fields content,
reasoning_content (or thinking, reasoning) and tool_calls are read; other fields are dropped.

Text and reasoning are yielded piece by piece. A call is yielded once it is complete, because its name and arguments may
stand anywhere in the field's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import UnsupportedModel, shown
from forerun.text.messages import REASONING
from forerun.text.parts import CallArguments, CallBegin, CallEnd, Reasoning, Scanner, Steps, Text
from forerun.text.tools import Tools, inside, json_of

KEY = "response_template"  # of tokenizer_config.json
MOST_HEAD_CHARS = 256  # the longest beginning of a field
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_NAMES = re.compile(r"(?<=[{,])(\w+):")


@dataclass(frozen=True)
class Anchor:
    """The marks at the beginning or end of a field.

    heads: the texts with which a mark may begin. pattern: a regex that matches whole marks.
    """

    heads: tuple[str, ...]
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, spec: Mapping[str, Any], name: str) -> Anchor | None:
        """Make an anchor from an entry of `spec`: one or several texts under `name`, or a regex under `name`_pattern.

        Returns None if `spec` has neither entry. Raises UnsupportedModel for a regex that does not begin with literal
        characters, after optional white space.
        """
        texts, pattern = spec.get(name), spec.get(f"{name}_pattern")
        if pattern is not None:
            return cls((_head(pattern),), re.compile(pattern.removeprefix(r"\s*"), re.DOTALL))
        if texts is None:
            return None
        several = (texts,) if isinstance(texts, str) else tuple(texts)
        return cls(several, re.compile("|".join(map(re.escape, sorted(several, key=len, reverse=True)))))


NEVER = Anchor((), re.compile(r"(?!)"))


def _head(pattern: str) -> str:
    """Return the literal text at the beginning of a regex, after optional white space.

    Raises UnsupportedModel if the regex begins with no literal text.
    """
    text = ""
    for op, value in re._parser.parse(pattern.removeprefix(r"\s*")):  # type: ignore[attr-defined]
        if str(op) != "LITERAL":
            break
        text += chr(value)
    if not text:
        raise UnsupportedModel(f"{KEY}: the expression {shown(pattern)} begins with no text that can be looked for")
    return text


@dataclass(frozen=True)
class Field:
    """One field of a response template. spec: the field's entry in the template."""

    name: str
    opening: Anchor  # NEVER for the field without one
    closing: Anchor | None
    spec: Mapping[str, Any] = field(compare=False)

    @property
    def part(self) -> type[Text] | type[Reasoning] | None:
        """The class for pieces of the field's text; None for the field of calls, and for fields that are dropped."""
        return Text if self.name == "content" else Reasoning if self.name in REASONING else None


@dataclass(frozen=True)
class Declared:
    """A response template.

    implicit: the field without a beginning. start: a regex for the texts after which an answer begins. `begun` looks
    for an open field only after the last such text in the prompt.
    """

    fields: tuple[Field, ...]
    implicit: Field | None
    start: re.Pattern[str] | None
    text: str = field(repr=False)  # all of it, for the marks in it

    @classmethod
    def of(cls, spec: object) -> Declared:
        """Read a response template, the value of KEY. Raises UnsupportedModel for a value that cannot be read."""
        fields = spec.get("fields") if isinstance(spec, Mapping) else None
        if not isinstance(spec, Mapping) or not isinstance(fields, Mapping) or spec.get("version", 1) != 1:
            raise UnsupportedModel(f"{KEY}={shown(spec)} is not possible: it must be an object with fields")
        try:
            parsed = [
                Field(name, Anchor.of(one, "open") or NEVER, Anchor.of(one, "close") if _opens(one) else None, one)
                for name, one in fields.items()
            ]
            start = Anchor.of({"open": spec["start_anchor"]}, "open") if "start_anchor" in spec else None
        except (TypeError, ValueError, AttributeError, re.error) as error:
            raise UnsupportedModel(f"{KEY} cannot be read ({error})") from error
        implicit = next((one for one in parsed if one.opening is NEVER), None)
        return cls(
            tuple(one for one in parsed if one.opening is not NEVER),
            implicit,
            None if start is None else start.pattern,
            json.dumps(spec, ensure_ascii=False),
        )

    def begun(self, prompt: str) -> tuple[Field, dict[str, str]] | None:
        """Return the field that is open at the end of a prompt, and the named groups that its opening regex matched.

        Returns None if no field is open.
        """
        ends = [match.end() for match in self.start.finditer(prompt)] if self.start is not None else []
        at = ends[-1] if ends else len(prompt)
        while True:
            openings = [
                (match.start(), -match.end(), i)
                for i, one in enumerate(self.fields)
                if (match := one.opening.pattern.search(prompt, at)) is not None
            ]
            if not openings:
                return None
            one = self.fields[min(openings)[2]]
            match = one.opening.pattern.search(prompt, at)
            assert match is not None
            closed = None if one.closing is None else one.closing.pattern.search(prompt, match.end())
            if closed is None:
                return one, _named(match)
            at = closed.end()

    def read(self, scan: Scanner, tools: Tools, prompt: str) -> Steps:
        """Yield an answer as pieces. prompt: the end of the prompt, in which a field may already be open."""
        if (begun := self.begun(prompt)) is not None:
            yield from self._inside(scan, tools, *begun)
        part = Text if self.implicit is None or self.implicit.part is None else self.implicit.part
        heads = [head for one in self.fields for head in one.opening.heads]
        while (head := (yield from scan.until(heads, part))) is not None:
            scan.rest = head + scan.rest
            opened = yield from self._opened(scan)
            if opened is None:
                yield part(scan.take(len(head)))  # it looked like the beginning of a field
            else:
                yield from self._inside(scan, tools, *opened)

    def _opened(self, scan: Scanner) -> Any:
        """Consume the mark that opens a field. Returns the field and the named groups of the match.

        Returns None if no field begins.
        """
        while True:
            matches = [
                (match, one) for one in self.fields if (match := one.opening.pattern.match(scan.rest)) is not None
            ]
            if matches:
                match, one = max(matches, key=lambda pair: pair[0].end())
                if match.end() < len(scan.rest) or "open" in one.spec or scan.is_closed:
                    scan.take(match.end())
                    return one, _named(match)
            if scan.is_closed or len(scan.rest) > MOST_HEAD_CHARS:
                return None
            yield None

    def _inside(self, scan: Scanner, tools: Tools, one: Field, captures: Mapping[str, str]) -> Steps:
        """Yield the pieces of a field, up to the field's end. The mark that opens the field was already consumed.

        captures: the named groups in the match of the opening mark.
        """
        if one.part is not None:
            yield from self._text(scan, one, one.part)
            return
        text = ""
        while True:
            match = None if one.closing is None else one.closing.pattern.search(scan.rest)
            if match is not None:
                text = scan.take(match.start())
                scan.take(match.end() - match.start())
                break
            if scan.is_closed:
                text = scan.take(len(scan.rest))
                break
            yield None
        if one.name == "tool_calls":
            for name, arguments in _calls(text, one.spec, captures, tools):
                yield CallBegin(name)
                yield CallArguments(arguments)
                yield CallEnd()

    def _text(self, scan: Scanner, one: Field, part: type[Text] | type[Reasoning]) -> Steps:
        heads = () if one.closing is None else one.closing.heads
        while (head := (yield from scan.until(heads, part))) is not None:
            assert one.closing is not None
            scan.rest = head + scan.rest
            while (match := one.closing.pattern.match(scan.rest)) is None and not scan.is_closed:
                yield None
            if match is not None:
                scan.take(match.end())
                return
            yield part(scan.take(len(head)))


def _named(match: re.Match[str]) -> dict[str, str]:
    """Return the text of each named group that took part in a match."""
    return {key: value for key, value in match.groupdict().items() if value is not None}


def _opens(spec: Mapping[str, Any]) -> bool:
    return "open" in spec or "open_pattern" in spec


def _calls(text: str, spec: Mapping[str, Any], captures: Mapping[str, str], tools: Tools) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of each call in a field's text; nothing where the text cannot be read.

    spec: the field's entry in the response template. captures: the named groups in the match of the opening mark.
    """
    try:
        content = _content(text, spec.get("content", "text"), spec.get("content_args") or {})
        transform = spec.get("transform")
        if transform is None:
            calls = content
        elif spec.get("transform_each"):
            calls = [_transformed(transform, {**captures, **item}) for item in content]
        else:
            calls = _transformed(transform, {**captures, "content": content})
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        function = function if isinstance(function, dict) else {}
        name, given = function.get("name"), function.get("arguments", {})
        if isinstance(name, str) and name:
            if isinstance(given, dict):
                pairs = (f'"{inside(key)}": {_json(value, tools.types(name, key))}' for key, value in given.items())
                given = "{" + ", ".join(pairs) + "}"
            yield name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _json(value: Any, types: frozenset[str]) -> str:
    """Return a value as JSON. A string is read as a value of `types`, the types in the parameter's schema."""
    if isinstance(value, str) and types:
        return json_of(value, types)
    return json.dumps(value, ensure_ascii=False)


def _content(text: str, kind: str, args: Mapping[str, Any]) -> Any:
    """Parse a field's text in the format `kind`, such as json, with the options `args`, and return the value.

    Raises ValueError for a text that is not in this format.
    """
    if kind == "json":
        return _lax_json(text, args)
    if kind == "xml-inline":
        entries: dict[str, Any] = {}
        for match in re.finditer(args["tag_pattern"], text, re.DOTALL):
            value = _inner(match["value"], args)
            if match["key"] in entries and args.get("merge_duplicates"):
                before = entries[match["key"]]
                value = [*(before if isinstance(before, list) else [before]), value]
            entries[match["key"]] = value
        return entries
    if kind == "kv-lines":
        pairs = (line.partition(args.get("kv_sep", ":")) for line in text.split(args.get("line_sep", "\n")))
        return {key.strip(): _inner(value.strip(), args) for key, sep, value in pairs if sep}
    word = text.strip() if args.get("strip", True) else text
    if kind in ("int", "float"):
        return int(word) if kind == "int" else float(word)
    return word.lower() in ("true", "1") if kind == "bool" else word


def _inner(text: str, args: Mapping[str, Any]) -> Any:
    """Read a value inside a field as `args` says under value_parser. Without this entry, the value stays a text.

    args: the entry content_args of the field in the response template.
    """
    parser = args.get("value_parser")
    return text if parser is None else _content(text, parser.get("name", "text"), parser.get("args") or {})


def _lax_json(text: str, args: Mapping[str, Any]) -> Any:
    """Parse JSON, with the deviations that `args` permits, and return the value.

    Keys may have no quotes, and strings may have other marks around them. With allow_non_json, a text that is no JSON
    is returned as it is. Otherwise such a text raises ValueError.
    """
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[1])
        return f"\x01{len(kept) - 1}\x02"

    work = text
    for opening, closing in args.get("string_delims", []):
        work = re.sub(f"{re.escape(opening)}(.*?){re.escape(closing)}", keep, work, flags=re.DOTALL)
    if args.get("unquoted_keys"):
        work = _NAMES.sub(r'"\1":', work)
    work = re.sub("\x01(\\d+)\x02", lambda match: json.dumps(kept[int(match[1])]), work)
    try:
        return json.loads(work)
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return the value that `transform` describes, with its placeholders filled from `scope`."""
    if isinstance(transform, dict):
        return {key: _transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_transformed(value, scope) for value in transform]
    match = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    value: Any = scope
    for key in match[1].split("."):
        value = value[key]
    return value
