"""Encodes answers as JSON and as server-sent events (the HTML standard, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"  # how the API of OpenAI ends a stream
KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients skip: it keeps a connection open while nothing is to be said
_MOST_VALUES = 1000  # written in one call, which takes a fraction of a millisecond
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one server-sent event with `data` as JSON. name: the event's name; None = no name."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + as_json(data) + b"\n\n"


def in_slices(data: Any) -> bytes:
    """Return data as JSON, like `as_json`, but let other threads run meanwhile.

    While the encoder writes a million numbers in one call, no other thread runs. So each slice of the data is encoded
    in a separate call.
    """
    return b"".join(_slices(data))


def _slices(data: Any) -> Iterator[bytes]:
    if not isinstance(data, dict | list) or num_values(data, _MOST_VALUES) <= _MOST_VALUES:
        yield as_json(data)
        return
    pairs = [(b"", value) for value in data]
    if isinstance(data, dict):
        pairs = [(as_json(name) + b":", value) for name, value in data.items()]
    before, end = (b"{", b"}") if isinstance(data, dict) else (b"[", b"]")
    for name, value in pairs:
        yield before + name
        yield from _slices(value)
        before = b","
    yield end


def num_values(data: Any, most: int) -> int:
    """Return the number of values in data, nested values included. Counting may stop once the number exceeds `most`."""
    num = 1
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        if num > most:
            break
        num += num_values(value, most - num)
    return num


def as_json(data: Any) -> bytes:
    """Return data as JSON in UTF-8. Half a surrogate pair, which UTF-8 cannot hold, is escaped."""
    try:
        return _ENCODER.encode(data).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()
