"""Which of several replicas serves a request: one that has seen its beginning, unless it is busier than another.

A replica keeps the KV cache of beginnings that it has run, so requests that begin alike belong together. A new
beginning goes to the least busy replica; among equals rendezvous hashing decides (Thaler and Ravishankar, 1998), by
which proxies agree without asking each other. Nothing here needs Ray.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BEGINNING = 256  # characters of a text, or tokens of a prompt that is given as ids
MOST_READ_BYTES = 256 << 10  # of a body that a proxy reads before the API key is checked; a longer one goes by load
SYSTEM_ROLES = ("system", "developer")


def beginning(body: Any) -> str | None:
    """Return what requests that belong together have in common; None where a body is not understood.

    For a conversation: the instructions and the first turn, so that all its turns meet, while conversations that share
    their instructions alone are spread. For a prompt: its first BEGINNING characters or tokens.
    """
    if not isinstance(body, dict):
        return None
    given = [body.get(name) for name in ("instructions", "system")]
    turns = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), None)
    if turns is None:
        return None
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        first = next((i for i, turn in enumerate(turns) if turn.get("role") not in SYSTEM_ROLES), len(turns))
        given += [turn.get("content") for turn in turns[: first + 1]]
    else:
        given.append(turns)
    return json.dumps([_cut(part) for part in given if part])


def _cut(part: Any) -> Any:
    """Return the beginning of a text, of ids, or of a list of parts."""
    if isinstance(part, str):
        return part[:BEGINNING]
    if isinstance(part, list) and part and all(type(token) is int for token in part):
        return part[:BEGINNING]
    return json.dumps(part)[:BEGINNING]


def order(key: str, queues: Mapping[str, int], known: str = "", slack: int = 0) -> list[str]:
    """Return the names of replicas, the one to ask first at the beginning.

    queues: requests that each of them has. known: the replica that has served the key before, which is first while it
    has at most `slack` requests more than the least busy one. The others come by their queues.
    """
    least = min(queues.values(), default=0)

    def place(name: str) -> tuple[int, bool, bytes]:
        more = queues[name] - least - (slack if name == known else 0)
        return max(0, more), name != known, hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()

    return sorted(queues, key=place)


class Keys:
    """ASGI middleware of a proxy: sets the header that says how a request begins, where its client has not set it.

    The body is read before it is passed on, because it decides where to. header: in lower case.
    """

    def __init__(self, app: ASGIApp, header: str) -> None:
        self._app, self._header = app, header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle any request."""
        if scope["type"] != "http" or scope["method"] != "POST" or self._header in MutableHeaders(scope=scope):
            await self._app(scope, receive, send)
            return
        read, num_bytes = list[Message](), 0
        while num_bytes <= MOST_READ_BYTES:
            message = await receive()
            read.append(message)
            num_bytes += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
        if num_bytes <= MOST_READ_BYTES and (key := key_of(b"".join(m.get("body", b"") for m in read))):
            scope["headers"] = [*scope["headers"], (self._header.encode(), key.encode())]
        waiting = iter(read)

        async def again() -> Message:
            return next(waiting, None) or await receive()

        await self._app(scope, again, send)


def key_of(body: bytes) -> str:
    """Return the digest of a body's beginning; empty where it is not understood."""
    try:
        begins = beginning(json.loads(body))
    except (ValueError, RecursionError):
        return ""
    if begins is None:
        return ""
    return hashlib.blake2b(begins.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
