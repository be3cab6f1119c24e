"""Server-sent events (the HTML standard, section 9.2): how pieces of an answer go over the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"  # how the API of OpenAI ends a stream
KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients skip: it keeps a connection open while nothing is to be said
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event with JSON data, and a name where the API has them."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + as_json(data) + b"\n\n"


def as_json(data: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which UTF-8 cannot hold, is escaped."""
    try:
        return _ENCODER.encode(data).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()
