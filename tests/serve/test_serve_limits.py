"""Load and faults: keys, limits, clients that leave or stall, signals; with a running server, as all of it is met."""

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from forerun.serve import server
from serve.agents import CLAUDE_CODE, CODEX
from serve.running import CODE, JSON, Running, assert_refused, serving, wait_for

pytestmark = pytest.mark.once("a process of its own, which speculates")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
KEY = {"Authorization": "Bearer secret"}
LONG: Any = {"prompt": CODE, "max_tokens": 1500, "ignore_eos": True, "logit_bias": {}}
SECRET = "a text that nobody else is to read"


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    """A server with small limits and a key, for agents."""
    options = ["--api-key", "secret", "--ignore-unsupported", "--log-format", "json", "--metrics-prefix", "vllm"]
    options += ["--max-batch-size", "2", "--max-queue", "2", "--max-body-bytes", "20000", "--body-timeout-s", "1"]
    options += ["--request-timeout-s", "2", "--host", "0.0.0.0"]
    with serving(*options) as running:
        running.url = running.url.replace("0.0.0.0", "127.0.0.1")
        running.http = httpx.Client(base_url=running.url, headers=KEY, timeout=60)
        yield running


def code(answer: httpx.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json()["error"].get("code")


def test_a_key_is_wanted_where_there_is_one(strict: Running) -> None:
    assert "can be reached from other machines" not in strict.log
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"x-api-key": "secre"}):
        assert code(httpx.get(f"{strict.url}/v1/models", headers=headers)) == (401, "invalid_api_key")
    answer = httpx.post(f"{strict.url}/v1/messages", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    for headers in (KEY, {"x-api-key": "secret"}, {"authorization": "bearer secret"}):
        assert httpx.get(f"{strict.url}/v1/models", headers=headers).status_code == 200
    for path in ("/", "/health", "/ready", "/metrics", "/openapi.json"):
        assert httpx.get(f"{strict.url}{path}").status_code == 200


def test_the_lab_has_the_limits_of_the_server(strict: Running) -> None:
    asked = {"calls": [{"function": "speedup", "arguments": {"alpha": 0.7, "gamma": 5, "c": 0.2}}]}
    assert httpx.post(f"{strict.url}/lab/api/theory", json=asked).status_code == 401
    assert strict.http.post("/lab/api/theory", json=asked).json()["results"] == [pytest.approx(2.94117 / 2)]
    assert strict.http.post("/lab/api/theory", json={**asked, "more": " " * 20_000}).status_code == 413
    chunked = strict.http.post("/lab/api/theory", content=iter([json.dumps(asked).encode()]), headers=JSON)
    assert chunked.status_code == 411


def test_agents_are_told_what_was_ignored(strict: Running) -> None:
    answer = strict.http.post("/v1/responses", json={**CODEX, "max_output_tokens": 4, "temperature": 0})
    ignored = "tools[1], reasoning.summary, tools, reasoning_effort"
    assert (answer.status_code, answer.headers["x-forerun-ignored"]) == (200, ignored)
    assert answer.text.count("event: response.output_text.delta") in range(1, 5)
    answer = strict.http.post("/v1/messages?beta=true", json={**CLAUDE_CODE, "stop_sequences": [" "]})
    ignored = "context_management, tools, reasoning_effort, max_tokens"
    assert (answer.status_code, answer.headers["x-forerun-ignored"]) == (200, ignored)
    assert answer.text.rstrip().endswith('{"type":"message_stop"}')
    long = {"prompt": CODE, "max_tokens": 10**6, "min_tokens": 2, "stop": [" "], "temperature": 0}
    answer = strict.http.post("/v1/completions", json=long)
    assert (answer.status_code, answer.headers["x-forerun-ignored"]) == (200, "max_tokens, min_tokens")
    body = {name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools")}
    answer = strict.http.post("/v1/messages/count_tokens?beta=true", json=body)
    assert answer.json()["input_tokens"] > 20
    assert answer.headers["x-forerun-ignored"] == "tools"


def test_bodies_that_are_no_bodies(strict: Running) -> None:
    for content, sentence in (
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "x", "metadata": NaN}', "not valid JSON"),
        (b"[1]", "it must be a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b'{"prompt": "\\ud800"}', "not valid UTF-8"),
        (b'{"prompt": [99999999]}', "the model's ids are"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ):
        assert_refused(strict.http.post("/v1/completions", content=content, headers=JSON), sentence)
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": ""}  # Java's client makes it
    assert strict.http.post("/tokenize", json={"prompt": "x"}, headers=offer).status_code == 200
    assert code(strict.http.post("/v1/completions", json={"prompt": "x" * 30_000})) == (413, "body_too_large")
    chunked = strict.http.post("/v1/completions", content=iter([b" " * 15_000] * 2), headers=JSON)
    assert code(chunked) == (413, "body_too_large")
    assert strict.http.get("/nothing").status_code == 404
    assert strict.http.get("/v1/completions").status_code == 405
    for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/messages/nothing", 404)):
        answer = strict.http.request(method, path)
        kind, own = answer.json()["type"], answer.headers["request-id"]
        assert (answer.status_code, kind, answer.json()["request_id"]) == (status, "error", own)
    address, port = strict.url.removeprefix("http://").split(":")
    for target in (f"{strict.url}/health", "http://elsewhere.example/health"):  # as proxies write it
        connection = HTTPConnection(address, int(port), timeout=60)
        connection.request("GET", target)
        answered = connection.getresponse()
        assert (answered.status, json.loads(answered.read())) == (200, {"status": "ok"})
        connection.close()
    assert strict.http.get("/health", headers={"x-large": "y" * 100_000}).status_code == 431


def test_headers_and_bodies_that_do_not_come_are_not_waited_for(strict: Running) -> None:
    address = ("127.0.0.1", int(strict.url.rsplit(":", 1)[1]))
    with socket.create_connection(address) as no_headers, socket.create_connection(address) as no_body:
        no_headers.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        head = HEAD + b"Authorization: Bearer secret\r\nContent-Length: 9\r\n\r\n{"
        no_body.sendall(head)
        no_body.settimeout(30)
        no_headers.settimeout(30)
        assert b" 408 " in no_body.recv(4096)
        assert no_headers.recv(4096) == b""
    with contextlib.ExitStack() as held:  # nor do they take places: there are four
        begun = [held.enter_context(socket.create_connection(address)) for _ in range(12)]
        for i, no_body in enumerate(begun):
            no_body.sendall(head if i % 2 else head.replace(b"/v1/completions", b"/lab/api/theory"))
        assert strict.http.post("/lab/api/theory", json={"calls": []}).status_code == 200
        assert strict.http.post("/v1/completions", json={"prompt": CODE, "max_tokens": 1}).status_code == 200
        for no_body in begun:
            no_body.settimeout(30)
            assert b" 408 " in no_body.recv(4096)


def test_beyond_the_queue_is_429_and_beyond_the_time_504(strict: Running) -> None:
    """Two choices run and two wait; the fifth is turned away. All are too long for the two seconds they have."""
    greedy: Any = {**LONG, "temperature": 1.0, "max_tokens": 2000, "draft": "none", "logprobs": 20}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(strict.http.post, "/v1/completions", json={**greedy, "n": 2}) for _ in range(2)]
        wait_for(lambda: strict.metric("vllm:num_requests_running") + strict.metric("vllm:num_requests_waiting") == 4)
        turned = strict.http.post("/v1/completions", json=greedy)
        assert code(turned) == (429, "queue_full")
        assert 1 <= int(turned.headers["retry-after"]) <= 60
        messages = strict.http.post("/v1/messages", json=CLAUDE_CODE)
        assert (messages.status_code, messages.json()["error"]["type"]) == (429, "rate_limit_error")
        codes = [answer.result().status_code for answer in answers]
    assert set(codes) <= {200, 504}
    assert 504 in codes
    assert strict.http.post("/v1/completions", json={"prompt": "x", "n": 5}).status_code == 400
    wait_for(lambda: not strict.metric("vllm:kv_cache_usage_perc"))


def test_the_log_has_requests_and_none_of_their_texts(strict: Running) -> None:
    body = {"prompt": SECRET, "max_tokens": 3, "user": SECRET, "stop": [SECRET]}
    strict.http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    strict.http.post("/v1/completions", json={**body, SECRET: 1}, headers={"x-request-id": "not printable\x7f"})
    found: Any = wait_for(lambda: re.search('.*"mine-1".*', strict.log))
    record = json.loads(found[0])
    assert (record["event"], record["path"], record["status"]) == ("request", "/v1/completions", 200)
    assert (record["completion_tokens"], record["finish_reason"]) == (3, "length")
    assert record["prompt_tokens"] > 3
    assert 1 <= record["steps"] <= 3
    assert 0 <= record["accepted"] <= record["drafted"]
    assert record["accepted"] + record["steps"] >= 3
    assert SECRET not in strict.log
    assert "not printable" not in strict.log
    assert '"logger": "forerun.engine' not in strict.log  # a request has one line


def test_clients_that_leave_free_what_they_held(server: Running) -> None:
    """While they read a stream, wait for a whole answer, and send their body."""
    slow: Any = {**LONG, "temperature": 1.0, "draft": "none", "logprobs": 20}
    before = server.metric("forerun:generation_tokens_total")
    for stream in (True, False):
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as leaving:
            body = json.dumps({**slow, "stream": stream}).encode()
            leaving.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: server.metric("forerun:num_requests_running"))
        wait_for(server.is_idle)
    assert server.metric("forerun:generation_tokens_total") - before < 2 * LONG["max_tokens"], "they went on to the end"
    before = server.metric("forerun:generation_tokens_total")
    time.sleep(0.05)
    assert server.metric("forerun:generation_tokens_total") == before


def test_a_text_that_cannot_fit_is_not_even_read(server: Running) -> None:
    for url, fields in (
        ("/v1/completions", {"prompt": CODE * 300_000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x " * 1_500_000}], "max_tokens": 1}),
    ):
        assert_refused(server.http.post(url, json=fields), "whatever they are")


def test_a_slow_reader_gets_longer_pieces_and_stops_nobody(server: Running) -> None:
    """It reads nothing until another request has come and gone, and then gets everything that was written."""
    asked = {**LONG, "max_tokens": 600, "stream": True, "logprobs": 5, "temperature": 0, "bad_words": ["\n\n\n\n"]}
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(asked).encode()
        slow.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: server.metric("forerun:num_requests_running"))
        assert server.http.post("/v1/completions", json={"prompt": CODE, "max_tokens": 4}).status_code == 200
        wait_for(server.is_idle)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        slow.settimeout(60)
        got = b""
        while b"data: [DONE]" not in got:
            part = slow.recv(1 << 16)
            assert part
            got += part
    assert got.count(b'"tokens":[') < 600, "pieces hold several tokens"


# ---------------------------------------------------------------------------------------------------------- the end


def test_sigterm_lets_accepted_requests_finish() -> None:
    with serving("--max-batch-size", "4") as running:
        asked: Any = {**LONG, "temperature": 0}
        lengths = [800] * 4 + [60] * 8  # the first four are not done before the others have come

        def ask(i: int) -> str:
            body = {**asked, "max_tokens": lengths[i], "stream": i % 2 == 0}
            answer = running.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            if i % 2:
                return str(answer.json()["choices"][0]["text"])
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert answer.text.rstrip().endswith("data: [DONE]")
            return "".join(event["choices"][0]["text"] for event in events)

        alone = {lengths[i]: ask(i) for i in (1, 5)}
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(ask, i) for i in range(4)]
            wait_for(lambda: running.metric("forerun:num_requests_running") == 4)
            answers += [pool.submit(ask, i) for i in range(4, 12)]
            wait_for(lambda: running.metric("forerun:num_requests_waiting") == 8)
            running.process.send_signal(signal.SIGTERM)
            wait_for(lambda: running.http.get("/ready").status_code == 503)
            for url, body in (("/v1/completions", asked), ("/lab/api/theory", {"calls": []})):
                turned = running.http.post(url, json=body)
                assert code(turned) == (503, "draining")
                assert int(turned.headers["retry-after"]) >= 1
            assert running.http.get("/lab/").status_code == 200
            assert running.http.get("/health").status_code == 200
            assert [answer.result() for answer in answers] == [alone[num] for num in lengths]
        assert running.process.wait(60) == 0
        assert "shutting down: 12 choices are still to be made" in running.log
        assert "a second Ctrl-C ends at once" in running.log


def test_an_idle_server_has_one_form_of_errors_and_says_only_that_it_ends() -> None:
    with serving() as running:
        errors = [running.http.get("/lab/nothing"), running.http.post("/lab/nothing"), running.http.get("/nothing")]
        assert [answer.status_code for answer in errors] == [404, 405, 404]
        assert len({tuple(answer.json()["error"]) for answer in errors}) == 1
        assert running.terminate() == 0
        assert re.search(r"shutting down$", running.log, re.M)
    assert server._draining(1).startswith("shutting down: 1 choice is still to be made,")


def test_killed_and_started_again_and_ended_twice() -> None:
    with serving() as first:
        port = int(first.url.rsplit(":", 1)[1])
        threading.Thread(target=_ask_and_lose, args=(first.url,), daemon=True).start()
        wait_for(lambda: first.metric("forerun:num_requests_running"))
        first.process.kill()
        first.process.wait()
        with serving("--host", "127.0.0.1", "--no-lab", port=port) as second:
            assert second.http.get("/lab/").status_code == 404
            assert second.http.post("/v1/completions", json={"prompt": CODE, "max_tokens": 2}).status_code == 200
            threading.Thread(target=_ask_and_lose, args=(second.url,), daemon=True).start()
            wait_for(lambda: second.metric("forerun:num_requests_running"))
            second.process.send_signal(signal.SIGINT)
            wait_for(lambda: "shutting down" in second.log)
            second.process.send_signal(signal.SIGINT)
            assert second.process.wait(60) == 0
            assert "ended by a second signal" in second.log
            assert "Traceback" not in second.log


def _ask_and_lose(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 2000}, timeout=120)
