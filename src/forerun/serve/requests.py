"""Reads the input file of a batch, which has one request per line.

All lines are checked before any model is loaded. Requests do not stay in memory: the file is read again when the batch
runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from forerun.errors import BadOption, NotFound, shown
from forerun.registry import unknown
from forerun.serve.apis import batched

KEYS = ("custom_id", "method", "url", "body")
NUM_SHOWN = 5  # malformed lines that the refusal names


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input. digest: a hash of url and body that ignores white space and the order of fields."""

    custom_id: str
    url: str
    body: dict[str, Any]
    digest: str


class RequestFile:
    """The requests of a file. Each iteration reads the file again, line by line.

    line_of: custom_id -> the number of the request's line. digest_of: custom_id -> the digest of the request's url and
    body. models: the names of models in the bodies. has_chats: whether any request needs a chat template. Raises
    NotFound for a missing file. Raises BadOption for a path that is no file, for a file without requests, and for
    malformed lines. The message names the first few malformed lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line_of: dict[str, int] = {}
        self.digest_of: dict[str, str] = {}
        self.models: set[str] = set()
        self.has_chats = False
        if not path.exists():
            raise NotFound(f"the input file {str(path)!r} does not exist: check its name")
        if not path.is_file():
            raise BadOption(f"the input {str(path)!r} is not a file: it is read twice, so write it to one first")
        self._check()

    def __iter__(self) -> Iterator[BatchRequest]:
        """Yield the requests. Raises BadOption where the file has changed since it was checked."""
        for number, line in self._lines():
            try:
                request = _read(line)
            except BadOption:
                request = None
            if (
                request is None
                or self.line_of.get(request.custom_id) != number
                or self.digest_of[request.custom_id] != request.digest
            ):
                raise BadOption(f"line {number} of {str(self.path)!r} has changed since the run began: begin anew")
            yield request

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the bytes of each line that is not blank. The first line has number 1."""
        with self.path.open("rb") as file:  # as bytes, a line ends at a line feed and nowhere else
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())

    def _check(self) -> None:
        problems: list[str] = []
        for number, line in self._lines():
            try:
                request = _read(line)
                first = self.line_of.setdefault(request.custom_id, number)
                if first != number:
                    raise BadOption(f"has the custom_id {shown(request.custom_id)} of line {first}")
                self.digest_of[request.custom_id] = request.digest
                self.has_chats |= batched()[request.url].reads_chats
                model = request.body.get("model")
                self.models |= {model} if isinstance(model, str) else set()
            except BadOption as error:
                problems.append(f"line {number} {error}")
        if problems:
            more = f"; and {len(problems) - NUM_SHOWN} more lines" if len(problems) > NUM_SHOWN else ""
            raise BadOption(f"{self.path}: {'; '.join(problems[:NUM_SHOWN])}{more}: mend the input, nothing was run")
        if not self.line_of:
            raise BadOption(f"{self.path} has no request: write one per line, {_EXAMPLE}")


_EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f("}}'


def _read(line: bytes) -> BatchRequest:
    """Parse one line of the input. Raises BadOption. The caller puts the number of the line before the message."""
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise BadOption("is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadOption(f"is not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise BadOption("is not a JSON object")
    for name in fields:
        if name not in KEYS:
            raise BadOption(f"is not a request: {unknown('key', name, KEYS)}")
    custom_id, url, body = (fields.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        _missing("custom_id", custom_id, "a text of its own")
    if fields.get("method") != "POST":
        _missing("method", fields.get("method"), "POST")
    if not isinstance(url, str) or url not in batched():
        _missing("url", url, " or ".join(batched()))
    if not isinstance(body, dict):
        _missing("body", body, "an object")
    return BatchRequest(custom_id, url, body, _digest(line, url, body))


def _digest(line: bytes, url: str, body: dict[str, Any]) -> str:
    """Return the first 128 bits of the SHA-256 of a request's url and body, as hexadecimal digits."""
    try:
        data = json.dumps([url, body], sort_keys=True, separators=(",", ":")).encode()
    except RecursionError:  # the body is nested so deeply that it could just be read, and will be refused
        data = line
    return hashlib.sha256(data).hexdigest()[:32]


def _missing(name: str, value: Any, what: str) -> NoReturn:
    has = f"has no {name}" if value is None else f"has the {name} {shown(value)}"
    raise BadOption(f"{has} (it must be {what})")
