"""What a grammar of calls allows is read as valid calls, whatever a model says within it."""

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from forerun.errors import BadOption
from forerun.sampling.grammar import GrammarState, vocabulary
from forerun.sampling.thinking import Limited
from forerun.text.answer_form import THOUGHTS, AnswerForm, AnswerMarks
from forerun.text.call_grammars import Rules, in_turn
from forerun.text.calls import dialect
from forerun.text.tokenizer import Tokenizer
from forerun.text.tools import ToolRequest, Tools
from forerun.types import Constraint, SamplingParams
from text.test_calls import CASES, SIGNS, parts_of, read, tokenizer_of

pytestmark = pytest.mark.once("texts alone")
CLOSED = {"additionalProperties": False}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'Where ::= "it" is.'},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit": {"type": "string", "enum": ["°C", "°F"]},
        "inner": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], **CLOSED},
        "list": {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 3},
    },
    "required": ["days", "unit"],
    **CLOSED,
}
OPTIONAL = {
    "type": "object",
    "properties": {
        "x": {"type": "boolean"},
        "y": {"type": ["integer", "null"]},
        "z": {"anyOf": [{"type": "string", "pattern": "^[ab]{2}$"}, {"type": "null"}]},
        "either": {"enum": ["a", "b", 3]},
    },
    **CLOSED,
}
NOTHING = {"type": "object", "properties": {}, **CLOSED}
SCHEMAS = {"weather": WEATHER, "opt": OPTIONAL, "now": NOTHING}
TOOLS = Tools.of([{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()])
END = "<|unread|>"
FINAL = "<|channel|>final<|message|>"  # how an answer of harmony begins
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HERMES, HARMONY = (AnswerMarks(dialect(name), ()) for name in ("hermes", "harmony"))
# Answers whose reasoning has a limit: a text, a call, and the channels of harmony.
PLAIN = AnswerForm(AnswerMarks(None, THOUGHTS[:1]), max_thinking_tokens=3)
CALL = AnswerForm(AnswerMarks(dialect("hermes"), THOUGHTS[:1]), ToolRequest(TOOLS, "now"), 3)
CHANNELS = AnswerForm(HARMONY, max_thinking_tokens=3)


@pytest.fixture
def tokenizer(name: str, tmp_path: Path) -> Tokenizer:
    """A tokenizer that has the marks of a dialect as special tokens."""
    return tokenizer_of(tmp_path, list(dialect(name).marks))


def is_valid(name: str, values: dict[str, Any]) -> bool:
    return Draft202012Validator(SCHEMAS[name]).is_valid(values)


def said(walk: GrammarState, tokenizer: Tokenizer, rng: random.Random, most: int = 400) -> list[int] | None:
    """What a model says that knows nothing but what it may say; it likes quotes and ends. None = too much."""
    end, ids = tokenizer.encode(END)[0], list[int]()
    liked = set(tokenizer.encode('"}])\n<,')) | {i for i in tokenizer.special_ids if i != end}
    while not walk.is_over(ids):
        if len(ids) == most:
            return None
        may = np.flatnonzero(walk.allowed(ids).bits).tolist()
        weights = [60 if i == end else 12 if i in liked else 1 for i in may]
        chosen = rng.choices(may, weights)[0]
        if chosen == end:
            break
        ids.append(chosen)
    return ids


def started(params: SamplingParams, tokenizer: Tokenizer) -> GrammarState:
    """What holds an answer with these parameters."""
    return vocabulary(tokenizer).compiled(params).start(frozenset(tokenizer.encode(END)), 0)


def held(answer_form: AnswerForm, tokenizer: Tokenizer, prompt: str = "x") -> GrammarState:
    return started(answer_form.constrained(SamplingParams(), tokenizer, tokenizer.encode(prompt)), tokenizer)


@pytest.mark.parametrize("special", [True, False], ids=["special", "spelled"])
@pytest.mark.parametrize("name", CASES)
def test_what_must_be_a_call_is_one_with_valid_arguments(name: str, special: bool, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, list(dialect(name).marks) if special else ["<|other|>"])
    rng, num, several = random.Random(3), 0, 0
    for choice in ("required", "weather", "opt", "now"):
        use = ToolRequest(TOOLS, choice)
        answer_form = AnswerForm(AnswerMarks(dialect(name), (), SIGNS[name]), use)
        for _ in range(12):
            ids = said(held(answer_form, tokenizer), tokenizer, rng)
            if ids is None:
                continue
            calls = read(answer_form, tokenizer, ids).calls
            assert calls, tokenizer.decode(ids)
            assert all(is_valid(call.name, call.values()) for call in calls), tokenizer.decode(ids)
            assert choice == "required" or {call.name for call in calls} == {choice}
            num, several = num + 1, several + (len(calls) > 1)
        alone = dataclasses.replace(answer_form, tool_request=dataclasses.replace(use, parallel=False))
        ids = said(held(alone, tokenizer), tokenizer, rng)
        assert ids is None or len(read(answer_form, tokenizer, ids).calls) == 1
    assert num > 12


@pytest.mark.parametrize("name", CASES)
def test_strict_tools_may_be_called_or_not(name: str, tokenizer: Tokenizer) -> None:
    """Any text may be said that is no call; a call is valid where its tool is strict."""
    answer_marks = AnswerMarks(dialect(name), (), SIGNS[name])
    auto = AnswerForm(answer_marks, ToolRequest(TOOLS, strict=frozenset(["weather", "now"])))
    end, rng = tokenizer.encode(END)[0], random.Random(5)
    text = "It is 3 < 4, [1] and {x}."
    text = f"{FINAL}{text}" if name == "harmony" else text
    assert held(auto, tokenizer).allowed(tokenizer.encode(text)).bits[end]
    forced = AnswerForm(answer_marks, ToolRequest(TOOLS, "weather"))
    for _ in range(4):
        if (ids := said(held(forced, tokenizer), tokenizer, rng)) is not None:
            assert held(auto, tokenizer).takes([], ids), "what is a call when it must be is one when it may be"
    wrong = {"days": 3, "unit": "K"}
    spelled = {
        "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}',
        "mistral": "[TOOL_CALLS]weather[ARGS]%s",
        "phi": '<|tool_call|>[{"name": "weather", "arguments": %s',
    }
    if name in spelled:
        ids = tokenizer.encode(spelled[name] % json.dumps(wrong))
        assert not held(auto, tokenizer).takes([], ids)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"llama3_json"}))
def test_an_answer_of_a_schema_or_calls(name: str, tokenizer: Tokenizer) -> None:
    """A schema holds what is said to the user; tools may be called before, as agents with an output type do."""
    answer_marks, rng = AnswerMarks(dialect(name), (), SIGNS[name]), random.Random(7)
    params = SamplingParams(json_schema={"type": "object", "properties": {"n": DIGIT}, "required": ["n"], **CLOSED})

    def may_say(ids: list[int], use: ToolRequest) -> bool:
        made = AnswerForm(answer_marks, use).constrained(params, tokenizer, tokenizer.encode("x"))
        walk, end = started(made, tokenizer), tokenizer.encode(END)[0]
        return walk.takes([], ids) and (walk.is_over(ids) or bool(walk.allowed(ids).bits[end]))

    before, free = FINAL if name == "harmony" else "", ToolRequest(TOOLS)
    assert may_say(tokenizer.encode(before + '{"n": 3}'), free)
    for wrong in ('{"n": "x"}', "It is 3.", '{"n": 3} and'):
        assert not may_say(tokenizer.encode(before + wrong), free), wrong
    forced = AnswerForm(answer_marks, ToolRequest(TOOLS, "required"))
    num = 0
    for _ in range(6):
        if (ids := said(held(forced, tokenizer), tokenizer, rng)) is not None:
            assert may_say(ids, ToolRequest(TOOLS, strict=frozenset(TOOLS))), tokenizer.decode(ids)
            num += may_say(ids, free)
    assert num


def test_a_call_that_must_be_needs_no_form_of_the_answer(tmp_path: Path) -> None:
    """Agents send the type of their last answer while a tool must be called first."""
    tokenizer = tokenizer_of(tmp_path, list(dialect("hermes").marks))
    forced = AnswerForm(HERMES, ToolRequest(TOOLS, "required"))
    plain = forced.constrained(SamplingParams(), tokenizer, [0])
    for form in ({"json_schema": WEATHER}, {"json_object": True, "json_whitespace": "compact"}):
        assert forced.constrained(SamplingParams(**form), tokenizer, [0]) == plain
    for other in ({"regex": "a+"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}):
        with pytest.raises(BadOption, match=r"^tool_choice='required' and a grammar for the answer: drop one of them$"):
            forced.constrained(SamplingParams(**other), tokenizer, [0])


@pytest.mark.parametrize("name", CASES)
def test_functions_without_parameters_are_called_with_none(name: str, tokenizer: Tokenizer) -> None:
    bare = {"type": "object", "properties": {}, "required": [], "title": "now"}
    tools = Tools.of([{"name": "a"}, {"name": "b", "parameters": {}}, {"name": "c", "parameters": bare}])
    answer_form = AnswerForm(AnswerMarks(dialect(name), (), SIGNS[name]), ToolRequest(tools, "required"))
    rng, num = random.Random(9), 0
    for _ in range(6):
        if (ids := said(held(answer_form, tokenizer), tokenizer, rng)) is not None:
            assert all(call.values() == {} for call in read(answer_form, tokenizer, ids).calls), tokenizer.decode(ids)
            num += 1
    assert num
    assert Tools.of([{"name": "f", "parameters": {"type": "object"}}]).schemas["f"] == {"type": "object"}


def test_formats_that_json_schema_does_not_define_are_notes(tmp_path: Path) -> None:
    """As pydantic writes them for paths and secrets; in the schemas of tools, and of answers."""
    tokenizer = tokenizer_of(tmp_path, list(dialect("hermes").marks))
    named = {"type": "object", "properties": {"format": {"type": "string", "format": "path"}}, **CLOSED}
    use = ToolRequest(Tools.of([{"name": "f", "parameters": named}]), "f")
    call = '<tool_call>\n{"name": "f", "arguments": {"format": "/tmp"}}\n</tool_call>'
    assert held(AnswerForm(HERMES, use), tokenizer).takes([], tokenizer.encode(call))
    walk = started(SamplingParams(json_schema={**named, "const": {"format": "path"}}), tokenizer)
    assert walk.takes([], tokenizer.encode('{"format": "path"}'))


def test_calls_that_have_no_mark_are_not_among_answers_of_a_schema(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ["<|other|>"])
    params = SamplingParams(json_schema={"type": "object", "properties": {"name": {"type": "string"}}, **CLOSED})
    bare = AnswerForm(AnswerMarks(dialect("llama3_json"), (), SIGNS["llama3_json"]), ToolRequest(TOOLS))
    assert bare.constrained(params, tokenizer, tokenizer.encode("x")) is params


def test_calls_come_behind_the_reasoning(tmp_path: Path) -> None:
    """What the prompt has begun, or the model begins, is free; then the call must come."""
    tokenizer = tokenizer_of(tmp_path, ["<think>", "</think>"])
    answer_form = AnswerForm(AnswerMarks(dialect("hermes"), THOUGHTS[:1]), ToolRequest(TOOLS, "now"))
    for prompt, thought in (("<think>\n", "Hm. </think>\n\n"), ("x", "<think>Hm.</think>\n"), ("x", "")):
        walk = held(answer_form, tokenizer, prompt)
        ids = tokenizer.encode(thought + NOW)
        assert walk.takes([], ids), thought
        answer_parts = read(answer_form, tokenizer, ids, prompt)
        assert (answer_parts.reasoning, len(answer_parts.calls)) == ("Hm." if thought else "", 1)
        assert not held(answer_form, tokenizer, prompt).takes([], tokenizer.encode(thought + "No."))


def test_a_schema_of_the_answer_begins_behind_the_reasoning_too(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ["</think>", *dialect("harmony").marks])
    thinking = AnswerForm(AnswerMarks(None, THOUGHTS[:1]))
    channels = AnswerForm(HARMONY)
    given: Any
    for given, good, bad in (
        ({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}, '{"a": 1}', '{"a": "x"}'),
        ({"json_object": True, "json_whitespace": "compact"}, '{"a":1}', '{"a": 1}'),
        ({"regex": "a/b+"}, "a/bb", "a/c"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
    ):
        params = SamplingParams(**given)
        for how, prompt, before in ((thinking, "<think>", "Hm.</think>\n"), (channels, "x", FINAL)):
            made = how.constrained(params, tokenizer, tokenizer.encode(prompt))
            for text, ok in ((before + good, True), (before + bad, False), (good, how is thinking)):
                assert started(made, tokenizer).takes([], tokenizer.encode(text)) == ok, (text, made.grammar)
    with pytest.raises(BadOption, match="tool_choice='now' and a grammar for the answer"):
        AnswerForm(HERMES, ToolRequest(TOOLS, "now")).constrained(SamplingParams(regex="a"), tokenizer, [0])
    plain = SamplingParams()
    assert AnswerForm(HERMES, ToolRequest(TOOLS)).constrained(plain, tokenizer, [0]) is plain


def limited(answer_form: AnswerForm, tokenizer: Tokenizer, prompt: str = "x", **fields: Any) -> Constraint:
    """What holds an answer whose reasoning has a limit."""
    params = answer_form.constrained(SamplingParams(**fields), tokenizer, tokenizer.encode(prompt))
    grammar = vocabulary(tokenizer).compiled(params)
    return Limited(params.thinking, grammar, tokenizer.num_ids).start(frozenset(tokenizer.encode(END)), 0)


def may_say(walk: Constraint, ids: list[int]) -> bool:
    """Whether each token may follow those before it."""
    return all(walk.allowed(ids[:i]).bits[ids[i]] for i in range(len(ids)))


def test_reasoning_is_closed_behind_its_limit(tmp_path: Path) -> None:
    """Begun by the prompt or by the model; then anything may follow, or what the answer is held to."""
    tokenizer = tokenizer_of(tmp_path, ["<think>", "</think>", *dialect("harmony").marks])
    channel_call = AnswerForm(HARMONY, ToolRequest(TOOLS, "now"), 3)
    analysis, next_channel = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>"
    in_channel = "commentary to=functions.now<|message|>{}"
    for how, prompt, before, after, wrong in (
        (PLAIN, "<think>\n", "", " So <think>.", ""),
        (PLAIN, "x", "<think>", "So.", ""),
        (CALL, "<think>", "", NOW, "So."),
        (CALL, "x", "<think>", f"\n\n{NOW}", "So."),
        (CHANNELS, "x", analysis, f"{next_channel}final<|message|>So.", ""),
        (channel_call, "x", analysis, next_channel + in_channel, f"{next_channel}final"),
    ):
        end = "<|end|>" if "channel" in before else "</think>"
        begun = tokenizer.encode(before)
        closing = tokenizer.encode(end)[0]
        for thought in ("", "abc", "<|end|>" if how in (PLAIN, CALL) else "</think>"):
            ids = [*begun, *tokenizer.encode(thought), closing]
            assert may_say(limited(how, tokenizer, prompt), [*ids, *tokenizer.encode(after)]), (prompt, before)
            assert not wrong or not may_say(limited(how, tokenizer, prompt), [*ids, *tokenizer.encode(wrong)])
        walk = limited(how, tokenizer, prompt)
        assert not may_say(walk, [*begun, *tokenizer.encode("abcd")])
        assert walk.allowed([*begun, *tokenizer.encode("abc")]).only == closing
        assert walk.forced([*begun, *tokenizer.encode("abc")])[0] == closing


def test_an_answer_without_reasoning_is_what_it_would_be_without_a_limit(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ["<think>", "</think>", *dialect("harmony").marks])
    assert may_say(limited(PLAIN, tokenizer), tokenizer.encode("No thought, <thin"))
    for text in (f"{FINAL}So.", "<|channel|>commentary to=functions.f<|message|>{}"):
        assert may_say(limited(CHANNELS, tokenizer), tokenizer.encode(text))
    opening, closing, blank = (tokenizer.encode(text)[0] for text in ("<think>", "</think>", "\n"))
    bits = limited(CALL, tokenizer).allowed([]).bits
    assert (bits[opening], bits[closing], bits[blank]) == (True, False, False)
    assert may_say(limited(CALL, tokenizer), tokenizer.encode("<tool_call>\n"))
    schema = {"type": "object", "properties": {"n": DIGIT}, "required": ["n"], **CLOSED}
    assert may_say(limited(PLAIN, tokenizer, json_schema=schema), tokenizer.encode('{"n": 3}'))
    assert may_say(limited(PLAIN, tokenizer, json_schema=schema), tokenizer.encode('<think>ab</think>\n{"n": 3}'))
    assert not may_say(limited(PLAIN, tokenizer, json_schema=schema), tokenizer.encode('<think>ab</think>\n{"n": x'))
    left = PLAIN.constrained(SamplingParams(), tokenizer, tokenizer.encode("<think></think>"))
    assert left == SamplingParams(), "nothing is left"


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ["<think>", "</think>"])
    many = AnswerForm(AnswerMarks(None, (("<think>", "<|end of thought|>"),)), max_thinking_tokens=3)
    with pytest.raises(BadOption, match="is no single token of this model"):
        many.constrained(SamplingParams(), tokenizer, tokenizer.encode("<think>"))
    assert (PLAIN.can_limit(tokenizer), many.can_limit(tokenizer)) == (True, False)
    with pytest.raises(BadOption, match="max_thinking_tokens=3 and a grammar"):
        PLAIN.constrained(SamplingParams(grammar='start: "a"'), tokenizer, [0])


KEYS = ("type", "enum", "required", "anyOf", "items", "minLength", "pattern", "properties", "additionalProperties")


@pytest.mark.parametrize("name", CASES)
def test_schemas_that_are_none_are_refused_or_taken(name: str, tokenizer: Tokenizer) -> None:
    """Nothing but BadOption is raised, and an answer can be read by them."""
    num = 0
    for key, value in itertools.product(KEYS, (3, "x", None, [3], {"a": 3}, [{}], ["string", 3])):
        inner: Any = {"type": "string", key: value}
        for schema in ({"properties": {"a": inner}}, {key: value}, {"properties": {"a": {"type": "array", **inner}}}):
            use = ToolRequest(Tools.of([{"name": "f", "parameters": schema}]), "f")
            answer_form = AnswerForm(AnswerMarks(dialect(name), (), SIGNS[name]), use)
            try:
                held(answer_form, tokenizer)
                num += 1
            except BadOption:
                pass
            for text, _ in CASES[name]:
                parts_of(answer_form, text.replace("weather", "f").replace("city", "a"))
    assert num > 20


def test_parameters_that_may_be_left_out() -> None:
    schema = {"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b", "z"]}
    rules = Rules({})
    assert in_turn(rules, schema, lambda name, _: name, ", ") == 'r0 ", " r1 (", " r2)? (", " r3)?'
    assert list(rules.rules.values()) == ["b", "z", "a", "c"]
    assert in_turn(Rules({}), {}, lambda name, _: name, ", ") == '""'
