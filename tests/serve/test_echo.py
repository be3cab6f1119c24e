"""A completion that repeats its prompt: the text as it was sent, whatever tokens the tokenizer puts around it."""

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.engine.opened import SHIPPED_TARGET
from forerun.serve.apis.openai import COMPLETIONS
from forerun.serve.batch import BatchRequest, Requests, Running
from serve.test_serve_inside import served

pytestmark = pytest.mark.once("texts of prompts, whatever the speculation")
BOS = "<|endoftext|>"
PROMPTS = ("def fib(n):\n", f"a {BOS} b", "  naïve 🙂\n", BOS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, whose tokenizer puts a token at the beginning and one at the end."""
    made = tmp_path_factory.mktemp("model")
    for file in SHIPPED_TARGET.iterdir():
        (made / file.name).symlink_to(file)
    (made / "tokenizer.json").unlink()
    raw = json.loads((SHIPPED_TARGET / "tokenizer.json").read_text(encoding="utf-8"))
    special = {"SpecialToken": {"id": BOS, "type_id": 0}}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}, special],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }
    (made / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), draft="none") as made:
        yield made


async def test_a_prompt_is_repeated_as_it_was_sent(llm: LLM) -> None:
    """With and without log-probabilities, whole and in pieces, alone and among others; as ids, too."""

    async with served(llm) as (client, _):

        async def texts(**given: Any) -> list[str]:
            body = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, **given}
            answer = await client.post("/v1/completions", json=body)
            if not given.get("stream"):
                return [choice["text"] for choice in answer.json()["choices"]]
            made = dict[int, str]()
            for line in answer.text.splitlines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
                    made[choice["index"]] = made.get(choice["index"], "") + choice["text"]
            return [made[index] for index in sorted(made)]

        alone = [(await texts(prompt=prompt))[0] for prompt in PROMPTS]
        wanted = [prompt + text for prompt, text in zip(PROMPTS, alone, strict=True)]
        for more in ({}, {"stream": True}, {"logprobs": 1}):
            assert await texts(prompt=list(PROMPTS), echo=True, **more) == wanted, more
        assert await texts(prompt=list(PROMPTS), echo=True, n=2) == [text for text in wanted for _ in range(2)]
        assert await texts(prompt=list(PROMPTS), echo=True, max_tokens=0) == list(PROMPTS)
        ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        assert await texts(prompt=ids, echo=True) == wanted
        assert await texts(prompt=[[0, *one] for one in ids], echo=True, max_tokens=0) == [BOS + p for p in PROMPTS]
        bare = [llm.tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS[:3]]
        assert await texts(prompt=bare, echo=True, max_tokens=0) == list(PROMPTS[:3])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("num", [0, 2])
async def test_offsets_count_the_text_and_no_token_that_it_has_not(llm: LLM, prompt: str, num: int) -> None:
    async with served(llm) as (client, _):
        body = {"prompt": prompt, "max_tokens": num, "echo": True, "logprobs": 0, "temperature": 0}
        (choice,) = (await client.post("/v1/completions", json=body | {"ignore_eos": True})).json()["choices"]
        made, ids = choice["logprobs"], llm.tokenizer.encode(prompt)
        assert {len(made[name]) for name in made} == {len(ids) + num}
        offsets = [*made["text_offset"], len(choice["text"])]
        pieces = [choice["text"][start:end] for start, end in pairwise(offsets)]
        assert "".join(pieces) == choice["text"]
        assert (made["tokens"][0], pieces[0], pieces[len(ids) - 1]) == (BOS, "", "")
        assert offsets[len(ids)] == len(prompt)
        shown = [(one, piece) for one, piece in zip(made["tokens"][1:-1], pieces[1:-1], strict=True) if piece]
        assert all(one == piece for one, piece in shown if not one.startswith("bytes:"))
        assert made["token_logprobs"][0] is None
        assert all(value is not None for value in made["token_logprobs"][1:])


def test_a_batch_repeats_the_same(llm: LLM) -> None:
    body = {"prompt": list(PROMPTS), "echo": True, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    requests, is_told = Requests(llm, "small", (), {}), threading.Event()
    running = requests.start(BatchRequest("a", COMPLETIONS, body, "0a"), lambda _: is_told.set())
    assert isinstance(running, Running)
    while not running.is_over:
        assert is_told.wait(60)
        is_told.clear()
    texts = [choice["text"] for choice in requests.answer(running)["response"]["body"]["choices"]]
    assert [text[: len(prompt)] for text, prompt in zip(texts, PROMPTS, strict=True)] == list(PROMPTS)
    assert not any(text[len(prompt) :].startswith(BOS) for text, prompt in zip(texts, PROMPTS, strict=True))
