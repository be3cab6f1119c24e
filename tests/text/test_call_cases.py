"""What models wrote in the tests of llama.cpp and vLLM means the same here; where not, the case says how it differs.

call_cases.json has the tools, and the cases in words of our own: `said` by the model behind `prompt`, the `text`,
`reasoning` and `calls` in it, and which tests it stands for (`of`). A call is a name and its arguments, or a name, null
and what was written of them where they are cut or no JSON. `thinks` is false where the template has no reasoning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.text.calls import dialect
from forerun.text.parts import Spoken, ToolCall
from forerun.text.speech import THOUGHTS, Parser, Speaking, Speech
from forerun.text.tools import Tools, ToolUse

pytestmark = pytest.mark.once("texts alone")
FILE = json.loads(Path(__file__).with_name("call_cases.json").read_text("utf-8"))
CASES: list[dict[str, Any]] = FILE["cases"]
IDS = [f"{case['dialect']}-{case['of'][0]}" for case in CASES]


def speaking(case: dict[str, Any]) -> Speaking:
    tools = Tools({name: FILE["tools"][name] for name in case.get("tools", ())})
    speech = Speech(dialect(case["dialect"]), THOUGHTS if case.get("thinks", True) else ())
    return Speaking(speech, ToolUse(tools) if tools.schemas else None)


def call(one: ToolCall) -> list[Any]:
    if one.is_whole:
        try:
            return [one.name, json.loads(one.arguments)]
        except ValueError:
            pass
    return [one.name, None, one.arguments]


def spoken(case: dict[str, Any], *pieces: str) -> Spoken:
    parser = Parser(speaking(case), case.get("prompt", ""))
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    return parser.spoken


def meaning(said: Spoken) -> tuple[str, str, list[list[Any]]]:
    return said.text, said.reasoning, [call(one) for one in said.calls]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_text_of_their_tests_means_what_it_means_there(case: dict[str, Any]) -> None:
    said = case["said"]
    whole = spoken(case, said)
    assert meaning(whole) == (case.get("text", ""), case.get("reasoning", ""), case.get("calls", []))
    assert meaning(spoken(case, *said)) == meaning(whole)
    for i in range(1, len(said)):
        assert meaning(spoken(case, said[:i], said[i:])) == meaning(whole), said[:i]


def test_most_cases_do_not_differ() -> None:
    """Those that do say why; both projects, and every dialect, have cases that do not."""
    same = [case for case in CASES if "differs" not in case]
    assert {case["dialect"] for case in same} == {case["dialect"] for case in CASES}
    assert {of.split()[0] for case in same for of in case["of"]} == {"llama.cpp", "vllm"}
    assert len(CASES) - len(same) < len(CASES) / 10
