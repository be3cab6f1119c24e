"""What cannot be provoked from outside: an engine that fails, a text that cannot be made; and schemathesis' bodies."""

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import schemathesis
import uvicorn
from fastapi.responses import JSONResponse
from hypothesis import HealthCheck, given, seed, settings
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from forerun import LLM, SamplingParams
from forerun.engine.request import Request
from forerun.errors import ForerunError, InternalError
from forerun.serve import server
from forerun.serve.apis import generating
from forerun.serve.app import Door, make_app
from forerun.serve.bodies import Refused
from forerun.serve.events import KEEP_ALIVE
from forerun.serve.limits import Gate, Patience
from forerun.serve.options import Limits, ServerOptions
from forerun.serve.origins import Origins, is_local
from forerun.serve.server import PatientProtocol, _end_on_signals, _Server
from forerun.serve.service import Service, Services
from serve.running import CODE, JSON, Running, assert_refused
from speculation import llm_options

pytestmark = pytest.mark.once("faults, whatever the speculation")
RAW_JSON = [(b"content-type", b"application/json")]


def alone(llm: LLM, names: tuple[str, ...] = ("small",), **limits: Any) -> Services:
    """A server of one model."""
    own = Limits(**limits)
    return Services([Service(llm, names, max_queue=own.max_queue)], limits=own)


@asynccontextmanager
async def served(llm: LLM, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Services]]:
    service = alone(llm, **options)
    app = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=app, base_url="http://test", timeout=60) as client:
        try:
            yield client, service
        finally:
            service.close()


async def posted(llm: LLM, send: Any, body: Any, **limits: Any) -> None:
    """Send a whole body to /v1/completions; `send` takes the messages that answer it, and no place is left taken."""
    service, messages = alone(llm, **limits), asyncio.Queue[dict[str, Any]]()
    messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": RAW_JSON}
    try:
        await make_app(service)(scope, messages.get, send)
        assert service.gate.num_taken == 0
    finally:
        service.close()


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def on_fire(*_: Any) -> Any:
    raise RuntimeError("the machine is on fire")


def asked(**fields: Any) -> dict[str, Any]:
    return {"json": {"prompt": CODE, "max_tokens": 200, "temperature": 0, **fields}}


async def test_an_engine_that_fails_takes_all_with_it_and_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("shipped", max_batch_size=2, **llm_options())
    steps = chain(repeat(llm.engine.stepper.step, 19), repeat(on_fire))

    async with served(llm) as (client, service):
        assert (await client.get("/ready")).status_code == 200
        monkeypatch.setattr(llm.engine.stepper, "step", lambda *given: next(steps)(*given))
        posts = [client.post("/v1/completions", **asked(stream=i == 0)) for i in range(4)]
        streamed, *whole = await asyncio.gather(*posts)
        assert [answer.status_code for answer in whole] == [500] * 3
        assert all(answer.json()["error"]["type"] == "server_error" for answer in whole)
        assert '"error":{"message":"' in streamed.text
        assert "[DONE]" not in streamed.text
        for path in ("/ready", "/health"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "failed")
        assert (await client.post("/v1/completions", **asked())).status_code == 500
        assert service.gate.num_taken == 0
        metrics = (await client.get("/metrics")).text
        assert 'request_success_total{finished_reason="error",model_name="small"} 4.0' in metrics


async def test_an_engine_that_fails_on_what_no_route_asked_for_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("shipped", max_batch_size=2, **llm_options())

    async with served(llm) as (client, _):
        monkeypatch.setattr(llm.engine.stepper, "step", on_fire)
        with pytest.raises(ForerunError):
            await asyncio.to_thread(llm.generate, CODE, SamplingParams(max_tokens=4))
        assert (await client.get("/ready")).status_code == 503


async def test_what_can_never_run_is_refused_before_it_is_made() -> None:
    """One body may ask for millions of choices; and a text of megabytes holds up every other request while it is cut.

    Requests count up, whoever makes them.
    """
    llm = LLM("shipped", draft="none", max_batch_size=2)

    async with served(llm, max_queue=6) as (client, _):
        before = llm.engine.make([5], SamplingParams())[0].seq.id
        assert_refused(await client.post("/v1/completions", **asked(prompt=[[5]] * 200, n=50)), "makes 10000 choices")
        most = await client.post("/v1/completions", **asked(prompt=[[5]] * 4, n=2, max_tokens=1))
        assert (most.status_code, len(most.json()["choices"])) == (200, 8)
        assert llm.engine.make([5], SamplingParams())[0].seq.id == before + 9
        for url in ("/tokenize", "/v1/completions"):
            assert_refused(await client.post(url, json={"prompt": CODE * 100_000}), "whatever they are")


@asynccontextmanager
async def begun(service: Service, url: str, first: bytes) -> AsyncIterator[asyncio.Task[list[dict[str, Any]]]]:
    """A request that sends the first bytes of its body and no more; the task ends with what it was answered."""
    app, sent, told = make_app(service, pages={"/page": large_or_small}), list[dict[str, Any]](), asyncio.Event()
    messages = iter([{"type": "http.request", "body": first, "more_body": True}])

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            told.set()
            await asyncio.Event().wait()
        return message

    async def ask() -> list[dict[str, Any]]:
        headers = [(b"content-length", b"1000"), *RAW_JSON]
        scope = {"type": "http", "method": "POST", "path": url, "query_string": b"", "headers": headers}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return sent

    asking = asyncio.create_task(ask())
    await asyncio.wait((asking, asyncio.create_task(told.wait())), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_bodies_that_do_not_end_take_no_place_and_little_memory() -> None:
    """A place is taken when the body is whole: there are three, and 40 that wait for more. The oldest is given up."""
    llm = LLM("shipped", draft="none", max_batch_size=2)

    async with served(llm, max_queue=1, max_body_bytes=1000) as (client, service), AsyncExitStack() as stack:
        for i in range(20):
            for url in ("/v1/completions", ("/tokenize", "/page/api/x")[i % 2]):
                await stack.enter_async_context(begun(service, url, b"{"))
        assert (service.gate.num_taken, service.arriving.num_bytes) == (0, 40)
        assert (await client.post("/v1/completions", **asked(max_tokens=1))).status_code == 200
    async with served(llm, max_body_bytes=1000) as (client, service), AsyncExitStack() as stack:
        first, *others = [await stack.enter_async_context(begun(service, "/tokenize", b" " * 999)) for _ in range(17)]
        assert [(await first)[0]["status"], *(other.done() for other in others)] == [408, *[False] * 16]
        assert service.arriving.num_bytes == 16 * 999
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert service.arriving.num_bytes == 0


async def test_a_drafter_that_a_request_names_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says, no file is looked for, and a name that no file may have is refused as any other is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    async with served(LLM("shipped", draft="none", max_batch_size=2)) as (client, _):
        for name in ("a" * 300, "folder", "x\0y", "model:path=" + "b" * 300):
            answer = await client.post("/v1/completions", **asked(speculation={"draft": name}))
            message = assert_refused(answer, "there is no drafter in this engine")["message"]
            assert ("start it with" in message) == name.startswith("model:"), message


async def test_what_goes_wrong_in_one_request_ends_that_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text cannot be made, or the engine ends it; the one beside it is answered, and so is the next."""
    llm = LLM("shipped", **llm_options())
    real = Request.output

    def output(self: Request) -> Any:
        if self.seq.params.seed == 13:
            raise ValueError("no text for you")
        return real(self)

    with caplog.at_level(logging.CRITICAL):
        async with served(llm) as (client, service):
            monkeypatch.setattr(Request, "output", output)
            posts = (client.post("/v1/completions", **asked(seed=seed)) for seed in (13, 14))
            bad, good = await asyncio.gather(*posts)
            assert (bad.status_code, good.status_code) == (500, 200)
            assert "the text of the request or its answer could not be made" in bad.json()["error"]["message"]
            cut = await client.post("/v1/completions", **asked(seed=13, stream=True))
            assert "the text of the request or its answer could not be made" in cut.text
            going = asyncio.create_task(client.post("/v1/completions", **asked(max_tokens=1500, ignore_eos=True)))
            await until(lambda: llm.engine.scheduler.running)
            request = llm.engine.scheduler.running[0]
            request.error = InternalError("the logits are no numbers")
            llm.end([request])
            assert (await going).status_code == 500
            assert (await client.get("/ready")).status_code == 200
            assert (await client.post("/v1/completions", **asked())).status_code == 200
            assert service.gate.num_taken == 0
    assert llm.engine.runner.cache.free_tokens() == llm.engine.runner.cache.num_blocks * 16


async def test_a_stream_whose_steps_take_long_says_that_it_lives_and_one_that_takes_too_long_ends() -> None:
    llm = LLM("shipped", draft="none")  # as many steps as tokens

    wanted = asked(max_tokens=8, stream=True, seed=1, temperature=1.0)
    async with served(llm) as (client, _):
        at_once = await client.post("/v1/completions", **wanted)
    async with served(llm, keep_alive_s=0.05) as (client, _):
        end = llm.listen(lambda _: time.sleep(0.1))
        slow = await client.post("/v1/completions", **wanted)
        end()
        assert KEEP_ALIVE not in at_once.content
        assert slow.content.count(KEEP_ALIVE) > 2
        assert events(slow.content.replace(KEEP_ALIVE, b"")) == events(at_once.content)
    async with served(llm, request_timeout_s=0.2) as (client, service):
        late = await client.post("/v1/completions", **asked(stream=True, max_tokens=2000, ignore_eos=True))
        assert "more than 0.2 s" in events(late.content)[-1]["error"]["message"]
        assert service.gate.num_taken == 0


def events(stream: bytes) -> list[dict[str, Any]]:
    """Those with JSON, without what differs between two requests that are alike."""
    made = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    return [{name: value for name, value in one.items() if name not in ("id", "created")} for one in made]


class Impatient(PatientProtocol):
    headers_s, stall_s = 1.0, 1.0


async def large_or_small(scope: Any, receive: Any, send: Any) -> None:
    size = 64 << 20 if scope["path"] == "/large" else 2
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
    await send({"type": "http.response.body", "body": b"x" * size})


SMALL = b"GET /small HTTP/1.1\r\nhost: a\r\n\r\n"
LARGE = SMALL.replace(b"small", b"large")


@asynccontextmanager
async def impatient() -> AsyncIterator[tuple[_Server, Callable[[bytes], Coroutine[Any, Any, socket.socket]]]]:
    """A running server, and what sends bytes to it on a connection that takes little at once."""
    config = uvicorn.Config(large_or_small, http=Impatient, lifespan="off", log_config=None, timeout_keep_alive=60)
    server, listening = _Server(config), socket.create_server(("127.0.0.1", 0))
    # What the system holds looks as if it were taken.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    serving, made = asyncio.create_task(server.serve([listening])), list[socket.socket]()

    async def ask(data: bytes) -> socket.socket:
        client = socket.socket()
        made.append(client)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
        await asyncio.get_running_loop().sock_sendall(client, data)
        return client

    try:
        yield server, ask
        server.should_exit = True
        await serving
    finally:
        for client in made:
            client.close()


async def until_cut(client: socket.socket) -> bytes:
    """All that comes before the server cuts the connection."""
    got = b""
    with suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            got += data
    return got


async def test_connections_whose_clients_stand_still_are_cut() -> None:
    """Readers that take nothing, first requests and later ones whose headers do not end; a slow reader stays."""

    loop = asyncio.get_running_loop()
    async with impatient() as (server, ask):
        silent, idle = await ask(LARGE), await ask(SMALL)
        again = await ask(SMALL + SMALL[:20])
        assert await until_cut(await ask(SMALL[:20])) == b""
        assert (await until_cut(again)).endswith(b"xx")
        slow, taken = await ask(LARGE), 0
        for _ in range(30):  # three times as long as a reader may take nothing
            taken += len(await loop.sock_recv(slow, 1 << 20))
            await asyncio.sleep(0.1)
        await until(lambda: len(server.server_state.connections) <= 2)  # the silent one is cut
        assert len(await until_cut(silent)) < 64 << 20
        while taken < 64 << 20:
            data = await loop.sock_recv(slow, 1 << 20)
            assert data
            taken += len(data)
        assert (await loop.sock_recv(idle, 1 << 20)).endswith(b"xx")
        await loop.sock_sendall(idle, SMALL)
        assert (await loop.sock_recv(idle, 1 << 20)).endswith(b"xx")
        slow.close()
        idle.close()


async def test_a_second_signal_ends_a_server_that_waits_for_a_reader_alone() -> None:
    gate, loop = Gate(1, 1), asyncio.get_running_loop()
    async with impatient() as (server, ask):
        ending = asyncio.create_task(_end_on_signals(SimpleNamespace(gate=gate), server))  # type: ignore[arg-type]
        reader = await ask(LARGE)
        await until(lambda: server.server_state.connections)
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: server.should_exit)
        signal.raise_signal(signal.SIGTERM)
        await ending
        assert server.force_exit
        assert reader.fileno() > 0
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def test_when_to_come_again_is_told_by_requests_that_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting tokens takes a moment, and so does a refusal."""

    gate, now_s = Gate(8, 1), 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    for num, seconds in [(1, 10.0)] * 60 + [(None, 0.0)] * 60:
        with gate.enter() as place:
            if num is not None:
                place.grow(num)
            now_s += seconds
    assert gate.retry_after_s() == 10
    monkeypatch.undo()


async def test_a_request_takes_and_gives_back_a_place_for_each_of_its_choices() -> None:
    gate = Gate(4, 2)
    with gate.enter() as first, gate.enter() as second:
        first.grow(2)
        with pytest.raises(Refused, match="3 choices run or wait, of 4"):
            second.grow(3)
        second.grow(2)
        with pytest.raises(Refused, match="4 choices run or wait, of 4"), gate.enter():
            pass
    assert (gate.num_taken, gate.is_empty.is_set()) == (0, True)


async def test_a_stream_gives_signs_of_life_while_its_prompt_is_read() -> None:
    llm = LLM("shipped", **llm_options(), max_num_batched_tokens=16, max_batch_size=4)
    sent: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    body = {"prompt": CODE * 60, "max_tokens": 1, "ignore_eos": True, "stream": True}
    await posted(llm, send, body, keep_alive_s=0.05)
    assert KEEP_ALIVE in sent  # though each chunk of the prompt woke the stream
    assert b"".join(sent).rstrip().endswith(b"data: [DONE]")


async def test_a_stream_whose_answer_is_over_before_its_reader_takes_anything_has_its_text() -> None:
    llm = LLM("shipped", **llm_options())
    sent: list[bytes] = []
    seen: list[Request] = []
    llm.listen(lambda _: seen.extend(llm.engine.scheduler.running))

    async def send(message: dict[str, Any]) -> None:
        await until(lambda: seen and not llm.engine.scheduler.running)
        sent.append(message.get("body", b""))

    await posted(llm, send, {"prompt": CODE, "max_tokens": 4, "temperature": 0, "stream": True})
    (plain,) = llm.generate(CODE, SamplingParams(max_tokens=4, temperature=0))
    told = [choice["text"] for event in events(b"".join(sent)) for choice in event["choices"]]
    assert "".join(told) == plain.text != ""


async def test_a_reader_that_takes_nothing_loses_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    body = {"prompt": CODE, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with caplog.at_level(logging.INFO, "forerun.serve.requests"):
        await posted(LLM("shipped", **llm_options()), send, body, stall_timeout_s=0.05)
    assert "'reason': 'stalled'" in caplog.text


async def test_patience() -> None:
    """A short wait behind a long one, a wait that is in time behind one that was not, and a cancellation of others."""

    patience = Patience()
    assert await patience.wait(asyncio.sleep(0, "done"), 60) == "done"
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await patience.wait(asyncio.Event().wait(), 0.01)
        assert await patience.wait(asyncio.sleep(0.03, "done"), 60) == "done"
    await asyncio.sleep(0.02)  # nothing waits: nobody is cancelled

    task = asyncio.create_task(Patience().wait(asyncio.Event().wait(), 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_model_without_a_template_refuses_conversations(checkpoints: Any) -> None:
    async with served(LLM(checkpoints / "llama", **llm_options())) as (client, _):
        hello = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        bodies = dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"), hello)
        for url, body in {**bodies, "/v1/responses": {"input": "x"}}.items():
            assert_refused(await client.post(url, json=body), "chat template")
        assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})).status_code == 200


def ask_for_what_is_described(server: Running, num_examples: int) -> dict[str, set[int]]:
    """Ask every route for what its document describes. Returns the statuses by path, none of them of a fault."""
    schema, seen = schemathesis.openapi.from_url(f"{server.url}/openapi.json"), dict[str, set[int]]()
    for result in schema.get_all_operations():
        _ask(result.ok(), num_examples, seen)
    return seen


async def test_lists_of_models_have_no_places_of_files() -> None:
    names = ("small", "/srv/models/small")
    async with served(LLM("shipped", draft="none", max_batch_size=2), names=names) as (client, _):
        listed = (await client.get("/v1/models")).json()
        assert ([one["id"] for one in listed["data"]], listed["last_id"]) == (["small"], "small")
        assert (await client.get("/v1/models//srv/models/small")).status_code == 200  # who knows it may say it


def test_what_a_server_says_before_a_model_is_loaded(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port} cannot be served" in cli("serve", "shipped", "--port", port, code=2).stderr
    for flag, value, sentence in (
        ("--metrics-prefix", "mine", "must be forerun or vllm"),
        ("--log-format", "xml", "must be text or json"),
        ("--log-level", "loud", "must be debug, info, warning or error"),
        ("--max-queue", "-1", "--max-queue=-1 is not possible"),
        ("--host", "no.such.host.invalid", "is no address"),
        ("--host", "192.0.2.1", "name an address of this machine as --host"),
        ("--port", "99999", "less than or equal to 65535"),
        ("--api-key", "", "--api-key='' is not possible: it must not be empty"),
        ("--served-model-name", "", "must not be empty"),
    ):
        assert sentence in cli("serve", "shipped", "--port", "0", flag, value, code=2).stderr
    done = cli("serve", "nowhere/at-all", "--host", "0.0.0.0", "--port", "0", code=2, HF_HUB_OFFLINE="1")
    assert "can be reached from other machines" in done.stderr
    for host in ("127.0.0.1", "::1", "localhost", "127.1", "127.9.9.9", "::ffff:127.0.0.1", "a.localhost", "LOCALHOST"):
        assert is_local(host), host
    for host in ("0.0.0.0", "10.0.0.1", "example.org", "::", "::ffff:10.0.0.1", "10.1", "localhost.example.org", ""):
        assert not is_local(host), host
    monkeypatch.setitem(sys.modules, "forerun.serve.server", None)
    assert "-m pip install 'fastapi>=" in cli("serve", "shipped", code=2).stderr


# Fields that another one contradicts more often than not, where all are drawn at random.
_CONTRADICTORY = (
    *("max_completion_tokens", "min_tokens", "top_logprobs", "best_of", "stream_options"),
    *("draft", "spec_length", "acceptance", "chat_template_kwargs", "prediction"),
    *("json_schema", "json_object", "regex", "choice", "grammar", "json_whitespace"),
)


def _ask(operation: Any, num_examples: int, seen: dict[str, set[int]]) -> None:
    route = generating().get(operation.path)
    names = () if route is None else ("max_output_tokens", "n_predict", "max_tokens")
    limit: dict[str, Any] = {name: 2 for name in names if route is not None and name in route.form.own}
    if route is not None and "options" in route.form.own:
        limit = {"options": {"num_predict": 2}}

    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(1)
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            body = {name: value for name, value in case.body.items() if name not in _CONTRADICTORY}
            if isinstance(body.get("options"), dict) and "options" in limit:
                limit["options"] = {**body["options"], **limit["options"]}
            case.body = body | limit
        answer = case.call()
        assert answer.status_code < 500, (case.body, answer.text)
        seen.setdefault(operation.path, set()).add(answer.status_code)

    ask()


def test_what_the_document_describes_is_answered(server: Running) -> None:
    seen = ask_for_what_is_described(server, 4)
    assert {path for path, codes in seen.items() if 200 in codes} >= {"/v1/models", "/health", "/tokenize"}


@pytest.mark.parity
def test_much_of_what_the_document_describes_is_answered(server: Running) -> None:
    """The share that is answered is not small: the document describes bodies that are honoured."""
    seen = ask_for_what_is_described(server, 300)
    assert all(200 in codes for path, codes in seen.items() if "{" not in path and path != "/infill"), seen
    assert set().union(*seen.values()) <= {200, 400, 404}


def test_a_server_that_has_ended_leaves_logging_as_it_was() -> None:
    names = ("", "uvicorn.error", "asyncio")
    before = [logging.getLogger(name).level for name in names]
    with server._logging(ServerOptions(log_level="error")):
        assert logging.getLogger("asyncio").level == logging.ERROR
    assert [logging.getLogger(name).level for name in names] == before


async def test_a_request_is_a_span_below_the_clients_own() -> None:
    """Where OpenTelemetry is set up; what the log says of a request is in the span, its text is not."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}

    try:
        async with served(LLM("shipped", max_batch_size=2, **llm_options())) as (client, _):
            good = await client.post("/v1/completions", **asked(max_tokens=8), headers=parent)
            bad = await client.post("/v1/completions", **asked(max_tokens=-2), headers=parent)
            assert (good.status_code, bad.status_code) == (200, 400)
    finally:
        # FastAPI has its own, too.
        spans = [span for span in kept.get_finished_spans() if span.name == "/v1/completions"]
        provider.shutdown()
    for span, status in zip(spans, (200, 400), strict=True):
        assert (span.context.trace_id, span.parent.span_id) == (int("ab" * 16, 16), int("cd" * 8, 16))
        assert span.kind is trace.SpanKind.SERVER
        assert span.attributes["forerun.status"] == status
        assert CODE not in str(dict(span.attributes))


async def test_a_page_takes_what_the_context_allows() -> None:
    """And says what to do with more; the limit of all bodies holds there, too."""
    llm = LLM("shipped", draft="none", max_batch_size=1)

    for most_bytes, most, option in ((4 << 20, 40_000, "--max-seq-len"), (9_000, 9_000, "--max-body-bytes")):
        service = alone(llm, max_body_bytes=most_bytes)
        service.first.llm = SimpleNamespace(engine=SimpleNamespace(max_seq_len=5_000))  # type: ignore[assignment]
        page = Door(JSONResponse({}), service, None, ("/lab",), Origins())
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url="http://test") as client:
                for length, status in ((most, 200), (most + 1, 413)):
                    body = json.dumps("x" * (length - 2)).encode()
                    answer = await client.post("/lab/api/live", content=body, headers=JSON)
                    assert answer.status_code == status
                message = answer.json()["error"]["message"]
                assert f"takes {most:,} bytes at once, and this has {most + 1:,}: shorten it" in message
                assert message.endswith(f"or raise {option}")
        finally:
            service.first.llm = llm
            service.close()
