"""What chat templates refuse, in which words; and that a template, which is a program of others, can do no harm."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import BadOption, NotFound, UnsupportedModel, UserError
from forerun.text import limits
from forerun.text.chat import ChatTemplate
from forerun.text.messages import MAX_DEPTH
from refusals import refusal

CONFIG = "tokenizer_config.json"
HELLO = [{"role": "user", "content": "Hello"}]
PRINT_ALL = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ChatTemplate]:
    """A chat template from its text, or from that of another file of a model's folder."""

    def write_and_load(text: str, file: str = "chat_template.jinja") -> ChatTemplate:
        (tmp_path / file).write_text(text, encoding="utf-8")
        return ChatTemplate.load(tmp_path)

    return write_and_load


# ------------------------------------------------------------------------------------------------------------ loading


def test_a_folder_without_a_template(load: Any, tmp_path: Path) -> None:
    assert refusal(NotFound, ChatTemplate.load, tmp_path) == (
        f"{tmp_path} has no chat template, as is usual for a base model: use generate, which needs none, or "
        "name a template with --chat-template FILE (chat_template= in Python)"
    )
    assert "base model" in refusal(NotFound, load, '{"chat_template": null}', CONFIG)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"there is no file .*mine\.jinja: name a chat template"):
        ChatTemplate.load(tmp_path, tmp_path / "mine.jinja")
    assert "is a folder: name a chat template" in refusal(NotFound, ChatTemplate.load, tmp_path, tmp_path)
    assert "there is no folder" in refusal(NotFound, ChatTemplate.load, tmp_path / "model")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"chat_template": 3}', "chat_template in .* must be a text, or a list of mappings"),
        ('{"chat_template": [{"name": "default"}]}', "must be a text, or a list of mappings"),
        ('{"chat_template": ', "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"chat_template": [{"name": "rag", "template": "{% if %}"}]}', "'rag' of chat_template in .* syntax error"),
    ],
)
def test_a_broken_tokenizer_config(config: str, words: str, load: Any) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        load(config, CONFIG)


def test_an_empty_template(load: Any) -> None:
    words = r"is empty: fetch it again, or name another template with --chat-template FILE"
    with pytest.raises(UnsupportedModel, match=rf"chat_template in .*tokenizer_config\.json {words}"):
        load('{"chat_template": " "}', CONFIG)
    assert f"chat_template.jinja {words}" in refusal(UnsupportedModel, load, "\n")


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "chat_template.jinja is not a UTF-8 text" in refusal(UnsupportedModel, ChatTemplate.load, tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n{% for m in messages %}\n{{ m", r"syntax error in line 3 \(unexpected end of template"),
        ("\n{% if x %}", r"syntax error in line 2 \(Unexpected end of template"),
        ("{{ x | colour }}", r"syntax error in line 1 \(No filter named 'colour'"),
        ("{% nonsense %}", r"syntax error in line 1 \(Encountered unknown tag 'nonsense'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"cannot be compiled \(RecursionError"),
    ],
)
def test_a_template_that_is_not_valid(text: str, words: str, load: Any) -> None:
    with pytest.raises(UnsupportedModel, match=words) as caught:
        load(text)
    assert "--chat-template FILE" in str(caught.value)


def test_several_templates(load: Any) -> None:
    templates = [{"name": name, "template": name + "{{ tools }}"} for name in ("tool_use", "rag")]
    chat = load(json.dumps({"chat_template": templates}), CONFIG)
    assert refusal(BadOption, chat.render, HELLO) == (
        "no chat template of this model is the default: choose one of ['rag', 'tool_use'] by name"
    )
    assert chat.render(HELLO, name="rag") == "ragNone"
    assert chat.render(HELLO, tools=[]) == "tool_use[]"
    said = refusal(BadOption, chat.render, HELLO, name="default")
    assert said == "there is no chat template 'default': it must be one of ['rag', 'tool_use']"


# ---------------------------------------------------------------------------------------------------- what is passed in


class Colour:
    """Nothing that JSON knows."""


cyclic: list[Any] = []
cyclic.append(cyclic)


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


MESSAGES: list[tuple[Any, str]] = [
    ("Hello", "messages='Hello' is not possible: it must be a list of at least one mapping such as {'role'"),
    ([], "messages=[] is not possible"),
    (HELLO[0], "messages={'role': 'user', 'content': 'Hello'} is not possible"),
    (None, "messages=None is not possible"),
    (iter(HELLO), "is not possible: it must be a list"),
    (["Hello"], "messages[0] is 'Hello' (of type str): it must be a mapping such as {'role'"),
    ([HELLO], "messages[0] is [{'role': 'user', 'content': 'Hello'}] (of type list)"),
    ([*HELLO, {"content": "x"}], "messages[1] has no role: give it one, such as 'user' or 'assistant'"),
    ([{"role": None, "content": "x"}], "messages[0] has no role"),
    ([{"role": "", "content": "x"}], "messages[0] has the role '': give it one"),
    ([{"role": 3, "content": "x"}], "messages[0] has the role 3: give it one"),
    ([{"role": "user"}], "messages[0] (role 'user') has neither content nor tool_calls: give it one of them"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0] (role 'assistant') has neither content"),
    ([{"role": "user", "content": 3}], "messages[0].content is 3 (of type int): it must be a text, or a list of"),
    ([{"role": "user", "content": {"a": 1}}], "messages[0].content is {'a': 1} (of type dict): it must be a text"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0] is 'x' (of type str): each part must be {\"type\""),
    (
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
        'messages[0].content[1] is a part of type \'image_url\': each part must be {"type": "text", "text": "..."}',
    ),
    ([{"role": "assistant", "tool_calls": {"name": "f"}}], "messages[0].tool_calls must be a list of mappings"),
    ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls must be a list of mappings"),
    ([{"role": "user", "content": "x", 3: "y"}], "messages[0] has the key 3: keys must be texts, as in JSON"),
    ([{"role": "user", "content": b"x"}], "messages[0].content is b'x' (of type bytes): it must be made of texts"),
    ([{"role": "tool", "content": [{"a": Colour()}]}], "(of type Colour): it must be made of texts, numbers, lists"),
    ([{"role": "tool", "content": cyclic}], f"has more than {MAX_DEPTH} levels of lists and mappings"),
    ([{"role": "tool", "content": deep(MAX_DEPTH)}], f"has more than {MAX_DEPTH} levels of lists and mappings"),
    (
        [{"role": "tool", "content": [{"t": "x"}]}],
        "takes content as a text, and messages[0].content is [{'t': 'x'}]: give it as one text",
    ),
    (
        [*HELLO, {"role": "usr", "content": "x"}],
        "messages[1]: there is no role 'usr' (did you mean 'user'?): it must be one of assistant, developer, ",
    ),
]


@pytest.mark.parametrize(("messages", "words"), MESSAGES, ids=[words[:50] for _, words in MESSAGES])
def test_messages_that_are_none(messages: Any, words: str, load: Any) -> None:
    said = refusal(BadOption, load(PRINT_ALL).render, messages)
    assert words in said
    assert len(said) < 250


PARTS = [{"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two's"}]}]


@pytest.mark.parametrize(
    "text",
    [
        PRINT_ALL,
        "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}",  # fails on a list
        "{% for m in messages %}{% if m.content is string %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('a text!') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ],
    ids=["prints", "fails", "leaves out", "refuses"],
)
def test_parts_of_text_become_one_where_a_template_wants_texts(load: Any, text: str) -> None:
    """As clients of the OpenAI API send them; a template that knows parts gets them (test_chat.py)."""
    assert load(text).render(PARTS) == "user: One \ntwo's\n"
    assert load(PRINT_ALL).render(PARTS, continue_final_message=True) == "user: One \ntwo's"
    assert "refuses these messages (never)" in refusal(BadOption, load("{{ raise_exception('never') }}").render, PARTS)


def test_a_role_that_the_template_names_is_one(load: Any) -> None:
    narrator = [{"role": "narrator", "content": "x"}]
    named = "{% for m in messages %}{% if m.role == 'narrator' %}* {% endif %}{{ m.content }}{% endfor %}"
    assert load(named).render(narrator) == "* x"
    with pytest.raises(BadOption, match=r"messages\[0\]: there is no role 'narrator': it must be one of assistant, "):
        load(PRINT_ALL).render(narrator)


def get_weather(city: str) -> str:
    """Weather of a city."""
    return city


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL, get_weather]}, "tools holds the Python function get_weather, and JSON schemas are wanted: "),
    ({"tools": ["f"]}, 'tools[0] is \'f\' (of type str): it must be a mapping such as {"type": "function", '),
    (
        {"tools": TOOL},
        'is not possible: it must be a list, each item a mapping such as {"type": "function", ',
    ),
    ({"tools": [{"f": Colour()}]}, "tools[0].f is <"),
    (
        {"documents": "text"},
        "documents='text' is not possible: it must be a list, each item a mapping such as {'title'",
    ),
    ({"documents": ["text"]}, "documents[0] is 'text' (of type str): it must be a mapping such as {'title': "),
    ({"tools": [TOOL]}, "does not read 'tools', so it would have no effect: leave it out (it reads date, documents)"),
    ({"enable_thinking": False}, "does not read 'enable_thinking', so it would have no effect"),
    ({"messages": HELLO}, "does not read 'messages'"),
    ({"raise_exception": "x"}, "does not read 'raise_exception'"),
    ({"date": Colour()}, "variables.date is <"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt and continue_final_message exclude one another: set one of them",
    ),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=[words[:50] for _, words in OPTIONS])
def test_options_that_cannot_be_honoured(options: dict[str, Any], words: str, load: Any) -> None:
    chat = load(PRINT_ALL + "{{ date }}{{ documents }}{{ raise_exception is defined }}")
    assert words in refusal(BadOption, chat.render, HELLO, **options)


def test_empty_lists_are_no_tools_and_no_documents(load: Any) -> None:
    assert load(PRINT_ALL).render(HELLO, tools=[], documents=[]) == "user: Hello\n"


def test_a_template_that_reads_nothing_says_so(load: Any) -> None:
    with pytest.raises(BadOption, match=r"leave it out \(it reads the messages alone\)"):
        load(PRINT_ALL).render(HELLO, date="today")


def test_any_mapping_or_text_of_json_is_welcome(load: Any) -> None:
    class Role(StrEnum):
        USER = "user"

    messages = ({"role": Role.USER, "content": "Hello", "n": True, "x": 1.5, "y": (1, None)},)
    printed = load("{{ messages | tojson }}").render(messages)
    assert json.loads(printed) == [{"role": "user", "content": "Hello", "n": True, "x": 1.5, "y": [1, None]}]
    assert load("{{ messages[0].role.name is defined }}").render(messages) == "False"
    assert load("{{ messages | tojson }}").render([{"role": "tool", "content": deep(MAX_DEPTH - 1)}])


@pytest.mark.parametrize(
    ("text", "messages", "words"),
    [
        (PRINT_ALL, [{"role": "assistant", "tool_calls": [TOOL]}], "the last message has no text to be continued"),
        ("{{ messages | length }}", HELLO, "the chat template leaves out the last message or parts of it"),
        ("{{ messages[0].content[2:] }}", HELLO, "the chat template leaves out the last message or parts of it"),
    ],
)
def test_a_message_that_cannot_be_continued(text: str, messages: Any, words: str, load: Any) -> None:
    said = refusal(BadOption, load(text).render, messages, continue_final_message=True)
    assert said == f"continue_final_message=True is not possible: {words}"


# ------------------------------------------------------------------------------------ what a template does when it runs


def test_what_a_template_refuses(load: Any) -> None:
    chat = load("{% if messages[0].role != 'system' %}{{ raise_exception('Begin with the system!') }}{% endif %}")
    assert refusal(BadOption, chat.render, HELLO) == (
        "the chat template refuses these messages (Begin with the system!): change them accordingly"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n\n{{ messages[0].nothing.more }}", "in line 3 (UndefinedError: 'dict object' has no attribute 'nothing')"),
        ("{% macro f(x) %}\n{{ x.content + 1 }}{% endmacro %}\n{{ f(messages[0]) }}", "in line 2 (TypeError: "),
        ("{{ nothing() }}", "in line 1 (UndefinedError: 'nothing' is undefined)"),
        ("\n{{ 1 // (messages | length - 1) }}", "in line 2 (ZeroDivisionError: "),
        ("{{ nothing | tojson }}", "(TypeError: Object of type Undefined is not JSON serializable)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "(RecursionError: "),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "in line 1 (OverflowError: Range too big"),
        ("{% include '/etc/passwd' %}", "in line 1 (TypeError: no loader"),
        ("{% import 'os' as os %}", "in line 1 (TypeError: no loader"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ lipsum(n=10 ** 6) }}", "'lipsum' is undefined"),
        ("{{ dict.update(messages[0], role='x') }}", "has no attribute"),  # which would get past the sandbox
        ("{{ dict.pop(messages[0], 'role') }}", "has no attribute"),
    ],
)
def test_a_template_that_fails(text: str, words: str, load: Any) -> None:
    said = refusal(UnsupportedModel, lambda: load(text).render(HELLO))
    assert words in said
    assert "fails on these messages" in said
    assert "it may expect them in another shape, or name another template with --chat-template" in said


FORBIDDEN = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ 'a'.expandtabs(9) }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{{ 'a'.encode() }}",
    "{{ (1).to_bytes(9) }}",
    "{{ self.__init__ }}",
    "{{ dict.__call__.__globals__ }}",
    "{% macro f() %}{% endmacro %}{{ f._func }}",
    "{{ namespace(__call__=1) }}",
    "{{ namespace({'_x': 1}) }}",
    "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
    "{{ messages.append({'role': 'x'}) }}",
    "{{ messages.pop() }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages | map('attr', 'clear') | list }}",
    "{% set m = messages[0] %}\n\n{{ m['clear']() }}",
]


@pytest.mark.parametrize("text", FORBIDDEN)
def test_what_the_sandbox_forbids(text: str, load: Any) -> None:
    """Refused where transformers' sandbox refuses it, and also where that prints an empty text instead."""
    messages = copy.deepcopy(HELLO)
    said = refusal(UnsupportedModel, lambda: load(text).render(messages))
    line = text.count("\n") + 1
    assert f"chat_template.jinja in line {line} does what a chat template must not do (" in said
    assert messages == HELLO


DOUBLING = "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"
BIG = "{% set big = 'a' * 10 ** 6 %}"
STEPS, CHARACTERS = "takes more than 20,000 steps", "makes texts and lists of more than 500,000,000 characters"
ENDLESS = {
    "folded when printed": ("{{ 'a' * 10000000000 }}", CHARACTERS),
    "folded when set": ("{% set x = 'a' * 10 ** 10 %}", CHARACTERS),
    "folded in a condition": ("{% if 'a' | center(10000000000) %}{% endif %}", CHARACTERS),
    "folded by autoescape": ("{% autoescape 'a' | center(10000000000) %}{% endautoescape %}", CHARACTERS),
    "list": ("{{ [messages] * 10 ** 10 }}", CHARACTERS),
    "power": ("{% set x = 10 ** 10000000 %}", CHARACTERS),
    "product": (
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        CHARACTERS,
    ),
    "nested ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", STEPS),
    "filtered ranges": ("{% for i in range(9999) %}{% for j in range(9999) if j < 0 %}{% endfor %}{% endfor %}", STEPS),
    "long body": ("{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}", CHARACTERS),
    "recursion": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", STEPS),
    "sums of lists": (DOUBLING.replace("EXPRESSION", "ns.x + ns.x"), CHARACTERS),
    "joined texts": (DOUBLING.replace("EXPRESSION", "ns.x ~ ns.x"), CHARACTERS),
    "lists of lists": (DOUBLING.replace("EXPRESSION", "[ns.x, ns.x]"), STEPS),
    "mappings": (DOUBLING.replace("EXPRESSION", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}", STEPS),
    "slices": (
        BIG + "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + [big[i:]] %}{% endfor %}",
        CHARACTERS,
    ),
    "join": (BIG + "{{ range(9999) | join(big) }}", CHARACTERS),
    "join of a text": (BIG + "{{ big.join(range(9999) | map('string')) }}", CHARACTERS),
    "join of long texts": (BIG + "{{ ([big] * 9999) | join }}", CHARACTERS),
    "replace": (BIG + "{{ big | replace('a', big) }}", CHARACTERS),
    "replace of a text": (BIG + "{{ big.replace('a', big) }}", CHARACTERS),
    "method": ("{{ 'a'.ljust(10 ** 10) }}", CHARACTERS),
    "percent": ("{{ '%10000000000d' % 1 }}", CHARACTERS),
    "percent of a value": ("{{ '%*d' % (10 ** 10, 1) }}", CHARACTERS),
    "format filter": ("{{ '%10000000000d' | format(1) }}", CHARACTERS),
    "format": ("{{ '{:10000000000}'.format(1) }}", CHARACTERS),
    "format of a value": ("{{ '{:{}}'.format(1, 10 ** 10) }}", "formats a text with a width that is a value"),
    "mapped": ("{{ range(99999) | map('center', 99999) | list }}", CHARACTERS),
    "batch": ("{{ [1] | batch(10000000000, 'x') | list }}", CHARACTERS),
    "tojson": ("{{ messages | tojson(indent=10000000000) }}", CHARACTERS),
    "sum": ("{{ ([[1, 2]] * 99999) | sum(start=[]) }}", CHARACTERS),
    "printed": ("{% for i in range(99999) %}" + "x" * 200 + "{% endfor %}", "prints more than 10,000,000 characters"),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_would_use_up_the_machine(case: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text, words = ENDLESS[case]
    if words == STEPS:
        monkeypatch.setattr(limits, "MAX_STEPS", 20_000)  # a million of them take seconds
    with pytest.raises(UnsupportedModel, match=words) as caught:
        load(text).render(HELLO)
    assert ", which no template of a published model does: name another template with --chat-temp" in str(caught.value)


def test_a_template_that_takes_too_long(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = load("{% for i in range(999) %}{% endfor %}")
    assert chat.render(HELLO) == ""
    monkeypatch.setattr(limits, "MAX_CPU_S", 0.0)
    assert "in line 1 takes more than 0 s, which" in refusal(UnsupportedModel, chat.render, HELLO)


def test_each_rendering_has_limits_of_its_own(load: Any) -> None:
    chat = load("{% set big = 'a' * 10 ** 6 %}{% for i in range(99) %}{% set x = big ~ big %}{% endfor %}done")
    assert [chat.render(HELLO) for _ in range(5)] == ["done"] * 5


def test_templates_of_megabytes_are_refused_before_they_are_compiled(load: Any, tmp_path: Path) -> None:
    assert refusal(UnsupportedModel, load, "{{ x }}" * 700_000) == (
        f"{tmp_path}/chat_template.jinja: 4,900,000 bytes are more than the 262,144 that chat templates of a model may "
        "have, so name another template with --chat-template FILE (chat_template= in Python)"
    )
    (tmp_path / "chat_template.jinja").unlink()
    templates = [{"name": f"t{i}", "template": "x" * 99_999} for i in range(3)]
    with pytest.raises(UnsupportedModel, match=f"^the chat templates in {tmp_path}: 299,997 bytes are more than"):
        load(json.dumps({"chat_template": templates}), CONFIG)


def test_a_long_conversation_is_far_from_the_limits(load: Any) -> None:
    """A template that builds its text piece by piece, for 3,000 messages of 500 characters."""
    messages = [{"role": "user", "content": "word " * 100}] * 3000
    chat = load(
        "{% set ns = namespace(text='', all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m] %}"
        "{% if loop.index0 == messages | length - 1 or m.content.split('x')[-1] | trim %}"
        "{% set ns.text = m.role ~ ': ' ~ m.content | replace('a', 'b') | trim + '\n' %}{{ ns.text }}"
        "{% endif %}{% endfor %}"
    )
    assert chat.render(messages) == ("user: " + ("word " * 100).strip() + "\n") * 3000


def test_nothing_a_template_does_reaches_the_messages(load: Any) -> None:
    """Even where a way round the sandbox is found: a template gets copies of plain data."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [{"function": {"n": 1}}]}]
    tools, before = [copy.deepcopy(TOOL)], copy.deepcopy(messages)
    chat = load("{{ messages[0].content[0].text }}{{ tools[0].function.name }}{{ seen }}")
    assert chat.render(messages, tools=tools, seen=[1], continue_final_message=True) == "a"
    assert (messages, tools) == (before, [TOOL])


def test_rooms_for_assignments_are_those_of_transformers(load: Any) -> None:
    """What is set between generation tags does not leave them."""
    chat = load(
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}{{ namespace(self=3).self }}"
    )
    assert chat.render(HELLO) == "213"


def test_dict_and_its_keys(load: Any) -> None:
    assert load("{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}").render(HELLO) == "{'a': 1}{'a': 0, 'b': 0}"


def test_every_error_is_one_that_the_user_can_mend() -> None:
    assert issubclass(BadOption, UserError)
    assert issubclass(UnsupportedModel, UserError)
    assert issubclass(NotFound, UserError)


def test_jinja_is_imported_by_those_who_chat_alone(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(PRINT_ALL, encoding="utf-8")
    code = (
        "import sys\nfrom forerun.text.chat import ChatTemplate\nprint('jinja2' in sys.modules)\n"
        "ChatTemplate.load(sys.argv[1])\nprint('jinja2' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
