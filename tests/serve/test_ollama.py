"""Ollama's API, through its own client as its package is, and what a body of it asks for."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import ollama as client_of_ollama
import pytest

from forerun import LLM, SamplingParams
from forerun.serve.apis import generating, ollama
from forerun.serve.bodies import Job, Refused
from forerun.serve.openapi import body_of
from serve.running import CODE, Running, serving

pytestmark = pytest.mark.once("texts and forms, whatever the speculation")
HELLO = [{"role": "user", "content": CODE}]
GREEDY = {"temperature": 0, "num_predict": 12}
# It knows tools and thinking, with the marks of Hermes.
TEMPLATE = """{%- if tools %}Tools: {{ tools | tojson }} Answer with <tool_call></tool_call>.
{% endif %}{%- for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
NOTHING_TO_READ: Any = None  # in place of a tokenizer
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 17\}\}\n</tool_call>'


@pytest.fixture(scope="module")
def client(server: Running) -> client_of_ollama.Client:
    return client_of_ollama.Client(host=server.url, timeout=60)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    with serving("--chat-template", str(template), "--served-model-name", "agent") as running:
        yield running


def read(url: str = ollama.CHAT, *, ignore: bool = False, **body: Any) -> Job:
    given = {"messages": HELLO} if url == ollama.CHAT else {"prompt": CODE}
    return generating()[url].job({**given, **body}, "small", served_names=("small",), ignore_unsupported=ignore)


# ------------------------------------------------------------------------------------------------------ the client


def test_what_is_served_is_what_the_engine_says(client: client_of_ollama.Client, plain: LLM) -> None:
    (expected,) = plain.generate(CODE, SamplingParams(max_tokens=12, temperature=0), raw=True)
    whole = client.generate("shipped", CODE, raw=True, options=GREEDY)
    assert (whole.response, whole.done, whole.done_reason) == (expected.text, True, expected.finish_reason)
    assert (whole.prompt_eval_count, whole.eval_count) == (len(expected.prompt_ids), len(expected.token_ids))
    assert whole.total_duration >= whole.prompt_eval_duration + whole.eval_duration > 0
    pieces = list(client.generate("shipped", CODE, raw=True, options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == expected.text
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (pieces[-1].eval_count, pieces[-1].done_reason) == (whole.eval_count, whole.done_reason)
    assert len(pieces) > 1


def test_durations_are_nanoseconds(plain: LLM) -> None:
    (output,) = plain.generate(CODE, SamplingParams(max_tokens=2, temperature=0), raw=True)
    times = {"arrived_at_s": 1.0, "scheduled_at_s": 1.25, "first_token_at_s": 1.5, "last_token_at_s": 3.0}
    output.report = dataclasses.replace(output.report, **times)
    made = ollama.answer(read(), [output], plain.tokenizer, "", 0)
    assert {name: value for name, value in made.items() if name.endswith("_duration")} == {
        "total_duration": 2_000_000_000,
        "load_duration": 0,
        "prompt_eval_duration": 250_000_000,
        "eval_duration": 1_500_000_000,
    }


def test_chats_whole_and_in_pieces(client: client_of_ollama.Client, plain: LLM) -> None:
    (expected,) = plain.chat(HELLO, SamplingParams(max_tokens=12, temperature=0))
    whole = client.chat("shipped:latest", HELLO, options=GREEDY, keep_alive="5m", think=False)
    assert (whole.message.role, whole.message.content) == ("assistant", expected.text)
    assert whole.model == "shipped"
    assert whole.created_at.endswith("Z")
    pieces = list(client.chat("shipped", HELLO, options=GREEDY, stream=True))
    assert "".join(piece.message.content for piece in pieces) == expected.text
    floats = {"temperature": 0, "num_predict": 12.0, "draft_num_predict": 2}
    assert client.chat("shipped", HELLO, options=floats).message.content == expected.text
    assert client.generate("shipped", CODE, options=GREEDY).response == expected.text


def test_a_stream_is_the_default_and_its_lines_are_json(server: Running) -> None:
    answer = server.http.post(ollama.CHAT, json={"model": "shipped", "messages": HELLO, "options": GREEDY})
    assert answer.headers["content-type"] == ollama.LINES
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert len(lines) > 1
    assert {line["model"] for line in lines} == {"shipped"}
    assert set(lines[0]) == {"model", "created_at", "message", "done"}
    assert set(lines[-1]) - set(lines[0]) == {
        *("done_reason", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
        *("eval_count", "eval_duration"),
    }


def test_a_seed_makes_the_same_text_again(client: client_of_ollama.Client) -> None:
    options = {"temperature": 1.0, "top_k": 50, "seed": 7, "num_predict": 16}
    texts = {client.generate("shipped", CODE, options={**options, "seed": seed}).response for seed in (7, 7, 8)}
    assert len(texts) == 2


def test_an_answer_has_the_form_that_is_asked_for(client: client_of_ollama.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    options = {"temperature": 0, "num_predict": 64}
    assert json.loads(client.chat("shipped", HELLO, format=schema, options=options).message.content)["n"] in (1, 2)
    assert client.generate("shipped", CODE, format="json", options=options).response.lstrip().startswith("{")

    streamed = client.chat("shipped", [], stream=True)
    for answer in (client.generate("shipped", ""), client.chat("shipped", []), *streamed):
        assert (answer.done, answer.done_reason) == (True, "load")
    (unloaded,) = client.chat("shipped", [], stream=True, keep_alive=0)
    assert (unloaded.done, unloaded.done_reason) == (True, "unload")
    assert client.generate("shipped", "", keep_alive="0s").done_reason == "unload"
    assert client.list().models  # it stays


def test_lists_of_models(client: client_of_ollama.Client, server: Running) -> None:
    (model,) = client.list().models
    assert (model.model, len(model.digest)) == ("shipped", 64)
    assert model.size > 0
    (running,) = client.ps().models
    assert (running.name, running.context_length) == ("shipped", 2048)
    shown = client.show("shipped:latest")
    assert shown.modelinfo["general.architecture"] == shown.details.family == "llama"
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.capabilities == ["completion"]
    assert server.http.post(ollama.SHOW, json={"name": "shipped"}).status_code == 200  # as older clients ask
    assert server.http.get("/api/version").json()["version"] == ollama.FOLLOWED


def test_what_is_refused_is_refused_in_a_sentence(client: client_of_ollama.Client, server: Running) -> None:
    for call, status, sentence in (
        (lambda: client.chat("gpt-5", HELLO), 404, "'gpt-5' is not here: it must be 'shipped'"),
        (lambda: client.show("gpt-5"), 404, "'gpt-5' is not here"),
        (lambda: client.pull("llama3"), 404, "models are not fetched or changed by requests"),
        (lambda: client.embed("shipped", "x"), 404, "no embeddings are made here"),
        (lambda: client.generate("shipped", CODE, options={"mirostat": 2}), 400, "options.mirostat=2 is not possible"),
    ):
        with pytest.raises(client_of_ollama.ResponseError, match=sentence) as refused:
            call()
        assert refused.value.status_code == status
    nameless = server.http.post(ollama.SHOW, json={}).json()
    assert nameless == {"error": "there is no model: name one of those that /api/tags lists"}
    assert isinstance(server.http.post(ollama.CHAT, content=b"{").json()["error"], str)


def test_a_context_that_is_not_there_is_told_in_a_header(server: Running) -> None:
    body = {"model": "shipped", "prompt": CODE, "stream": False}
    for wanted, ignored in ((2048, None), (32768, "options.num_ctx")):
        answer = server.http.post(ollama.GENERATE, json={**body, "options": {**GREEDY, "num_ctx": wanted}})
        assert (answer.status_code, answer.headers.get("x-forerun-ignored")) == (200, ignored)


def test_tools_are_called_and_their_results_read(with_tools: Running) -> None:
    """The model is held to the text of a call; the client reads it, whole and from the lines of a stream."""
    options = GREEDY | {"num_predict": 64}
    body = {"model": "agent", "messages": HELLO, "tools": [ADD], "options": options, "think": False, "regex": CALL}
    whole = client_of_ollama.ChatResponse(**with_tools.http.post(ollama.CHAT, json={**body, "stream": False}).json())
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 17})
    assert (whole.message.content, whole.done_reason) == ("", "stop")
    lines = with_tools.http.post(ollama.CHAT, json=body).text.splitlines()
    pieces = [client_of_ollama.ChatResponse(**json.loads(line)) for line in lines]
    calls = [call for piece in pieces for call in piece.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("add", {"a": 17})]
    assert "".join(piece.message.content for piece in pieces) == ""
    client = client_of_ollama.Client(host=with_tools.url, timeout=60)
    result = {"role": "tool", "tool_name": "add", "content": "42"}
    again = client.chat("agent", [*HELLO, whole.message, result], tools=[ADD], options=GREEDY)
    assert again.prompt_eval_count > whole.prompt_eval_count
    assert client.show("agent").capabilities == ["completion", "tools", "thinking"]


# --------------------------------------------------------------------------------------------------------- bodies


def test_options_are_sampling_parameters() -> None:
    same = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3}
    same |= {"presence_penalty": 0.2, "frequency_penalty": 0.3}
    renamed = {"num_predict": 5, "stop": "x", "repeat_penalty": 1.1, "repeat_last_n": -1}
    of_the_runner = {"num_thread": 8, "num_gpu": 1, "use_mmap": True, "num_keep": 4, "typical_p": 1.0, "mirostat": 0}
    params = read(options={**same, **renamed, **of_the_runner}).params
    assert params == SamplingParams(**same, max_tokens=5, stop=("x",), repetition_penalty=1.1)
    assert read(options={"num_predict": -1}).params.max_tokens is None
    assert read(options={"num_predict": -2, "seed": None}).params.max_tokens is None
    assert read(options={"repeat_last_n": 0, "repeat_penalty": 1.3}).params.repetition_penalty == 1
    assert read(options={"repeat_last_n": 64}).params.repetition_penalty == 1
    assert read(options={"num_ctx": 9}).context == ("options.num_ctx", 9)
    whole = {"num_ctx": 2048.0, "num_predict": 5.0, "top_k": 4.0, "seed": 3.0}
    assert read(options=whole) == read(options={name: int(value) for name, value in whole.items()})
    assert read().stream
    assert not read(stream=False).stream


def test_a_model_is_unloaded_in_words_alone() -> None:
    for keep_alive, word in (
        *((none, "unload") for none in (0, 0.0, "0", "0s", "0.0m")),
        *((some, "load") for some in (None, -1, 5, False, "", "5m", "10", "0x", [], {})),
    ):
        for url, empty in ((ollama.CHAT, {"messages": []}), (ollama.GENERATE, {"prompt": ""})):
            job = read(url, **empty, keep_alive=keep_alive)
            assert ollama.answer(job, [], NOTHING_TO_READ, "", 0)["done_reason"] == word, keep_alive
            end = ollama.Stream(job, [], NOTHING_TO_READ, "", 0).end([])
            assert json.loads(end)["done_reason"] == word, keep_alive
    assert read(keep_alive=0) == read()


def test_thinking_and_forms() -> None:
    heard = {True: (True, None), False: (False, None), "low": (None, "low"), None: (None, None)}
    assert {said: (read(think=said).thinks, read(think=said).effort) for said in heard} == heard
    assert read(format="json").params.json_object
    assert json.loads(str(read(format={"type": "object"}).params.json_schema)) == {"type": "object"}
    assert read(format="").params == read().params


def test_prompts_become_conversations_or_stay_as_they_are() -> None:
    job = read(ollama.GENERATE, system="be short")
    assert job.messages == [{"role": "system", "content": "be short"}, {"role": "user", "content": CODE}]
    raw = read(ollama.GENERATE, raw=True, context=[], images=[])
    assert (raw.messages, raw.prompts) == (None, (CODE,))
    filled = read(ollama.GENERATE, suffix="return x", system="unused")
    assert (filled.messages, filled.prompts, filled.suffix) == (None, (CODE,), "return x")
    assert read(ollama.CHAT, messages=[*HELLO, {"role": "assistant", "content": "x"}]).continue_final_message


def test_messages_have_the_form_of_templates() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    said = [
        {"role": "user", "content": "x", "images": None},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_name": "add"},
    ]
    assert read(messages=said).messages == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"type": "function", **call}], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "name": "add"},
    ]


@pytest.mark.parametrize(
    ("url", "body", "sentence"),
    [
        (ollama.CHAT, {"options": {"temprature": 1}}, "did you mean 'temperature'"),
        (ollama.CHAT, {"options": 3}, "options=3 is not possible"),
        (ollama.CHAT, {"options": {"num_ctx": "big"}}, "options.num_ctx='big' is not possible"),
        (ollama.CHAT, {"options": {"num_ctx": 9.5}}, "options.num_ctx=9.5 is not possible"),
        (ollama.CHAT, {"options": {"top_p": 2}}, "top_p=2"),
        (ollama.CHAT, {"options": {"num_predict": -5}}, "num_predict=-5"),
        (ollama.CHAT, {"options": {"repeat_last_n": 64, "repeat_penalty": 1.2}}, "counts the whole text; say -1"),
        (ollama.CHAT, {"format": "xml"}, "format='xml' is not possible: it must be 'json'"),
        (ollama.CHAT, {"think": "deeply"}, "think='deeply' is not possible"),
        (ollama.CHAT, {"tools": [{"function": 3}]}, "tools\\[0\\]"),
        (ollama.CHAT, {"messages": [{"role": "robot", "content": ""}]}, "has the role 'robot'"),
        (ollama.CHAT, {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "has images"),
        (ollama.CHAT, {"messages": [{"role": "user", "content": 3}]}, "content=3"),
        (ollama.CHAT, {"logprobs": True}, "ask /v1/chat/completions"),
        (ollama.GENERATE, {"template": "{{ .Prompt }}"}, "the model's own chat template is used"),
        (ollama.GENERATE, {"context": [1, 2]}, "as messages to /api/chat"),
        (ollama.GENERATE, {"images": ["aGk="]}, "the model reads texts alone"),
        (ollama.GENERATE, {"prompt": 3}, "prompt=3"),
        (ollama.GENERATE, {"suffix": 3}, "suffix=3"),
    ],
)
def test_what_changes_the_text_and_is_not_built_is_refused(url: str, body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        read(url, **body)


def test_options_may_be_ignored_by_name() -> None:
    job = read(options={"mirostat": 2, "new_option": 1, "top_k": 3}, ignore=True)
    assert (job.ignored, job.params.top_k) == (("options.mirostat", "options.new_option"), 3)


def test_every_option_has_a_place() -> None:
    """Each that is honoured names a field of SamplingParams, and none is in two lists."""
    lists = [set(ollama.OPTIONS), set(ollama.RUNNER), set(ollama._OFF), {ollama.CONTEXT}, set(ollama._PENALISED)]
    assert len(set().union(*lists)) == sum(map(len, lists))
    assert set(ollama.OPTIONS.values()) <= set(SamplingParams.__dataclass_fields__)
    assert ollama._OF_OPTIONS.keys() == set().union(*lists)


@pytest.mark.parametrize("url", [ollama.CHAT, ollama.GENERATE])
def test_the_document_and_the_checks_have_one_list_of_options(url: str) -> None:
    described = body_of(generating()[url])["properties"]["options"]
    assert described == body_of(generating()[ollama.CHAT])["properties"]["options"]
    (schema,) = [one for one in described["anyOf"] if one["type"] == "object"]
    values = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "stop": "x", "tfs_z": 1, "typical_p": 1.0}
    values |= {"vocab_only": False, "embedding_only": False, "mirostat": 0, "repeat_last_n": -1}
    for name in schema["properties"]:
        for value in (values.get(name, 1), None):
            jsonschema.validate({name: value}, schema)
            assert read(url, options={name: value})
    for wrong in ({"vocab_only": True}, {"num_ctx": 0}, {"num_ctx": "big"}, {"mirostat": 2}, {"new_option": 1}):
        assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)
        said = r"new_option" if "new_option" in wrong else r"^options\.\w+=.* is not possible"
        with pytest.raises(Refused, match=said):
            read(url, options=wrong)
