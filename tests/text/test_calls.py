"""Dialects of tool calls: texts in each published format become the same parts, however they are cut."""

import itertools
import json
import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from forerun.errors import BadOption
from forerun.text.answer_form import THOUGHTS, AnswerForm, AnswerMarks
from forerun.text.calls import dialect, dialects, of_template
from forerun.text.parts import AnswerParts, Part, Text, ToolCall
from forerun.text.reading import Parser, PartsReader, joined
from forerun.text.tokenizer import Tokenizer
from forerun.text.tools import ToolRequest, Tools
from tiny import byte_tokenizer

pytestmark = pytest.mark.once("texts alone")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"type": ["string", "null"]},
        "code": {"enum": ["07", "x"]},
        "any": {},
        "inner": {"type": "object"},
    },
}
TOOLS = Tools.of([{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}, {"name": "now"}])
W, N = "weather", "now"
CITY = {"city": 'Zürich, "old" town\n\'}]</tool', "days": 3}
# Of each dialect: texts, and what is said and called in them: a text, or the name and arguments of a call.
Said = list[str | tuple[str, Any]]
CASES: dict[str, list[tuple[str, Said]]] = {
    "hermes": [
        (f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(CITY)}}}\n</tool_call>', [(W, CITY)]),
        (
            'Both.\n\n<tool_call>{"arguments": {"a": [1, {}]}, "name": "weather"}</tool_call>\n'
            '<tool_call>\n{"name":"now","arguments":{}}\n</tool_call>\n',
            ["Both.", (W, {"a": [1, {}]}), (N, {})],
        ),
        ('<tool_call>{"name": "now"}</tool_call> Done.', [(N, {}), "Done."]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [(N, {})]),
        ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [(N, {"a": 1})]),
        ('<tool_call>[{"name": "now"}, {"name": "weather"}]</tool_call>', [(N, {}), (W, {})]),
        ('```json\n{\n  "name": "weather",\n  "arguments": {"city": "P"}\n}\n```', [(W, {"city": "P"})]),
        ('{{"name": "now", "arguments": {}}}', [(N, {})]),
        ('<tools>\n{"name": "now"}\n{"name": "weather"}\n</tools>', [(N, {}), (W, {})]),
        ("<tools> are here", [" are here"]),
        ('{"name": "now"}\n{"name": "weather", "arguments": {"days": 2}}', [(N, {}), (W, {"days": 2})]),
        ('{"name": "Anna", "age": 3}', ['{"name": "Anna", "age": 3}']),
        ("```json\n[1]\n```", ["```json\n[1]\n```"]),
        ("It is 3 < 4 <tool> {x} \n", ["It is 3 < 4 <tool> {x} \n"]),
        ("<tool_call>nothing", ["nothing"]),
        ('Say <tool_call> [x], or {"name": "now"}.', ['Say  [x], or {"name": "now"}.']),
        ('<tool_call>{"name": "now", "arguments": {"a": 1]}}</tool_call> So.', ["So."]),
        ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', []),
        ('<tool_call>{"name": "now", "arguments": {"a": x}}</tool_call>', []),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "now", "arguments": {"a"<tool_call>{"name": "weather"}</tool_call>', [(W, {})]),
        ('{"name": "now", "arguments": {"a": 1]} So.', ['{"name": "now", "arguments": {"a": 1]} So.']),
    ],
    "qwen3_coder": [
        (
            'I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\n a\n"b" </p>\n</parameter>\n'
            "<parameter=days>\n3\n</parameter>\n<parameter=note>\nnull\n</parameter>\n<parameter=code>\n07\n</parameter>\n"
            '<parameter=inner>\n{"a": [true, null]}\n</parameter>\n</function>\n</tool_call>',
            [
                "I look.",
                (W, {"city": ' a\n"b" </p>', "days": 3, "note": None, "code": "07", "inner": {"a": [True, None]}}),
            ],
        ),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>\n<function=now></function>", [(N, {}), (N, {})]),
        ("<function=weather>\n<parameter=any>\nTrue\n</parameter>\n</function>", [(W, {"any": True})]),
        ("<tool_call>x</tool_call>", ["x"]),
    ],
    "glm": [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Par\nis</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n<arg_key>any</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>",
            [(W, {"city": "Par\nis", "days": 3, "any": [1, 2]})],
        ),
        ("So:\n<tool_call>now\n</tool_call>\n<tool_call>now</tool_call>", ["So:", (N, {}), (N, {})]),
    ],
    "llama3_json": [
        (f'{{"name": "weather", "parameters": {json.dumps(CITY)}}}', [(W, CITY)]),
        (
            '{"type": "function", "name": "weather", "parameters": {"days": 1}}; {"name": "now", "parameters": {}}',
            [(W, {"days": 1}), (N, {})],
        ),
        ('<|python_tag|>{"name": "now", "parameters": {}}', [(N, {})]),
        ('{"name": "Anna"}', ['{"name": "Anna"}']),
        ('See {"name": "now"}', ['See {"name": "now"}']),
    ],
    "pythonic": [
        (
            '[weather(city=\'Par\\\'is, (x)]\', days=3, any={"a": [1, None, True]}, note="""a\n"b" """), now()]',
            [(W, {"city": "Par'is, (x)]", "days": 3, "any": {"a": [1, None, True]}, "note": 'a\n"b" '}), (N, {})],
        ),
        ("[see(this)] and [1]", ["[see(this)] and [1]"]),
        ("Yes.<|tool_call_start|>[now()]<|tool_call_end|>Wait.", ["Yes.", (N, {}), "Wait."]),
        ("<|python_start|>[weather(days=-1.5e3, city='')]<|python_end|>", [(W, {"days": -1500.0, "city": ""})]),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "P"}, "id": "abcdefghi"}, {"name": "now"}]',
            [(W, {"city": "P"}), (N, {})],
        ),
        (
            f"So.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{json.dumps(CITY)}[TOOL_CALLS]now[ARGS]{{}}",
            ["So.", (W, CITY), (N, {})],
        ),
        ('[TOOL_CALLS]weather{"days": 1}', [(W, {"days": 1})]),
        ("a [list] of [TOOLS]", ["a [list] of [TOOLS]"]),
    ],
    "phi": [
        (
            '<|tool_call|>[{"name": "weather", "arguments": {"a": 1}}, {"name": "now"}]<|/tool_call|>',
            [(W, {"a": 1}), (N, {})],
        ),
        ('Ok <|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', ["Ok", (N, {})]),
    ],
    "granite": [
        (
            '<|tool_call|>[{"name": "weather", "arguments": {"a": 1}}, {"arguments": {}, "name": "now"}]',
            [(W, {"a": 1}), (N, {})],
        ),
        ('<tool_call>[{"name": "now", "arguments": {}}]', [(N, {})]),
    ],
    "deepseek": [
        (
            'Hm<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "P"}\n```'
            "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            ["Hm", (W, {"city": "P"}), (N, {})],
        ),
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [(W, {"a": 1}), (N, {})],
        ),
    ],
    "gemma": [
        (
            '<|tool_call>call:weather{city:<|"|>Pa"r,}is\n<|"|>,days:-3,any:{a:[1.5,true,null,<|"|>x<|"|>],b:{}}}'
            "<tool_call|><|tool_call>call:now{}<tool_call|>",
            [(W, {"city": 'Pa"r,}is\n', "days": -3, "any": {"a": [1.5, True, None, "x"], "b": {}}}), (N, {})],
        ),
        ("<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", [(W, {"city": "Paris"})]),
        ("<|tool_call>call us", []),
        ("<|tool_call>a {call}", ["a {call}"]),
    ],
    "harmony": [
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.weather <|constrain|>json<|message|>{json.dumps(CITY)}<|call|>",
            ["I look.", (W, CITY)],
        ),
        (
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>final<|message|>It is late.\n<|return|>",
            [(N, {}), "It is late."],
        ),
        ("<|channel|>final<|message|>Hello  you", ["Hello  you"]),
        ("Hello", ["Hello"]),
    ],
    "kimi": [
        (
            "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            ["Ok.", (W, {"a": 1}), (N, {})],
        )
    ],
}
TEXTS = [(name, text, said) for name, cases in CASES.items() for text, said in cases]
IDS = [f"{name}-{i}" for name, cases in CASES.items() for i in range(len(cases))]


def answer_form(name: str, thoughts: tuple[tuple[str, str], ...] = ()) -> AnswerForm:
    return AnswerForm(AnswerMarks(dialect(name), thoughts), ToolRequest(TOOLS))


def said_in(answer_parts: AnswerParts) -> Said:
    """As in CASES."""
    said: Said = []
    for item in answer_parts.items:
        if hasattr(item, "name"):
            said.append((item.name, json.loads(item.arguments)))
        elif item.kind == "text":
            said.append(item.text)
    return said


def parts_of(how: AnswerForm, *pieces: str, prompt: str = "") -> tuple[list[Part], AnswerParts]:
    parser = Parser(how, prompt)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    return joined(parts), parser.answer_parts


def test_every_dialect_has_texts() -> None:
    assert {one.name for one in dialects()} == set(CASES)


@pytest.mark.parametrize(("name", "text", "said"), TEXTS, ids=IDS)
def test_texts_of_the_published_formats(name: str, text: str, said: Said) -> None:
    assert said_in(parts_of(answer_form(name), text)[1]) == said


@pytest.mark.parametrize(("name", "text", "said"), TEXTS, ids=IDS)
def test_a_text_gives_the_same_parts_wherever_it_is_cut(name: str, text: str, said: Said) -> None:
    how = answer_form(name, THOUGHTS)
    whole = parts_of(how, text)[0]
    assert parts_of(how, *text)[0] == whole
    for i in range(len(text)):
        assert parts_of(how, text[:i], text[i:])[0] == whole, text[:i]
    random.seed(7)
    for _ in range(20):
        cuts = [0, *sorted(random.sample(range(len(text) + 1), min(5, len(text)))), len(text)]
        assert parts_of(how, *(text[a:b] for a, b in itertools.pairwise(cuts)))[0] == whole


@pytest.mark.parametrize(("name", "text", "said"), TEXTS, ids=IDS)
def test_what_was_given_of_a_text_stays_when_it_is_cut_short(name: str, text: str, said: Said) -> None:
    """Parts are given as soon as they are certain: what an answer of max_tokens has is the beginning of the whole."""
    how, whole = answer_form(name), parts_of(answer_form(name), text)[1]
    for i in range(len(text)):
        parser = Parser(how)
        given = AnswerParts()
        for part in parser.feed(text[:i]):
            given.add(part)
        assert whole.text.startswith(given.text)
        assert given.calls == whole.calls[: len(given.calls)]
        parser.finish()
        assert parser.answer_parts.calls == whole.calls[: len(parser.answer_parts.calls)]


def test_a_call_is_given_when_it_is_whole() -> None:
    parser = Parser(answer_form("hermes"))
    assert parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}') == []
    assert parser.feed("}") == [ToolCall("weather", '{"city": "Paris"}')]
    parser = Parser(answer_form("qwen3_coder"))
    assert parser.feed("<function=weather>\n<parameter=city>\nParis\n</parameter>\n") == []
    assert parser.feed("</function>") == [ToolCall("weather", '{"city": "Paris"}')]
    assert parser.answer_parts.num_broken_calls == 0


def test_calls_that_break_off_are_counted() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1]}}</tool_call><tool_call>{"name": "now"}</tool_call>'
    answer_parts = parts_of(answer_form("hermes"), f'{text}<tool_call>{{"name": "now", "arg')[1]
    assert (len(answer_parts.calls), answer_parts.num_broken_calls, answer_parts.text) == (1, 2, "")


def test_of_one_call_at_most_the_first_whole_one_counts() -> None:
    how = AnswerForm(AnswerMarks(dialect("hermes"), ()), ToolRequest(TOOLS, parallel=False))
    broken, now, weather = (
        f"<tool_call>{inner}</tool_call>"
        for inner in ('{"name": "now", "arguments": 3}', '{"name": "now"}', '{"name": "weather"}')
    )
    assert said_in(parts_of(how, f"{broken}{now}{weather}")[1]) == [(N, {})]


def test_no_tail_of_a_cut_answer_is_the_beginning_of_a_mark() -> None:
    for text, is_cut, shown in (("a <tool_c", True, "a"), ("a <tool_c", False, "a <tool_c"), ("a <b", True, "a <b")):
        parser = Parser(answer_form("hermes"))
        parser.feed(text)
        parser.finish(is_cut=is_cut)
        assert parser.answer_parts.text.rstrip() == shown


# ---------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize("pair", THOUGHTS, ids=lambda pair: pair[1])
def test_reasoning(pair: tuple[str, str]) -> None:
    how = AnswerForm(AnswerMarks(None, THOUGHTS), None)
    opening, closing = pair
    text = f"{opening}\nHm.\n Well. \n{closing}\n\nYes <think>.\n"
    whole, answer_parts = parts_of(how, text)
    assert (answer_parts.reasoning, answer_parts.text) == ("Hm.\n Well.", "Yes <think>.\n")
    assert parts_of(how, *text)[0] == whole
    begun = parts_of(how, f"Hm. {closing}Yes", prompt=f"... {opening}\n")[1]
    assert (begun.reasoning, begun.text) == ("Hm.", "Yes")
    ended = parts_of(how, "Yes", prompt=f"{opening}\n\n{closing}\n\n")[1]
    assert (ended.reasoning, ended.text) == ("", "Yes")
    cut = parts_of(how, f"{opening}Hm. </")[1]
    assert (cut.reasoning, cut.text) == ("Hm. </", "")


def test_reasoning_and_then_a_call() -> None:
    text = '<think>\nIt is asked for.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    answer_parts = parts_of(answer_form("hermes", THOUGHTS), *text)[1]
    assert (answer_parts.reasoning, said_in(answer_parts)) == ("It is asked for.", [("now", {})])
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    answer_parts = parts_of(answer_form("harmony"), *text)[1]
    assert (answer_parts.reasoning, answer_parts.text) == ("Hm.", "Yes.")


def test_white_space_of_an_answer_that_is_a_text_stays() -> None:
    for text in (" a \n b  \n", "  ", ""):
        assert parts_of(answer_form("hermes", THOUGHTS), *text)[1].text == text


# ------------------------------------------------------------------------------------------------------ hostile texts


def test_no_text_is_lost_or_raises() -> None:
    """Random texts of marks and brackets: what is no call is text, and nothing is given twice."""
    random.seed(5)
    for one in dialects():
        pieces = [*one.marks, *'{}[]":,\\ \n', "name", "arguments", "weather", "x", "```"]
        pieces += ["<function=", "<parameter=", "call:", "(", ")", "=", "<think>", "</think>", '{"name": "weather", ']
        for _ in range(300):
            text = "".join(random.choices(pieces, k=random.randint(1, 14)))
            whole = parts_of(answer_form(one.name, THOUGHTS), text)[0]
            assert parts_of(answer_form(one.name, THOUGHTS), *text)[0] == whole, (one.name, text)


def test_deep_brackets_are_no_way_out() -> None:
    for name, text in (
        ("gemma", "<|tool_call>call:now{a:" + "[" * 5000),
        ("hermes", '<tool_call>{"name": "now", "x": ' + "[" * 5000 + "]" * 5000 + "}"),
    ):
        parts_of(answer_form(name), text)


def test_a_long_answer_is_read_in_a_time_that_does_not_grow_with_its_square() -> None:
    """Counted by what the scanner holds: text that is certain is let go of."""
    parser = Parser(answer_form("hermes"))
    for _ in range(2000):
        parser.feed("word <tool ")
        assert len(parser._scan.rest) < 20


# ------------------------------------------------------------------------------------------------------------- tokens


def tokenizer_of(tmp_path: Path, marks: list[str], words: Seq[str] = ()) -> Tokenizer:
    """Bytes and words as tokens, and marks as special tokens, which the text of an answer does not show."""
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in [*marks, "<|unread|>"]])
    backend.add_tokens([AddedToken(word, normalized=False) for word in words])
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path)


def read(
    how: AnswerForm, tokenizer: Tokenizer, ids: list[int], prompt: str = "!", *, step: int = 1, **options: Any
) -> AnswerParts:
    """What is read of tokens that come so many at a time. options: of PartsReader."""
    reader = PartsReader(how, tokenizer, tokenizer.encode(prompt), **options)
    for i in range(0, len(ids), step):
        reader.push(ids[i : i + step])
    reader.finish()
    return reader.answer_parts


@pytest.mark.parametrize("name", CASES)
def test_special_tokens_are_not_lost_between_ids_and_parts(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, list(dialect(name).marks))
    for text, said in CASES[name]:
        ids = [*tokenizer.encode(text), *tokenizer.encode("<|unread|>")]
        for step in (1, 3, len(ids)):
            assert said_in(read(answer_form(name), tokenizer, ids, "user: ", step=step)) == said


def test_a_mark_that_begins_with_a_special_token_is_read(tmp_path: Path) -> None:
    """As Gemma's channel of thought: the token says channel, and the text behind it which one."""
    tokenizer = tokenizer_of(tmp_path, ["<|channel>", "<channel|>"])
    for how in (AnswerForm(AnswerMarks(dialect("gemma"), THOUGHTS)), AnswerForm(AnswerMarks(None, THOUGHTS))):
        said = read(how, tokenizer, tokenizer.encode("<|channel>thought\nHm.<channel|>Yes."), step=99)
        assert (said.reasoning, said.text) == ("Hm.", "Yes.")


def test_a_call_in_reasoning_that_is_not_closed() -> None:
    """It ends the reasoning where models leave the mark out, but for a mark without a call, or under a grammar."""
    call = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    how = AnswerForm(AnswerMarks(dialect("qwen3_coder"), THOUGHTS), ToolRequest(TOOLS))
    for text, reasoning, calls in (
        (f"Hm.\n{call}", "Hm.", ["now"]),
        (f"A <tool_call> or <function=>.</think>{call}", "A <tool_call> or <function=>.", ["now"]),
    ):
        whole, answer_parts = parts_of(how, text, prompt="<think>\n")
        names = [one.name for one in answer_parts.calls]
        assert (answer_parts.reasoning, names, answer_parts.text) == (reasoning, calls, "")
        assert parts_of(how, *text, prompt="<think>\n")[0] == whole
    held = AnswerForm(how.answer_marks, ToolRequest(TOOLS, "required"))
    assert parts_of(held, f"Hm.\n{call}</think>{call}", prompt="<think>")[1].reasoning == f"Hm.\n{call}"


def test_tokens_of_reasoning_are_counted(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ["<think>", "</think>"])
    ids = tokenizer.encode("<think>abcd</think>xyz")
    said = read(AnswerForm(AnswerMarks(None, THOUGHTS), None), tokenizer, ids, step=len(ids))
    assert (said.num_reasoning_tokens, said.text) == (len("abcd"), "xyz")


@pytest.mark.parametrize("name", CASES)
def test_tokens_that_make_the_text_are_told_from_all_others(name: str, tmp_path: Path) -> None:
    """Of marks, calls and white space between parts none is among them; nor of what a stop text cuts."""
    tokenizer = tokenizer_of(tmp_path, list(dialect(name).marks))
    for text, _ in CASES[name]:
        for stop in ((), ("\n\n", "never"), ("é",), (".\n", "!!"), ("o",)):
            ids = [*tokenizer.encode(text + " é"), *tokenizer.encode("<|unread|>")]
            parts = read(answer_form(name), tokenizer, ids, "user: ", step=3, stop=stop, traces=True)
            answer, said = parts.text, [ids[place] for place in parts.said]
            # The stop text may cut the last of them.
            assert tokenizer.decode(said).startswith(answer), (text, stop)
            assert not said or not tokenizer.decode(said[:-1]).startswith(answer), (text, stop)
            assert tokenizer.decode(said) == answer or any(one in tokenizer.decode(said[-1:]) for one in stop)
            assert parts.said == sorted(set(parts.said))


@pytest.mark.parametrize("stop", [(".\n",), ("!!",), ("b c", "never")])
def test_tokens_are_told_apart_where_stop_texts_hold_them_back(stop: tuple[str, ...], tmp_path: Path) -> None:
    """A token whose text came late, or in part, makes what it says, and no other token does."""
    tokenizer = tokenizer_of(tmp_path, ["<think>", "</think>"], ["a.", "\n", "b ", "c", "!", "x!", ".\n"])
    for pieces, places, text in (
        (["a.", "c", "!", "c", "x!", "c"], [0, 1, 2, 3, 4, 5], "a.c!cx!c"),
        (["<think>", "a.", "</think>", "a.", "c", "!"], [3, 4, 5], "a.c!"),
        (["c", "x!", "!", "b ", "c", ".\n"], [0, 1], None),
        (["c", "!", "a.", "b ", "c", ".\n"], [0, 1, 2, 3, 4], None),
    ):
        ids = [token for piece in pieces for token in tokenizer.encode(piece)]
        assert len(ids) == len(pieces)
        said = read(AnswerForm(AnswerMarks(None, THOUGHTS), None), tokenizer, ids, "x!", stop=stop, traces=True)
        whole = "".join(pieces)
        ends = [whole.find(one) for one in stop if one in whole]
        if text is None and ends:
            text = whole[: min(ends)]
            places = [i for i in range(len(pieces)) if len("".join(pieces[:i])) < min(ends)]
        assert said.text == (whole if text is None else text)
        assert said.said == (places if text is not None else list(range(len(pieces))))


def test_a_token_that_is_held_back_in_part_makes_the_text_once(tmp_path: Path) -> None:
    """What looks like a mark may begin within a token, and be none."""
    tokenizer = tokenizer_of(tmp_path, [], ["Hi <", "to", " you", "ol_call>", "!"])
    for pieces, text in (
        (["Hi <", "to", "!"], "Hi <to!"),
        (["Hi <", "to", " you", "Hi <", "!"], "Hi <to youHi <!"),
        (["Hi <", "to", "ol_call>", " you"], "Hi you"),
    ):
        ids = [token for piece in pieces for token in tokenizer.encode(piece)]
        assert len(ids) == len(pieces)
        said = read(answer_form("hermes"), tokenizer, ids, step=len(ids), traces=True)
        assert "".join(said.text.split()) == "".join(text.split())
        assert said.said == ([0, 3] if text == "Hi you" else list(range(len(ids)))), pieces


# ---------------------------------------------------------------------------------------------------- which dialect

SIGNS = {
    "hermes": "a json object within <tool_call></tool_call> XML tags: <tool_call>\n{...}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its value} <|python_tag|>',
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "mistral": "[AVAILABLE_TOOLS] [TOOL_CALLS] [",
    "phi": "<|tool|>...<|/tool|> <|tool_call|>...<|/tool_call|>",
    "granite": "respond with <|tool_call|> followed by a JSON list of tools",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "gemma": "<|tool_call>call:f{}<tool_call|>",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "kimi": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
}


def test_the_template_chooses_the_dialect() -> None:
    assert set(SIGNS) == set(CASES)
    for name, source in SIGNS.items():
        assert of_template(source).name == name
    assert of_template("{{ messages }}") is None
    assert AnswerMarks.of_template("{{ tools }}", reads_tools=True).dialect is dialect("hermes")
    assert AnswerMarks.of_template("{{ messages }}", reads_tools=False).with_tools(ToolRequest(TOOLS)) is None


def test_tools_that_are_none() -> None:
    for tools in (
        [{"type": "function"}],
        [{"name": ""}],
        [{"name": "a"}, {"name": "a"}],
        [{"name": "a", "parameters": 3}],
    ):
        with pytest.raises(BadOption):
            Tools.of(tools)
    assert Text("a") != ToolCall("a")
