"""Chooses the replica that serves a request: a replica that has run the request's beginning, unless it is too busy.

A replica keeps the KV cache of the beginnings that it has run, so requests with the same beginning should go to the
same replica. A new beginning goes to the least busy replica. Among equally busy replicas, rendezvous hashing decides
(Thaler and Ravishankar, 1998), so that proxies agree without asking each other. This module does not need Ray.
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
    """Return the beginning of a request, as a text; None where the body is not understood. body: the parsed JSON.

    Requests with the same beginning should go to the same replica. The beginning of a conversation is the instructions
    and the first turn. So all requests of one conversation have the same beginning, and conversations that share only
    their instructions have different beginnings. The beginning of a prompt is its first BEGINNING characters or tokens.
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
    """Return the first BEGINNING characters of a text or items of a list of token ids; otherwise, of the JSON text."""
    are_ids = isinstance(part, list) and part and all(type(token) is int for token in part)
    return (part if are_ids or isinstance(part, str) else json.dumps(part))[:BEGINNING]


def order(key: str, queues: Mapping[str, int], known: str = "", slack: int = 0) -> list[str]:
    """Return the names of the replicas, in the order in which they should be asked to serve a request.

    key: the digest of the request's beginning. queues: maps each replica's name to its number of requests. known: the
    replica that served the last request with this key; "" = none. It comes first if it has at most `slack` requests
    more than the least busy replica. Other replicas are ordered by their number of requests, and then by rendezvous
    hashing.
    """
    least = min(queues.values(), default=0)

    def place(name: str) -> tuple[int, bool, bytes]:
        more = queues[name] - least - (slack if name == known else 0)
        return max(0, more), name != known, hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()

    return sorted(queues, key=place)


class Keys:
    """ASGI middleware of a proxy. Sets a header to the digest of a request's beginning, unless the client has set it.

    The body is read before the request is passed on, because the choice of the replica depends on the body. header: the
    header's name in lower case.
    """

    def __init__(self, app: ASGIApp, header: str) -> None:
        self._app, self._header = app, header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Set the header if the request is a POST whose body is understood and not too long."""
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
    """Return the digest of a body's beginning; '' where the body is not understood."""
    try:
        begins = beginning(json.loads(body))
    except (ValueError, RecursionError):
        return ""
    if begins is None:
        return ""
    return hashlib.blake2b(begins.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
