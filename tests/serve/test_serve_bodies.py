"""Bodies of /v1/responses and /v1/messages: what is honoured and refused; and the document of all bodies."""

import json
from typing import Any

import pytest

from forerun.serve.apis import generating, messages, openai, responses
from forerun.serve.bodies import Job, Refused
from forerun.serve.fields import MOST_ENTRIES
from forerun.serve.openapi import body_of
from forerun.types import SamplingParams
from serve.agents import CLAUDE_CODE, CODEX

pytestmark = pytest.mark.once("no engine runs: bodies alone")
HELLO = [{"role": "user", "content": "hello"}]


def respond(**body: Any) -> Job:
    return generating()[responses.RESPONSES].job({"input": "hello", **body}, "small", served_names=("small",))


def message(**body: Any) -> Job:
    asked = {"messages": HELLO, "max_tokens": 5, **body}
    return generating()[messages.MESSAGES].job(asked, "small", served_names=("small",))


def test_a_developer_is_the_system_of_templates() -> None:
    body = {"model": "small", "messages": [{"role": "developer", "content": "Be brief."}, *HELLO]}
    job = generating()[openai.CHAT].job(body, "small", served_names=("small",))
    assert job.messages == [{"role": "system", "content": "Be brief."}, *HELLO]


def test_what_responses_honour() -> None:
    job = respond(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "No jokes."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"role": "developer", "content": "Now joke."},
            {"role": "user", "content": [{"type": "input_text", "text": t} for t in "cd"]},
        ],
        max_output_tokens=7,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        seed=5,
        top_k=4,
        stop=["x"],
        reasoning={"effort": None, "summary": "auto"},
        text={"format": {"type": "text"}},
        tools=[],
        tool_choice="auto",
    )
    assert job.params == SamplingParams(max_tokens=7, logprobs=3, seed=5, top_k=4, stop="x")
    assert job.messages == [
        {"role": "system", "content": "Be brief.\n\nNo jokes."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "Now joke."},
        {"role": "user", "content": "c\nd"},
    ]
    assert respond().params == SamplingParams(max_tokens=None)


def test_what_an_assistant_does_in_a_row_is_one_message() -> None:
    """Reasoning, text and calls, of the first turn and the second; results are the tools'."""

    def called(call_id: str) -> dict[str, Any]:
        return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": "f", "arguments": '{"a": 1}'}

    def result(call_id: str, output: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call_id, "output": output}

    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    parts = [{"type": "input_text", "text": "two"}]
    given = [*HELLO, thought, answer, called("a"), called("b"), result("a", "one"), result("b", parts), hidden]
    job = respond(input=[*given, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Thanks"}])
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert job.messages == [
        *HELLO,
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [{"id": "a", **call}, {"id": "b", **call}],
        },
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "name": "f", "content": "two"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "Thanks"},
    ]


def test_histories_of_other_services_are_read() -> None:
    """Free calls, a refusal, an answer and a result without text, and what there is nothing of."""
    called = {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+ x"}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    empty = {"type": "function_call_output", "call_id": "a", "output": []}
    result = {"type": "custom_tool_call_output", "call_id": "a", "output": "done"}
    given = [*HELLO, called, result, empty, {"role": "assistant", "content": []}, *HELLO, refused, *HELLO]
    job = respond(input=given, include=list(responses.EMPTY))
    call = {"id": "a", "type": "function", "function": {"name": "patch", "arguments": '{"input": "+ x"}'}}
    assert job.messages == [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        *({"role": "tool", "tool_call_id": "a", "name": "patch", "content": text} for text in ("done", "")),
        {"role": "assistant", "content": ""},
        *HELLO,
        {"role": "assistant", "content": "No."},
        *HELLO,
    ]


def test_what_messages_honour() -> None:
    job = message(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        messages=[*HELLO, {"role": "user", "content": [{"type": "text", "text": "again"}]}],
        stop_sequences=["x", "y"],
        temperature=0.5,
        thinking={"type": "disabled"},
        metadata={"user_id": "me"},
    )
    assert job.params == SamplingParams(max_tokens=5, stop=("x", "y"), temperature=0.5)
    assert job.messages == [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hello\nagain"}]
    assert not job.continue_final_message
    reminded = message(system="a", messages=[*HELLO, {"role": "system", "content": "b"}])
    assert [m["role"] for m in reminded.messages or ()] == ["system", "user", "system"]
    assert message(messages=[*HELLO, {"role": "assistant", "content": "Well,"}]).continue_final_message


RESULT = {"type": "tool_result"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
REFUSED: list[tuple[Any, dict[str, Any], str | None, str]] = [
    (respond, {"conversation": "c"}, "conversation", "send previous_response_id, or the whole as input"),
    (respond, {"input": []}, "input", "a text or a list such as"),
    (respond, {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]", "must have call_id"),
    (respond, {"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]", "the texts call_id, name and"),
    (respond, {"input": [{"type": "computer_call"}]}, "input[0]", "it must be message, reasoning, function_call"),
    (respond, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "texts alone"),
    (respond, {"input": [{"role": "system", "content": "x"}]}, "input", "nothing to answer"),
    (respond, {"instructions": ["x"]}, "instructions", "must be a text"),
    (respond, {"reasoning": {"effort": "much"}}, "reasoning.effort", "it must be one of none"),
    (respond, {"reasoning": {"length": 3}}, "reasoning.length", "one of effort, generate_summary, summary"),
    (respond, {"tools": [{"type": "function"}]}, "tools", "which has no name"),
    (respond, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    (respond, {"tool_choice": {"type": "allowed_tools", "tools": {}}}, "tool_choice.tools", "must be a list of tools"),
    (respond, {"tool_choice": {"type": "web_search"}}, "tool_choice", "it must be none, auto, required or"),
    (respond, {"text": {"format": {"type": "xml"}}}, "text.format", '{"type": "json_schema", "schema": {...}}'),
    (respond, {"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format", "text.format and regex are"),
    (message, {"output_config": {"format": {"type": "xml"}}}, "output_config.format", "output_config.format="),
    (respond, {"text": {"form": 1}}, "text.form", "did you mean 'format'"),
    (respond, {"max_thinking_tokens": -1}, "max_thinking_tokens", "it must be in 0 .."),
    (respond, {"background": True}, "background", "when it is asked for"),
    (respond, {"background": 0}, "background", "leave it out (or say "),
    (respond, {"max_tool_calls": True}, "max_tool_calls", "max_tool_calls=True is not possible"),
    (respond, {"include": ["message.output_text.bytes"]}, "include", "must be a list of"),
    (respond, {"top_logprobs": 2}, "top_logprobs", "needs include"),
    (respond, {"max_output_tokens": -7}, "max_output_tokens", "max_output_tokens=-7 is not possible"),
    (respond, {"n": 2}, "n", "gives one answer"),
    (message, {"max_tokens": None}, "max_tokens", "this API wants it"),
    (message, {"messages": []}, "messages", "a list such as"),
    (message, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "must be user or assistant"),
    (message, {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "a text, or a list of parts"),
    (message, {"system": [{"type": "image"}]}, "system", "texts alone"),
    (message, {"thinking": {"type": "much"}}, "thinking", "must be enabled, disabled or adaptive"),
    (message, {"output_config": {"effort": "much"}}, "output_config.effort", "must be one of none"),
    (message, {"tools": [{"input_schema": {}}]}, "tools", "which has no name"),
    (message, {"tool_choice": {"type": "any"}}, "tool_choice", "there are no tools"),
    (message, {"tool_choice": "auto"}, "tool_choice", 'it must be {"type": "auto"}'),
    (message, {"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content", "texts alone"),
    (message, {"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, None, "calls tools"),
    (message, {"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0]", "no tool"),
    (message, {"stop_sequences": [""]}, "stop_sequences", "a text that is not empty"),
    (message, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
]


@pytest.mark.parametrize(
    ("read", "body", "param", "sentence"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_what_cannot_be_honoured_is_refused_by_name(read: Any, body: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(Refused, match=r".") as error:
        read(**body)
    assert (error.value.param, sentence in str(error.value)) == (param, True), error.value


def test_agents_are_served_without_what_is_not_built() -> None:
    job = generating()[responses.RESPONSES].job(CODEX, "shipped")
    assert (job.ignored, job.effort) == (("tools[1]", "reasoning.summary"), "medium")
    assert [tool["function"]["name"] for tool in job.tools.given] == ["shell"] if job.tools else False
    assert [m["role"] for m in job.messages or ()] == ["system", "user", "user"]
    assert job.stream
    job = generating()[messages.MESSAGES].job(CLAUDE_CODE, "shipped")
    assert (job.ignored, job.effort, job.thinks) == (("context_management",), "medium", None)
    assert [tool["function"]["name"] for tool in job.tools.given] == ["Bash"] if job.tools else False
    assert [m["role"] for m in job.messages or ()] == ["system", "user"]
    chat = {"messages": HELLO, "tools": [{"type": "web_search"}], "best_of": 2, "verbosity": "low"}
    job = generating()[openai.CHAT].job(chat, "small", ignore_unsupported=True)
    assert job.ignored == ("best_of", "verbosity", "tools[0]")
    for wrong in ({"messages": 3}, {"temperature": "hot"}):
        with pytest.raises(Refused):
            generating()[openai.CHAT].job({**chat, **wrong}, "small", ignore_unsupported=True)


def test_documents_that_are_texts_are_read() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "one"}
    blocks: dict[str, Any] = {"type": "content", "content": [{"type": "text", "text": "two"}]}
    found = {"type": "search_result", "source": "x", "title": "T", "content": [{"type": "text", "text": "three"}]}
    given: list[dict[str, Any]] = [
        {"type": "document", "source": plain, "title": "A", "context": None},
        {"type": "document", "source": blocks, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Compare."},
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]}
    turns = [{"role": "assistant", "content": []}, {"role": "user", "content": [result]}]
    assert message(messages=[{"role": "user", "content": given}, *turns]).messages == [
        {"role": "user", "content": "A\none\ntwo\nCompare."},
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "T\nthree"},
    ]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
    image = {"type": "document", "source": {"type": "content", "content": [{"type": "image", "source": {}}]}}
    for wrong, kind in ((pdf, "document"), (image, "image"), ({"type": "search_result"}, "search_result")):
        with pytest.raises(Refused, match=f"has the type '{kind}': the model reads texts alone"):
            message(messages=[{"role": "user", "content": [wrong]}])


def test_results_of_tools_are_messages_of_their_own() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "one"}]}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    said = {"type": "text", "text": "I look."}
    job = message(
        messages=[
            *HELLO,
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, thinking, said, USE]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
        tools=[
            {"name": "f", "description": "F.", "input_schema": {"type": "object"}, "cache_control": {}},
            {"type": "bash_20250124", "name": "bash"},
        ],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert job.messages == [
        *HELLO,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "f", "content": "one"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
    assert job.tools.given == ({"type": "function", "function": function},)
    assert (job.tools.parallel, job.thinks, job.ignored) == (False, True, ("tools[1]",))
    with pytest.raises(Refused, match="tool_choice='g' is not possible: the tools are f"):
        message(tools=[{"name": "f"}], tool_choice={"type": "tool", "name": "g"})


def test_the_form_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    wanted = SamplingParams(json_schema=schema).json_schema
    job = respond(text={"format": form, "verbosity": "low"})
    assert (job.params.json_schema, job.given["text"]["format"]) == (wanted, form)
    assert respond(text={"format": {"type": "json_object"}}).params.json_object
    assert message(output_config={"format": form}).params.json_schema == wanted
    assert message(thinking={"type": "enabled", "budget_tokens": 64.0}).max_thinking_tokens == 64


def test_the_document_has_the_limits_of_fields() -> None:
    for url, route in generating().items():
        fields = body_of(route)["properties"]
        for name, most in MOST_ENTRIES.items():
            for own in {name, "stop_sequences" if name == "stop" else name} & fields.keys():
                found = json.dumps(fields[own])
                assert f'"maxItems": {most}' in found or f'"maxProperties": {most}' in found, (url, own)
        assert '"maxLength": 1024' in json.dumps(fields["cache_salt"]), url
