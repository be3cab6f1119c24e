"""Grammars and schemas that are meant to take much: each is refused or served, and a stream beside them goes on."""

import asyncio
import json
import threading

import httpx
import pytest

from benchmarks.hostile_grammars import NUM, hostile
from forerun import LLM, SamplingParams
from forerun.sampling.grammar import is_short, vocabulary
from forerun.serve import aside
from serve.running import CODE, JSON, Running, assert_refused
from serve.test_serve_inside import asked, served, until
from speculation import llm_options

COMPLETION = "/v1/completions"
LONG = {"prompt": CODE, "max_tokens": 1500, "ignore_eos": True, "temperature": 0.8, "seed": 5}
FOR_EVER = "start: T\nT: " + " & ".join(f"/(.{{{prime}}})*/" for prime in (7, 11, 13, 17, 19, 23, 29))


def ask(server: Running, each: int) -> dict[str, int]:
    """Send every so many of them while streams run; returns their statuses, which are those of answers."""
    alone = server.http.post(COMPLETION, json=LONG).json()["choices"][0]["text"]
    statuses, texts = dict[str, int](), list[str]()
    is_over = threading.Event()

    def stream() -> None:
        with httpx.Client(base_url=server.url, timeout=600) as http:
            while not is_over.is_set():
                with http.stream("POST", COMPLETION, json=LONG | {"stream": True}) as answer:
                    events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
                texts.append("".join(choice["text"] for event in events for choice in event["choices"]))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        for i, (name, inside) in enumerate(hostile()[::each]):
            body = b'{"prompt": "x", "max_tokens": 3, ' + inside + b"}"
            answer = server.http.post(COMPLETION, content=body, headers=JSON, timeout=600)
            statuses[f"{i} {name}"] = answer.status_code
    finally:
        is_over.set()
        thread.join()
    assert set(texts) == {alone}
    assert {name: status for name, status in statuses.items() if status not in (200, 400, 413)} == {}
    assert_well(server)
    return statuses


def assert_well(server: Running) -> None:
    """It answers as it should, grammars that had to be tried included, and nothing is left of what was asked."""
    words = " | ".join(f'"word {i}"' for i in range(400))
    for fields in ({"regex": "[a-c]{3}"}, {"json_schema": {"enum": ["x"]}}, {"grammar": f"start: {words}"}):
        answer = server.http.post(COMPLETION, json={"prompt": "x", "max_tokens": 60, **fields})
        assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "stop")
    assert server.http.get("/ready").status_code == 200
    assert server.is_idle()


def test_hostile_grammars_are_answered_and_disturb_no_text(server: Running) -> None:
    assert list(ask(server, 16).values()).count(200) > 2


@pytest.mark.parity
def test_all_200_are_answered(server: Running) -> None:
    assert len(ask(server, 1)) == NUM


@pytest.mark.once("no text is generated")
async def test_a_grammar_that_would_take_for_ever_is_refused_and_holds_up_no_other() -> None:
    """It is tried in a process that ends of it; one that is short is compiled meanwhile, and none is tried twice."""
    async with served(LLM("shipped", **llm_options())) as (client, service):
        slow = asyncio.create_task(client.post(COMPLETION, **asked(grammar=FOR_EVER)))
        quick = await client.post(COMPLETION, **asked(regex="[ab]{2}", max_tokens=4))
        assert (quick.status_code, slow.done()) == (200, False)
        error = assert_refused(await slow, "takes more than 2 s to compile")
        assert service.trial.pid is None
        service.trial.attempt = None  # type: ignore[assignment, method-assign]
        again = await client.post(COMPLETION, **asked(grammar=FOR_EVER))
        assert (again.status_code, again.json()) == (400, {"error": error})


@pytest.mark.once("no text is generated")
async def test_a_grammar_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system ends the process where there is no more."""
    code = aside._CODE.replace("main(int", "import forerun.serve.texts as t; t.MOST_TRIED_BYTES = 1 << 20; main(int")
    monkeypatch.setattr(aside, "_CODE", code)
    async with served(LLM("shipped", **llm_options())) as (client, _):
        schema = {"type": "integer", "multipleOf": 99_991}
        assert_refused(await client.post(COMPLETION, **asked(json_schema=schema, max_tokens=2)), "MiB of memory")


@pytest.mark.once("no text is generated")
async def test_what_a_grammar_holds_is_measured() -> None:
    """Every time: what the one before held is given back."""
    llm = LLM("shipped", **llm_options())

    async with served(llm) as (_, service):
        held = []
        for number in (99_989, 99_971, 97):
            params = SamplingParams(json_schema={"type": "integer", "multipleOf": number})
            await service.compile(service.first, params)
            held.append(vocabulary(llm.tokenizer).compiled(params).num_bytes)
        assert min(held[:2]) > 20 << 20
        assert held[2] < 20 << 20


def test_what_is_short_compiles_in_a_moment() -> None:
    for key, expected in (
        (("regex", "(a|b)*"), True),
        (("regex", "a" * 5000), False),
        (("choice", json.dumps(["a" * 5000])), True),
        (("grammar", FOR_EVER), False),
        (("grammar", 'start: "a"'), True),
        (("grammar", "start: " + " | ".join(["start start"] * 50)), False),
        (("json_schema:free", '{"multipleOf": 3}'), False),
        (("json_schema:free", '{"multiple\\u004ff": 3}'), False),
    ):
        assert is_short(key) == expected, key


@pytest.mark.once("no text is generated")
async def test_the_process_that_tries_grammars_is_started_with_the_first_of_any_kind() -> None:
    async with served(LLM("shipped", **llm_options())) as (client, service):
        assert (await client.post(COMPLETION, **asked(max_tokens=2))).status_code == 200
        assert service.trial.pid is None
        assert (await client.post(COMPLETION, **asked(regex="a", max_tokens=2))).status_code == 200
        await until(lambda: service.trial.pid is not None)
