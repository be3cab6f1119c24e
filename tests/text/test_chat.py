"""Chat templates against transformers: the same folder, the same messages, the same text and the same ids."""

import copy
import datetime
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Backend, processors
from transformers import PreTrainedTokenizerFast

from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.text.chat import MARK, ChatTemplate
from forerun.text.tokenizer import Tokenizer
from forerun.text.unwritten import unwritten_ids
from refusals import refusal
from tiny import byte_tokenizer

Message = dict[str, Any]
TEMPLATES = Path(__file__).parent / "templates"
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
MARKERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]

QUOTES = """<b>'single' & "double"</b> {{ braces }} {% tag %} back\\slash"""
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": f"Where; {QUOTES}"},
        "unit": {"enum": ["°C", "°F"], "default": "°C"},
        "days": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "note": {"type": "string", "default": {"b": 1, "a": "日本"}}},
            "required": ["lat"],
            "nullable": True,
        },
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the <weather>.", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {}, "return": {"type": "string"}},
    },
]


def say(*turns: str) -> list[Message]:
    """Messages of "role: text" lines."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def call(name: str, arguments: object, call_id: str = "abcdefghi") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = call("weather", {"city": "Zürich", "unit": "°C", "note": QUOTES, "days": [1, "two", None, True]})
ASKED = [*say("user: Weather?"), {"role": "assistant", "content": None, "tool_calls": [WEATHER]}]
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"t": "<22>"}'}
CONVERSATIONS: dict[str, list[Message]] = {
    "one": say("user: Hello"),
    "system": say("system: Be brief.", "user: Hello"),
    "turns": say("system: Be brief.", "user: One?", "assistant: Two.", "user: Three?"),
    "answered": say("user: One?", "assistant: Two.", "user: Three?", "assistant: Four, \n"),
    "prefix": say("user: Write a loop", "assistant:   for i in"),
    "odd": say("user: \n  çà 日本 😀\u2028 \t", f"assistant: {QUOTES}", f"user: {QUOTES}"),
    "empty": say("user: ", "assistant: "),
    "thought": say(
        "user: One?",
        "assistant: <think>\nhm </think>\n\nTwo.",
        "user: Three?",
        "assistant: <think>a</think>b</think>\nFour.",
    ),
    "reasoning": [*say("user: Hm?"), {"role": "assistant", "content": "So.", "thinking": "Hm.\n", "refusal": None}],
    "called": ASKED,
    "result": [*ASKED, RESULT],
    "results": [*ASKED, RESULT, {**RESULT, "content": "22"}, *say("assistant: It is 22.", "user: Thanks")],
    "two calls": [*say("user: ?"), {"role": "assistant", "content": "Both.", "tool_calls": [WEATHER, call("now", {})]}],
    "object result": [*ASKED, {**RESULT, "content": {"t": [22.5, "°", {"x": None}]}}, *say("assistant: 22.")],
    "not alternating": say("user: One", "user: Two"),
    "only system": say("system: Be brief."),
    "other role": say("user: One", "assistant: Two", "function: Three"),
}
PARTS = [
    *say("system: Be brief."),
    {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "<two>"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Three "}, {"type": "text", "text": "four  "}]},
]
# Variables that a template reads, besides tools.
VARIABLES: dict[str, list[Message]] = {
    "headers": [
        {"date_string": "26 Jul 2024"},
        {"date_string": "today", "tools_in_user_message": False},
        {"date_string": "x", "builtin_tools": ["interpreter", "search", "now"]},
    ],
    "thinking": [{}, {"enable_thinking": False}, {"enable_thinking": True}],
    "instructions": [{}, {"bos_token": "<another>"}],
    "macros": [
        {},
        {"ascii": True},
        {"documents": [{"title": "T", "text": "word " * 20}, {"title": "U", "text": "<&>"}]},
    ],
    "plain": [{}],
}
# Of each template: comparisons of texts in the loop over everything, and conversations that it cannot write.
NUM_SAME = {"headers": 396, "thinking": 441, "instructions": 234, "macros": 450, "plain": 47}
REFUSED = {
    "headers": ["only system", "two calls"],
    "instructions": ["not alternating", "object result", "other role"],
    "plain": ["object result"],
}


def backend() -> Backend:
    """Bytes as tokens, the markers of all templates, and a post-processor that puts BOS before every text."""
    made = byte_tokenizer()
    made.add_special_tokens([BOS, EOS, *MARKERS])
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, made.token_to_id(BOS))]
    )
    return made


class Pair:
    """One folder as transformers writes it, read by transformers and by forerun."""

    def __init__(self, folder: Path, template: str) -> None:
        made = PreTrainedTokenizerFast(tokenizer_object=backend(), bos_token=BOS, eos_token=EOS)
        made.chat_template = template
        made.save_pretrained(folder)
        self.oracle = PreTrainedTokenizerFast.from_pretrained(folder)
        self.chat = ChatTemplate.load(folder)
        self.tokenizer = Tokenizer.load(folder)

    def expected(self, messages: list[Message], **options: Any) -> tuple[str, list[int]]:
        text = self.oracle.apply_chat_template(messages, tokenize=False, **options)
        return text, self.oracle.apply_chat_template(messages, return_dict=False, **options)

    def found(self, messages: list[Message], **options: Any) -> tuple[str, list[int]]:
        before = copy.deepcopy((messages, options))
        result = self.chat.render(messages, **options), self.chat.encode(self.tokenizer, messages, **options)
        assert (messages, options) == before
        return result

    def check(self, messages: list[Message], **options: Any) -> bool:
        """Same text and ids, or both refuse; True in the former case."""
        try:
            expected = self.expected(messages, **options)
        except (jinja2.exceptions.UndefinedError, TypeError, AttributeError):
            assert "fails on these messages in line" in refusal(UnsupportedModel, self.found, messages, **options)
        except jinja2.exceptions.TemplateError as error:
            with pytest.raises(BadOption, match=re.escape(f"the chat template refuses these messages ({error})")):
                self.found(messages, **options)
        except ValueError as error:
            if "continue_final_message" not in str(error):
                raise
            assert "continue_final_message=True is not possible" in refusal(BadOption, self.found, messages, **options)
        else:
            if any(isinstance(m.get("content"), dict) and repr(m["content"]) in expected[0] for m in messages):
                assert "takes content as a text" in refusal(BadOption, self.found, messages, **options)
                return False
            assert self.found(messages, **options) == expected
            return True
        return False


@cache
def pair_of(name: str, folder: Path) -> Pair:
    return Pair(folder / name, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


# ------------------------------------------------------------------------------------------------ parity with an oracle


@pytest.mark.parametrize("name", VARIABLES)
def test_the_text_and_the_ids_are_those_of_transformers(name: str, folder: Path) -> None:
    pair, same, refused = pair_of(name, folder), 0, set()
    for case, messages in CONVERSATIONS.items():
        for variables in VARIABLES[name]:
            for tools in (None, [], TOOLS) if name != "plain" else (None,):
                for end in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
                    agreed = pair.check(messages, tools=tools, **variables, **end)
                    same += agreed
                    refused |= set() if agreed else {case}
                same += pair.check(messages, tools=tools, **variables, continue_final_message=True)
    # So that the loop is known to have compared texts, and to have met refusals where there should be some.
    assert (same, refused) == (NUM_SAME[name], set(REFUSED.get(name, ())))


@pytest.mark.parametrize("name", ["headers", "thinking", "instructions", "macros"])
def test_arguments_as_a_json_text_are_those_of_a_mapping(name: str, folder: Path) -> None:
    """As clients of the OpenAI API send them back, with content that is null."""
    pair = pair_of(name, folder)
    arguments = {"city": "Zürich", "days": [1, None, True], "note": QUOTES}

    def asked(given: object) -> list[Message]:
        return [*say("user: ?"), {"role": "assistant", "content": None, "tool_calls": [call("weather", given)]}, RESULT]

    options: Any = {"tools": TOOLS, "add_generation_prompt": True, **VARIABLES[name][0]}
    assert pair.found(asked(json.dumps(arguments)), **options) == pair.expected(asked(arguments), **options)
    broken = pair.found(asked('{"city": '), **options)[0] if name == "thinking" else ""
    assert ('{"city": ' in broken) == (name == "thinking"), "what is no JSON goes to the template as it is"


TEXT_ALONE = """\
{% for m in messages %}{{ m.role + ': ' + m.content }}{% for c in m.tool_calls or [] %}\
[{{ c.function.name + ' ' + c.function.arguments }}]{% endfor %}
{% endfor %}
"""


def test_a_template_that_wants_texts_gets_them(tmp_path: Path) -> None:
    """Arguments that it puts behind a text, and content that may not be missing."""
    made = Pair(tmp_path, TEXT_ALONE)
    given = [{"role": "assistant", "content": None, "tool_calls": [call("now", {"a": [1]})]}]
    assert made.chat.render(given) == 'assistant: [now {"a": [1]}]'
    printed = Pair(tmp_path, "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}")
    assert printed.chat.render(given) == '{"a": [1]}', "not as Python prints a mapping"


def test_ids_that_a_template_refuses_are_shortened(folder: Path) -> None:
    pair = pair_of("instructions", folder)
    calls = [*say("user: ?"), {"role": "assistant", "tool_calls": [call("now", {}, "call_0123456789")]}]
    text = pair.chat.render([*calls, {**RESULT, "tool_call_id": "call_0123456789"}], tools=TOOLS)
    first, second = re.findall(r'"(?:call_)?id": ?"([0-9a-f]{9})"', text)
    assert first == second


def test_content_in_parts(folder: Path) -> None:
    pair = pair_of("macros", folder)
    assert pair.check(PARTS, add_generation_prompt=True)
    assert pair.check(PARTS, add_generation_prompt=False)
    assert pair.check(PARTS, continue_final_message=True)
    assert pair.found(PARTS, continue_final_message=True)[0].endswith("Three four  ")


def test_the_date_of_today(folder: Path) -> None:
    pair = pair_of("headers", folder)
    days = [datetime.date.today()]
    ours, theirs = (f(CONVERSATIONS["one"], add_generation_prompt=True)[0] for f in (pair.found, pair.expected))
    days.append(datetime.date.today())
    assert any(text in ours for text in [f"Today is {day:%d %b %Y}.\n" for day in days])
    assert ours == theirs or days[0] != days[1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
contents = st.text(max_size=30) | st.sampled_from(["<think>a</think>b", "</think>", " x ", "<|im_end|>", BOS, QUOTES])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Alternating turns with any text, some of them calls with results."""
    messages = [{"role": "system", "content": draw(contents)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(contents)})
        if draw(st.booleans()):
            arguments = draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3))
            messages.append({"role": "assistant", "content": None, "tool_calls": [call("f", arguments)]})
            messages.append({**RESULT, "content": draw(contents)})
        messages.append({"role": "assistant", "content": draw(contents)})
    return messages if draw(st.booleans()) else messages[:-1]


@pytest.mark.parametrize("name", ["headers", "thinking", "instructions", "macros"])
@settings(deadline=None, max_examples=60)
@given(conversations(), st.booleans(), st.booleans(), st.booleans())
def test_any_contents(
    name: str, folder: Path, messages: list[Message], with_tools: bool, prompt: bool, go_on: bool
) -> None:
    pair = pair_of(name, folder)
    end: Message = {"continue_final_message": True} if go_on else {"add_generation_prompt": prompt}
    assert pair.check(messages, tools=TOOLS if with_tools else None, **VARIABLES[name][0], **end) or go_on


# --------------------------------------------------------------------------------- where the sequence begins and ends


@pytest.mark.parametrize("name", ["headers", "instructions", "macros"])
def test_exactly_one_beginning_of_sequence(name: str, folder: Path) -> None:
    """This tokenizer puts one before every text by itself, and the template writes one."""
    pair = pair_of(name, folder)
    bos = pair.oracle.bos_token_id
    for ids in (pair.chat.encode(pair.tokenizer, CONVERSATIONS["turns"]), pair.tokenizer.encode("def f():")):
        assert ids[0] == bos
        assert ids.count(bos) == 1
    assert pair.tokenizer.encode(pair.chat.render(CONVERSATIONS["turns"])).count(bos) == 2


def test_a_template_without_beginning_of_sequence_gets_none(folder: Path) -> None:
    pair = pair_of("thinking", folder)
    assert pair.oracle.bos_token_id not in pair.chat.encode(pair.tokenizer, CONVERSATIONS["turns"])


def test_generation_prompt_is_the_default_unless_a_message_is_continued(folder: Path) -> None:
    chat, messages = pair_of("thinking", folder).chat, CONVERSATIONS["prefix"]
    assert chat.render(messages[:1]).endswith("<|im_start|>assistant\n")
    assert chat.render(messages[:1], add_generation_prompt=False).endswith("Write a loop<|im_end|>\n")
    assert chat.render(messages, continue_final_message=True).endswith("  for i in")


def test_a_message_may_contain_the_mark_of_its_end(folder: Path) -> None:
    chat = pair_of("thinking", folder).chat
    for text in (MARK, f"a {MARK}b", MARK * 2, f"a{MARK.strip()}"):
        messages = [*say("user: ?"), {"role": "assistant", "content": text}]
        assert chat.render(messages, continue_final_message=True).endswith(text)


# -------------------------------------------------------------------------------------------------- which template


def test_several_templates_as_transformers_writes_them(tmp_path: Path) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=backend(), bos_token=BOS)
    made.chat_template = {"default": "d{{ tools }}", "tool_use": "t{{ tools }}", "rag": "r{{ documents }}{{ tools }}"}
    made.save_pretrained(tmp_path)
    chat, oracle = ChatTemplate.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert chat.names == ("default", "rag", "tool_use")
    for tools in (None, [], TOOLS):
        for name in (None, *chat.names):
            expected = oracle.apply_chat_template(say("user: x"), tools=tools, chat_template=name, tokenize=False)
            assert chat.render(say("user: x"), tools=tools, name=name) == expected


# Where a template can be -> how it gets there. The text of each is its name.
PLACES = {
    "text": {"tokenizer_config.json": "text"},
    "list": {"tokenizer_config.json": [{"name": n, "template": f"list {n}"} for n in ("default", "tool_use")]},
    "list without default": {"tokenizer_config.json": [{"name": "tool_use", "template": "no default"}]},
    "file": {"chat_template.jinja": "file"},
    "more default": {"additional_chat_templates/default.jinja": "more default"},
    "more tool_use": {"additional_chat_templates/tool_use.jinja": "more tool_use"},
}
ADDED = ("file", "more default", "more tool_use")
SETS = [
    (first, *(ADDED[i] for i in range(3) if bits >> i & 1))
    for first in ("text", "list", "list without default", None)
    for bits in range(8)
]


@pytest.fixture(scope="session")
def bare(folder: Path) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=backend(), bos_token=BOS).save_pretrained(folder / "bare")
    return folder / "bare"


@pytest.mark.parametrize("places", SETS, ids=str)
def test_precedence_is_that_of_transformers(places: tuple[str | None, ...], bare: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bare, folder)
    for name, content in (item for place in places if place for item in PLACES[place].items()):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".json"):
            config = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**config, "chat_template": content}), encoding="utf-8")
        else:
            path.write_text(str(content), encoding="utf-8")
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    for tools in (None, []):
        try:
            expected = oracle.apply_chat_template(say("user: x"), tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(BadOption if any(places) else NotFound, match="no chat template"):
                ChatTemplate.load(folder).render(say("user: x"), tools=tools)
        else:
            assert ChatTemplate.load(folder).render(say("user: x"), tools=tools) == expected


def test_a_file_goes_before_what_the_folder_holds(folder: Path, tmp_path: Path) -> None:
    pair = pair_of("thinking", folder)
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}{{ messages[0].content }}\n", encoding="utf-8")
    chat = ChatTemplate.load(folder / "thinking", tmp_path / "mine.jinja")
    assert chat.names == ("default",)
    assert chat.render(say("user: Hello")) == f"{BOS}Hello" != pair.chat.render(say("user: Hello"))
    chat = ChatTemplate.load(str(folder / "thinking"), str(tmp_path / "mine.jinja"))
    assert chat.special_tokens == {"bos_token": BOS, "eos_token": EOS}


# --------------------------------------------------------------------------------------------------- special tokens

ADDED_TOKEN = {"__type": "AddedToken", "content": EOS, "lstrip": False, "normalized": False, "special": True}
TOKEN_FILES: dict[str, tuple[Message, Message | None]] = {
    "texts": ({"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": None, "add_bos_token": True}, None),
    "objects": ({"bos_token": BOS, "eos_token": ADDED_TOKEN}, None),
    "own names": ({"image_token": "[INST]", "extra_special_tokens": {"video_token": "[/INST]"}}, None),
    "map first": ({"bos_token": BOS}, {"bos_token": {"content": EOS, "lstrip": False}, "eos_token": EOS}),
    "map not read": ({"bos_token": BOS, "added_tokens_decoder": {}}, {"eos_token": EOS}),
}


@pytest.mark.parametrize(("config", "names"), TOKEN_FILES.values(), ids=TOKEN_FILES)
def test_special_tokens_are_those_of_transformers(config: Message, names: Any, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}", encoding="utf-8")
    shutil.copy(bare / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if names is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(names), encoding="utf-8")
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = ChatTemplate.load(tmp_path)
    assert chat.special_tokens == oracle.special_tokens_map
    assert chat.special_tokens
    assert chat.render(say("user: x")) == chat.special_tokens.get("bos_token", "")


# --------------------------------------------------------------------------------------- what the template alone writes

UNWRITTEN = {
    "headers": (["<|eot_id|>"], [BOS, "<|start_header_id|>", "<|end_header_id|>"]),
    "thinking": (["<|im_end|>"], ["<|im_start|>"]),
    "instructions": ([EOS], [BOS, "[INST]", "[/INST]"]),
    "macros": (["<|im_end|>"], [BOS, "<|im_start|>"]),
    "plain": ([EOS], []),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_ids_that_the_template_alone_writes(name: str, folder: Path) -> None:
    """Neither the end of an answer is among them, nor what stands in the model's own turn."""
    pair = pair_of(name, folder)
    ends, expected = ([pair.tokenizer.encode(text)[-1] for text in texts] for texts in UNWRITTEN[name])
    assert unwritten_ids(pair.chat, pair.tokenizer, ends) == set(expected)
    assert unwritten_ids(pair.chat, pair.tokenizer, []) == set(), "the model may begin the next message itself"


def test_what_stands_in_the_models_turn_is_written_by_it(tmp_path: Path) -> None:
    """As channels do, and thoughts that the template writes into the last answer alone."""
    turn = "{% for m in messages %}[INST]{{ m.content }}<|im_end|>{% endfor %}"
    added = turn.replace("{{ m", "{% if loop.last and m.role == 'assistant' %}[/INST]{% endif %}{{ m")
    for i, template in enumerate((added, added + "{% if add_generation_prompt %}[INST]{% endif %}")):
        pair = Pair(tmp_path / str(i), "<|im_start|>[/INST]" + template)
        [end], [first] = pair.tokenizer.encode("<|im_end|>")[1:], pair.tokenizer.encode("<|im_start|>")[1:]
        found = unwritten_ids(pair.chat, pair.tokenizer, [end])
        assert first in found
        assert pair.tokenizer.encode("[/INST]")[-1] not in found
