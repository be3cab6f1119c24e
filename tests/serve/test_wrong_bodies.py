"""Bodies with any value in any place are read or refused by name: nothing else is raised, which would be status 500."""

import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.opened import SHIPPED_TARGET
from forerun.errors import UserError
from forerun.serve.apis import generating, messages, ollama, openai, responses, with_bodies
from forerun.serve.apis.vllm import TOKENIZE
from forerun.serve.bodies import Refused
from forerun.serve.texts import TextOptions, Texts
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from serve.agents import CLAUDE_CODE, CODEX

pytestmark = pytest.mark.once("no engine runs: bodies alone")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "strict": True, "parameters": PARAMETERS}
PATCH = {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
THOUGHT = {"type": "thinking", "thinking": "x", "signature": "s"}
USE = {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FORM = {"type": "json_schema", "schema": {}}
BODIES: dict[str, dict[str, Any]] = {
    openai.CHAT: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "max_thinking_tokens": 5,
        "chat_template_kwargs": {"enable_thinking": True},
        "continue_final_message": False,
        "add_generation_prompt": True,
    },
    openai.COMPLETIONS: {"prompt": "a", "suffix": "b", "max_tokens": 3},
    responses.RESPONSES: {
        **CODEX,
        "text": {"format": FORM},
        "tools": [*CODEX["tools"], PATCH],
        "tool_choice": {"type": "function", "name": "shell"},
        "input": [
            {"type": "custom_tool_call", "call_id": "b", "name": "p", "input": "a"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "x"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": []},
            {"type": "function_call", "call_id": "a", "name": "shell", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ],
    },
    messages.MESSAGES: {
        **CLAUDE_CODE,
        "tool_choice": {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low", "format": FORM},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [THOUGHT, USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        ],
    },
}
GONE = object()
VALUES: list[Any] = [GONE, None, True, -1, 3.5, "", "x", [], {}, [1], ["x"], {"a": 1}, [{}], {"type": "text"}, "auto"]
VALUES += ["\ud800", [None], 10**30]
GROUPS = ((), ("text", "output_config"), ("tools", "tool_choice"))  # fields left out: two grammars are refused early


@pytest.fixture(scope="module")
def texts() -> Texts:
    template = ChatTemplate.load(SHIPPED_TARGET, Path(__file__).parent / "tools.jinja")
    return Texts(TextOptions(SHIPPED_TARGET, ("shipped",), 2048, 64), Tokenizer.load(SHIPPED_TARGET), lambda: template)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    made = copy.deepcopy(body)
    place: Any = made
    for key in path[:-1]:
        place = place[key]
    if value is not GONE:
        place[path[-1]] = value
    else:
        del place[path[-1]]
    return made


@pytest.mark.parametrize("url", BODIES)
def test_any_value_in_any_place(url: str, texts: Texts) -> None:
    num_read, sentences = 0, list[str]()
    for left_out in GROUPS:
        base = {key: value for key, value in BODIES[url].items() if key not in left_out}
        for path, value in itertools.product(places(base), VALUES):
            try:
                texts.read(generating()[url], changed(base, path, value) if path else value)
            except UserError as error:
                sentences.append(str(error))
            else:
                num_read += 1
    assert num_read > 5
    assert len(sentences) > 5
    assert not [one for one in sentences if re.search(r"\b(None|True|False)\b|\['|{'", one)], "words of Python"


def test_tools_of_a_template_that_knows_none() -> None:
    """They may be left out where unsupported fields are ignored, but for a call that must be."""
    body = {**BODIES[openai.CHAT], "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {}}
    for ignore in (False, True):
        own = Texts(TextOptions(SHIPPED_TARGET, ("shipped",), 2048, 64, {}, ignore))
        for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
            if ignore and choice == "auto":
                job, _ = own.read(with_bodies()[openai.CHAT], {**body, "tool_choice": choice})
                assert job.ignored == ("tools", "reasoning_effort")
                continue
            with pytest.raises(UserError, match="does not know tools"):
                own.read(with_bodies()[openai.CHAT], {**body, "tool_choice": choice})


HELLO = {"messages": [{"role": "user", "content": "hi"}]}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys((openai.CHAT, messages.COUNT_TOKENS, ollama.CHAT, TOKENIZE), HELLO),
    responses.RESPONSES: {"input": "hi"},
    messages.MESSAGES: {**HELLO, "max_tokens": 1},
}


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "the model 'm' has no chat template, as is usual for a base model, and cannot read a conversation"),
        ("", "chat_template.jinja is empty"),
        ("{% if %}", "chat_template.jinja has a syntax error in line 1"),
    ],
)
def test_a_model_without_a_chat_template(
    template: str | None, sentence: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is told what it can do; files and options are for the log, where whoever serves the model looks."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((SHIPPED_TARGET / name).read_bytes())
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    for url, body in CONVERSATIONS.items():
        with pytest.raises(Refused, match=re.escape(sentence)) as refused:
            Texts(TextOptions(tmp_path, ("m",), 2048, 64)).work(with_bodies()[url], body)
        assert refused.value.param == "messages"
        for word in (str(tmp_path), "--chat-template", "chat_template="):
            assert word not in str(refused.value)
            assert word in caplog.text
        caplog.clear()
