"""No web page makes the server compute but its own: hosts, origins and content types, from real HTTP clients."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest

from forerun.errors import BadOption
from forerun.serve.bodies import Refused
from forerun.serve.origins import Origins
from serve.running import Running, serving

pytestmark = pytest.mark.once("a process of its own, which speculates")
BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
JSON = {"content-type": "application/json"}
FRIEND = "https://chat.example.org"


@pytest.fixture(scope="module")
def friendly(checkpoints: Any) -> Iterator[Running]:
    """A server with a friend, without a key."""
    with serving("--allow-origin", FRIEND, target=str(checkpoints / "llama")) as running:
        yield running


def ask(server: Running, path: str = "/v1/completions", **headers: str) -> tuple[int, str]:
    """The status and the code of what http.client is answered, which adds no header but its Host, and that not here."""
    address = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.putrequest("POST", path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"host": address, "content-length": str(len(BODY)), **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(BODY)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read()).get("error", {}).get("code", "")


def test_only_pages_of_the_server_and_its_friends_make_it_compute(friendly: Running) -> None:
    own, said = friendly.url.removeprefix("http://"), {"content_type": "application/json"}
    port = own.rpartition(":")[2]
    for host in (
        own,
        f"localhost:{port}",
        "LOCALHOST",
        f"[::1]:{port}",
        "a.localhost",
        "127.9.9.9",
        "chat.example.org",
    ):
        assert ask(friendly, host=host, **said)[0] == 200, host
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::1",
        "8.8.8.8",
    ):
        for path in ("/v1/completions", "/tokenize", "/lab/api/theory"):
            assert ask(friendly, path, host=host, **said) == (403, "host_not_allowed"), host
    for origin in (f"http://{own}", FRIEND, FRIEND.upper()):
        assert ask(friendly, origin=origin, **said)[0] == 200, origin
    for origin in (
        "http://evil.example",
        "null",
        f"http://localhost:{port}",
        f"{FRIEND}.evil.example",
        "http://127.0.0.1",
    ):
        for path in ("/v1/completions", "/tokenize", "/lab/api/theory"):
            assert ask(friendly, path, origin=origin, **said) == (403, "origin_not_allowed"), origin
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "",
    ):
        for path in ("/v1/completions", "/tokenize", "/lab/api/theory"):
            assert ask(friendly, path, content_type=kind) == (415, "unsupported_media_type"), kind
    assert ask(friendly) == (415, "unsupported_media_type")
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert ask(friendly, content_type=kind)[0] == 200, kind
    assert httpx.get(f"{friendly.url}/metrics", headers={"host": "evil.example"}).status_code == 403


def test_clients_as_they_are_get_an_answer(friendly: Running) -> None:
    """Those of OpenAI and Anthropic have tests of their own."""
    assert httpx.post(f"{friendly.url}/v1/completions", json=json.loads(BODY)).status_code == 200
    request = urllib.request.Request(f"{friendly.url}/v1/completions", BODY, JSON)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    with pytest.raises(HTTPError, match="415"):  # it calls every body a form
        urllib.request.urlopen(f"{friendly.url}/v1/completions", BODY, timeout=60)


def test_origins() -> None:
    headers = {b"host": b"llm.example.org", b"content-type": b"application/json"}
    Origins().check("POST", headers)  # a public server has any name
    Origins.parse(["https://llm.example.org/"], only_local=True).check("POST", headers)
    Origins.parse(["*"], only_local=True).check("POST", {**headers, b"origin": b"null"})
    Origins.parse([], only_local=True).check("POST", {b"content-type": b"application/json"})  # HTTP/1.0
    with pytest.raises(Refused, match="by a name of this machine"):
        Origins.parse([], only_local=True).check("GET", headers)
    for wrong in ("chat.example.org", "https://", "https://a/b", ""):
        with pytest.raises(BadOption, match="--allow-origin"):
            Origins.parse([wrong])
