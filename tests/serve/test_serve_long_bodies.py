"""Bodies that are legal and long hold up nobody: they are read elsewhere, and fields have limits."""

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.errors import InternalError
from forerun.serve import aside
from forerun.serve.bodies import MOST_ENTRIES
from forerun.serve.events import as_json, in_slices
from forerun.serve.texts import TextOptions, Texts
from serve.running import CODE, JSON
from serve.test_serve_inside import asked, served
from speculation import llm_options

pytestmark = pytest.mark.once("texts, whatever the speculation")
MOST_STEPS = 5  # until a first token: the step that runs, the prompt's, its own; and two that it may be late
WORD = "x" * 120_000
WORDS = ["w"] * 250_000
TALK = {"messages": [{"role": "user", "content": "x"}]}
ATTACKS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "a prediction": ("/v1/completions", {"prompt": "x", "prediction": "ab " * 1_300_000}, 400, "prediction has"),
    "bad words": ("/v1/completions", {"prompt": "x", "bad_words": WORDS}, 400, "at most 1,024 entries"),
    "stop texts": ("/v1/messages", {"max_tokens": 1, **TALK, "stop_sequences": WORDS}, 400, "stop_sequences="),
    "tiny messages": (
        "/v1/messages/count_tokens",
        {"messages": [{"role": role, "content": ""} for role in ("user", "assistant")] * 40_000},
        400,
        "80,000 messages",
    ),
    "a word": ("/tokenize", {"prompt": WORD * 5}, 400, "whatever they are"),
    "a word that might fit": ("/tokenize", {"prompt": WORD}, 200, '"count":'),
    "a million lists": ("/v1/completions", {"prompt": [[]] * 1_000_000}, 400, "prompt="),
}


async def test_a_request_beside_long_bodies_is_late_by_two_steps_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bodies are, four times each; and this process reads none of them."""
    llm = LLM("shipped", draft="none", max_batch_size=4)
    lengths, real, num_steps = list[int](), Texts.work, 0

    def work(self: Texts, url: str, body: bytes) -> Any:
        lengths.append(len(body))
        return real(self, url, body)

    def count(_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.05)  # longer than a short body takes

    monkeypatch.setattr(Texts, "work", work)
    async with served(llm) as (client, service):
        going = asyncio.create_task(client.post("/v1/completions", **asked(max_tokens=2000, ignore_eos=True)))
        await client.post("/tokenize", json={"prompt": WORD})  # the process starts
        assert service.aside.pid not in (None, os.getpid())
        end = llm.listen(count)
        for name, (url, fields, status, said) in ATTACKS.items():
            body = json.dumps(fields).encode()
            assert aside.LONG_BYTES < len(body) < service.limits.max_body_bytes
            attacks = [asyncio.create_task(client.post(url, content=body, headers=JSON)) for _ in range(4)]
            await asyncio.sleep(0.01)
            before = num_steps
            answer = await client.post("/v1/completions", **asked(prompt="def f(", max_tokens=1))
            assert (answer.status_code, num_steps - before <= MOST_STEPS) == (200, True), (name, num_steps - before)
            for attack in await asyncio.gather(*attacks):
                assert (attack.status_code, said in attack.text) == (status, True), (name, attack.text[:500])
        end()
        going.cancel()
    assert lengths
    assert max(lengths) <= aside.LONG_BYTES


async def test_long_and_short_bodies_are_answered_alike() -> None:
    """The process makes what a thread makes, errors included; and it is started anew where it ended."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": CODE, "max_tokens": 8, "seed": 3, "bad_words": ["\n"], "prediction": "def f("}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 4, "seed": 3}),
        ("/v1/responses", {"input": "def f(", "instructions": "x", "max_output_tokens": 4, "temperature": 0}),
        ("/v1/messages", {**TALK, "max_tokens": 4, "temperature": 0}),
        ("/v1/messages", {"messages": [{"role": "nobody", "content": "x"}], "max_tokens": 4}),
        ("/v1/messages/count_tokens", TALK),
        ("/tokenize", {"prompt": "x y", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
        ("/v1/completions", {"prompt": CODE, "model": "another"}),
        ("/v1/completions", {"prompt": [5], "n": 3, "max_tokens": 4, "temperature": 1, "seed": 1, "logprobs": 2}),
        ("/v1/completions", {"prompt": [5] * 50, "nothing": 1}),
    ]

    async with served(LLM("shipped", **llm_options())) as (client, service):
        for i, (url, fields) in enumerate(bodies):
            body = json.dumps(fields).encode()
            short = await client.post(url, content=body, headers=JSON)
            long = await client.post(url, content=body + b" " * aside.LONG_BYTES, headers=JSON)
            assert (short.status_code, known(short.json())) == (long.status_code, known(long.json()))
            if i == 0:
                pid = service.aside.pid
                assert pid is not None
                os.kill(pid, 9)  # nobody is told: the next one is read by another process
        assert service.aside.pid not in (None, pid)


def test_what_ends_every_process_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A body is read again once; a process that ends while the server does is not started again."""
    started = tmp_path / "started"
    monkeypatch.setattr(aside, "_CODE", f"open({str(started)!r}, 'a').write('x')")
    reader = aside.Aside([TextOptions(tmp_path, ("x",), 16, 1)])
    with pytest.raises(InternalError, match="twice in a row"):
        reader.work("/tokenize", b"{}").result()
    assert started.read_text(encoding="utf-8") == "xx"
    reader._is_closed = True
    with pytest.raises(InternalError):
        reader._ask(("/tokenize", b"{}"))
    assert started.read_text(encoding="utf-8") == "xxx"
    reader.close()


def known(answer: dict[str, Any]) -> str:
    """Without what differs between two requests that are alike: ids, times, and how much was drafted or cached."""
    differs = ("id", "created", "created_at", "request_id", "usage")
    return re.sub("[0-9a-f]{24}", "ID", json.dumps({k: v for k, v in answer.items() if k not in differs}))


async def test_fields_have_limits() -> None:
    llm = LLM("shipped", draft="none", max_batch_size=2, max_seq_len=64)

    async with served(llm) as (client, _):
        most: dict[str, Any] = {
            "bad_words": ["w"] * MOST_ENTRIES["bad_words"],
            "stop": ["w" * 1024] * MOST_ENTRIES["stop"],
            "stop_token_ids": [5] * MOST_ENTRIES["stop_token_ids"],
            "logit_bias": {str(i): -1 for i in range(llm.engine.runner.num_ids)},
            "prediction": [5] * 64,
            "cache_salt": "s" * 1024,
        }
        one_more: dict[str, Any] = {
            "bad_words": [*most["bad_words"], "w"],
            "stop": [*most["stop"][1:], "w" * 1025],
            "stop_token_ids": [*most["stop_token_ids"], 5],
            "logit_bias": {str(i): -1 for i in range(MOST_ENTRIES["logit_bias"] + 1)},
            "prediction": [5] * 65,
            "cache_salt": "s" * 1025,
            "acceptance": "ratio:" + " " * 1025,
            "draft": "none:" + " " * 1025,
        }
        assert (await client.post("/v1/completions", **asked(**most, max_tokens=1))).status_code == 200
        for name, value in one_more.items():
            answer = await client.post("/v1/completions", **asked(**{name: value}, max_tokens=1))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
        many = await client.post("/v1/completions", **asked(bad_words=["w" * 512] * 129, max_tokens=1))
        assert "at most 65,536 characters in all its texts, not 66,048" in many.json()["error"]["message"]


@pytest.mark.parametrize("num", [1, 40, 3000])
def test_long_answers_are_written_in_slices(num: int) -> None:
    """None of which has many values, and which make the same bytes."""
    entry = {"token": "\ud800" if num == 40 else "é", "logprob": -0.5, "bytes": [1, 2], "top": [{"a": None}] * 20}
    answer = {"id": "x", "choices": [{"index": i, "content": [entry] * num, "empty": []} for i in range(3)], "none": {}}
    assert json.loads(in_slices(answer)) == json.loads(as_json(answer))
    if num != 40:
        assert in_slices(answer) == as_json(answer)
