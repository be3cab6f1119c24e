"""A call of a tool that is not whole is none, whatever cut it: in every dialect, through every API, streamed and whole.

What is read of an answer is what a client is told: text, calls with their arguments, and why it ended.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.engine.opened import SHIPPED_TARGET
from forerun.engine.request import Chunk, RequestOutput, RequestReport
from forerun.serve.apis import generating, messages, ollama, openai, responses
from forerun.serve.bodies import Job
from forerun.text.answer_form import AnswerForm
from forerun.text.calls import dialect, dialects
from forerun.text.parts import ToolCall
from forerun.text.reading import Parser
from forerun.text.tokenizer import Tokenizer
from forerun.types import FinishReason
from text.test_calls import CASES, answer_form

pytestmark = pytest.mark.once("texts and forms, whatever the speculation")
TOKENIZER = Tokenizer.load(SHIPPED_TARGET)
URLS = (openai.CHAT, responses.RESPONSES, messages.MESSAGES, ollama.CHAT)
Told = tuple[str, list[tuple[str, Any]], str]  # text, calls, and whether it was "cut" or ended by itself, "over"


def read_chat(body: dict[str, Any]) -> Told:
    (choice,) = body["choices"]
    said = choice["message"]
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in said.get("tool_calls", [])]
    assert choice["finish_reason"] in ("length", "tool_calls" if calls else "stop")
    return said["content"] or "", calls, "cut" if choice["finish_reason"] == "length" else "over"


def read_response(body: dict[str, Any]) -> Told:
    items = body["output"]
    text = "".join(part["text"] for one in items if one["type"] == "message" for part in one["content"])
    called = [one for one in items if one["type"] == "function_call"]
    assert all(one["status"] == "completed" for one in called)
    calls = [(one["name"], json.loads(one["arguments"])) for one in called]
    return text, calls, "cut" if body["status"] == "incomplete" else "over"


def read_message(body: dict[str, Any]) -> Told:
    blocks = body["content"]
    text = "".join(one["text"] for one in blocks if one["type"] == "text")
    calls = [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
    assert body["stop_reason"] in ("max_tokens", "tool_use" if calls else "end_turn")
    return text, calls, "cut" if body["stop_reason"] == "max_tokens" else "over"


def read_ollama(body: dict[str, Any]) -> Told:
    said = body["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in said.get("tool_calls", [])]
    return said["content"], calls, "cut" if body["done_reason"] == "length" else "over"


READ = dict(zip(URLS, (read_chat, read_response, read_message, read_ollama), strict=True))


def events_of(raw: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in lines]


def whole_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole that a client puts together from the pieces of a chat."""
    said: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for event in events:
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            said["content"] += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", []):
                calls = said["tool_calls"]
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "function": {"name": "", "arguments": ""}})
                for name, value in piece["function"].items():
                    calls[piece["index"]]["function"][name] += value
    return {"choices": [{"message": said, "finish_reason": reason}]}


def whole_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event has all of it; what came before it says the same."""
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    arguments = [one["arguments"] for one in done if one["type"] == "function_call"]
    assert arguments == [one["arguments"] for one in events if one["type"].endswith("call_arguments.done")]
    return dict(events[-1]["response"])


def whole_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks, inputs = list[dict[str, Any]](), dict[int, str]()
    made: dict[str, Any] = {"content": blocks}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            made |= event["delta"]
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return made


def whole_ollama(events: list[dict[str, Any]]) -> dict[str, Any]:
    said = {
        "content": "".join(one["message"]["content"] for one in events),
        "tool_calls": [call for one in events for call in one["message"].get("tool_calls", [])],
    }
    return {**events[-1], "message": said}


JOIN = dict(zip(URLS, (whole_chat, whole_response, whole_message, whole_ollama), strict=True))


def answered(how: AnswerForm, text: str, reason: FinishReason) -> tuple[RequestOutput, list[Chunk]]:
    """An answer with this text, whole and in two pieces."""
    parser, half = Parser(how), len(text) // 2
    first, rest = parser.feed(text[:half]), parser.feed(text[half:])
    rest += parser.finish(is_cut=reason == "length")
    output = RequestOutput([1], text, [2], reason, None, 0, RequestReport(), answer_parts=parser.answer_parts)
    return output, [Chunk("", [2], parts=first), Chunk("", [2], reason, output, parts=rest)]


def told(url: str, output: RequestOutput, chunks: list[Chunk]) -> Told:
    """What an API tells of an answer: the same, whole and in pieces."""
    job, route = Job(url, "small", SamplingParams()), generating()[url]
    body = route.answer(job, [output], TOKENIZER, "0a", 0)
    stream = route.stream(job, [output.prompt_ids], TOKENIZER, "0a", 0)
    pieces = [stream.begin(), *(stream.piece(0, chunk) for chunk in chunks), stream.end([output])]
    whole = READ[url](json.loads(json.dumps(body)))
    assert READ[url](JOIN[url](events_of(b"".join(pieces)))) == whole
    return whole


@pytest.mark.parametrize("name", [one.name for one in dialects()])
def test_a_call_that_is_cut_anywhere_is_none_in_any_api(name: str) -> None:
    """Behind each character, by the limit of tokens and by the model's own end."""
    how = answer_form(name)
    for text, said in CASES[name]:
        calls = [one for one in said if not isinstance(one, str)]
        whole = told(openai.CHAT, *answered(how, text, "stop"))
        assert whole[1:] == (calls, "over")
        for num in range(1, len(text) if calls else 1):
            for reason, ends in (("length", "cut"), ("stop", "over")):
                ways = [told(url, *answered(how, text[:num], reason)) for url in URLS]
                content, found, ended = ways[0]
                assert all(way == ways[0] for way in ways), text[:num]
                assert (found, ended) == (calls[: len(found)], ends), text[:num]
                assert not [mark for mark in dialect(name).marks if mark in content], text[:num]
                if reason == "length":
                    assert whole[0].startswith(content.rstrip()) or content == text[:num]


# ------------------------------------------------------------------------------------------------------------ an engine


def test_the_engine_tells_no_call_that_was_cut() -> None:
    """A regular expression makes the random model write one. What is left of the tokens is in `text`, as written."""
    call = r'<tool_call>\n\{"name": "f", "arguments": \{"a": 1\}\}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with LLM("shipped", draft="none", chat_template=str(Path(__file__).with_name("tools.jinja"))) as llm:
        for most in range(1, 100, 2):
            params = SamplingParams(regex=call, max_tokens=most, temperature=0)
            (output,) = llm.chat([{"role": "user", "content": "x"}], params, tools=[tool])
            if output.tool_calls:
                break
            assert (output.content, output.finish_reason) == ("", "length")
            assert call.replace("\\n", "\n").replace("\\", "").startswith(output.text)
    assert output.tool_calls == [ToolCall("f", '{"a": 1}')]
    assert most > 20
