"""Bodies of the OpenAI API: a request's becomes prompts and SamplingParams, its outputs become the answer's.

Follows the API reference of /v1/chat/completions and /v1/completions. Policy, as for checkpoints: a field that would
change the answer and is not honoured is refused by name. _PARAMS are honoured; NEUTRAL change nothing with the values
listed; INERT never change the text and are ignored; any other field is refused. null is as good as absent.

Plain data in and out: no web framework, no file, no clock, and no model but for the texts of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import BadOption, CapacityError, ForerunError, PromptTooLong, UserError, shown
from forerun.registry import by_name, unknown
from forerun.serve.logprobs import chat_logprobs, completion_logprobs
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.request import RequestOutput
    from forerun.text.tokenizer import Tokenizer

Body = Mapping[str, Any]
Prompt = str | list[int]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETIONS)
SHIPPED = "shipped"  # the name of the shipped model
MAX_CHOICES = 128  # per prompt, as in the API
# What the API says where a body says nothing: a chat's answer goes as far as the context, a completion has 16 tokens.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {CHAT: {"max_tokens": None}, COMPLETIONS: {"max_tokens": 16}}

# Bookkeeping of the service: whom it is for, what is kept, how it is billed, what is cached.
INERT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
# Honoured as they are: every field of SamplingParams but logprobs, which has another form in each of the two.
_PARAMS = frozenset(SamplingParams.__dataclass_fields__) - {"logprobs"}
_BOTH = _PARAMS | INERT | {"model", "max_completion_tokens", "logprobs", "stream", "stream_options"}
_OWN = {CHAT: {"messages", "top_logprobs", "chat_template_kwargs"}, COMPLETIONS: {"prompt", "best_of"}}
_NO_CALLS = "the model is not told of tools and calls none"
# Fields that are not honoured -> the values that change nothing, and why no other is possible.
NEUTRAL: Mapping[str, Mapping[str, tuple[Seq[Any], str]]] = {
    CHAT: {
        "response_format": (({"type": "text"},), "output cannot be held to a grammar or schema"),
        "tools": (([],), _NO_CALLS),
        "tool_choice": (("none",), _NO_CALLS),
        "functions": (([],), _NO_CALLS),
        "function_call": (("none",), _NO_CALLS),
        "parallel_tool_calls": ((True, False), _NO_CALLS),
        "modalities": ((["text"],), "answers are texts"),
    },
    COMPLETIONS: {
        "echo": ((False,), "an answer does not repeat its prompt"),
        "suffix": (("",), "text is continued, not filled in"),
    },
}
# What a chat template's variables cannot be called: they have a meaning of their own in LLM.apply_chat_template.
_NO_VARIABLES = ("self", "messages", "tools", "documents", "name", "add_generation_prompt", "continue_final_message")
_REPORTED = ("num_steps", "num_drafted", "num_tested", "num_accepted", "num_emitted")


class Refused(BadOption):
    """A body that cannot be honoured. param: the field at fault; status: HTTP's; code: a word for programs."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Job:
    """What one body asks for. messages: of a chat; prompts: of a completion. params.n choices for each of them."""

    url: str
    model: str  # as the answer names it
    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    messages: list[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    stream: bool = False
    include_usage: bool = False  # at the end of a stream


# --------------------------------------------------------------------------------------------------------- requests


def read_body(
    url: str, body: Body, model: str, defaults: Mapping[str, Any] | None = None, served_names: Seq[str] = ()
) -> Job:
    """What the body of a request to `url`, one of URLS, asks for.

    model: as the answer names it. served_names: what bodies may call it; none = whatever they like. defaults: fields
    of SamplingParams over those of the API, below what the body says. Raises Refused, naming the field.
    """
    _check_names(url, body)
    given = {name: value for name, value in body.items() if value is not None and name not in INERT}
    _check_neutral(url, given)
    _check_model(given, served_names)
    params = _params(url, given, {**DEFAULTS[url], **(defaults or {})})
    stream, include_usage = _stream(given)
    if url == COMPLETIONS:
        prompts = _prompts(given.get("prompt"))
        return Job(url, model, params, prompts=prompts, stream=stream, include_usage=include_usage)
    return Job(
        url,
        model,
        params,
        messages=_messages(given.get("messages")),
        variables=_variables(given.get("chat_template_kwargs", {})),
        stream=stream,
        include_usage=include_usage,
    )


def model_names(target: str | None) -> tuple[str, ...]:
    """What requests may call a target: its folder's name or its path; its hub id, with or without the revision."""
    if target is None:
        return (SHIPPED,)
    path = Path(target)
    if path.exists():
        return tuple(dict.fromkeys((path.resolve().name, target)))
    return tuple(dict.fromkeys((target.partition("@")[0], target)))


def _check_names(url: str, body: Body) -> None:
    known = {*_BOTH, *_OWN[url], *NEUTRAL[url]}
    for name in body:
        if name in known:
            continue
        other = COMPLETIONS if url == CHAT else CHAT
        if name in _OWN[other] or name in NEUTRAL[other]:
            raise Refused(f"{name} is a field of {other}, not of {url}", name, code="unknown_parameter")
        there = by_name(name, known, "the engine") or unknown("field", name, known)
        raise Refused(there, name, code="unknown_parameter")


def _check_neutral(url: str, given: Body) -> None:
    for name, (allowed, why) in NEUTRAL[url].items():
        if name in given and not any(given[name] == value and type(given[name]) is type(value) for value in allowed):
            values = " or ".join(f"{value!r}" for value in allowed)
            message = f"{name}={shown(given[name])} is not possible: {why}; leave it out (or say {values})"
            raise Refused(message, name, code="unsupported_parameter")


def _check_model(given: Body, served_names: Seq[str]) -> None:
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise Refused(f"model={shown(model)} is not possible: it must be a text, or left out", "model")
    if model is not None and served_names and model not in served_names:
        message = f"model={shown(model)} is not here: it must be {' or '.join(map(repr, served_names))}, or left out"
        raise Refused(message, "model", code="model_not_found", status=404)


def _params(url: str, given: Body, defaults: Mapping[str, Any]) -> SamplingParams:
    fields = {**defaults, **{name: value for name, value in given.items() if name in _PARAMS}}
    longest = given.get("max_completion_tokens")
    if longest is not None:
        if given.get("max_tokens", longest) != longest:
            raise Refused(
                f"max_completion_tokens={shown(longest)} and max_tokens={shown(given['max_tokens'])} are two names of "
                "one limit: drop one of them",
                "max_completion_tokens",
            )
        fields["max_tokens"] = longest
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = _biases(fields["logit_bias"])
    if isinstance(fields.get("prediction"), dict):
        fields["prediction"] = _prediction(fields["prediction"])
    fields["logprobs"] = given.get("logprobs") if url == COMPLETIONS else _num_top_logprobs(given)
    try:
        params = SamplingParams(**fields)
    except BadOption as error:
        raise _named_as_given(str(error), given) from None
    if params.n > MAX_CHOICES:
        raise Refused(f"n={params.n} is not possible: it must be at most {MAX_CHOICES}", "n")
    if given.get("best_of", params.n) != params.n:
        message = f"best_of={shown(given['best_of'])} is not possible: no choices are made to be thrown away; use n"
        raise Refused(message, "best_of", code="unsupported_parameter")
    return params


def _num_top_logprobs(given: Body) -> int | None:
    """A chat says whether it wants log-probabilities, and how many others beside each token's own."""
    wanted, num_top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise Refused(f"logprobs={shown(wanted)} is not possible: it must be true or false", "logprobs")
    if "top_logprobs" in given and not wanted:
        raise Refused(f"top_logprobs={shown(num_top)} needs logprobs=true: set both or neither", "top_logprobs")
    return num_top if wanted else None


def _biases(biases: dict[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise Refused(f"logit_bias={shown(biases)} is not possible: its keys must be token ids", "logit_bias") from None


def _prediction(given: Mapping[str, Any]) -> str:
    """The text of a prediction in the API's form: of type content, whose content is a text, alone or in parts."""
    content = given.get("content") if given.keys() == {"type", "content"} and given["type"] == "content" else None
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        form = '{"type": "content", "content": "..."}'
        raise Refused(f"prediction={shown(given)} is not possible: it must be {form}, a text or ids", "prediction")
    return "".join(map(str, texts))


def _named_as_given(message: str, given: Body) -> Refused:
    """What SamplingParams refuses, with the field called as the body calls it."""
    found = re.match(r"(\w+)=", message)
    if found is None:
        return Refused(message)
    name = found[1]
    for other, ours in (("max_completion_tokens", "max_tokens"), ("top_logprobs", "logprobs")):
        if name == ours and other in given:
            return Refused(other + message.removeprefix(name), other)
    return Refused(message, name)


def _stream(given: Body) -> tuple[bool, bool]:
    """Whether the answer is wanted in pieces, and its usage at their end."""
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool):
        raise Refused(f"stream={shown(stream)} is not possible: it must be true or false", "stream")
    usage = options.get("include_usage", False) if isinstance(options, dict) else None
    if not isinstance(usage, bool) or set(options) - {"include_usage"} or (options and not stream):
        message = (
            f'stream_options={shown(options)} is not possible: it must be {{"include_usage": true}}, with a stream'
        )
        raise Refused(message, "stream_options")
    return stream, usage


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    """A text, ids, or a list of either."""
    several = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if not several or not all(isinstance(one, str) or (one and _are_ids(one)) for one in several):
        message = f"prompt={shown(prompt)} is not possible: it must be a text, a list of token ids, or a list of either"
        raise Refused(message, "prompt")
    return tuple(several)


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _messages(messages: Any) -> list[Mapping[str, Any]]:
    """A conversation, whose contents are texts, alone or in parts."""
    ok = isinstance(messages, list) and messages
    if not ok or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        example = '[{"role": "user", "content": "hello"}]'
        raise Refused(f"messages={shown(messages)} is not possible: it must be a list such as {example}", "messages")
    for i, message in enumerate(messages):
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                problem = f"messages[{i}] has a part of type {shown(kind)}: the model reads texts alone"
                raise Refused(problem, f"messages[{i}].content")
    made: list[Mapping[str, Any]] = messages
    return made


def _variables(variables: Any) -> Mapping[str, Any]:
    wrong = variables if not isinstance(variables, dict) else [name for name in _NO_VARIABLES if name in variables]
    if wrong or not isinstance(variables, dict):
        message = f"chat_template_kwargs={shown(wrong)} is not possible: it takes the template's own variables, by name"
        raise Refused(message, "chat_template_kwargs")
    return variables


# ---------------------------------------------------------------------------------------------------------- answers


def answer_body(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, *, answer_id: str, created_s: int
) -> dict[str, Any]:
    """The body of an answer. outputs: params.n of the first prompt, then of the next; answer_id: hex digits of its own.

    What the API has no word for is under "forerun": the seed that makes the same choices again, and how speculation
    went for all of them together, as in RequestReport.
    """
    is_chat = job.url == CHAT
    prompt_tokens = sum(len(output.prompt_ids) for output in outputs[:: job.params.n])
    completion_tokens = sum(len(output.token_ids) for output in outputs)
    choice = _chat_choice if is_chat else _text_choice
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answer_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": job.model,
        "choices": [choice(i, output, tokenizer) for i, output in enumerate(outputs)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "forerun": _report(outputs),
    }


def error_answer(error: ForerunError) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body of an answer that is an error."""
    status = 500
    code: str | None = "internal_error"
    param: str | None = None
    if isinstance(error, Refused):
        status, code, param = error.status, error.code, error.param
    elif isinstance(error, UserError):
        status, code = 400, "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    elif isinstance(error, CapacityError):
        status, code = 503, "capacity"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _chat_choice(index: int, output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None if output.logprobs is None else chat_logprobs(output, tokenizer),
        "finish_reason": output.finish_reason,
    }


def _text_choice(index: int, output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": index,
        "text": output.text,
        "logprobs": None if output.logprobs is None else completion_logprobs(output, tokenizer),
        "finish_reason": output.finish_reason,
    }


def _report(outputs: Seq[RequestOutput]) -> dict[str, Any]:
    """The sums over all choices, and their ratios; a ratio is None where nothing was counted."""
    sums = {name: sum(getattr(output.report, name) for output in outputs) for name in _REPORTED}

    def ratio(above: str, below: str) -> float | None:
        return sums[above] / sums[below] if sums[below] else None

    first, prices = outputs[0].report, [price for output in outputs for price in output.report.prices]
    return {
        "seed": outputs[0].seed,
        "acceptance": first.acceptance,
        "is_lossless": first.is_lossless,
        "tv_price": sum(prices) / len(prices) if prices else None,
        **sums,
        "acceptance_rate": ratio("num_accepted", "num_drafted"),
        "mean_accepted_length": ratio("num_emitted", "num_steps"),
        "alpha_hat": ratio("num_accepted", "num_tested"),
    }
