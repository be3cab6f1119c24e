"""Responses that are kept in memory for a while, by API key, so that later requests can refer to them.

A request with `previous_response_id` continues a kept response. An input item of type `item_reference` stands for an
item in the output of a kept response.

The kept responses are limited in number, bytes and age. The oldest response is dropped first. Nothing is written to a
disk, and nothing outlives the server.
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
from forerun.serve.events import as_json, in_slices

MOST_AGE_S = 3600.0
MOST_RESPONSES = 1024
MOST_BYTES = 64 << 20
MOST_NAMING_BYTES = 1 << 20  # of a body that names kept responses or items: a thread of the server reads it
REFERENCE = "item_reference"
_NAMED = (b'"previous_response_id"', f'"{REFERENCE}"'.encode())


@dataclass(frozen=True)
class _Kept:
    key: str
    at_s: float
    items: bytes  # the conversation up to its end, as a JSON list
    response: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.response)


def _joined(items: bytes, more: bytes) -> bytes:
    """Join two JSON lists without parsing them."""
    return items[:-1] + (b"," if len(items) > 2 and len(more) > 2 else b"") + more[1:]


def names_kept(body: bytes) -> bool:
    """Return whether a body of /v1/responses may refer to a kept response or to an item of it."""
    return any(name in body for name in _NAMED)


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == REFERENCE


class Kept:
    """The kept responses of the last hour. clock: returns the time of a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0

    def put(self, key: str, response: dict[str, Any], items: bytes) -> None:
        """Keep a response. key: the digest of the API key with which the response was requested.

        items: the whole conversation before the response, as a JSON list. It includes earlier responses.
        """
        conversation = _joined(items, in_slices(response["output"]))
        one = _Kept(key, self._clock(), conversation, in_slices(response))
        with self._lock:
            self._kept[response["id"]] = one
            self._num_bytes += one.num_bytes
            while len(self._kept) > MOST_RESPONSES or self._num_bytes > MOST_BYTES:
                self._drop(next(iter(self._kept)))
            self._forget_old()

    def get(self, key: str, response_id: str) -> dict[str, Any]:
        """Return a kept response. Raises Refused if the response is not kept, or belongs to another key."""
        response: dict[str, Any] = json.loads(self._find(key, response_id, 404).response)
        return response

    def delete(self, key: str, response_id: str) -> None:
        """Forget a response. Raises Refused as `get` does."""
        self._find(key, response_id, 404)
        with self._lock:
            if response_id in self._kept:
                self._drop(response_id)

    def extend(self, key: str, body: bytes) -> bytes:
        """Return a body in which references to kept responses and items are replaced by the conversation and the items.

        The conversation that the body continues comes before the body's own input. A body without references is
        returned unchanged, and so is a body that cannot be parsed. Raises Refused if a response or an item is not kept
        or belongs to another key, or if a body with references is too long.
        """
        if not names_kept(body):
            return body
        if len(body) > MOST_NAMING_BYTES:
            message = (
                f"the body has {len(body):,} bytes, and one that names what is kept here may have "
                f"{MOST_NAMING_BYTES:,}: send the whole conversation as input"
            )
            raise Refused(message, "input", code="body_too_large", status=413)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            return body
        if not isinstance(given, dict):
            return body
        content, previous = given.get("input"), given.get("previous_response_id")
        items = [{"role": "user", "content": content}] if isinstance(content, str) else content
        goes_on = isinstance(previous, str)
        if not isinstance(items, list) or not (goes_on or any(map(_is_reference, items))):
            return body
        before = self._find(key, str(previous), 400).items if goes_on else b"[]"
        del given["input"]
        conversation = _joined(before, in_slices(self._resolved(key, items)))
        return b'{"input":' + conversation + (b"," if given else b"") + as_json(given)[1:]

    def _resolved(self, key: str, items: list[Any]) -> list[Any]:
        """Return the items, with each reference replaced by the item that it refers to. Raises Refused.

        Each response is parsed only once.
        """
        outputs, resolved = dict[str, dict[str, Any]](), list[Any]()
        for i, item in enumerate(items):
            if not _is_reference(item):
                resolved.append(item)
                continue
            item_id = str(item.get("id"))
            response_id = f"resp_{(*item_id.split('_'), '')[1]}"  # the ids of a response's items are made so
            if response_id not in outputs:
                kept = self._found(key, response_id)
                output = [] if kept is None else json.loads(kept.response)["output"]
                outputs[response_id] = {one.get("id"): one for one in output}
            if item_id not in outputs[response_id]:
                message = (
                    f"input[{i}] refers to {shown(item_id)}, which is not kept here, as items of responses are for an "
                    "hour unless store is false: send the item itself"
                )
                raise Refused(message, "input", code="item_not_found")
            resolved.append(outputs[response_id][item_id])
        return resolved

    def _found(self, key: str, response_id: str) -> _Kept | None:
        with self._lock:
            self._forget_old()
            found = self._kept.get(response_id)
        return found if found is not None and found.key == key else None

    def _find(self, key: str, response_id: str, status: int) -> _Kept:
        response = self._found(key, response_id)
        if response is None:
            message = (
                f"the response {shown(response_id)} is not kept here, as they are for an hour unless store is false: "
                "send the whole conversation as input"
            )
            raise Refused(message, "previous_response_id", code="previous_response_not_found", status=status)
        return response

    def _forget_old(self) -> None:
        oldest_s = self._clock() - MOST_AGE_S
        while self._kept and next(iter(self._kept.values())).at_s < oldest_s:
            self._drop(next(iter(self._kept)))

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._kept.pop(response_id).num_bytes
