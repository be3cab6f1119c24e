"""Responses that are kept for a while, so that `previous_response_id` goes on from them: in memory, by API key.

What is kept is bounded in number, bytes and age; the oldest goes first. Nothing is written to a disk, and nothing
outlives the server.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forerun.errors import shown
from forerun.serve.bodies import Refused

MOST_AGE_S = 3600.0
MOST_RESPONSES = 1024
MOST_BYTES = 64 << 20
FIELD = b'"previous_response_id"'


@dataclass(frozen=True)
class _Kept:
    key: str
    at_s: float
    items: bytes  # the conversation up to its end, as a JSON list
    response: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.response)


class Kept:
    """The responses of the last hour. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0

    def put(self, key: str, response: dict[str, Any], items: list[Any]) -> None:
        """Keep a response. items: of its input, those of earlier responses included. key: whose it is."""
        conversation = json.dumps([*items, *response["output"]]).encode()
        one = _Kept(key, self._clock(), conversation, json.dumps(response).encode())
        with self._lock:
            self._kept[response["id"]] = one
            self._num_bytes += one.num_bytes
            while len(self._kept) > MOST_RESPONSES or self._num_bytes > MOST_BYTES:
                self._drop(next(iter(self._kept)))
            self._forget_old()

    def get(self, key: str, response_id: str) -> dict[str, Any]:
        """A response. Raises Refused where it is not kept, or another key's."""
        found: dict[str, Any] = json.loads(self._find(key, response_id, 404).response)
        return found

    def delete(self, key: str, response_id: str) -> None:
        """Forget a response. Raises Refused as `get`."""
        self._find(key, response_id, 404)
        with self._lock:
            if response_id in self._kept:
                self._drop(response_id)

    def extend(self, key: str, body: bytes) -> bytes:
        """A body whose input begins with the conversation that it goes on from. Raises Refused as `get`.

        A body that goes on from nothing, or that cannot be read, is returned as it is.
        """
        if FIELD not in body:
            return body
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            return body
        previous = given.get("previous_response_id") if isinstance(given, dict) else None
        if not isinstance(previous, str):
            return body
        own = given.get("input")
        items = [{"role": "user", "content": own}] if isinstance(own, str) else own
        if not isinstance(items, list):
            return body
        given["input"] = [*json.loads(self._find(key, previous, 400).items), *items]
        return json.dumps(given).encode()

    def _find(self, key: str, response_id: str, status: int) -> _Kept:
        with self._lock:
            self._forget_old()
            found = self._kept.get(response_id)
        if found is None or found.key != key:
            message = (
                f"the response {shown(response_id)} is not kept here, as they are for an hour unless store is false: "
                "send the whole conversation as input"
            )
            raise Refused(message, "previous_response_id", code="previous_response_not_found", status=status)
        return found

    def _forget_old(self) -> None:
        oldest_s = self._clock() - MOST_AGE_S
        while self._kept and next(iter(self._kept.values())).at_s < oldest_s:
            self._drop(next(iter(self._kept)))

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._kept.pop(response_id).num_bytes
