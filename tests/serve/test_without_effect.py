"""What a body says is honoured, refused, or told to be ignored; what is taken without effect has none on any answer.

A body becomes a Job, which is all that an answer is made of: two bodies with one Job have one answer.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.opened import SHIPPED_TARGET
from forerun.serve.apis import generating, llama_server, messages, ollama, openai, responses, vllm, with_bodies
from forerun.serve.bodies import Job, Refused
from forerun.serve.routes import Count
from forerun.serve.texts import OnlyAside, TextOptions, Texts
from forerun.text.tokenizer import Tokenizer

pytestmark = pytest.mark.once("no engine runs: bodies alone")
DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
ROUTES = {route.form.url: route for route in generating().values()}
ASKED: Any = [{"role": "user", "content": "hi"}]
FUNCTION: Any = {"name": "f", "parameters": {"type": "object"}}
TOOL: Any = {"type": "function", "function": FUNCTION}
BASES: dict[str, dict[str, Any]] = {
    openai.CHAT: {"messages": ASKED},
    openai.COMPLETIONS: {"prompt": "a"},
    responses.RESPONSES: {"input": ASKED},
    messages.MESSAGES: {"messages": ASKED, "max_tokens": 9},
    llama_server.COMPLETION: {"prompt": "a"},
    llama_server.INFILL: {"input_prefix": "a", "input_suffix": "b"},
    ollama.CHAT: {"messages": ASKED},
    ollama.GENERATE: {"prompt": "a"},
}
ANY = (True, 1, "x", ["x"], {"x": 1})
# A value of each field that makes another Job. Some are heard beside others only: then these come first.
Example = Any | tuple[dict[str, Any], Any]
GREEDY = {"temperature": 0}
BEAMS = {**GREEDY, "num_beams": 2, "stream": False}
COMMON: dict[str, Example] = {
    **dict.fromkeys(("cache_salt", "decoder_prompt", "prediction", "prompt", "suffix", "system"), "x"),
    **dict.fromkeys(("ignore_eos", "json_object", "stream"), True),
    **dict.fromkeys(("min_tokens", "priority"), 1),
    **dict.fromkeys(("forced_eos_token_id", "max_thinking_tokens", "max_tokens", "seed", "spec_length", "top_k"), 3),
    **dict.fromkeys(("min_p", "temperature", "top_p"), 0.25),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0.5),
    "acceptance": "ratio",
    "bad_words": ["x"],
    "chat_template_kwargs": {"x": 1},
    "choice": ["a", "b"],
    "draft": "none",
    "draft_beams": (BEAMS, 3),
    "early_stopping": (BEAMS, True),
    "grammar": 'start: "a"',
    "json_schema": {"type": "object"},
    "json_whitespace": "compact",
    "length_penalty": (BEAMS, 0.5),
    "logit_bias": {"3": 1},
    "messages": [{"role": "user", "content": "x"}],
    "model": "other",
    "n": 2,
    "num_beams": ({**GREEDY, "stream": False}, 2),
    "regex": "a",
    "repetition_penalty": 1.25,
    "speculation": {"report": True},
    "stop": ["x"],
    "stop_token_ids": [3],
}
WITH_TOOL = {"tools": [TOOL]}
OF_OPENAI: dict[str, Example] = {
    **{f"guided_{name}": value for name, value in (("choice", ["a"]), ("grammar", 'start: "a"'), ("regex", "a"))},
    "guided_json": {"type": "object"},
    "max_completion_tokens": 3,
    "logprobs": True,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "return_token_ids": True,
}
LLAMA: Any = {"n_predict": 3, "penalize_nl": None, "repeat_penalty": 1.25, "response_fields": ["content"]}
OLLAMA: dict[str, Example] = {"format": "json", "options": {"top_k": 3}, "stream": False, "think": True}
OWN: dict[str, dict[str, Example]] = {
    openai.CHAT: {
        **OF_OPENAI,
        "add_generation_prompt": False,
        "continue_final_message": ({"messages": [*ASKED, {"role": "assistant", "content": "a"}]}, True),
        "parallel_tool_calls": (WITH_TOOL, False),
        "reasoning_effort": "low",
        "tool_choice": (WITH_TOOL, "required"),
        "tools": [TOOL],
        "top_logprobs": ({"logprobs": True}, 2),
    },
    openai.COMPLETIONS: {**OF_OPENAI, "logprobs": 1, "best_of": None, "echo": True},
    responses.RESPONSES: {
        **dict.fromkeys(("input", "instructions"), "x"),
        **dict.fromkeys(("max_output_tokens", "max_tool_calls"), 3),
        "include": [responses.LOGPROBS],
        "parallel_tool_calls": ({"tools": [{"type": "function", **FUNCTION}]}, False),
        "previous_response_id": "resp_x",
        "reasoning": {"effort": "low"},
        "store": False,
        "text": {"format": {"type": "json_object"}},
        "tool_choice": ({"tools": [{"type": "function", **FUNCTION}]}, "required"),
        "tools": [{"type": "function", **FUNCTION}],
        "top_logprobs": ({"include": [responses.LOGPROBS]}, 2),
    },
    messages.MESSAGES: {
        "context_management": {"edits": [{"type": "x"}]},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
        "tool_choice": ({"tools": [{"name": "f", "input_schema": {}}]}, {"type": "any"}),
        "tools": [{"name": "f", "input_schema": {}}],
    },
    llama_server.COMPLETION: LLAMA,
    llama_server.INFILL: {**LLAMA, "input_prefix": "x", "input_suffix": "x"},
    ollama.CHAT: {**OLLAMA, "tools": [TOOL]},
    ollama.GENERATE: {**OLLAMA, "raw": True},
}


def sample(schema: dict[str, Any], text: str = "x") -> Any:
    """Return a value that a schema permits."""
    if "anyOf" in schema:
        return sample(schema["anyOf"][0], text)
    if schema.get("type") == "object":
        return {name: sample(schema["properties"][name], text) for name in schema.get("required", ())}
    if schema.get("type") == "array":
        return [sample(schema["items"], text)]
    values = {"string": text, "boolean": True}
    return schema["enum"][0] if "enum" in schema else values.get(schema["type"], schema.get("minimum", 1))


def base_of(url: str) -> dict[str, Any]:
    """Return a short body of a route; one of an API that is not listed above has what must be in it."""
    fields = ROUTES[url].form.fields.items()
    return BASES.get(url) or {name: sample(field.schema) for name, field in fields if field.is_required}


def example_of(url: str, name: str) -> Example:
    """Return a value of a field that makes another Job."""
    if url in OWN or name in COMMON:
        return {**COMMON, **OWN.get(url, {})}[name]
    return sample(ROUTES[url].form.fields[name].schema, "y")


def read(url: str, body: dict[str, Any], *, ignore: bool = False) -> Job:
    return ROUTES[url].job(body, body.get("model", "small"), {}, (), ignore_unsupported=ignore)


@pytest.mark.parametrize("url", ROUTES)
def test_every_field_that_is_honoured_makes_a_difference(url: str) -> None:
    for name, field in ROUTES[url].form.fields.items():
        if field.schema is None:
            continue
        example = example_of(url, name)
        beside, value = example if isinstance(example, tuple) else ({}, example)
        base = {**base_of(url), **{key: given for key, given in beside.items() if key in ROUTES[url].form.fields}}
        # What is refused where it would make one stands below.
        assert example is None or read(url, {**base, name: value}) != read(url, base), name


@pytest.mark.parametrize("url", ROUTES)
def test_a_field_without_effect_has_none_and_says_why(url: str) -> None:
    base = read(url, base_of(url))
    for name, field in ROUTES[url].form.fields.items():
        if field.inert:
            assert len(field.why.split()) > 2
            assert field.why in field.described["description"]
            for value in ANY:
                assert dataclasses.replace(read(url, {**base_of(url), name: value}), given=base.given) == base, name
        elif field.neutral is not None:
            for value in field.neutral:
                assert read(url, {**base_of(url), name: value}) == base, name
        elif field.is_noted:
            assert read(url, {**base_of(url), name: True}) == dataclasses.replace(base, ignored=(name,))
            assert read(url, {**base_of(url), name: False}) == base


@pytest.mark.parametrize("url", ROUTES)
def test_what_clients_send_everywhere_is_taken_everywhere(url: str) -> None:
    """Their bookkeeping has no effect; wishes for numbers that an answer has anyway are noted, unless they are met."""
    base = read(url, base_of(url))
    inert = ("user", "guided_decoding_backend", "id_slot", "service_tier", "prompt_cache_key")
    assert dataclasses.replace(read(url, {**base_of(url), **dict.fromkeys(inert, "x")}), given=base.given) == base
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
    job = read(url, {**base_of(url), **{key: v for key, v in streamed.items() if key in ROUTES[url].form.fields}})
    assert job.include_usage or job.ignored[0] == "stream_options"
    assert job.ignored[-1] == "return_progress"
    with pytest.raises(Refused) as refused:
        read(url, {**base_of(url), "nobody_sends_this": 1})
    assert refused.value.param == "nobody_sends_this"


def test_the_page_names_every_field_without_effect() -> None:
    """`make pages` writes them; the page keeps the place where it does."""
    page = DOCS.read_text(encoding="utf-8")
    forms = [route.form for route in ROUTES.values()]
    names = {name for form in forms for name, field in form.fields.items() if field.inert or field.is_noted}
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


def test_options_of_a_runner_change_nothing() -> None:
    base = read(ollama.CHAT, BASES[ollama.CHAT])
    for name in ollama.RUNNER:
        assert read(ollama.CHAT, {**BASES[ollama.CHAT], "options": {name: 1}}) == base


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (llama_server.COMPLETION, {"penalize_nl": False, "repeat_penalty": 1.2}, "penalize_nl"),
        (ollama.CHAT, {"options": {"penalize_newline": False, "repeat_penalty": 1.2}}, "options.penalize_newline"),
        (ollama.CHAT, {"options": {"embedding_only": True}}, "options.embedding_only"),
        (openai.COMPLETIONS, {"best_of": 3}, "best_of"),
    ],
)
def test_what_would_change_an_answer_is_refused_or_told(url: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused, match=r"is not possible") as refused:
        read(url, {**base_of(url), **body})
    assert refused.value.param == param
    assert read(url, {**base_of(url), **body}, ignore=True).ignored == (param,)


def test_what_is_asked_of_a_response_and_not_made_is_told() -> None:
    body = {**BASES[responses.RESPONSES], "text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}}
    assert read(responses.RESPONSES, body).ignored == ("text.verbosity", "reasoning.summary")


def test_a_text_is_filled_in_behind_its_own_beginning() -> None:
    job = read(llama_server.INFILL, {"input_prefix": "a", "prompt": "b", "input_suffix": "c"})
    assert (job.prompts, job.suffix) == (("ab",), "c")
    assert read(llama_server.INFILL, {"input_prefix": "", "input_suffix": ""}).suffix == ""  # it is filled in, too
    assert read(llama_server.COMPLETION, {"prompt": "a"}).suffix is None


# ----------------------------------------------------------------------------------------------------------- /tokenize


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(TextOptions(SHIPPED_TARGET, ("small",), 2048, 4))


def tokenize(texts: Texts, body: dict[str, Any]) -> Any:
    return texts.work(with_bodies()[vllm.TOKENIZE], body)


def test_what_is_not_needed_to_show_a_model_is_told(texts: Texts) -> None:
    asked = {"name": "small", "verbose": True, "system": ""}
    assert texts.work(with_bodies()[ollama.SHOW], asked) == (b'{"model":"small"}', ("verbose",))


COUNTED: dict[str, dict[str, Any]] = {
    vllm.TOKENIZE: {"prompt": "hi"},
    vllm.DETOKENIZE: {"tokens": [1]},
    llama_server.APPLY_TEMPLATE: {"messages": ASKED},
    messages.COUNT_TOKENS: {"messages": ASKED},
    ollama.SHOW: {"name": "small"},
}


def test_every_route_that_counts_tells_what_it_ignored() -> None:
    texts = Texts(TextOptions(SHIPPED_TARGET, ("small",), 2048, 4, ignore_unsupported=True))
    counting = {url: route for url, route in with_bodies().items() if isinstance(route, Count)}
    assert counting.keys() == COUNTED.keys()
    for url, route in counting.items():
        assert texts.work(route, {**COUNTED[url], "user": "x", "no_such_field": 1})[1] == ("no_such_field",), url


def test_every_field_of_tokenize_makes_a_difference(texts: Texts) -> None:
    examples: dict[str, tuple[dict[str, Any], Any]] = {
        "parse_special": ({"content": "<|endoftext|>hi"}, False),
        "with_pieces": ({"content": "hi"}, True),
        "return_token_strs": ({"prompt": "hi"}, True),
        "content": ({}, "hi"),
        "prompt": ({}, "hi"),
        "messages": ({}, ASKED),
        "continue_final_message": ({"messages": [*ASKED, {"role": "assistant", "content": "a"}]}, True),
    }
    for name, (base, value) in examples.items():
        with_it = tokenize(texts, {**base, name: value})
        assert not base or with_it != tokenize(texts, base), name
    # These need another tokenizer or template than the small model's: tests/serve/test_echo.py, test_serve_tools.py.
    elsewhere = {"add_special", "add_special_tokens", "tools", "chat_template_kwargs", "add_generation_prompt", "model"}
    fields = with_bodies()[vllm.TOKENIZE].form.fields
    assert {name for name, field in fields.items() if field.schema is not None} == examples.keys() | elsewhere
    for wrong in ({"prompt": "hi", "parse_special": False}, {"messages": ASKED, "with_pieces": True}):
        with pytest.raises(Refused, match="belongs to content"):
            tokenize(texts, wrong)
    with pytest.raises(Refused, match="the chat template has them"):
        tokenize(texts, {"messages": ASKED, "add_special_tokens": True})


def test_names_of_special_tokens_are_texts_where_that_is_wanted(texts: Texts) -> None:
    text = "a<|endoftext|>b"
    tokenizer = texts.tokenizer

    def ids(**fields: Any) -> list[int]:
        made: list[int] = json.loads(tokenize(texts, {"content": text, **fields})[0])["tokens"]
        return made

    special = tokenizer.encode("<|endoftext|>", False)[0]
    assert special in ids()
    assert special in ids(parse_special=True)
    assert special not in ids(parse_special=False)
    assert tokenizer.decode(ids(parse_special=False)) == text
    assert special in ids(), "the next one is read as before"
    shared = Texts(texts.options, Tokenizer.load(SHIPPED_TARGET))
    with pytest.raises(OnlyAside):
        tokenize(shared, {"content": text, "parse_special": False})
    assert tokenize(shared, {"content": "plain", "parse_special": False}) == tokenize(texts, {"content": "plain"})


def test_fields_of_an_answer_are_chosen() -> None:
    made = {"content": "x", "stop": True, "timings": {"cache_n": 3}}
    for fields, expected in (
        (["content", "nothing"], {"content": "x"}),
        (["timings/cache_n", "stop/x"], {"timings/cache_n": 3}),
        ([], made),
    ):
        job = read(llama_server.COMPLETION, {"prompt": "a", "response_fields": fields})
        assert llama_server._chosen(job, made) == expected
    with pytest.raises(Refused, match="it must be a list"):
        read(llama_server.COMPLETION, {"prompt": "a", "response_fields": json.dumps(made)})
