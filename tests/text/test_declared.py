"""Answers read by a model's own response template, against transformers' reader of the same."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from forerun.errors import UnsupportedModel
from forerun.text.answer_form import AnswerForm, AnswerMarks
from forerun.text.chat import ChatTemplate
from forerun.text.declared import Declared
from forerun.text.parts import AnswerParts
from forerun.text.tools import ToolRequest, Tools
from text.test_calls import parts_of

pytestmark = pytest.mark.once("texts alone")
START = "<|im_start|>assistant\n"
JSON_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": START,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
TAGS: dict[str, Any] = {
    "start_anchor": START,
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<call>\s*<f=(?P<name>[^>\n]+)>",
            "close_pattern": r"</f>\s*</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<p=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</p>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
LAX: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
LIST: dict[str, Any] = {
    "start_anchor": START,
    "fields": {
        "tool_calls": {
            "open": "[CALLS]",
            "close": "[/CALLS]",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{input.args}"}},
            "transform_each": True,
        },
        "note": {"open": "[NOTE]", "close": "[/NOTE]", "content": "kv-lines"},
        "content": {"content": "text"},
    },
}
ASKED = '<tool_call>\n{"name": "weather", "arguments": {"city": "P", "days": 2}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {"a": [1]}}</tool_call>'
LAX_TEXT = '<|channel>thought\nHm.<channel|>Ok.<|tool_call>call:weather{city:<|"|>P "q"<|"|>,days:3}<tool_call|>'
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("text", JSON_CALLS, START, "Hello, you."),
    ("thought", JSON_CALLS, START, "<think>\nHm.\n</think>\n\nYes."),
    ("begun", JSON_CALLS, f"{START}<think>\n", "Hm.\n</think>\n\nYes."),
    ("closed", JSON_CALLS, f"{START}<think>\n\n</think>\n\n", "Yes."),
    ("call", JSON_CALLS, START, f"So.\n{ASKED}"),
    ("calls", JSON_CALLS, START, f"<think>x</think>{NOW}\n{NOW}"),
    ("looks so", JSON_CALLS, START, "a <tool <think"),
    ("tags", TAGS, START, "I look.\n<call>\n<f=weather>\n<p=city>\nParis\n</p>\n<p=days>3</p>\n</f>\n</call>"),
    ("no tags", TAGS, START, "It is <call me>, 3 < 4"),
    ("lax", LAX, "<|turn>model\n", LAX_TEXT),
    ("each", LIST, START, '[NOTE]a: b[/NOTE]Yes[CALLS][{"name": "now", "input": {"args": {"x": 1}}}][/CALLS]'),
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
TOOLS = Tools.of([*FUNCTIONS, {"name": "now"}])


def read(template: dict[str, Any], prompt: str, *pieces: str) -> tuple[list[Any], AnswerParts]:
    marks = AnswerMarks(None, (), declared=Declared.of(template))
    return parts_of(AnswerForm(marks, ToolRequest(TOOLS)), *pieces, prompt=prompt)


@pytest.mark.parametrize(("template", "prompt", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_answers_are_what_transformers_makes_of_them(template: dict[str, Any], prompt: str, text: str) -> None:
    wanted = parse_response(text, template, prefix=prompt, tools=FUNCTIONS)
    whole, parts = read(template, prompt, text)
    thought = wanted.get("reasoning_content", wanted.get("thinking", ""))
    assert (parts.text.strip(), parts.reasoning) == (wanted.get("content", ""), thought)
    calls = [{"type": "function", "function": {"name": call.name, "arguments": call.values()}} for call in parts.calls]
    assert calls == wanted.get("tool_calls", [])
    assert read(template, prompt, *text)[0] == whole
    for i in range(len(text)):
        assert read(template, prompt, text[:i], text[i:])[0] == whole, text[:i]


WRONG = [
    3,
    {"fields": 3},
    {"version": 2, "fields": {}},
    *({"fields": {"a": {"open_pattern": p}}} for p in ("[ab]", "(")),
]


@pytest.mark.parametrize("template", WRONG)
def test_templates_that_cannot_be_read(template: Any) -> None:
    with pytest.raises(UnsupportedModel):
        Declared.of(template)


def test_what_a_model_carries_goes_before_the_marks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"chat_template": "{{ tools }}<tool_call>{{ messages }}", "response_template": TAGS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    answer_marks = ChatTemplate.load(tmp_path).answer_marks
    assert answer_marks.declared is not None
    assert answer_marks.dialect is not None
    answer_parts = parts_of(AnswerForm(answer_marks, ToolRequest(TOOLS)), "<call><f=now></f></call>")[1]
    assert [call.name for call in answer_parts.calls] == ["now"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": 3}), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert ChatTemplate.load(tmp_path).answer_marks.declared is None
    assert "response_template=3 is not possible" in caplog.text
