"""Checks and copies the input of a chat template: messages, tools and documents as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from typing import Any

from forerun.errors import BadOption, shown

SHORT_ID = 9  # length of call ids that the strictest templates take
MAX_DEPTH = 100  # of lists and mappings within one another; no real message comes near
# Messages of these roles hold text. Others, such as "tool", may hand over any data.
SPEAKERS = ("system", "developer", "user", "assistant")
# Names that a message's reasoning goes by; the first is the usual one.
REASONING = ("reasoning_content", "thinking", "reasoning")
# These casts turn a value of a subclass, such as an enum, into a plain value.
_SCALARS: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def copy_messages(messages: object) -> list[dict[str, Any]]:
    """Check messages, and copy them as transformers does.

    Fields that are None are left out. Reasoning gets the names reasoning_content and thinking. A message must have a
    role, and content or tool_calls. Content must be a text or a list of text parts; the content of a tool's message may
    be any data. Raises BadOption for anything else; the error names the message by its index, from 0.
    """
    if isinstance(messages, str) or not isinstance(messages, Seq) or not messages:
        raise BadOption(
            f"messages={shown(messages)} is not possible: it must be a list of at least one mapping such as "
            "{'role': 'user', 'content': 'Hello'}"
        )
    return [_copy_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _copy_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadOption(
            f"{where} is {_kind(message)}: it must be a mapping such as {{'role': 'user', 'content': 'Hello'}}"
        )
    copy = {key: value for key, value in plain(message, where).items() if value is not None}
    role = copy.get("role")
    if not isinstance(role, str) or not role:
        actual = "no role" if role is None else f"the role {shown(role)}"
        raise BadOption(f"{where} has {actual}: give it one, such as 'user' or 'assistant'")
    if "content" not in copy and not copy.get("tool_calls"):
        raise BadOption(f"{where} (role {shown(role)}) has neither content nor tool_calls: give it one of them")
    calls = copy.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadOption(
            f"{where}.tool_calls must be a list of mappings such as "
            '{"type": "function", "function": {"name": "f", "arguments": {}}}'
        )
    if role in SPEAKERS and "content" in copy:
        _check_content(copy["content"], f"{where}.content")
    reasoning = next((copy[name] for name in REASONING if name in copy), None)
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def _check_content(content: object, where: str) -> None:
    """Raise BadOption unless content is a text, or parts like {"type": "text", "text": ...}.

    where: the place of the content, for the message.
    """
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise BadOption(f"{where} is {_kind(content)}: it must be a text, or a list of text parts")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            actual = f"a part of type {shown(part.get('type'))}" if isinstance(part, dict) else _kind(part)
            raise BadOption(f'{where}[{i}] is {actual}: each part must be {{"type": "text", "text": "..."}}')


def call_forms(messages: Seq[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages in each form of tool calls that some template takes; only once if there are no tool calls.

    Forms with arguments as mappings come before forms with arguments as JSON texts. Forms in which content is missing
    come before forms in which content is empty. Forms with the original call ids come before forms with ids of nine
    letters and digits.
    """
    given = [dict(message) for message in messages]
    if not any(message.get("tool_calls") for message in given):
        yield given
        return
    seen: list[list[dict[str, Any]]] = []
    for short_ids in (False, True):
        for as_text in (False, True):
            for fill in (False, True):
                form = [_in_form(message, as_text, fill, short_ids) for message in given]
                if form not in seen:
                    seen.append(form)
                    yield form


def _in_form(message: dict[str, Any], as_text: bool, fill: bool, short_ids: bool) -> dict[str, Any]:
    copy = dict(message)
    if short_ids and isinstance(copy.get("tool_call_id"), str):
        copy["tool_call_id"] = _short_id(copy["tool_call_id"])
    calls = copy.get("tool_calls")
    if not calls:
        return copy
    if fill:
        copy.setdefault("content", "")
    copy["tool_calls"] = [_call_in_form(call, as_text, short_ids) for call in calls]
    return copy


def _call_in_form(call: dict[str, Any], as_text: bool, short_ids: bool) -> dict[str, Any]:
    copy = dict(call)
    if short_ids and isinstance(copy.get("id"), str):
        copy["id"] = _short_id(copy["id"])
    if isinstance(copy.get("function"), dict):
        return copy | {"function": _call_in_form(copy["function"], as_text, False)}
    arguments = copy.get("arguments")
    if as_text and isinstance(arguments, dict):
        copy["arguments"] = json.dumps(arguments, ensure_ascii=False)
    if not as_text and isinstance(arguments, str):
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return copy
        copy["arguments"] = values if isinstance(values, dict) else arguments
    return copy


def _short_id(call_id: str) -> str:
    """Return `call_id` if it has nine letters and digits; otherwise the first nine hex digits of its SHA-256."""
    if len(call_id) == SHORT_ID and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_ID]


def with_texts(messages: Seq[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages with the text parts of content joined by line breaks; None if no message has parts."""

    def text(content: Any) -> Any:
        return "\n".join(part["text"] for part in content) if _has_parts(content) else content

    if not any(_has_parts(message.get("content")) for message in messages):
        return None
    return [message | {"content": text(message.get("content"))} for message in map(dict, messages)]


def _has_parts(content: object) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    )


def copy_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check tools (JSON schemas) and copy them. Raises BadOption for anything else, Python functions included."""
    wanted = 'a mapping such as {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
    for tool in tools if isinstance(tools, Seq) else ():
        if callable(tool):
            name = getattr(tool, "__name__", repr(tool))
            raise BadOption(
                f"tools holds the Python function {name}, and JSON schemas are wanted: describe it by {wanted}"
            )
    return _copy_mappings(tools, "tools", wanted)


def copy_documents(documents: object) -> list[dict[str, Any]] | None:
    """Check documents and copy them. Raises BadOption for anything but mappings."""
    return _copy_mappings(documents, "documents", "a mapping such as {'title': '...', 'text': '...'}")


def _copy_mappings(values: object, where: str, wanted: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Seq):
        raise BadOption(f"{where}={shown(values)} is not possible: it must be a list, each item {wanted}")
    for i, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise BadOption(f"{where}[{i}] is {_kind(value)}: it must be {wanted}")
    return [plain(value, f"{where}[{i}]") for i, value in enumerate(values)]


def plain(value: object, where: str, depth: int = 0) -> Any:
    """Return a copy made only of dict, list, str, int, float, bool and None, so that a template can reach nothing else.

    Raises BadOption for any other object, and beyond MAX_DEPTH levels. where: the place of the value, for the message.
    depth: the number of lists and mappings around the value.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind, cast in _SCALARS.items():
        if isinstance(value, kind):
            return cast(value)
    if depth == MAX_DEPTH:
        raise BadOption(f"{where[:60]}... has more than {MAX_DEPTH} levels of lists and mappings: make it flatter")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise BadOption(f"{where} has the key {shown(key)}: keys must be texts, as in JSON")
        return {str.__str__(key): plain(item, _within(where, key), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise BadOption(f"{where} is {_kind(value)}: it must be made of texts, numbers, lists and mappings, as in JSON")


def _within(where: str, key: str) -> str:
    return f"{where}.{key}" if key.isidentifier() else f"{where}[{shown(key)}]"


def _kind(value: object) -> str:
    return f"{shown(value)} (of type {type(value).__name__})"
