"""Bodies of the OpenAI API: what is honoured, what is refused and by which name, and what answers look like."""

import codecs
import math
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadOption, CapacityError, InternalError, NotFound, PromptTooLong
from forerun.serve.apis import generating
from forerun.serve.apis.openai import CHAT, COMPLETIONS, chat_answer, completion_answer
from forerun.serve.bodies import Refused, model_names
from forerun.serve.logprobs import CompletionLogprobs, chat_logprobs
from forerun.serve.routes import plain_error
from forerun.text.tokenizer import Tokenizer
from forerun.types import TokenLogprob
from speculation import llm_options
from tiny import byte_tokenizer

pytestmark = pytest.mark.once("no engine runs: bodies alone")  # except where a test says otherwise
NAMES = ("small", "models/small")


def said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


HELLO = said("hello")


def read(url: str, **body: Any) -> Any:
    asked = {"messages": HELLO} if url == CHAT else {"prompt": "hello"}
    return generating()[url].job({**asked, **body}, "small", served_names=NAMES)


# ------------------------------------------------------------------------------------------------------- honoured


def test_defaults_are_those_of_the_api() -> None:
    assert read(COMPLETIONS).params == SamplingParams(max_tokens=16)
    assert read(CHAT).params == SamplingParams(max_tokens=None)
    given = {"max_tokens": 7, "seed": 3, "top_k": 5}
    floats = {name: float(value) for name, value in given.items()}
    assert repr(read(CHAT, **floats).params) == repr(SamplingParams(**given)), "JSON has one type of numbers"
    assert repr(read(COMPLETIONS, prompt=[1.0, 2]).prompts) == "([1, 2],)"
    for url in (CHAT, COMPLETIONS):
        asked = {"messages": HELLO} if url == CHAT else {"prompt": "x", "top_k": None}
        job = generating()[url].job(asked, "small", given)
        assert job.params == SamplingParams(**given)
        assert (job.model, job.stream, job.include_usage) == ("small", False, False)


BEAMS = {"num_beams": 3, "draft_beams": 4, "temperature": 0, "early_stopping": "never", "length_penalty": 0.5}
HONOURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0, "top_p": 0.5, "n": 3, "seed": 7}, {"temperature": 0, "top_p": 0.5, "n": 3, "seed": 7}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"presence_penalty": 1, "frequency_penalty": -1.5}, {"presence_penalty": 1, "frequency_penalty": -1.5}),
    ({"logit_bias": {"7": -100, "8": 2}}, {"logit_bias": {7: -100, 8: 2}}),
    ({"max_completion_tokens": 4}, {"max_tokens": 4}),
    ({"max_completion_tokens": 4, "max_tokens": 4}, {"max_tokens": 4}),
    ({"top_k": 2, "min_p": 0.1, "repetition_penalty": 1.2}, {"top_k": 2, "min_p": 0.1, "repetition_penalty": 1.2}),
    ({"min_tokens": 2, "ignore_eos": True}, {"min_tokens": 2, "ignore_eos": True}),
    ({"bad_words": ["x"], "stop_token_ids": [5]}, {"bad_words": ("x",), "stop_token_ids": (5,)}),
    ({"acceptance": "ratio", "draft": "none"}, {"acceptance": "ratio", "draft": "none"}),
    ({"spec_length": 2}, {"spec_length": 2}),
    (BEAMS, BEAMS),
    ({"priority": 3, "cache_salt": "s"}, {"priority": 3, "cache_salt": "s"}),
    ({"prediction": {"type": "content", "content": "ab"}}, {"prediction": "ab"}),
    ({"prediction": {"type": "content", "content": [{"type": "text", "text": t} for t in "ab"]}}, {"prediction": "ab"}),
    ({"prediction": [3, 4]}, {"prediction": (3, 4)}),
    ({"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}, {}),
    ({"temperature": None, "stop": None, "logprobs": None, "max_tokens": None, "stream": None}, {}),
]


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("body", "fields"), HONOURED, ids=lambda value: "-".join(value))
def test_fields_become_sampling_params(url: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    assert read(url, **body).params == SamplingParams(**{"max_tokens": None if url == CHAT else 16, **fields})


def test_every_field_of_sampling_params_can_be_said() -> None:
    """A field that is added to SamplingParams is a field of a body, unless the table of fields says otherwise."""
    for name in SamplingParams.__dataclass_fields__.keys() - {"logprobs", "prompt_logprobs"}:
        assert read(COMPLETIONS, **{name: None}).params == SamplingParams(max_tokens=16)


def test_probabilities_of_zero_have_a_number() -> None:
    """JSON has no infinity; -9999 is what the API says."""
    tokenizer = Tokenizer(byte_tokenizer("<|end|>"), Path("nowhere"))
    position = TokenLogprob(5, -math.inf, [(6, -0.5), (5, -math.inf)])
    [entry] = chat_logprobs([position], [4], tokenizer)
    assert [entry["logprob"], *(one["logprob"] for one in entry["top_logprobs"])] == [-9999.0, -0.5, -9999.0]
    made = CompletionLogprobs(4, tokenizer).piece([position])
    assert (made["token_logprobs"], sorted(made["top_logprobs"][0].values())) == ([-9999.0], [-9999.0, -0.5])


def test_logprobs_have_two_styles() -> None:
    assert read(COMPLETIONS, logprobs=0).params.logprobs == 0
    assert read(COMPLETIONS, logprobs=5).params.logprobs == 5
    assert read(CHAT, logprobs=False).params.logprobs is None
    assert read(CHAT, logprobs=True).params.logprobs == 0
    assert read(CHAT, logprobs=True, top_logprobs=20).params.logprobs == 20


def test_prompts_and_conversations() -> None:
    for prompt, several in (("a", ("a",)), ([1, 2], ([1, 2],)), (["a", "b"], ("a", "b")), ([[1], [2]], ([1], [2]))):
        assert read(COMPLETIONS, prompt=prompt).prompts == several
    parts = said([{"type": "text", "text": "hello"}])
    job = read(CHAT, messages=parts, chat_template_kwargs={"enable_thinking": False})
    assert (job.messages, job.prompts, job.variables) == (parts, (), {"enable_thinking": False})


def test_what_changes_nothing_is_taken() -> None:
    chat = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "modalities": ["text"]}
    assert read(CHAT, **chat).params == SamplingParams(max_tokens=None)
    assert read(CHAT, response_format={"type": "text", "json_schema": None}, reasoning=None) == read(CHAT)
    assert read(CHAT, verbosity="low").ignored == ("verbosity",)
    assert read(COMPLETIONS, echo=False, suffix="", best_of=2, n=2).params == SamplingParams(max_tokens=16, n=2)
    job = read(CHAT, stream=True, stream_options={"include_usage": True})
    assert (job.stream, job.include_usage, job.continuous_usage) == (True, True, False)
    for says_nothing in ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        job = read(CHAT, stream=True, stream_options=says_nothing)
        assert (job.include_usage, job.continuous_usage) == (False, False)
    assert not read(CHAT, stream_options={"include_usage": False}).include_usage
    job = read(CHAT, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (job.stream, job.include_usage, job.continuous_usage) == (True, True, True)


def test_minus_one_is_off_as_in_other_servers() -> None:
    assert read(CHAT, top_k=-1, seed=-1, max_tokens=-1).params == SamplingParams(max_tokens=None)


def test_tools_and_how_they_are_chosen() -> None:
    now = {"type": "function", "function": {"name": "now", "description": "Tells the time.", "strict": True}}
    tools = read(CHAT, tools=[TOOL, now], parallel_tool_calls=False).tools
    assert (tools.choice, tools.parallel, tools.strict) == ("auto", False, {"now"})
    assert tools.given[1]["function"] == {"name": "now", "description": "Tells the time."}
    one = read(CHAT, tools=[TOOL, now], tool_choice={"type": "function", "function": {"name": "now"}}).tools
    assert (one.choice, len(one.given)) == ("now", 2)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}
    some = read(CHAT, tools=[TOOL, now], tool_choice=allowed).tools
    assert (some.choice, [tool["function"]["name"] for tool in some.given]) == ("required", ["weather"])
    assert read(CHAT, tools=[TOOL], tool_choice="none").tools is None
    assert read(CHAT, tools=[]).tools is None
    others = read(CHAT, tools=[{"type": "web_search"}, TOOL, {"type": "custom", "custom": {"name": "patch"}}])
    assert (len(others.tools.given), others.ignored) == (1, ("tools[0]", "tools[2]"))


def test_histories_of_other_services_are_read() -> None:
    custom = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "+ x"}}
    refused = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    given: list[dict[str, Any]] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "a", "content": []},
        {"role": "assistant", "content": refused, "tool_calls": None},
    ]
    function = {"name": "patch", "arguments": {"input": "+ x"}}
    assert read(CHAT, messages=given).messages == [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("Well.", "No.")], "tool_calls": None},
    ]


def test_names_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    assert model_names(str(tmp_path / "small")) == ("small", str(tmp_path / "small"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert (model_names("smollm2"), model_names("./smollm2")) == (("smollm2",), ("smollm2", "./smollm2"))
    assert model_names("org/name@v2") == ("org/name", "org/name@v2")
    for name in (*NAMES, None):
        assert read(CHAT, model=name).model == "small", "the answer says what answered"
    assert generating()[CHAT].job({"messages": HELLO, "model": "gpt-4o"}, "small").model == "small"
    with pytest.raises(Refused, match="model=3 is not possible: it must be a text"):
        generating()[CHAT].job({"messages": HELLO, "model": 3}, "small")


# -------------------------------------------------------------------------------------------------------- refused

TOOL = {"type": "function", "function": {"name": "weather"}}
ALLOWED = [{"type": "allowed_tools", "allowed_tools": one} for one in (None, [], {"mode": "auto"}, {"tools": "now"})]
REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"model": "gpt-4o"}, "model", "it must be 'small' or 'models/small', or left out"),
    (CHAT, {"num_beams": 2, "temperature": 0, "stream": True}, "stream", "which text is best is known at the end"),
    (COMPLETIONS, {"num_beams": 2}, "num_beams", "a beam search draws nothing; set temperature to 0"),
    (COMPLETIONS, {"num_beams": 2, "temperature": 0, "n": 3}, "n", "at most num_beams=2"),
    (CHAT, {"messages": []}, "messages", "must be a list such as"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages", "must be a list such as"),
    (CHAT, {"messages": said([{"type": "image_url"}])}, "messages[0].content", "the model reads texts alone"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "the template's own variables"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools", "it must be a function"),
    (CHAT, {"tools": [{"type": "custom"}], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (CHAT, {"response_format": {"type": "text", "schema": {}}}, "response_format", "it must be"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "which has no name"),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools", "two tools are called 'weather'"),
    (CHAT, {"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "the tools are weather"),
    (CHAT, {"tools": [TOOL], "tool_choice": 3}, "tool_choice", "it must be none, auto, required or"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    *((CHAT, {"tool_choice": allowed}, "tool_choice.allowed_tools", "it must") for allowed in ALLOWED),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "it must be"),
    (CHAT, {"response_format": "json"}, "response_format", "it must be"),
    (CHAT, {"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", "two grammars"),
    (CHAT, {"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json", "two grammars"),
    (COMPLETIONS, {"guided_json": "{"}, "guided_json", "it must be a JSON schema"),
    (COMPLETIONS, {"guided_choice": [""]}, "guided_choice", "a text that is not empty"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "two grammars"),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
    (COMPLETIONS, {"structured_outputs": "json"}, "structured_outputs", "must be an object"),
    (CHAT, {"logprobs": 3}, "logprobs", "must be true or false"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
    (CHAT, {"top_logprobs": False}, "top_logprobs", "needs logprobs=true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21 is not possible"),
    (CHAT, {"prompt": "x"}, "prompt", "a field of /v1/completions"),
    (CHAT, {"reasoning_effort": "much"}, "reasoning_effort", "it must be one of none, minimal, low"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, None, "exclude one another"),
    (CHAT, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
    (CHAT, {"max_model_len": 1}, "max_model_len", "vLLM's max_model_len is max_seq_len of the engine here"),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens", "two names of one limit"),
    (CHAT, {"max_completion_tokens": -2}, "max_completion_tokens", "max_completion_tokens=-2 is not possible"),
    (CHAT, {"temperature": 2.5e400}, "temperature", "temperature=inf is not possible"),
    (CHAT, {"temperature": "hot"}, "temperature", "must be a number"),
    (CHAT, {"n": 0}, "n", "n=0 is not possible"),
    (CHAT, {"n": 129}, "n", "at most 128"),
    (CHAT, {"n": 20_000}, "n", "at most 128"),
    (CHAT, {"n": 0}, "n", "at least 1 and at most 128"),
    (CHAT, {"seed": -2}, "seed", "seed=-2 is not possible"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    (CHAT, {"logit_bias": [1]}, "logit_bias", "a mapping"),
    (CHAT, {"prediction": {"type": "content"}}, "prediction", 'it must be {"type": "content", "content": "..."}'),
    (CHAT, {"prediction": {"type": "text", "content": "a"}}, "prediction", "a text or ids"),
    (CHAT, {"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction", "a text or ids"),
    (CHAT, {"prediction": 3}, "prediction", "prediction=3 is not possible"),
    (CHAT, {"stream": "yes"}, "stream", "true or false"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "with a stream"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "it must be"),
    (COMPLETIONS, {"prompt": []}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": ["a", [1]], "stop": [""]}, "stop", "a text that is not empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "must be a text"),
    (COMPLETIONS, {"prompt": None}, "prompt", "must be a text"),
    (COMPLETIONS, {"messages": HELLO}, "messages", "a field of /v1/chat/completions"),
    (COMPLETIONS, {"echo": 0}, "echo", "it must be true or false"),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": True}, "echo", "cannot be streamed"),
    (COMPLETIONS, {"echo": True, "suffix": "x"}, "echo", "exclude one another"),
    (COMPLETIONS, {"max_tokens": -2}, "max_tokens", "at least 0"),
    (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs"),
    (COMPLETIONS, {"prompt": ["a", "b"], "suffix": "x"}, "suffix", "it must be a text, with one text as prompt"),
    (COMPLETIONS, {"best_of": 2}, "best_of", "use n"),
    (COMPLETIONS, {"logprobs": True}, "logprobs", "an integer"),
    (COMPLETIONS, {"user": None, "functions": []}, "functions", "a field of /v1/chat/completions"),
]


@pytest.mark.parametrize(("url", "body", "param", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_honoured_is_refused_by_name(url: str, body: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(Refused) as error:
        read(url, **body)
    assert sentence in str(error.value)
    status, answer = plain_error(error.value)
    assert status == (404 if param == "model" else 400)
    kind = {"type": "invalid_request_error", "param": param, "code": error.value.code}
    assert answer["error"] == {"message": str(error.value), **kind}


def test_errors_of_the_engine_have_a_status() -> None:
    for error, status, code in (
        (BadOption("a"), 400, None),
        (NotFound("a"), 400, None),
        (PromptTooLong("a"), 400, "context_length_exceeded"),
        (CapacityError("a"), 503, "capacity"),
        (InternalError("a"), 500, "internal_error"),
    ):
        got, body = plain_error(error)
        assert (got, body["error"]["code"], body["error"]["message"]) == (status, code, "a")


# --------------------------------------------------------------------------------------------------------- answers


@pytest.mark.speculation("off", "auto")
def test_an_answer_counts_its_prompts_once(llm: LLM) -> None:
    asked = {"prompt": ["def f(", "class A:"], "n": 2, "seed": 1, "max_tokens": 5}
    job = read(COMPLETIONS, **asked, speculation={"report": True})
    outputs = llm.generate(list(job.prompts), job.params)
    body = completion_answer(job, outputs, llm.tokenizer, "00ff", 5)
    assert (body["id"], body["object"], body["created"], body["model"]) == ("cmpl-00ff", "text_completion", 5, "small")
    assert [choice["text"] for choice in body["choices"]] == [output.text for output in outputs]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    num_prompt = sum(len(llm.tokenizer.encode(prompt)) for prompt in ("def f(", "class A:"))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 20,
        "total_tokens": num_prompt + 20,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    report = body["forerun"]
    assert report["seed"] == 1
    assert report["num_steps"] == sum(output.report.num_steps for output in outputs)
    assert report["mean_accepted_length"] == report["num_emitted"] / report["num_steps"]


@pytest.mark.speculation("off", "auto")
def test_logprobs_spell_the_text(llm: LLM) -> None:
    output = llm.generate("def f(x):\n    return", SamplingParams(max_tokens=30, seed=3, logprobs=2))[0]
    text = completion_answer(read(COMPLETIONS, logprobs=2), [output], llm.tokenizer, "0", 0)["choices"][0]["logprobs"]
    assert "".join(text["tokens"]) == output.text
    placed = zip(text["text_offset"], text["tokens"], strict=True)
    assert [output.text[at:].startswith(token) for at, token in placed] == [True] * 30
    assert text["token_logprobs"] == [position.logprob for position in output.logprobs or ()]
    for token, logprob, top in zip(text["tokens"], text["token_logprobs"], text["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert len(top) in (2, 3)
        assert max(top.values()) == next(iter(top.values()))
    chat = chat_answer(read(CHAT, logprobs=True), [output], llm.tokenizer, "0", 0)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in chat] == text["tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in chat).decode() == output.text
    assert all(len(entry["top_logprobs"]) == 2 for entry in chat)


@pytest.mark.speculation("off", "auto")
def test_a_token_that_is_part_of_a_character_is_called_by_its_bytes(checkpoints: Path) -> None:
    """A model whose tokens are bytes, made to write characters of two and three bytes, and the end."""
    llm = LLM(checkpoints / "llama", **llm_options())
    ids = llm.tokenizer.encode("é€")
    for i in range(len(ids)):
        params = SamplingParams(max_tokens=1, temperature=0, logit_bias={ids[i]: 1e9}, logprobs=0)
        outputs = llm.generate([[*llm.tokenizer.encode("a"), *ids[:i]]], params)
        (choice,) = completion_answer(read(COMPLETIONS, logprobs=0), outputs, llm.tokenizer, "0", 0)["choices"]
        assert choice["logprobs"]["tokens"] == [f"bytes:\\x{'é€'.encode()[i]:02x}"]
    output = llm.generate("a", SamplingParams(max_tokens=4, logit_bias={0: 1e9}, logprobs=0))[0]
    entry = chat_answer(read(CHAT, logprobs=True), [output], llm.tokenizer, "0", 0)["choices"][0]
    assert entry["logprobs"]["content"][0]["token"] == "<|end|>"
    assert (entry["message"]["content"], entry["finish_reason"]) == ("", "stop")


@pytest.mark.speculation("off", "auto")
def test_bytes_of_random_tokens_are_those_of_the_text(checkpoints: Path) -> None:
    """The random model writes any bytes: what the entries hold, decoded together, is the text."""
    llm = LLM(checkpoints / "llama", **llm_options())
    params = SamplingParams(max_tokens=60, temperature=5.0, seed=11, ignore_eos=True, logit_bias={0: -1e9}, logprobs=1)
    output = llm.generate("é", params)[0]
    body = chat_answer(read(CHAT, logprobs=True), [output], llm.tokenizer, "0", 0)
    raw = b"".join(bytes(entry["bytes"]) for entry in body["choices"][0]["logprobs"]["content"])
    assert codecs.decode(raw, "utf-8", "replace") == output.text
