"""The form of an answer in the words of OpenAI's API and of vLLM, from the body to the text."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from forerun import SamplingParams
from forerun.serve.apis import generating
from forerun.serve.apis.messages import MESSAGES as MESSAGES_URL
from forerun.serve.apis.ollama import CHAT as OLLAMA
from forerun.serve.apis.openai import CHAT, COMPLETIONS
from forerun.serve.apis.responses import RESPONSES
from serve.running import Running

FIELDS: Any = {"n": {"type": "integer", "minimum": 3, "maximum": 8}}
SCHEMA: Any = {"type": "object", "properties": FIELDS, "required": ["n"], "additionalProperties": False}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "hello"}]


def params(url: str = CHAT, **fields: Any) -> SamplingParams:
    asked = {"messages": MESSAGES} if url == CHAT else {"prompt": "x = "}
    return generating()[url].job({**asked, **fields}, "small").params


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("asked", "means"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": None, "guided_json": None, "structured_outputs": {"json": None}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"response_format": FORM}, {"json_schema": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "json_whitespace": "compact"},
        ),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ["a", "b"]}),
        ({"json_schema": SCHEMA, "json_whitespace": "spaced"}, {"json_schema": SCHEMA, "json_whitespace": "spaced"}),
    ],
    ids=lambda value: next(iter(value), "nothing"),
)
def test_each_way_to_ask_becomes_a_field(url: str, asked: dict[str, Any], means: dict[str, Any]) -> None:
    wanted = SamplingParams(**means)
    made = params(url, **asked)
    assert (made.constraint, made.json_whitespace) == (wanted.constraint, wanted.json_whitespace)


def test_a_server_answers_in_the_form_that_is_asked_for(client: Any) -> None:
    form = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    asked: Any = {"model": "shipped", "prompt": "x = ", "max_tokens": 100, "extra_body": form}
    for temperature in (0.0, 1.0):
        answer = client.completions.create(temperature=temperature, **asked)
        jsonschema.validate(json.loads(answer.choices[0].text), SCHEMA)
        assert answer.choices[0].finish_reason == "stop"
    hello: Any = {"model": "shipped", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
    chat = client.chat.completions.create(response_format=FORM, **hello)
    jsonschema.validate(json.loads(chat.choices[0].message.content), SCHEMA)
    choice = {"guided_choice": ["left", "right"]}
    chunks = client.completions.create(stream=True, **{**asked, "extra_body": choice})
    assert "".join(chunk.choices[0].text for chunk in chunks) in ("left", "right")


def test_a_schema_that_cannot_be_honoured_is_refused_by_name(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "guided_regex": "(?=a)b"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("guided_regex cannot be honoured")
    wrong: Any = {"type": "object", "properties": {"n": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}
    openai, hello = {"type": "json_schema", "json_schema": {"schema": wrong}}, {"messages": MESSAGES}
    form = {"type": "json_schema", "schema": wrong}
    text = {"prompt": "x"}
    for url, body, param in (
        (COMPLETIONS, {**text, "regex": "(?=a)b"}, "regex"),
        (COMPLETIONS, {**text, "guided_grammar": "root ::= ("}, "guided_grammar"),
        (COMPLETIONS, {**text, "structured_outputs": {"json": wrong}, "guided_json": None}, "structured_outputs"),
        (COMPLETIONS, {**text, "guided_json": wrong, "response_format": {"type": "text"}}, "guided_json"),
        (CHAT, {**hello, "response_format": openai}, "response_format"),
        (CHAT, {**hello, "response_format": openai, "stream": True}, "response_format"),
        (RESPONSES, {"input": "x", "text": {"format": form}}, "text.format"),
        (MESSAGES_URL, {**hello, "max_tokens": 3, "output_config": {"format": form}}, None),
        (OLLAMA, {**hello, "format": wrong}, None),
    ):
        error = httpx.post(f"{server.url}{url}", json=body).json()["error"]
        message = error if url == OLLAMA else error["message"]
        named = param or ("format" if url == OLLAMA else "output_config.format")
        assert message.startswith((f"{named} cannot be honoured", f"{named}=")), message
        assert param is None or error["param"] == param, error
