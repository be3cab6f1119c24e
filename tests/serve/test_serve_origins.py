"""No web page makes the server compute but its own: hosts, origins and content types, from real HTTP clients."""

import dataclasses
import gzip
import http.client
import json
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest

from forerun import LLM
from forerun.errors import BadOption, InternalError
from forerun.serve.app import make_app
from forerun.serve.bodies import Refused
from forerun.serve.options import ServerOptions
from forerun.serve.origins import Origins
from forerun.serve.server import origins_of
from forerun.serve.service import Service, Services
from refusals import refusal
from serve.running import CODE, JSON, Running, assert_refused, serving

pytestmark = pytest.mark.once("a process of its own, which speculates")
BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
KEY = {"authorization": "Bearer secret"}
FRIEND = "https://chat.example.org"
PATHS = ("/v1/completions", "/tokenize", "/lab/api/theory")


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
    own = friendly.url.removeprefix("http://")
    said = {"content_type": "application/json"}
    port = own.rpartition(":")[2]
    local = ("LOCALHOST", f"localhost:{port}", f"[::1]:{port}", "a.localhost", "127.9.9.9")
    for host in (own, *local, "chat.example.org"):
        assert ask(friendly, host=host, **said)[0] == 200, host
    evil = ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example")
    for host in (*evil, "[::1", "8.8.8.8"):
        assert {ask(friendly, path, host=host, **said) for path in PATHS} == {(403, "host_not_allowed")}, host
    for origin in (f"http://{own}", FRIEND, FRIEND.upper(), f"http://localhost:{port}"):
        assert ask(friendly, origin=origin, **said)[0] == 200, origin
    for origin in ("http://evil.example", "null", f"{FRIEND}.evil.example", "http://127.0.0.1"):
        assert {ask(friendly, path, origin=origin, **said) for path in PATHS} == {(403, "origin_not_allowed")}, origin
    forms = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
    for kind in (*forms, "text/plain", "text/plain; application/json", ""):
        assert {ask(friendly, path, content_type=kind) for path in PATHS} == {(415, "unsupported_media_type")}, kind
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


HEADERS = {b"host": b"llm.example.org", b"content-type": b"application/json"}


def is_served(origins: Origins, method: str = "POST", path: str = "/v1/completions", **headers: str) -> bool:
    given = HEADERS | {name.encode(): value.encode() for name, value in headers.items()}
    try:
        origins.check(method, path, given)
    except Refused as error:
        return error.status != 403
    return True


def test_origins() -> None:
    assert is_served(Origins())  # whoever has the key may use any name
    assert is_served(Origins.parse(["https://llm.example.org/"], only_local=True))
    assert is_served(Origins.parse(["*"], only_local=True), origin="null")
    Origins.parse([], only_local=True).check("POST", "/", {b"content-type": b"application/json"})  # HTTP/1.0
    with pytest.raises(Refused, match=r"by a name of this machine.*--allow-host and that name, or with --api-key"):
        Origins.parse([], only_local=True).check("GET", "/", HEADERS)
    with pytest.raises(Refused, match=r"where a proxy with that address does not pass its Host on.*--allow-origin"):
        Origins().check("POST", "/", {**HEADERS, b"origin": b"https://chat.example.org"})
    for wrong in ("chat.example.org", "https://", "https://a/b", ""):
        assert "--allow-origin" in refusal(BadOption, Origins.parse, [wrong])
    for wrong in ("https://a", "a:80", "a/b", "a b", ""):
        assert "--allow-host" in refusal(BadOption, Origins.parse, [], [wrong])


def test_a_public_server_without_a_key_is_called_by_addresses_and_names_of_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page that points its own name here has that name as Host and in its Origin."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan.example")
    options = ServerOptions(host="0.0.0.0", allow_hosts=("LLM.example.net",))
    public, local = origins_of(options), origins_of(dataclasses.replace(options, host="127.1"))
    own = ("localhost", "a.localhost", "127.0.0.1", "127.1", "127.9.9.9", "[::1]", "[::ffff:127.0.0.1]", "localhost.")
    names = ("box", "box.local", "box.lan.example", "llm.example.net", "LLM.example.net.")
    addresses = ("192.168.1.5", "8.8.8.8", "[fe80::1]", "[::ffff:10.0.0.1]", "0.0.0.0", "10.1")
    foreign = ("evil.example", "box.evil.example", "192.168.1.5.evil.example", "forerun", "localhost.evil.example")
    broken = ("[::1", "localhost:x", "localhost@evil.example", ":80", "127.0.0.1 evil.example")
    for host in (*own, *names, *addresses, *foreign, *broken):
        for port in ("",) if host in broken else ("", ":8000"):
            assert is_served(public, host=host + port) == (host in (*own, *names, *addresses)), host
            assert is_served(local, host=host + port) == (host in (*own, *names)), host
    evil = "evil.example:8000"
    assert not is_served(public, host=evil, origin=f"http://{evil}")
    assert is_served(origins_of(dataclasses.replace(options, api_key="x")), host=evil, origin=f"http://{evil}")
    assert is_served(origins_of(dataclasses.replace(options, allow_hosts=("*",))), host=evil)
    assert is_served(origins_of(ServerOptions(host="llm.lan")), host="llm.lan:8000")


@pytest.mark.parametrize(
    ("origin", "host", "is_own"),
    [
        ("http://localhost", "localhost:80", True),
        ("https://llm.example.org", "llm.example.org:443", True),
        ("https://llm.example.org:443", "llm.example.org", True),
        ("http://localhost:8000", "127.0.0.1:8000", True),
        ("http://[::1]:8000", "localhost:8000", True),
        ("http://127.0.0.1:8000", "127.1:8000", True),
        ("http://127.0.0.1:8000", "[::ffff:127.0.0.1]:8000", True),
        ("http://[fe80::1]:8000", "[fe80:0:0::1]:8000", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://localhost", "localhost:443", False),
        ("https://localhost", "localhost:80", False),
        ("http://localhost:8000", "192.168.1.5:8000", False),
        ("http://evil.example:8000", "localhost:8000", False),
        ("http://localhost.evil.example:8000", "localhost:8000", False),
        ("ftp://localhost:8000", "localhost:8000", False),
        ("http://[::1", "[::1", False),
        ("null", "null", False),
    ],
)
def test_default_ports_and_names_of_this_machine_are_one_origin(origin: str, host: str, is_own: bool) -> None:
    assert is_served(Origins(), host=host, origin=origin) == is_own
    if not host.startswith("[::1"):
        named = is_served(Origins.parse([origin], "*"), host="x.example", origin=f"http://{host}")
        assert named == (is_own and origin.startswith("http:"))


async def test_probes_are_answered_by_any_name_and_nothing_else_that_a_page_could_read() -> None:
    """Also where the engine has failed: then the reason is for those who call the server by its own name."""
    service = Services([Service(LLM("shipped", draft="none", max_batch_size=1), ("small",))])
    app = httpx.ASGITransport(make_app(service, origins=origins_of(ServerOptions(host="0.0.0.0"))))
    try:
        async with httpx.AsyncClient(transport=app, base_url="http://evil.example", timeout=60) as client:
            for path in ("/health", "/ready"):
                assert (await client.get(path)).json() == {"status": "ok"}
                assert (await client.post(path)).status_code == 403
            for path in ("/metrics", "/openapi.json", "/v1/models", "/v1/models/small", "/lab/", "/nowhere"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), path
            service.first.failure = InternalError("a secret")
            assert (await client.get("/health")).json() == {"status": "failed"}
            own = await client.get("/health", headers={"host": "10.0.0.1:8000"})
            assert own.json() == {"status": "failed", "message": "a secret"}
    finally:
        service.close()


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    """A server with a key that pages of one other origin may use."""
    with serving("--allow-origin", FRIEND, FORERUN_API_KEY="secret") as running:
        yield running


ORIGIN = {"origin": FRIEND}
ASKS = {**ORIGIN, "access-control-request-method": "POST"}


def test_a_browser_that_asks_first_is_answered_without_the_key(keyed: Running) -> None:
    """Whatever the route, and with the headers that the page names; the answer to the request itself can be read."""
    wanted = {"access-control-request-headers": "authorization,x-stainless-os"}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/models", "/v1/completions/"):
        answer = keyed.http.options(path, headers={**ASKS, **wanted})
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
        assert answer.headers["access-control-allow-headers"] == wanted["access-control-request-headers"]
        assert {"POST", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
        assert "access-control-allow-private-network" not in answer.headers
    asked = keyed.http.options("/v1/models", headers={**ASKS, "access-control-request-private-network": "true"})
    assert asked.headers["access-control-allow-private-network"] == "true"
    assert "x-api-key" in asked.headers["access-control-allow-headers"]
    assert keyed.http.options("/v1/models").status_code == 401  # it asks for nothing
    assert keyed.http.options("/v1/models", headers={**KEY, **ORIGIN}).status_code == 405
    for answer, status in (
        (keyed.http.get("/v1/models", headers={**ORIGIN, **KEY}), 200),
        (keyed.http.get("/v1/models", headers=ORIGIN), 401),
        (keyed.http.post("/v1/completions", headers={**ORIGIN, **KEY}, json={}), 400),
    ):
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, ORIGIN["origin"])
        assert answer.headers["vary"] == "Origin"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    body = {"prompt": CODE, "max_tokens": 2, "stream": True}
    streamed = keyed.http.post("/v1/completions", headers={**ORIGIN, **KEY}, json=body)
    assert (streamed.status_code, streamed.headers["access-control-allow-origin"]) == (200, ORIGIN["origin"])


def test_an_answer_that_is_kept_is_not_shown_to_another_page(keyed: Running) -> None:
    for headers in ({}, {"origin": "https://evil.example"}, ORIGIN):
        assert keyed.http.get("/v1/models", headers={**KEY, **headers}).headers["vary"] == "Origin"


def test_other_pages_are_told_nothing(keyed: Running) -> None:
    evil = {"origin": "https://evil.example"}
    asked = keyed.http.options("/v1/completions", headers={**ASKS, **evil})
    assert (asked.status_code, asked.json()["error"]["code"]) == (403, "origin_not_allowed")
    for answer in (asked, keyed.http.get("/v1/models", headers={**evil, **KEY}), keyed.http.get("/health")):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_what_may_be_asked_without_a_key_of_any_origin() -> None:
    assert Origins.parse(["*"]).preflight("OPTIONS", {b"origin": b"null", b"access-control-request-method": b"POST"})
    assert Origins().preflight("POST", {b"origin": b"https://a"}) is None
    assert Origins().answer_headers({b"origin": b"https://a"}) == [(b"vary", b"Origin")]


def test_a_head_is_a_get_without_its_body(server: Running) -> None:
    for path in ("/", "/health", "/v1/models", "/lab/"):
        got, head = server.http.get(path), server.http.head(path)
        assert (head.status_code, head.content, len(got.content) > 0) == (200, b"", True), path
        assert head.headers["content-type"] == got.headers["content-type"]
    assert server.http.head("/v1/completions").status_code == 405
    assert server.http.get("/").text.startswith("forerun is running.")


def test_a_slash_at_the_end_says_nothing(server: Running) -> None:
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    assert server.http.post("/v1/completions/", json={"prompt": CODE, "max_tokens": 1}).status_code == 200


def test_a_compressed_body_is_refused_as_such(server: Running) -> None:
    body = gzip.compress(json.dumps({"prompt": CODE}).encode())
    answer = server.http.post("/v1/completions", content=body, headers={**JSON, "content-encoding": "gzip"})
    assert assert_refused(answer, "'gzip'): send it as it is", 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/responses", "but /v1/responses: end the address that the client is given with /v1"),
        ("/v1/v1/chat/completions", "the client adds /v1 itself"),
        ("/v1/embeddings", "no embeddings are made here"),
        ("/v1/rerank/", "nothing is ranked here"),
        ("/v1/images/generations", "no images are made here"),
        ("/v1/audio/transcriptions", "nothing is heard or spoken here"),
        ("/api/blobs/sha256:abc", "models are not fetched or changed by requests"),
        ("/v1/nowhere", "/openapi.json lists the routes"),
    ],
)
def test_a_route_that_is_not_there_is_refused_by_name(server: Running, path: str, sentence: str) -> None:
    answer = server.http.post(path, json={})
    assert answer.status_code == 404
    assert sentence in str(answer.json()["error"])


def test_clients_of_ollama_need_not_say_that_a_body_is_json(server: Running) -> None:
    """Neither litellm nor curl by itself does. A web page cannot send what they send, for browsers say more."""
    body = json.dumps({"prompt": "x", "options": {"num_predict": 1}, "stream": False}).encode()

    def status(path: str, sent: bytes, **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return int(server.http.post(path, content=sent, headers=named).status_code)

    kinds: tuple[dict[str, str], ...] = ({}, {"content_type": "application/x-www-form-urlencoded"})
    for kind in (*kinds, {"content_type": "text/plain"}):
        assert status("/api/generate", body, **kind) == 200
        assert status("/v1/completions", BODY, **kind) == 415
        for name in ("sec_fetch_site", "sec_fetch_mode", "referer"):
            assert status("/api/generate", body, **kind, **{name: "same-origin"}) == 415, name
        assert status("/api/generate", body, **kind, origin=server.url) == 415
        for origin in ("null", "https://elsewhere.example.org"):  # a form of a page, and fetch of a Blob in it
            assert status("/api/generate", body, **kind, origin=origin) == 403
        assert status("/api/generate", body, **kind, host="page.example.org") == 403
