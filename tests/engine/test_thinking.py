"""A limit of the tokens of reasoning holds, and texts are plain decoding's, whatever drafts."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from engine.load import named
from forerun import LLM, SamplingParams
from tiny import write_thinking

pytestmark = pytest.mark.once("each request names its drafter")
LIMITS = range(1, 25)
DRAFTS = ("model", "suffix", "recycle")
ASKED = [{"role": "user", "content": "abbaabbaab one two one two one"}]
TEMPLATE = "{# </think> #}{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if begins else 'x' }}"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"], "additionalProperties": False}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.1, "seed": 3, "repetition_penalty": 1.1},
    "schema": {"temperature": 0.7, "seed": 4, "json_schema": SCHEMA, "json_whitespace": "compact"},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("thinking")
    target = write_thinking(folder / "target", inner_scale=0.05)
    draft = write_thinking(folder / "draft", inner_scale=0.04)
    (folder / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")
    others = f"(model:path={draft});recycle;none"
    options = {"extra_drafts": others, "max_seq_len": 200, "chat_template": str(folder / "chat.jinja")}
    with LLM(str(target), draft="suffix:shape=tree", **options) as one:
        yield one


def texts(llm: LLM, prompt: list[int], ways: list[SamplingParams]) -> list[tuple[list[int], str | None]]:
    """The ids that plain decoding answers, and why each ends; every drafter must say the same."""
    said = []
    for draft in ("none", *DRAFTS):
        params = [dataclasses.replace(way, draft=named(llm, draft), spec_length=6) for way in ways]
        said.append([(out.token_ids, out.finish_reason) for out in llm.generate([prompt] * len(ways), params)])
        assert said[-1] == said[0], draft
    return said[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_chat_s_limit_is_held_whatever_drafts(llm: LLM, way: str) -> None:
    prompt = llm.apply_chat_template(ASKED, begins=True)
    params = SamplingParams(max_tokens=36, **WAYS[way])
    forms = [llm.answer_form(max_thinking_tokens=most) for most in LIMITS]
    said = texts(llm, prompt, [form.constrained(params, llm.tokenizer, prompt) for form in forms if form is not None])
    (closing,) = llm.tokenizer.encode("</think>", add_special_tokens=False)
    lengths = [(ids.index(closing) if closing in ids else len(ids)) for ids, _ in said]
    assert all(length <= most for length, most in zip(lengths, LIMITS, strict=True))
    assert sum(length == most for length, most in zip(lengths, LIMITS, strict=True)) > 10, "most would have gone on"
    for ids, reason in said:
        if way == "schema" and reason == "stop" and closing in ids:
            jsonschema.validate(json.loads(llm.tokenizer.decode(ids[ids.index(closing) + 1 :])), SCHEMA)


@pytest.mark.parametrize("rules", ["start: t{0,K} <[B]> <[*]>*", "start: <[A]> t{0,K} <[B]> /[ab]{3}/"])
def test_rules_that_count_tokens_are_held_whatever_drafts(llm: LLM, rules: str) -> None:
    a, b = (str(llm.tokenizer.encode(text, add_special_tokens=False)[0]) for text in ("(", ")"))
    text = rules.replace("A", a).replace("B", b) + f"\nt: <[^{b}]>"
    ways = [
        SamplingParams(max_tokens=40, grammar=text.replace("K", str(most)), temperature=temperature, seed=seed)
        for most in LIMITS
        for temperature, seed in ((0.0, None), (0.9, 2))
    ]
    assert all(int(b) in ids for ids, _ in texts(llm, llm.tokenizer.encode("abbaabbaab"), ways))
