"""What models wrote in the tests of llama.cpp and vLLM means the same here; where not, the case says how it differs.

call_cases.json has the tools, and the cases in words of our own: `said` by the model behind `prompt`, the `text`,
`reasoning` and `calls` in it, and which tests it stands for (`of`). A call is a name and its arguments. `thinks` is
false where the template has no reasoning.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.sampling.grammar import vocabulary
from forerun.text.answer_form import THOUGHTS, AnswerForm, AnswerMarks
from forerun.text.calling import FENCES
from forerun.text.calls import dialect, dialects
from forerun.text.tools import REQUIRED, ToolRequest, Tools
from forerun.types import SamplingParams
from text.test_calls import SIGNS, parts_of, tokenizer_of

pytestmark = pytest.mark.once("texts alone")
FILE = json.loads(Path(__file__).with_name("call_cases.json").read_text("utf-8"))
CASES: list[dict[str, Any]] = FILE["cases"]
IDS = [f"{case['dialect']}-{case['of'][0]}" for case in CASES]


def answer_form(case: dict[str, Any]) -> AnswerForm:
    tools = Tools({name: FILE["tools"][name] for name in case.get("tools", ())})
    answer_marks = AnswerMarks(dialect(case["dialect"]), THOUGHTS if case.get("thinks", True) else ())
    return AnswerForm(answer_marks, ToolRequest(tools) if tools.schemas else None)


def meaning(case: dict[str, Any], *pieces: str) -> tuple[str, str, list[list[Any]]]:
    said = parts_of(answer_form(case), *pieces, prompt=case.get("prompt", ""))[1]
    return said.text, said.reasoning, [[one.name, one.values()] for one in said.calls]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_text_of_their_tests_means_what_it_means_there(case: dict[str, Any]) -> None:
    said = case["said"]
    whole = meaning(case, said)
    assert whole == (case.get("text", ""), case.get("reasoning", ""), case.get("calls", []))
    assert meaning(case, *said) == whole
    for i in range(1, len(said)):
        assert meaning(case, said[:i], said[i:]) == whole, said[:i]


def test_a_python_text_with_a_bare_quote_in_it_is_no_call() -> None:
    said = "[trip(town='New York', unit='mile's)]"
    assert meaning({"dialect": "pythonic", "tools": ["trip"]}, said) == (said, "", [])


def test_most_cases_do_not_differ() -> None:
    """Those that do say why; both projects, and every dialect, have cases that do not."""
    same = [case for case in CASES if "differs" not in case]
    assert {case["dialect"] for case in same} == {case["dialect"] for case in CASES}
    assert {of.split()[0] for case in same for of in case["of"]} == {"llama.cpp", "vllm"}
    assert len(CASES) - len(same) < len(CASES) / 10


def template(case: dict[str, Any]) -> str:
    """The signs of the case's dialect, in the version that the text is of."""
    name, said = case["dialect"], case["said"]
    if name == "deepseek" and FENCES[0] in said:
        return SIGNS[name] + FENCES[0]
    if name == "gemma" and "<start_function_call>" in said:
        return "<start_function_call>call:"
    if name == "glm" and "\n<arg_key>" not in said:
        return "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    if name == "hermes" and "\n</tool_call>" not in said:
        return "<tool_call>"
    return SIGNS[name]


def is_held(case: dict[str, Any], folder: Path) -> bool:
    """Whether a grammar that asks for calls, and allows text where there is some, allows what was said."""
    name = case["dialect"]
    said = case["said"].rstrip().removesuffix("<|call|>")
    tools = Tools({name: FILE["tools"][name] for name in case["tools"]})
    use = ToolRequest(tools, strict=frozenset(tools)) if "text" in case else ToolRequest(tools, REQUIRED)
    pairs = tuple(pair for pair in THOUGHTS if pair[0] in (case.get("prompt", ""), said[: len(pair[0])]))
    marks = [mark for mark in (*dialect(name).marks, *(m for pair in pairs for m in pair)) if mark in said]
    tokenizer = tokenizer_of(folder, marks)
    answer_form = AnswerForm(AnswerMarks(dialect(name), pairs, template(case)), use)
    params = answer_form.constrained(SamplingParams(), tokenizer, tokenizer.encode("x" + case.get("prompt", "")))
    ids, matcher = tokenizer.encode(said), vocabulary(tokenizer).compiled(params).matcher()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("name", [one.name for one in dialects()])
def test_calls_of_their_tests_may_be_said_under_a_grammar(name: str, tmp_path: Path) -> None:
    """Those with `held`; the others differ in white space, in the order of parameters, or leave marks out."""
    cases = [case for case in CASES if case["dialect"] == name and case.get("held")]
    assert cases or name in ("granite", "phi")
    for i, case in enumerate(cases):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert is_held(case, folder), case["said"]
