"""Bodies of /v1/chat/completions and /v1/completions, and answers to them, whole and in pieces.

Follows the API reference of OpenAI; what is honoured, harmless and refused is in FORMS (see bodies.py). `forerun
batch` and `forerun serve` read bodies here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, shown
from forerun.serve.bodies import (
    NO_CALLS,
    Body,
    Form,
    Given,
    Job,
    Message,
    Neutral,
    Prompt,
    Refused,
    Usage,
    check,
    flag,
    params_of,
    report_of,
    status_of,
    variables,
    wants_report,
)
from forerun.serve.events import DONE, event
from forerun.serve.formats import FIELDS as FORMATS, GUIDED, params_of_format
from forerun.serve.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from forerun.serve.tools import Calls, calls_of, effort_of, listed, thinking_limit
from forerun.text.parts import Part, Reasoning, Text, ToolCall
from forerun.text.tools import A_TOOL, AUTO
from forerun.types import SamplingParams
from forerun.version import __version__

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETIONS)
FINGERPRINT = f"forerun-{__version__}"  # same engine, model and seed: same answers
# What the API says where a body says nothing: a chat's answer goes as far as the context, a completion has 16 tokens.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {CHAT: {"max_tokens": None}, COMPLETIONS: {"max_tokens": 16}}

_WHOM, _CACHED = "it says whom a request is for", "the cache is by the prompt itself"
# Bookkeeping of the service.
INERT: Mapping[str, str] = {
    "user": _WHOM,
    "safety_identifier": _WHOM,
    "metadata": "it is the client's own",
    "client_metadata": "it is the client's own",
    "store": "completions are not kept, and no route would list them",
    "service_tier": "there is one tier",
    "prompt_cache_key": _CACHED,
    "prompt_cache_retention": _CACHED,
    "id_slot": "an answer is the same wherever its prompt is found",
    "guided_decoding_backend": "grammars are compiled by one library",
}
_BOTH = {
    *("model", "n", "stop", "max_tokens", "max_completion_tokens", "logprobs", "stream", "stream_options"),
    *("return_token_ids", *FORMATS),
}
_SPEEDS = frozenset(("timings_per_token", "return_progress"))  # llama-server's: how fast it is, and how far
_OWN = {
    CHAT: {
        *("messages", "top_logprobs", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "max_thinking_tokens", "continue_final_message", "add_generation_prompt"),
    },
    COMPLETIONS: {"prompt", "suffix", "best_of", "echo"},
}
# No template reads the first; numbers of speed come with the report.
_NOTED: Mapping[str, frozenset[str]] = {CHAT: frozenset(("verbosity",)) | _SPEEDS, COMPLETIONS: _SPEEDS}
_NEUTRAL: Mapping[str, Mapping[str, Neutral]] = {
    CHAT: {
        "functions": (([],), NO_CALLS),
        "function_call": (("none", "auto"), NO_CALLS),
        "modalities": ((["text"],), "answers are texts"),
    },
    COMPLETIONS: {},
}


def _elsewhere(url: str) -> dict[str, str]:
    other = COMPLETIONS if url == CHAT else CHAT
    fields = {*_OWN[other], *_NEUTRAL[other], *_NOTED[other]}
    return dict.fromkeys(fields - _OWN[url] - set(_NEUTRAL[url]), other)


FORMS = {url: Form(url, _BOTH | _OWN[url], INERT, _NEUTRAL[url], _elsewhere(url), _NOTED[url]) for url in URLS}


# --------------------------------------------------------------------------------------------------------- requests


def read_body(
    url: str,
    body: object,
    model: str,
    defaults: Mapping[str, Any] | None = None,
    served_names: Seq[str] = (),
    *,
    ignore_unsupported: bool = False,
) -> Job:
    """What the body of a request to `url`, one of URLS, asks for.

    model: as the answer names it. served_names: what bodies may call it; none = whatever they like. defaults: fields
    of SamplingParams over those of the API, below what the body says. Raises Refused, naming the field.
    """
    read = check(FORMS[url], body, served_names, ignore_unsupported=ignore_unsupported)
    given = read.fields
    echo, only_prompt = _echo(given, given.get("stream") is True)
    params = _params(url, given, {**DEFAULTS[url], **(defaults or {})})
    _check_best_of(read, params.n)
    stream, options = _stream(read)
    calls = _calls(given, read.ignored)
    goes_on = flag(given, "continue_final_message")
    if goes_on and given.get("add_generation_prompt") is True:
        raise Refused("add_generation_prompt and continue_final_message exclude one another: set one of them")
    return Job(
        url,
        model,
        params,
        prompts=_prompts(given.get("prompt")) if url == COMPLETIONS else (),
        suffix=_suffix(given),
        messages=_messages(given.get("messages")) if url == CHAT else None,
        variables=variables(given),
        continue_final_message=goes_on,
        add_generation_prompt=None if goes_on else flag(given, "add_generation_prompt", True),
        calls=calls,
        effort=effort_of(given.get("reasoning_effort"), "reasoning_effort"),
        max_thinking_tokens=thinking_limit(given.get("max_thinking_tokens"), "max_thinking_tokens"),
        stream=stream,
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        report=wants_report(given),
        token_ids=flag(given, "return_token_ids"),
        ignored=tuple(read.ignored),
        echo=echo,
        only_prompt=only_prompt,
    )


def _echo(given: dict[str, Any], stream: bool) -> tuple[bool, bool]:
    """Whether the answer repeats the prompt, and has nothing else: that is a limit of 0 tokens, which becomes 1."""
    echo = flag(given, "echo")
    limits = [name for name in ("max_tokens", "max_completion_tokens") if given.get(name) == 0]
    if echo and stream and given.get("logprobs") is not None:
        raise Refused("echo with logprobs cannot be streamed: leave out one of echo, logprobs and stream", "echo")
    if echo and given.get("suffix"):
        raise Refused("echo and suffix exclude one another: leave out one of them", "echo")
    if not echo or any(type(given[name]) is not int for name in limits):
        return echo, False
    given |= dict.fromkeys(limits, 1)
    return echo, bool(limits)


def _calls(given: Body, ignored: list[str]) -> Calls | None:
    """The functions of a chat, and which of them must be called. Tools of other types are listed in `ignored`."""
    functions = list[Mapping[str, Any]]()
    for i, tool in enumerate(listed(given.get("tools", []))):
        if tool.get("type", "function") != "function":
            ignored.append(f"tools[{i}]")
            continue
        if not isinstance(tool.get("function"), Mapping):
            raise Refused(f"tools[{i}]={shown(tool)} is not possible: it must be a function, {A_TOOL}", "tools")
        functions.append(tool["function"])
    choice = given.get("tool_choice", AUTO)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", {})
        names = [_name(tool) for tool in allowed.get("tools", [])]
        functions = [function for function in functions if function.get("name") in names]
        choice = allowed.get("mode", AUTO)
    elif isinstance(choice, Mapping):
        choice = _name(choice)
    if not isinstance(choice, str):
        form = '{"type": "function", "function": {"name": "..."}}'
        message = f"tool_choice={shown(choice)} is not possible: it must be none, auto, required or {form}"
        raise Refused(message, "tool_choice")
    return calls_of(functions, choice, flag(given, "parallel_tool_calls", True))


def _name(tool: Any) -> Any:
    """The name in {"type": "function", "function": {"name": "f"}}."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _params(url: str, given: Body, defaults: Mapping[str, Any]) -> SamplingParams:
    names = {"n": "n", "stop": "stop", "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}
    logprobs = given.get("logprobs") if url == COMPLETIONS else _num_top_logprobs(given)
    fields = {**given, **params_of_format(given)}
    params = params_of(fields, defaults, {**names, **GUIDED}, logprobs)
    return replace(params, prompt_logprobs=params.logprobs) if given.get("echo") else params


def _num_top_logprobs(given: Body) -> int | None:
    """A chat says whether it wants log-probabilities, and how many others beside each token's own."""
    num_top, wanted = given.get("top_logprobs", 0), flag(given, "logprobs")
    if not wanted and (num_top != 0 or type(num_top) is not int):
        raise Refused(f"top_logprobs={shown(num_top)} needs logprobs=true: set both or neither", "top_logprobs")
    return num_top if wanted else None


def _check_best_of(read: Given, n: int) -> None:
    best_of = read.fields.get("best_of", n)
    if best_of == n:
        return
    message = f"best_of={shown(best_of)} is not possible: no choices are made to be thrown away; use n"
    read.ignore(Refused(message, "best_of", code="unsupported_parameter"))


def _stream(read: Given) -> tuple[bool, dict[str, bool]]:
    """Whether the answer is wanted in pieces, and the options of these."""
    stream, options = flag(read.fields, "stream"), read.fields.get("stream_options", {})
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    is_known = isinstance(options, dict) and set(options) <= known and all(type(v) is bool for v in options.values())
    if not is_known or (any(options.values()) and not stream):
        message = (
            f'stream_options={shown(options)} is not possible: it must be {{"include_usage": true}}, with a stream'
        )
        raise Refused(message, "stream_options")
    if not options.get("include_usage"):
        options = {**options, "continuous_usage_stats": False}  # it says when what is not wanted comes
    return stream, options


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    """A text, ids, or a list of either."""
    several = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if not several or not all(isinstance(one, str) or (one and _are_ids(one)) for one in several):
        message = f"prompt={shown(prompt)} is not possible: it must be a text, a list of token ids, or a list of either"
        raise Refused(message, "prompt")
    return tuple(several)


def _suffix(given: Body) -> str:
    """The text behind the one that is to be filled in; '' where nothing is."""
    suffix, prompt = given.get("suffix", ""), given.get("prompt")
    if not isinstance(suffix, str) or (suffix and not isinstance(prompt, str)):
        raise Refused(f"suffix={shown(suffix)} is not possible: it must be a text, with one text as prompt", "suffix")
    return suffix


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _messages(messages: Any) -> list[Message]:
    """A conversation, whose contents are texts, alone or in parts."""
    ok = isinstance(messages, list) and messages
    if not ok or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        example = '[{"role": "user", "content": "hello"}]'
        raise Refused(f"messages={shown(messages)} is not possible: it must be a list such as {example}", "messages")
    for i, message in enumerate(messages):
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else part
            if kind not in ("text", "refusal"):
                problem = f"messages[{i}] has a part of type {shown(kind)}: the model reads texts alone"
                raise Refused(problem, f"messages[{i}].content")
    return [_known(message) for message in messages]


def _known(message: Message) -> Message:
    """A message as chat templates know it: developers are the system, and what was refused or called freely is said."""
    made, parts, calls = {**message}, message.get("content"), message.get("tool_calls")
    if made["role"] == "developer":
        made["role"] = "system"  # templates know the older name alone, and would leave it out without a word
    if parts == []:
        made["content"] = ""
    elif isinstance(parts, list):
        refused = {i: {"type": "text", "text": p.get("refusal")} for i, p in enumerate(parts) if p["type"] == "refusal"}
        made["content"] = [refused.get(i, part) for i, part in enumerate(parts)]
    if isinstance(calls, list):
        made["tool_calls"] = [_function(call) for call in calls]
    return made


def _function(call: Any) -> Any:
    """A call of a custom tool, which takes a text, as one of a function that takes it by the name input."""
    custom = call.get("custom") if isinstance(call, Mapping) and call.get("type") == "custom" else None
    if not isinstance(custom, Mapping):
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return {"id": call.get("id"), "type": "function", "function": function}


# ---------------------------------------------------------------------------------------------------------- answers


def answer_body(
    job: Job,
    outputs: Seq[RequestOutput],
    tokenizer: Tokenizer,
    *,
    answer_id: str,
    created_s: int,
    with_report: bool = True,
) -> dict[str, Any]:
    """The body of an answer. outputs: params.n of the first prompt, then of the next; answer_id: hex digits of its own.

    What the API has no word for is under "forerun" (see `report_of`), if with_report.
    """
    if job.url == CHAT:
        choices = [_chat_choice(i, output, tokenizer) for i, output in enumerate(outputs)]
    else:
        choices = [_text_choice(i, output, tokenizer, job) for i, output in enumerate(outputs)]
    if job.token_ids:
        ids = [_ids_of(job, output.token_ids, output.prompt_ids) for output in outputs]
        choices = [choice | own for choice, own in zip(choices, ids, strict=True)]
    of_prompt = {"prompt_token_ids": list(outputs[0].prompt_ids)} if job.token_ids and job.url == CHAT else {}
    made = {
        **_head(job, answer_id, created_s, "chat.completion"),
        "choices": choices,
        "usage": _usage(Usage.of(outputs, job.params)),
        **of_prompt,
    }
    return made | ({"forerun": report_of(outputs)} if with_report else {})


def error_answer(error: ForerunError) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body of an answer that is an error."""
    status, code, param = status_of(error)
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


class Stream:
    """The server-sent events of one answer. A chunk is one choice's; the last ones have the usage, if it is wanted."""

    def __init__(self, job: Job, prompts: Seq[Seq[int]], tokenizer: Tokenizer, answer_id: str, created_s: int) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._head = _head(job, answer_id, created_s, "chat.completion.chunk")
        self._num_choices = len(prompts) * job.params.n
        self._num_prompt_tokens, self._num_tokens = sum(len(prompt) for prompt in prompts), 0
        lasts = [prompt[-1] for prompt in prompts for _ in range(job.params.n)]
        self._lefts = lasts[:]
        self._logprobs = [CompletionLogprobs(left, tokenizer) for left in lasts]
        self._num_calls = [0] * self._num_choices
        self._prompts = [prompt for prompt in prompts for _ in range(job.params.n)]
        self._ids: list[list[int]] = [[] for _ in self._prompts]  # that no event has told yet
        self._begun = [False] * self._num_choices
        echoed = prompts if job.echo else ()
        self._echoes = [_echo_of(job, i, ids, tokenizer) for i, ids in enumerate(echoed) for _ in range(job.params.n)]

    def begin(self) -> bytes:
        """Of a chat, the role of each choice; of a completion with echo, its prompt."""
        if self._job.url != CHAT:
            chosen = enumerate(self._echoes)
            return b"".join(self._chunk([self._choice(i, {"content": text}, None, None)]) for i, text in chosen)
        delta = {"role": "assistant", "content": "", "refusal": None}
        of_prompt = {"prompt_token_ids": list(self._prompts[0])} if self._job.token_ids else {}
        return b"".join(
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}], more=of_prompt)
            for i in range(self._num_choices)
        )

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """What a chunk of a choice adds; nothing where its text is held back."""
        logprobs = self._logprobs_of(index, chunk)
        self._num_tokens += len(chunk.token_ids)
        if self._job.token_ids:
            self._ids[index] += chunk.token_ids
        if self._job.only_prompt:
            deltas = []
        elif chunk.parts is None:
            deltas = [{"content": chunk.text}] if chunk.text else []
        else:
            deltas = [self._delta(index, part) for part in chunk.parts]
        if not deltas and logprobs is not None and chunk.token_ids:
            deltas = [{"content": ""}]
        made = b""
        for delta in deltas:
            made += self._chunk([self._choice(index, delta, logprobs, None)])
            logprobs = None
        if chunk.finish_reason is not None:
            reason = finish_reason(chunk.finish_reason, self._num_calls[index] > 0)
            made += self._chunk([self._choice(index, None, None, reason)])
        return made

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        """What a part adds to the message of a choice."""
        match part:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCall():
                self._num_calls[index] += 1
                return {"tool_calls": [{"index": self._num_calls[index] - 1, **part.message()}]}

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """The usage, where it is wanted, and the end of the stream."""
        made, more = b"", {"forerun": report_of(outputs)} if self._job.report else {}
        if self._job.include_usage or more:
            usage = _usage(Usage.of(outputs, self._job.params)) if self._job.include_usage else None
            made = self._chunk([], usage, more)
        return made + DONE

    def fail(self, error: ForerunError) -> bytes:
        """An error behind the first byte, when no status can be sent any more."""
        return event(error_answer(error)[1])

    def _chunk(self, choices: list[dict[str, Any]], usage: Any = None, more: Mapping[str, Any] | None = None) -> bytes:
        if usage is None and self._job.continuous_usage:
            prompt, completion = self._num_prompt_tokens, self._num_tokens
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        asked = {"usage": usage} if self._job.include_usage else {}
        return event({**self._head, "choices": choices, **asked, **(more or {})})

    def _choice(self, index: int, delta: Any, logprobs: Any, reason: str | None) -> dict[str, Any]:
        delta = delta or {}
        what = {"delta": delta} if self._job.url == CHAT else {"text": delta.get("content", "")}
        made = {"index": index, **what, "logprobs": logprobs, "finish_reason": reason}
        if self._job.token_ids:
            made |= _ids_of(self._job, self._ids[index], () if self._begun[index] else self._prompts[index])
            self._ids[index], self._begun[index] = [], True
        return made

    def _logprobs_of(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        if chunk.logprobs is None:
            return None
        if self._job.url != CHAT:
            return self._logprobs[index].piece(chunk.logprobs)
        made = chat_logprobs(chunk.logprobs, self._lefts[index], self._tokenizer)
        self._lefts[index] = chunk.token_ids[-1] if chunk.token_ids else self._lefts[index]
        return made


def _head(job: Job, answer_id: str, created_s: int, chat_object: str) -> dict[str, Any]:
    is_chat = job.url == CHAT
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answer_id}",
        "object": chat_object if is_chat else "text_completion",
        "created": created_s,
        "model": job.model,
        "system_fingerprint": FINGERPRINT,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    details: dict[str, int] = {"reasoning_tokens": usage.reasoning}
    if usage.accepted is not None and usage.rejected is not None:
        details |= {"accepted_prediction_tokens": usage.accepted, "rejected_prediction_tokens": usage.rejected}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": usage.prompt_details,
        "completion_tokens_details": details,
    }


def _ids_of(job: Job, ids: Seq[int], prompt: Seq[int]) -> dict[str, Any]:
    """Return the ids that a choice tells: its answer's, and beside them a completion's prompt, () where it was told."""
    answer: dict[str, Any] = {"token_ids": [] if job.only_prompt else list(ids)}
    return answer if job.url == CHAT or not prompt else {"prompt_token_ids": list(prompt), **answer}


def _chat_choice(index: int, output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs, calls = output.logprobs, output.tool_calls
    return {
        "index": index,
        "message": {**output.message, "content": output.content or (None if calls else ""), "refusal": None},
        "logprobs": None if logprobs is None else chat_logprobs(logprobs, output.prompt_ids[-1], tokenizer),
        "finish_reason": finish_reason(output.finish_reason, bool(calls)),
    }


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """Why an answer ended, in the words of this API: tool_calls where it did so to call tools."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def _text_choice(index: int, output: RequestOutput, tokenizer: Tokenizer, job: Job) -> dict[str, Any]:
    text, logprobs = "" if job.only_prompt else output.text, None
    number = index // job.params.n
    echo = _echo_of(job, number, output.prompt_ids, tokenizer) if job.echo else ""
    if output.logprobs is not None:
        reader = CompletionLogprobs(output.prompt_ids[-1], tokenizer, len(echo))
        logprobs = reader.piece([] if job.only_prompt else output.logprobs, len(echo + text))
        if job.echo and output.prompt_logprobs:
            prompt = prompt_logprobs(output.prompt_ids, output.prompt_logprobs, len(echo), tokenizer)
            logprobs = {name: [*prompt[name], *logprobs[name]] for name in prompt}
    return {"index": index, "text": echo + text, "logprobs": logprobs, "finish_reason": output.finish_reason}


def _echo_of(job: Job, number: int, ids: Seq[int], tokenizer: Tokenizer) -> str:
    """The text of a prompt, as it was given; of ids what they say, but for those that a tokenizer adds to a text."""
    prompt = job.prompts[number]
    return prompt if isinstance(prompt, str) else tokenizer.decode([ids[place] for place in tokenizer.inner(ids)])
