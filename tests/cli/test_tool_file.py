"""Functions of a file as tools, and a chat that calls them."""

import io
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.cli.chat import LEFT_OUT, Chat
from forerun.cli.tool_file import ToolFile
from forerun.errors import BadOption, NotFound
from forerun.text.parts import AnswerParts, Reasoning, Text, ToolCall
from forerun.types import SamplingParams
from refusals import refusal

TEMPLATE = str(Path(__file__).parents[1] / "serve" / "tools.jinja")
SOURCE = '''
import enum, json
from typing import Literal

class Unit(enum.Enum):
    C = "c"

def weather(city: str, days: int | None = None, unit: Literal["c", "f"] = "c", marks: list[float] = []) -> dict:
    """Tells the weather
    of a city.

    Args:
        city: where
        days (int): how many
    """
    return {"city": city, "é": days}

def fail(unit: Unit, more: dict, deep: bool = True) -> str:
    raise RuntimeError("no luck")

def long() -> str:
    return "x" * 30_000

def _private(a): ...
'''


@pytest.fixture
def tools(written: Any) -> ToolFile:
    return ToolFile(Path(written(SOURCE, "tools.py")))


def test_schemas_are_made_of_signatures_and_docstrings(tools: ToolFile) -> None:
    assert tools.names == ("weather", "fail", "long")
    weather, fail, _ = (tool["function"] for tool in tools.schemas)
    assert (weather["name"], weather["description"]) == ("weather", "Tells the weather of a city.")
    assert weather["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "how many"},
            "unit": {"enum": ["c", "f"]},
            "marks": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert fail["parameters"]["properties"]["unit"] == {"enum": ["c"]}
    assert fail["parameters"]["required"] == ["unit", "more"]


def test_what_a_call_returns_is_what_the_model_is_told(tools: ToolFile) -> None:
    assert tools.run(ToolCall("weather", '{"city": "Rome", "days": 2}')) == '{"city": "Rome", "é": 2}'
    assert tools.run(ToolCall("weather", '{"town": "Rome"}')).startswith("error: TypeError:")
    assert tools.run(ToolCall("fail", '{"unit": "c", "more": {}}')) == "error: RuntimeError: no luck"
    assert tools.run(ToolCall("_private", "{}")) == "error: there is no function _private"
    assert tools.run(ToolCall("long", "{}")).endswith("... (30,000 characters in all)")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def f(a): ...", "has no type"),
        ("def f(*a: int): ...", "cannot be called by its name"),
        ("def f(a: complex): ...", "take str, int, float"),
        ("x = 1", "has no function"),
        ("def f(:", "fails (SyntaxError"),
        ("1/0", "fails (ZeroDivisionError"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, written: Any, source: str, sentence: str) -> None:
    assert sentence in refusal(BadOption, ToolFile, Path(written(source, "a.py")))
    assert "there is no file" in refusal(NotFound, ToolFile, tmp_path / "b.py")


class Scripted(Chat):
    """A chat whose model writes what it is told to: what the random one says is no call."""

    script: list[list[object]]

    def _write(self, messages, out, interrupt, *, may_call=True):  # type: ignore[no-untyped-def]
        answer = super()._write(messages, io.StringIO(), interrupt, may_call=may_call)
        answer.answer_parts = AnswerParts()
        for part in self.script.pop(0):
            out.write(answer.add(part))  # type: ignore[arg-type]
        self.seen.append((len(messages), may_call))
        return answer


def test_a_chat_asks_before_it_runs_a_call(tools: ToolFile, capsys: pytest.CaptureFixture[str]) -> None:
    asked = list[str]()

    def may_run(call: str) -> bool:
        asked.append(call)
        return len(asked) == 1

    with LLM("shipped", chat_template=TEMPLATE) as llm:
        chat = Scripted(llm, SamplingParams(temperature=0, max_tokens=2), tools=tools, may_run=may_run)
        chat.seen = []  # type: ignore[attr-defined]
        rome, oslo = (ToolCall("weather", arguments) for arguments in ('{"city":\n"Rome"}', '{"city": "Oslo"}'))
        chat.script = [[Reasoning("Hm."), rome], [oslo], [oslo], [Reasoning("So."), Text("It is warm.")]]
        out = io.StringIO()
        chat.answer("Warm?", out)
        assert out.getvalue() == "<think>\nHm.<think>\nSo.\n</think>\n\nIt is warm."
        assert asked == ['weather({"city": "Rome"})', 'weather({"city": "Oslo"})']
        assert [(message["role"], message["content"]) for message in chat.messages] == [
            ("user", "Warm?"),
            ("assistant", ""),
            ("tool", '{"city": "Rome", "é": null}'),
            ("assistant", ""),
            ("tool", "the user did not allow this call"),
            ("assistant", "It is warm."),
        ]
        assert chat.seen == [(1, True), (3, True), (5, True), (5, False)]  # type: ignore[attr-defined]
        assert chat.retry() == "Warm?"
        assert chat.messages == []
    assert "was not run" in capsys.readouterr().err


def test_a_call_that_is_cut_is_not_asked_for(tools: ToolFile) -> None:
    """A regular expression makes the random model write a call; the limit of tokens cuts it."""
    call = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "Oslo"\}\}\n</tool_call>'
    asked = list[str]()
    with LLM("shipped", chat_template=TEMPLATE) as llm:
        for num in range(3, 200, 5):
            params = SamplingParams(regex=call, max_tokens=num, temperature=0)
            chat, out = Chat(llm, params, tools=tools, may_run=lambda one: bool(asked.append(one))), io.StringIO()
            line = chat.answer("Warm?", out)
            if asked:
                break
            assert "tool_call" not in out.getvalue()
            assert chat.messages[1:] == [{"role": "assistant", "content": ""}]
            assert LEFT_OUT not in line or num > 8
    assert asked == ['weather({"city": "Oslo"})']
    assert num > 20
