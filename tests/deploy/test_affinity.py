"""Which replica a request goes to, and the metrics of several: without Ray."""

import asyncio
import itertools
import json
from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from forerun.deploy.affinity import BEGINNING, MOST_READ_BYTES, Keys, beginning, key_of, order
from forerun.deploy.merging import merged

LONG = "x" * BEGINNING
SYSTEM = {"role": "system", "content": "be brief"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ({"prompt": LONG + "a"}, {"prompt": LONG + "b", "temperature": 0}, True),
        ({"prompt": "a"}, {"prompt": "b"}, False),
        ({"prompt": [5] * BEGINNING + [1]}, {"prompt": [5] * BEGINNING + [2]}, True),
        ({"prompt": ["a", "b"]}, {"prompt": ["a", "c"]}, False),
        ({"messages": [SYSTEM, user("a")]}, {"messages": [SYSTEM, user("a"), user("c")]}, True),
        ({"messages": [SYSTEM, user("a")]}, {"messages": [SYSTEM, user("b")]}, False),
        ({"messages": [user("a")]}, {"messages": [user("a")], "system": "be long"}, False),
        ({"input": [user("a")], "instructions": "x"}, {"input": [user("a"), user("b")], "instructions": "x"}, True),
        ({"input": "a"}, {"input": "b"}, False),
    ],
)
def test_beginnings(one: Any, other: Any, are_equal: bool) -> None:
    """Turns of one conversation meet, and prompts that begin alike; other ones do not."""
    assert beginning(one) is not None
    assert (beginning(one) == beginning(other)) is are_equal


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"{}", b'{"prompt": ""}', b"[" * 100_000, b"\xff"])
def test_what_is_not_understood_has_no_key(body: bytes) -> None:
    """It is the replica that refuses it."""
    assert key_of(body) == ""


def test_the_same_replica_until_it_is_too_busy() -> None:
    """The one that knows a beginning may have `slack` requests more than the least busy one; a new one goes there."""
    for known, other, third in itertools.permutations("abc"):
        assert order("key", {known: 4, other: 0, third: 1}, known, 4) == [known, other, third]
        assert order("key", {known: 5, other: 0, third: 2}, known, 4) == [other, known, third]
        assert order("key", {known: 9, other: 8, third: 5}, known, 4)[0] == known
        assert order("key", {known: 9, other: 8, third: 5}, "gone", 4) == [third, other, known]
        assert order("key", {known: 1, other: 0, third: 2}) == [other, known, third]
    assert order("key", {}) == []


def test_keys_are_spread_and_stay_where_they_are() -> None:
    """Of idle replicas each has its share, and one that goes moves no keys but its own."""
    before = {str(i): order(str(i), dict.fromkeys("abcd", 0))[0] for i in range(2000)}
    assert all(400 < count < 600 for count in Counter(before.values()).values())
    after = {key: order(key, dict.fromkeys("abc", 0))[0] for key in before}
    assert all(after[key] == name for key, name in before.items() if name != "d")


def passed_through(keys: list[bytes], parts: list[bytes], **scope: Any) -> tuple[bytes | None, list[bytes]]:
    """The header and the parts of the body that arrive behind the middleware."""
    sent = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)]
    messages, got, seen = iter(sent), list[bytes](), dict[bytes, bytes]()

    async def receive() -> Message:
        return next(messages)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope["headers"])
        more = True
        while more:
            message = await receive()
            got.append(message["body"])
            more = message["more_body"]

    async def send(_: Message) -> None:
        raise AssertionError

    given = {"type": "http", "method": "POST", "headers": [(b"x-key", key) for key in keys], **scope}
    asyncio.run(Keys(app, "x-key")(given, receive, send))
    return seen.get(b"x-key"), got


def test_the_proxy_writes_the_key_and_passes_the_body_on() -> None:
    """In its parts; what a client says itself is kept; one that is too long to be read has no key."""
    body = json.dumps({"prompt": "def f"}).encode()
    parts = [body[:4], body[4:]]
    assert passed_through([], parts) == (key_of(body).encode(), parts)
    assert passed_through([b"mine"], parts) == (b"mine", parts)
    assert passed_through([], parts, method="GET")[0] is None
    long = [b" " * (MOST_READ_BYTES // 2)] * 3
    assert passed_through([], [*long, body]) == (None, [*long, body])


def test_metrics_of_several_replicas_are_one_text() -> None:
    """A parser of Prometheus reads it: each family once, the samples of each replica under its name."""
    text = (
        "# HELP f:steps_total of it\n# TYPE f:steps_total counter\n"
        'f:steps_total{model_name="m"} 3.0\n'
        "# HELP f:busy or not\n# TYPE f:busy gauge\n"
        'f:busy{model_name="m"} 1.0\n'
    )
    families = {family.name: family for family in text_string_to_metric_families(merged({"a": text, "b": text}))}
    assert set(families) == {"f:steps", "f:busy"}
    for family in families.values():
        assert [sample.labels["replica"] for sample in family.samples] == ["a", "b"]
        assert all(sample.labels["model_name"] == "m" for sample in family.samples)
    assert merged({}) == ""
