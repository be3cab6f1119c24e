"""Crowds of connections and bodies: they take turns, their number is bounded, and what is beyond is told so."""

import asyncio
import json
import socket
import threading
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

import pytest

from benchmarks import attack_clients, attacks
from forerun import LLM
from forerun.serve import kept, server
from forerun.serve.apis import generating, ollama, responses
from forerun.serve.aside import LONG_BYTES
from forerun.serve.bodies import Refused
from forerun.serve.kept import Kept
from forerun.serve.limits import Arriving, Patience
from forerun.serve.options import ServerOptions
from forerun.serve.service import MOST_ARRIVING
from forerun.serve.turns import MOST_AT_ONCE, Turns, new_loop
from serve.running import CODE, JSON, Running, assert_refused, wait_for
from serve.test_serve_inside import begun, served
from speculation import llm_options

pytestmark = pytest.mark.once("connections and bodies, whatever the speculation")


@contextmanager
def readable(num: int) -> Iterator[list[socket.socket]]:
    """Sockets that have a byte to be read."""
    pairs = [socket.socketpair() for _ in range(num)]
    try:
        for ours, theirs in pairs:
            ours.setblocking(False)
            theirs.send(b"x")
        yield [ours for ours, _ in pairs]
    finally:
        for pair in pairs:
            for one in pair:
                one.close()


def test_sockets_take_turns() -> None:
    with readable(11) as sockets, Turns() as turns:
        for one in sockets:
            turns.register(one, 1)
        told = list[object]()
        while len(told) < len(sockets):
            ready = [key.fileobj for key, _ in turns.select(0)]
            assert 0 < len(ready) <= MOST_AT_ONCE
            told += ready
        assert set(told) == set(sockets), "each had its turn before one had a second"
        sockets[3].recv(1)
        assert sockets[3] not in [key.fileobj for _ in range(20) for key, _ in turns.select(0)]


def test_what_another_thread_tells_comes_before_a_crowd_of_sockets() -> None:
    """As the engine's thread tells of tokens: it is heard behind a few of the sockets, and not behind all."""
    order = list[str]()
    with readable(200) as sockets, asyncio.Runner(loop_factory=new_loop) as runner:

        async def test() -> None:
            loop, is_over = asyncio.get_running_loop(), asyncio.Event()

            def heard(one: socket.socket) -> None:
                one.recv(1)
                order.append("socket")
                if len(order) == 1:
                    teller = threading.Thread(target=loop.call_soon_threadsafe, args=(order.append, "told"))
                    teller.start()
                    teller.join()
                if len(order) == len(sockets) + 1:
                    is_over.set()

            for one in sockets:
                loop.add_reader(one, heard, one)
            await is_over.wait()
            for one in sockets:
                loop.remove_reader(one)

        runner.run(test())
    assert order.index("told") <= 2 * MOST_AT_ONCE


def test_a_server_runs_in_such_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[object]()

    async def serve(*_: Any) -> int:
        seen.append(asyncio.get_running_loop()._selector)  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(server, "loaded", lambda _: None)
    monkeypatch.setattr(server, "_serve", serve)
    assert server.run([], ServerOptions(port=0)) == 0
    assert [type(one) for one in seen] == [Turns]


# ------------------------------------------------------------------------------------------------------------- bodies


async def test_the_number_of_bodies_that_do_not_end_is_bounded() -> None:
    """The oldest is given up, with a word, and whoever sends a body at once is answered."""
    llm = LLM("shipped", draft="none", max_batch_size=2)

    async with served(llm, max_queue=3) as (client, services), AsyncExitStack() as stack:
        assert services.arriving._most == MOST_ARRIVING
        services.arriving = Arriving(5, 1 << 20)
        asked = [await stack.enter_async_context(begun(services, "/tokenize", b"{")) for _ in range(7)]
        for one in asked[:2]:
            start, body = await one
            assert start["status"] == 408
            assert b"while there was room for it: send it faster" in body["body"]
        assert not any(one.done() for one in asked[2:])
        assert services.arriving.num == 5
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert services.arriving.num == 0


async def test_ids_of_a_text_are_no_more_than_the_context_has() -> None:
    async with served(LLM("shipped", draft="none", max_batch_size=2, max_seq_len=64)) as (client, _):
        assert (await client.post("/detokenize", json={"tokens": [7] * 64})).status_code == 200
        refused = await client.post("/detokenize", json={"tokens": [7] * 65})
        message = "tokens has 65 ids and the context 64, so no text is as long: send them in parts"
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)


async def test_what_comes_from_the_process_for_long_bodies_is_bytes_and_arrays() -> None:
    """The server's own threads stand still while an object of many parts is made of bytes."""
    llm = LLM("shipped", draft="none", max_batch_size=2)
    prompts = [[7] * 1500, [8] * 1500, [9] * 9]
    too_large = {"prompt": [[2**40] * 9, [7] * 1500, [7] * 1500], "max_tokens": 1}

    async with served(llm) as (client, services):
        body = json.dumps({"prompt": prompts, "max_tokens": 1}).encode()
        assert len(body) > LONG_BYTES
        job, ids = await services.read("/v1/completions", body)
        assert [type(one) for one in ids] == [array] * 3
        assert ([list(one) for one in ids], job.prompts) == (prompts, ())
        text = json.dumps({"prompt": "a b " * 1000, "return_token_strs": True}).encode()
        written, ignored = await services.read("/tokenize", text)
        assert (json.loads(written)["count"], ignored) == (len(llm.tokenizer.encode("a b " * 1000)), ())
        answer = await client.post("/v1/completions", content=body, headers=JSON)
        assert len(answer.json()["choices"]) == 3
        assert_refused(await client.post("/v1/completions", json=too_large), "the model's ids are")


def test_a_conversation_that_is_kept_is_joined_and_not_read() -> None:
    memory = Kept()
    memory.put("me", {"id": "resp_1", "output": [{"content": "x"}]}, b'[{"content":"a"},NO JSON]')
    body = json.dumps({"input": "b", "previous_response_id": "resp_1", "store": False}).encode()
    extended = memory.extend("me", body)
    assert extended.startswith(b'{"input":[{"content":"a"},NO JSON,{"content":"x"},{"role":"user","content":"b"}],')
    assert json.loads(extended.replace(b"NO JSON,", b""))["store"] is False
    long = json.dumps({"input": "b" * kept.MOST_NAMING_BYTES, "previous_response_id": "resp_1"}).encode()
    with pytest.raises(Refused, match="send the whole conversation as input") as refused:
        memory.extend("me", long)
    assert refused.value.status == 413


@pytest.mark.parametrize("name", ["metadata", "tools", "reasoning"])
def test_what_an_answer_repeats_is_bounded(name: str) -> None:
    def body(num: int) -> dict[str, Any]:
        many = {"summary": [0] * num}
        return {"input": "x", name: [{"type": "web_search", **many}] if name == "tools" else many}

    assert name in generating()[responses.RESPONSES].job(body(responses.MOST_REPEATED - 10), "small").given
    with pytest.raises(Refused, match=f"{name} has more than 20,000 values, which the answer would repeat"):
        generating()[responses.RESPONSES].job(body(responses.MOST_REPEATED + 1), "small")


async def test_a_stream_that_says_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama's lines have no sign of life. The stream waits all the same, and does not ask again at once."""
    llm = LLM("shipped", **llm_options())
    may_step = threading.Event()
    num_waits = 0
    real = Patience.wait

    async def wait(self: Patience, awaited: Any, at_most_s: float) -> Any:
        nonlocal num_waits
        num_waits += 1
        return await real(self, awaited, at_most_s)

    monkeypatch.setattr(Patience, "wait", wait)
    async with served(llm, keep_alive_s=0.1) as (client, _):
        end = llm.listen(lambda _: may_step.wait(60))
        body = {"prompt": "x", "raw": True, "options": {"num_predict": 3}}
        asking = asyncio.create_task(client.post(ollama.GENERATE, json=body))
        await asyncio.sleep(0.5)
        told = num_waits
        may_step.set()
        assert (await asking).status_code == 200
        end()
        assert told < 100


# ------------------------------------------------------------------------------------------------------------- attacks


@pytest.mark.parametrize("attack", [attack_clients.slow_bodies, attack_clients.unread_streams])
def test_a_server_is_well_behind_a_flood(attack: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, num in (("NUM_SLOW", 40), ("NUM_UNREAD", 30), ("TRICKLE_S", 0.01)):
        monkeypatch.setattr(attack_clients, name, num)
    answers, port = Counter[str](), int(server.url.rsplit(":", 1)[1])
    before = server.http.post("/v1/completions", json={"prompt": CODE, "max_tokens": 4, "temperature": 0}).json()

    async def flood() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(attack("127.0.0.1", port, answers), 0.5)

    asyncio.run(flood())
    wait_for(server.is_idle)
    behind = server.http.post("/v1/completions", json={"prompt": CODE, "max_tokens": 4, "temperature": 0}).json()
    assert behind["choices"] == before["choices"]
    assert set(answers) <= {"200"}


def test_numbers_of_an_attack() -> None:
    made = attacks.line("x", {"408": 2, "200": 1000}, [0.25, 0.125, 1.0, 0.125], 0.25)
    assert made == attacks.AttackLine("x", "200: 1,000, 408: 2", 187.5, 250.0, 1000.0, 4.0)
    assert list(attack_clients.ATTACKS)[-1] == "900 new connections"
