"""The official clients call tools of a running server, whose small model must call one and so does, validly."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import ollama
import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadOption
from serve.agents import CLAUDE_CODE, CODEX
from serve.running import Running, assert_refused, serving

pytestmark = pytest.mark.once("a process of its own, which speculates")
TEMPLATE = str(Path(__file__).parent / "tools.jinja")
FIELDS = {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
WEATHER = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
NOW = {"name": "now", "description": "Tells the time.", "parameters": {"type": "object", "additionalProperties": False}}
ASKED: Any = [{"role": "user", "content": "Is it warm in Rome?"}]
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, NOW)]
GREEDY: Any = {"model": "shipped", "temperature": 0}
CHAT: Any = {**GREEDY, "tools": TOOLS}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving("--chat-template", TEMPLATE) as running:
        yield running


def checked(arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(arguments)
    jsonschema.validate(values, SCHEMA)
    return values


def test_a_chat_calls_a_tool_and_takes_its_result(client: Any) -> None:
    given = {**CHAT, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False}
    whole = client.chat.completions.create(messages=ASKED, **given)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert (whole.choices[0].finish_reason, call.type, call.function.name) == ("tool_calls", "function", "weather")
    checked(call.function.arguments)
    assert whole.system_fingerprint
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(messages=ASKED, stream=True, **given)]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments
    assert [delta.function.name for delta in deltas if delta.function and delta.function.name] == ["weather"]
    assert len([delta.id for delta in deltas if delta.id]) == 1
    assert {delta.index for delta in deltas} == {0}
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    again = client.chat.completions.create(messages=[*ASKED, whole.choices[0].message, result], max_tokens=4, **CHAT)
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens + 10, "the call and its result are told"


def test_the_tokens_of_a_chat_with_tools_are_those_of_its_prompt(client: Any, server: Running) -> None:
    def ids(**given: Any) -> list[int]:
        answer = server.http.post("/tokenize", json={"messages": ASKED, **given})
        return list(answer.raise_for_status().json()["tokens"])

    usage = client.chat.completions.create(messages=ASKED, max_tokens=1, **CHAT).usage
    assert len(ids(tools=TOOLS)) == usage.prompt_tokens > len(ids())
    thinking = ids(chat_template_kwargs={"enable_thinking": True})
    begun = ids(add_generation_prompt=False)
    assert ids()[: len(begun)] == thinking[: len(begun)] == begun
    assert len({len(begun), len(thinking), len(ids())}) == 3


def test_a_chat_must_call_some_tool_or_several(client: Any) -> None:
    for seed in range(4):
        given = {**CHAT, "tool_choice": "required", "temperature": 1, "seed": seed, "max_tokens": 160}
        choice = client.chat.completions.create(messages=ASKED, **given).choices[0]
        calls = choice.message.tool_calls or []
        assert calls
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            assert call.type == "function"
            schemas = {"weather": SCHEMA, "now": NOW["parameters"]}
            jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    several = client.chat.completions.create(messages=ASKED, n=2, tool_choice="required", max_tokens=80, **CHAT)
    assert all(choice.message.tool_calls for choice in several.choices)


def test_what_a_template_fails_with_says_no_places_of_files(tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{{ messages[0].content + 3 }}", encoding="utf-8")
    with serving("--chat-template", str(tmp_path / "broken.jinja")) as running:
        answer = running.http.post("/v1/chat/completions", json={"messages": ASKED})
        error = assert_refused(answer, "fails on these messages")
        assert error["param"] == "messages"
        assert str(tmp_path) not in error["message"]
        assert "--chat-template" not in error["message"]
        assert str(tmp_path) in running.log, "whoever serves it is told"
        answer = running.http.post("/v1/chat/completions", json={"messages": ASKED, "modalities": ["audio"]})
        assert_refused(answer, "--ignore-unsupported")
        answer = running.http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
        assert_refused(answer, "no tokens for filling in")


def test_long_bodies_are_read_aside(client: Any) -> None:
    """By the process for them: what reads the answer comes back from there."""
    long = [*ASKED, {"role": "user", "content": " " * 9000}]
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(**{**CHAT, "messages": long, "tool_choice": choice, "max_tokens": 64})
    (call, *_) = answer.choices[0].message.tool_calls or ()
    assert (call.type, call.function.name) == ("function", "weather")


def test_choices_that_contradict(client: Any) -> None:
    import openai

    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    must: Any = {**CHAT, "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match="drop one of them"):
        client.chat.completions.create(messages=ASKED, extra_body={"guided_regex": "a+"}, **must)
    choice = client.chat.completions.create(messages=ASKED, response_format=schema, **must).choices[0]
    assert choice.message.tool_calls, "the answer is a call, whatever another one would be"
    for seed in range(3):
        given = {**CHAT, "temperature": 1, "seed": seed, "max_tokens": 120}
        choice = client.chat.completions.create(messages=ASKED, response_format=schema, **given).choices[0]
        assert choice.message.tool_calls or choice.finish_reason == "length" or checked(choice.message.content or "")
    none = client.chat.completions.create(messages=ASKED, max_tokens=8, **{**CHAT, "tool_choice": "none"})
    assert none.choices[0].message.tool_calls is None


def test_reasoning_that_the_template_begins(client: Any) -> None:
    """All that is written is thought, until its end: the small model has none. A call must come behind it."""
    chat: Any = {**GREEDY, "messages": ASKED, "max_tokens": 8}
    asked = {**chat, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    whole = client.chat.completions.create(**asked)
    thought = (whole.choices[0].message.model_extra or {})["reasoning_content"]
    assert (bool(thought), whole.choices[0].message.content) == (True, "")
    assert whole.usage.completion_tokens_details.reasoning_tokens in (7, 8)  # white space before it is none
    pieces = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked)]
    assert "".join((piece.model_extra or {}).get("reasoning_content", "") for piece in pieces) == thought
    effort = client.chat.completions.create(reasoning_effort="high", **chat)
    assert (effort.choices[0].message.model_extra or {})["reasoning_content"] == thought
    (item,) = client.responses.create(input=ASKED, reasoning={"effort": "low"}, max_output_tokens=8, **GREEDY).output
    assert item.type == "reasoning"
    assert [part.text for part in item.content or ()] == [thought]


def test_responses_call_a_tool_and_take_its_result(client: Any) -> None:
    tool: Any = {"type": "function", "strict": True, **WEATHER}
    given: Any = {**GREEDY, "tools": [tool], "parallel_tool_calls": False}
    forced = {**given, "tool_choice": "required"}
    whole = client.responses.create(input=ASKED, **forced)
    (call,) = whole.output
    assert call.type == "function_call"
    checked(call.arguments)
    plain = {name: value for name, value in tool.items() if name != "strict"}
    echoed = client.responses.create(input="hi", model="shipped", tools=[plain], max_output_tokens=1).tools[0]
    assert (echoed.strict, whole.tools[0].strict) == (False, True)  # type: ignore[union-attr]
    events = list(client.responses.create(input=ASKED, stream=True, **forced))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    expected = ["created", "in_progress", "output_item.added", *["function_call_arguments.delta"] * len(deltas)]
    assert kinds == [*expected, "function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(deltas) == call.arguments
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    last: Any = events[-1]
    item = last.response.output[0]
    output: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "21 degrees"}]
    again = client.responses.create(input=output, previous_response_id=last.response.id, max_output_tokens=4, **given)
    stateless: Any = [*ASKED, item.model_dump(exclude_none=True), *output]
    same = client.responses.create(input=stateless, max_output_tokens=4, store=False, **given)
    assert again.output_text == same.output_text
    assert again.usage.input_tokens == same.usage.input_tokens


def test_responses_call_a_tool_that_takes_a_text(client: Any, server: Running) -> None:
    """As Codex declares apply_patch: no arguments, but one text, which a regular expression may hold."""
    form = {"type": "grammar", "syntax": "regex", "definition": '[ab]{2} "c"'}
    tool: Any = {"type": "custom", "name": "patch", "description": "Patches.", "format": form}
    asked: Any = {**GREEDY, "input": ASKED, "parallel_tool_calls": False}
    forced = {**asked, "tools": [tool], "tool_choice": {"type": "custom", "name": "patch"}}
    (call,) = client.responses.create(**forced).output
    assert call.type == "custom_tool_call"
    assert re.fullmatch('[ab]{2} "c"', call.input)
    events: list[Any] = list(client.responses.create(stream=True, **forced))
    kinds = [event.type.removeprefix("response.") for event in events]
    written = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert kinds == [*("created", "in_progress", "output_item.added"), *written, "output_item.done", "completed"]
    assert events[3].delta == events[4].input == events[5].item.input == call.input
    history: Any = [*ASKED, call.model_dump(exclude_none=True)]
    history.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."})
    told = {**asked, "input": history, "max_output_tokens": 4, "tools": [tool]}
    spelled = [*ASKED, {"type": "function_call", "call_id": "a", "name": "patch"}, history[-1] | {"call_id": "a"}]
    spelled[1]["arguments"] = json.dumps({"input": call.input})
    same = client.responses.create(**{**told, "input": spelled})
    assert client.responses.create(**told).usage.input_tokens == same.usage.input_tokens  # type: ignore[union-attr]
    lark = {**tool, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
    free = server.http.post("/v1/responses", json={**asked, "tools": [lark], "max_output_tokens": 4})
    assert (free.status_code, free.headers["x-forerun-ignored"]) == (200, "tools[0].format")
    for wrong in ({"type": "x"}, {"type": "grammar", "syntax": "peg", "definition": ""}, {"type": "grammar"}, "text"):
        answer = server.http.post("/v1/responses", json={**asked, "tools": [{**tool, "format": wrong}]})
        assert_refused(answer, "tools[0].format=")
    unread = {**tool, "format": {**form, "definition": "a("}}
    assert server.http.post("/v1/responses", json={**asked, "tools": [unread]}).status_code == 400


def test_messages_use_a_tool_and_take_its_result(claude: Any) -> None:
    tool: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
    given: Any = {"model": "shipped", "max_tokens": 64, "tools": [tool], "extra_body": {"temperature": 0}}
    forced = {**given, "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}}
    whole = claude.messages.create(messages=ASKED, **forced)
    (block,) = whole.content
    assert (block.type, whole.stop_reason) == ("tool_use", "tool_use")
    jsonschema.validate(block.input, SCHEMA)
    with claude.messages.stream(messages=ASKED, **forced) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "input_json" in kinds
    (used,) = final.content
    assert used.type == "tool_use"
    assert (used.input, final.stop_reason) == (block.input, "tool_use")
    result = [{"type": "tool_result", "tool_use_id": used.id, "content": "21 degrees"}]
    conversation: Any = [*ASKED, {"role": "assistant", "content": final.content}, {"role": "user", "content": result}]
    given["max_tokens"] = 4
    assert claude.messages.create(messages=conversation, **given).usage.output_tokens <= 4
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    thought = claude.messages.create(
        model="shipped", max_tokens=8, messages=ASKED, thinking=thinking, extra_body={"temperature": 0}
    )
    assert [one.type for one in thought.content] == ["thinking"]


CALL = r'<tool_call>\n\{"name": "now", "arguments": \{"a": 1\}\}\n</tool_call>'


def called(client: Any, claude: Any, server: Running, most: int) -> list[list[Any]]:
    """The calls that clients hand on, whole and in pieces, of an answer that a regular expression makes a call."""
    given: Any = {"model": "shipped", "extra_body": {"regex": CALL, "temperature": 0}}
    tool = {"name": "now", "parameters": {"type": "object"}}
    chat = {**given, "messages": ASKED, "tools": [{"type": "function", "function": tool}], "max_tokens": most}
    with client.chat.completions.stream(**chat) as chunks:
        list(chunks)
    chats = (client.chat.completions.create(**chat), chunks.current_completion_snapshot)
    functions = [[call.function for call in one.choices[0].message.tool_calls or []] for one in chats]
    asked = {**given, "input": ASKED, "tools": [{"type": "function", **tool}], "max_output_tokens": most}
    with client.responses.stream(**asked) as events:
        done = [event.item for event in events if event.type == "response.output_item.done"]
    functions += [
        [one for one in items if one.type == "function_call"]
        for items in (client.responses.create(**asked).output, done)
    ]
    message = {**given, "messages": ASKED, "tools": [{"name": "now", "input_schema": {}}], "max_tokens": most}
    with claude.messages.stream(**message) as blocks:
        final = blocks.get_final_message()
    used = [[one for one in m.content if one.type == "tool_use"] for m in (claude.messages.create(**message), final)]
    body = {"messages": ASKED, "tools": chat["tools"], "regex": CALL, "options": {"num_predict": most}}
    texts = [server.http.post("/api/chat", json={**body, "stream": streamed}).text for streamed in (False, True)]
    answers = [[ollama.ChatResponse.model_validate_json(line) for line in text.splitlines()] for text in texts]
    return [
        *([(one.name, json.loads(one.arguments)) for one in calls] for calls in functions),
        *([(one.name, one.input) for one in blocks] for blocks in used),
        *(
            [(call.function.name, dict(call.function.arguments)) for a in lines for call in a.message.tool_calls or ()]
            for lines in answers
        ),
    ]


def test_clients_hand_on_no_call_that_was_cut(client: Any, claude: Any, server: Running) -> None:
    """Of each API, whole and in pieces: what is not whole is no call, whatever a client makes of pieces of JSON."""
    for most in (12, 17, 22, 24):
        assert called(client, claude, server, most) == [[]] * 8, most
    assert called(client, claude, server, 100) == [[("now", {"a": 1})]] * 8


def test_agents_need_no_flag(server: Running) -> None:
    """Where the model's template knows tools, their bodies are served as they are."""
    answer = server.http.post("/v1/responses", json={**CODEX, "max_output_tokens": 8, "temperature": 0})
    assert (answer.status_code, answer.headers["x-forerun-ignored"]) == (200, "tools[1], reasoning.summary")
    assert "response.incomplete" in answer.text
    assert "response.reasoning_text.delta" in answer.text, "an effort lets this model think"
    forced = {**CODEX, "tool_choice": "required", "reasoning": {"effort": "none"}, "temperature": 0}
    assert '"name":"shell"' in server.http.post("/v1/responses", json={**forced, "max_output_tokens": 80}).text
    answer = server.http.post("/v1/messages?beta=true", json={**CLAUDE_CODE, "max_tokens": 8})
    assert (answer.status_code, answer.headers["x-forerun-ignored"]) == (200, "context_management")
    assert answer.text.rstrip().endswith('{"type":"message_stop"}')
    body = {name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools")}
    counted = server.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    bare = server.http.post("/v1/messages/count_tokens", json={**body, "tools": []}).json()["input_tokens"]
    assert counted > bare + 20


def test_from_python() -> None:
    llm = LLM("shipped", chat_template=TEMPLATE)
    params = SamplingParams(temperature=0, max_tokens=80)
    out = llm.chat(ASKED, params, tools=TOOLS, tool_choice="weather", parallel_tool_calls=False)[0]
    (call,) = out.tool_calls
    assert (call.name, out.content) == ("weather", "")
    checked(call.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    prompt = llm.apply_chat_template([*ASKED, out.message, result], tools=TOOLS)
    assert f'"arguments": {json.dumps(call.values())}' in llm.tokenizer.decode(prompt)
    form = llm.answer_form(TOOLS, "now", False)
    chunks = list(llm.stream(llm.apply_chat_template(ASKED, tools=TOOLS), params, answer_form=form))
    assert [one.name for one in chunks[-1].output.tool_calls] == ["now"]
    assert [part for chunk in chunks for part in chunk.parts or ()] == chunks[-1].output.tool_calls
    with pytest.raises(BadOption, match="tool_choice='sing' is not possible: the tools are weather, now"):
        llm.chat(ASKED, params, tools=TOOLS, tool_choice="sing")
    assert not llm.chat(ASKED, params, tools=TOOLS, tool_choice="none")[0].tool_calls
    llm.close()
    with LLM("shipped") as plain, pytest.raises(BadOption, match="does not know tools"):
        plain.chat(ASKED, params, tools=TOOLS)
