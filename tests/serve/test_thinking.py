"""Budgets of thinking tokens over HTTP, with a draft model; and a grammar on which the library's code gives up."""

from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from serve.running import assert_refused
from serve.test_serve_inside import served
from tiny import write_thinking

pytestmark = pytest.mark.once("each request names its drafter")
TEMPLATE = "{# </think> #}{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking else 'x' }}"
ASKED = [{"role": "user", "content": "abbaabbaab one two one two one"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("thinking")
    target = write_thinking(folder / "target", inner_scale=0.05)
    draft = write_thinking(folder / "draft", inner_scale=0.04)
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    return LLM(target, draft=f"model:path={draft}", spec_length=6, chat_template=str(template), max_seq_len=200)


async def test_a_budget_of_messages_is_held_beside_a_draft_model(llm: LLM) -> None:
    async with served(llm) as (client, _):
        for budget in (0, 1, 2, 3, 7, 12):
            thinking = {"type": "enabled", "budget_tokens": budget}
            body: Any = {"max_tokens": 30, "messages": ASKED, "thinking": thinking, "temperature": 0}
            answers = [await client.post("/v1/messages", json={**body, **draft}) for draft in ({}, {"draft": "none"})]
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            drafted, plain = (answer.json() for answer in answers)
            assert drafted["content"] == plain["content"]
            assert [part["type"] for part in plain["content"]] == ["thinking", "text"][budget == 0 :]


async def test_what_code_says_that_gives_up_is_told_to_nobody(llm: LLM) -> None:
    async with served(llm) as (client, _):
        body = {"prompt": "x", "grammar": 'start: (text "b")+\ntext[lazy]: /[ac]*/'}
        answer = await client.post("/v1/completions", json=body)
        said = "grammar cannot be honoured: llguidance, which reads it, fails on it; change it, or leave it out"
        assert assert_refused(answer, said)["message"] == said
