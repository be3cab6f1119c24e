"""OpenAI's /v1/chat/completions and /v1/completions (request bodies, whole and streamed answers), and /v1/models.

Follows OpenAI's API reference. Fields of vLLM and of llama-server that agents send are honoured or ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, shown
from forerun.serve import chats
from forerun.serve.absent import FILES, RANKS, TEXTS, VECTORS
from forerun.serve.bodies import (
    NO_CALLS,
    Body,
    Form,
    Given,
    Job,
    Refused,
    Usage,
    are_ids,
    meant,
    named,
    params_of,
    public_names,
    report_of,
    wants_report,
)
from forerun.serve.events import DONE, event
from forerun.serve.fields import (
    EFFORT,
    FLAG,
    IDS,
    OF_PARAMS,
    TEXT,
    THINKING_TOKENS,
    Fields,
    array,
    by_reader,
    either,
    honoured,
    neutral,
    noted,
    required,
    structure,
)
from forerun.serve.formats import FIELDS as FORMATS, GRAMMARS, GUIDED, params_of_format
from forerun.serve.logprobs import CompletionLogprobs, SaidLogprobs, prompt_logprobs, said_logprobs
from forerun.serve.routes import Api, Generate, Look, Models, plain_error
from forerun.serve.tools import thinking_limit
from forerun.text.parts import Part, Reasoning, Text, ToolCall
from forerun.types import SamplingParams
from forerun.version import __version__

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FINGERPRINT = f"forerun-{__version__}"  # same engine, model and seed: same answers
# The API's defaults: a chat's answer goes as far as the context, a completion has 16 tokens.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {CHAT: {"max_tokens": None}, COMPLETIONS: {"max_tokens": 16}}
# How ids of answers begin, what an answer is called, and what a chunk of a stream.
_NAMES = {
    CHAT: ("chatcmpl", "chat.completion", "chat.completion.chunk"),
    COMPLETIONS: ("cmpl", "text_completion", "text_completion"),
}

_BOTH: Fields = {
    **FORMATS,
    **honoured(
        model=TEXT,
        stream=FLAG,
        stream_options=structure(include_usage=FLAG, continuous_usage_stats=FLAG, include_obfuscation=FLAG),
        return_token_ids=FLAG,
    ),
    **by_reader(
        n=OF_PARAMS["n"],
        stop=OF_PARAMS["stop"],
        max_tokens=OF_PARAMS["max_tokens"],
        max_completion_tokens=OF_PARAMS["max_tokens"],
    ),
}
_OF_CHATS: Fields = {
    **chats.FIELDS,
    **chats.CHOICE,
    **honoured(logprobs=FLAG, reasoning_effort=EFFORT),
    **by_reader(top_logprobs=OF_PARAMS["logprobs"], max_thinking_tokens=THINKING_TOKENS),
    "functions": neutral(([],), NO_CALLS),
    "function_call": neutral(("none", "auto"), NO_CALLS),
    "modalities": neutral((["text"],), "answers are texts"),
    **noted("verbosity"),  # no template reads it
}
_OF_COMPLETIONS: Fields = {
    "prompt": required(
        either(TEXT, IDS, array(TEXT, 1), array(IDS, 1)),
        "it must be a text, a list of token ids, or a list of either",
        is_read=True,
    ),
    **honoured(suffix=TEXT, echo=FLAG),
    **by_reader(best_of=OF_PARAMS["n"], logprobs=OF_PARAMS["logprobs"]),
}


def _form(url: str, fields: Fields, others: Fields, other: str) -> Form:
    elsewhere = [name for name in others if name not in fields]
    return Form(url, {**_BOTH, **fields}, dict.fromkeys(elsewhere, other), grammars=GRAMMARS)


# --------------------------------------------------------------------------------------------------------- requests


def _read(
    url: str,
    talk: Callable[[Given], Mapping[str, Any]],
    num_logprobs: Callable[[Body], Any],
    read: Given,
    model: str,
    defaults: Mapping[str, Any],
) -> Job:
    """Return the Job of a body.

    talk: a function that returns the prompts, or the conversation with its tools, as fields of the Job. num_logprobs: a
    function that returns how many log-probabilities the body asks for. read: the fields of the body. model: the model's
    name in the answer. defaults: default values for fields of SamplingParams.
    """
    given = read.fields
    params = _params(given, {**_DEFAULTS[url], **defaults}, num_logprobs(given))
    _check_best_of(read, params.n)
    stream, options = _stream(read)
    return Job(
        url,
        model,
        params,
        **talk(read),
        suffix=_suffix(given),
        effort=given.get("reasoning_effort"),
        max_thinking_tokens=thinking_limit(given.get("max_thinking_tokens"), "max_thinking_tokens"),
        stream=stream,
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats") or False,
        report=wants_report(given),
        token_ids=given.get("return_token_ids", False),
        ignored=tuple(read.ignored),
        echo=_echo(given),
    )


def _echo(given: Body) -> bool:
    """Return whether the answer repeats the prompt. Raises Refused."""
    echo: bool = given.get("echo", False)
    if echo and given.get("stream") and given.get("logprobs") is not None:
        raise Refused("echo with logprobs cannot be streamed: leave out one of echo, logprobs and stream", "echo")
    if echo and given.get("suffix"):
        raise Refused("echo and suffix exclude one another: leave out one of them", "echo")
    return echo


def _params(given: Body, defaults: Mapping[str, Any], num_logprobs: Any) -> SamplingParams:
    names = {"n": "n", "stop": "stop", "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}
    params = params_of({**given, **params_of_format(given)}, defaults, {**names, **GUIDED}, num_logprobs)
    return replace(params, prompt_logprobs=params.logprobs) if given.get("echo") else params


def _num_top_logprobs(given: Body) -> int | None:
    """Return how many of the likeliest tokens a chat wants for each position; None = no log-probabilities."""
    num_top, wanted = given.get("top_logprobs", 0), given.get("logprobs", False)
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
    """Return whether the answer is to be streamed, and the options of the stream. Raises Refused.

    The options are {} unless the body asks for the usage (include_usage), because the other options need it. read: the
    fields of the body.
    """
    stream, options = read.fields.get("stream", False), read.fields.get("stream_options", {})
    if any(options.values()) and not stream:
        message = f"stream_options={shown(options)} is not possible: it goes with a stream; leave it out"
        raise Refused(message, "stream_options")
    return stream, options if options.get("include_usage") else {}  # the others have no meaning without it


def _prompts(read: Given) -> dict[str, Any]:
    """Return the prompts in a body, each a text or a list of token ids, as a field of the Job. Raises Refused."""
    prompt = read.fields.get("prompt")
    several = prompt if isinstance(prompt, list) and not are_ids(prompt) else [prompt]
    if not several or not all(isinstance(one, str) or (one and are_ids(one)) for one in several):
        message = f"prompt={shown(prompt)} is not possible: it must be a text, a list of token ids, or a list of either"
        raise Refused(message, "prompt")
    return {"prompts": tuple(several)}


def _suffix(given: Body) -> str | None:
    """Return the text after the gap that the model is to fill in; None if the body has no suffix. Raises Refused."""
    suffix, prompt = given.get("suffix"), given.get("prompt")
    if suffix and not isinstance(prompt, str):
        raise Refused(f"suffix={shown(suffix)} is not possible: it must be a text, with one text as prompt", "suffix")
    return suffix or None


# ---------------------------------------------------------------------------------------------------------- answers


def chat_answer(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, answer_id: str, created_s: int
) -> dict[str, Any]:
    """Return the whole answer to a chat. outputs: params.n outputs."""
    choices = [_chat_choice(i, one, tokenizer) | _ids_of(job, one.token_ids) for i, one in enumerate(outputs)]
    of_prompt = {"prompt_token_ids": list(outputs[0].prompt_ids)} if job.token_ids else {}
    return _whole(job, outputs, answer_id, created_s, choices) | of_prompt


def completion_answer(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, answer_id: str, created_s: int
) -> dict[str, Any]:
    """Return the whole answer to prompts. outputs: params.n outputs for each prompt, in the order of the prompts."""
    choices = [
        _text_choice(i, one, tokenizer, job) | _ids_of(job, one.token_ids, one.prompt_ids)
        for i, one in enumerate(outputs)
    ]
    return _whole(job, outputs, answer_id, created_s, choices)


def _whole(
    job: Job, outputs: Seq[RequestOutput], answer_id: str, created_s: int, choices: Seq[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the body of a whole answer with the given choices.

    The field "forerun" has the report on speculation, which OpenAI's API lacks.
    """
    return {
        **_head(job, answer_id, created_s),
        "choices": choices,
        "usage": _usage(Usage.of(outputs, job.params)),
        **({"forerun": report_of(outputs)} if job.report else {}),
    }


class CompletionStream:
    """Makes the server-sent events of one streamed answer to prompts; see `routes.Events`.

    Each event has one choice. If the body asks for the usage or for the report on speculation, an event without choices
    follows the last choice and has the usage and the report.
    """

    def __init__(self, job: Job, prompts: Seq[Seq[int]], tokenizer: Tokenizer, answer_id: str, created_s: int) -> None:
        self._job, self._tokenizer = job, tokenizer
        self._head = _head(job, answer_id, created_s, is_chunk=True)
        self._num_choices = len(prompts) * job.params.n
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._num_tokens = 0
        lasts = [prompt[-1] for prompt in prompts for _ in range(job.params.n)]
        self._said = [SaidLogprobs(left, tokenizer) for left in lasts]
        self._logprobs = [CompletionLogprobs(left, tokenizer) for left in lasts]
        self._num_calls = [0] * self._num_choices
        self._prompts = [prompt for prompt in prompts for _ in range(job.params.n)]
        self._ids: list[list[int]] = [[] for _ in self._prompts]  # that no event has carried yet
        self._begun = [False] * self._num_choices
        echoed = prompts if job.echo else ()
        self._echoes = [_echo_of(job, i, ids, tokenizer) for i, ids in enumerate(echoed) for _ in range(job.params.n)]

    def begin(self) -> bytes:
        """Return one event per choice with the text of its prompt, if the body has `echo`; otherwise no bytes."""
        echoes = enumerate(self._echoes)
        return b"".join(self._chunk([self._choice(i, {"content": text}, None, None)]) for i, text in echoes)

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return the events for a chunk of the choice `index`; no bytes if the chunk adds nothing to the choice."""
        logprobs = self._logprobs_of(index, chunk)
        self._num_tokens += len(chunk.token_ids)
        if self._job.token_ids:
            self._ids[index] += chunk.token_ids
        if chunk.parts is None:
            deltas = [{"content": chunk.text}] if chunk.text else []
        else:
            deltas = [self._delta(index, part) for part in chunk.parts]
        if not deltas and logprobs is not None and chunk.token_ids:
            deltas = [{"content": ""}]
        events = b""
        for delta in deltas:
            events += self._chunk([self._choice(index, delta, logprobs, None)])
            logprobs = None
        if chunk.finish_reason is not None:
            reason = finish_reason(chunk.finish_reason, self._num_calls[index] > 0)
            events += self._chunk([self._choice(index, None, None, reason)])
        return events

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        """Return the fields that a part of the answer adds to the message of the choice `index`."""
        match part:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCall():
                self._num_calls[index] += 1
                return {"tool_calls": [{"index": self._num_calls[index] - 1, **part.message()}]}

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """Return the event that ends the stream. If the body asks for usage or report, an event before it has both."""
        events = b""
        more = {"forerun": report_of(outputs)} if self._job.report else {}
        if self._job.include_usage or more:
            usage = _usage(Usage.of(outputs, self._job.params)) if self._job.include_usage else None
            events = self._chunk([], usage, more)
        return events + DONE

    def fail(self, error: ForerunError) -> bytes:
        """Return the event that reports an error after the response's status has been sent."""
        return event(plain_error(error)[1])

    def _chunk(self, choices: list[dict[str, Any]], usage: Any = None, more: Mapping[str, Any] | None = None) -> bytes:
        if usage is None and self._job.continuous_usage:
            prompt, completion = self._num_prompt_tokens, self._num_tokens
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        asked = {"usage": usage} if self._job.include_usage else {}
        return event({**self._head, "choices": choices, **asked, **(more or {})})

    def _choice(self, index: int, delta: Any, logprobs: Any, reason: str | None) -> dict[str, Any]:
        delta = delta or {}
        choice = {"index": index, **self._content(delta), "logprobs": logprobs, "finish_reason": reason}
        choice |= _ids_of(self._job, self._ids[index], () if self._begun[index] else self._prompts[index])
        self._ids[index] = []
        self._begun[index] = True
        return choice

    def _content(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}

    def _logprobs_of(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        return None if chunk.logprobs is None else self._logprobs[index].piece(chunk.logprobs)


class ChatStream(CompletionStream):
    """Makes the server-sent events of one streamed answer to a chat. Each event has a delta of a message."""

    def begin(self) -> bytes:
        """Return the first chunk of each choice: the role, and the prompt's token ids if the body asks for them."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        of_prompt = {"prompt_token_ids": list(self._prompts[0])} if self._job.token_ids else {}
        self._begun = [True] * self._num_choices  # the prompt's ids are in these chunks, and in no later one
        return b"".join(
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}], more=of_prompt)
            for i in range(self._num_choices)
        )

    def _content(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta}

    def _logprobs_of(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        if chunk.logprobs is None:
            return None
        entries = self._said[index].piece(chunk.logprobs, chunk.said)
        return _logprobs(entries) if entries else None


def _head(job: Job, answer_id: str, created_s: int, *, is_chunk: bool = False) -> dict[str, Any]:
    beginning, *objects = _NAMES[job.url]
    return {
        "id": f"{beginning}-{answer_id}",
        "object": objects[is_chunk],
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


def _ids_of(job: Job, ids: Seq[int], prompt: Seq[int] = ()) -> dict[str, Any]:
    """Return the fields prompt_token_ids and token_ids of a choice; {} if the body does not ask for token ids.

    ids: the choice's token ids. prompt: the prompt's token ids; () = without prompt_token_ids, because another part of
    the answer or an earlier chunk has them.
    """
    of_prompt = {"prompt_token_ids": list(prompt)} if prompt else {}
    return {**of_prompt, "token_ids": list(ids)} if job.token_ids else {}


def _chat_choice(index: int, output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    calls = output.tool_calls
    return {
        "index": index,
        "message": {**output.message, "content": output.content or (None if calls else ""), "refusal": None},
        "logprobs": None if output.logprobs is None else _logprobs(said_logprobs(output, tokenizer)),
        "finish_reason": finish_reason(output.finish_reason, bool(calls)),
    }


def _logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """Return the reason why an answer ended, in the words of this API.

    The reason is tool_calls where the answer has calls and was not cut off.
    """
    return "tool_calls" if has_calls and reason == "stop" else reason


def _text_choice(index: int, output: RequestOutput, tokenizer: Tokenizer, job: Job) -> dict[str, Any]:
    text, logprobs = output.text, None
    echo = _echo_of(job, index // job.params.n, output.prompt_ids, tokenizer) if job.echo else ""
    if output.logprobs is not None:
        reader = CompletionLogprobs(output.prompt_ids[-1], tokenizer, len(echo))
        logprobs = reader.piece(output.logprobs, len(echo + text))
        if job.echo and output.prompt_logprobs:
            prompt = prompt_logprobs(output.prompt_ids, output.prompt_logprobs, len(echo), tokenizer)
            logprobs = {name: [*prompt[name], *logprobs[name]] for name in prompt}
    return {"index": index, "text": echo + text, "logprobs": logprobs, "finish_reason": output.finish_reason}


def _echo_of(job: Job, number: int, ids: Seq[int], tokenizer: Tokenizer) -> str:
    """Return the text of the prompt with the index `number`.

    ids: the token ids of the prompt. They are decoded if the client sent ids instead of a text. Special tokens that the
    tokenizer adds at both ends are left out.
    """
    prompt = job.prompts[number]
    return prompt if isinstance(prompt, str) else tokenizer.decode([ids[place] for place in tokenizer.inner(ids)])


# ----------------------------------------------------------------------------------------------------------- models


def _described(models: Models, name: str) -> dict[str, Any]:
    """Return a model's entry in the list of models, including the fields that Anthropic's client reads."""
    service = models.of(name)
    return {
        "id": name,
        "object": "model",
        "created": models.started_s,
        "owned_by": "forerun",
        "root": service.name,
        "parent": None,
        "max_model_len": service.llm.engine.max_seq_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(models.started_s, UTC).isoformat(),
    }


def _models(models: Models, key: str) -> dict[str, Any]:
    names = public_names(models.names)
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [_described(models, name) for name in names], **ends}


def _model(models: Models, key: str, name: str) -> dict[str, Any]:
    served = meant(name, models.names)
    if served not in models.names:
        message = f"model={shown(name)} is not here: it must be {named(models.names)}"
        raise Refused(message, "model", code="model_not_found", status=404)
    return _described(models, served)


_SPEECH = f"nothing is heard or spoken here: {TEXTS}"
_KEPT = "no assistants and threads are kept here: send the conversation to /v1/chat/completions or /v1/responses"
_ABSENT = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), VECTORS),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score"), RANKS),
    "/v1/images/": f"no images are made here: {TEXTS}",
    **dict.fromkeys(("/v1/audio/", "/v1/realtime"), _SPEECH),
    "/v1/moderations": "texts are not judged here: ask a server of a moderation model",
    **dict.fromkeys(("/v1/files", "/v1/files/", "/v1/batches", "/v1/batches/"), FILES),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/threads/", "/v1/conversations"), _KEPT),
    "/v1/fine_tuning/": "no models are trained by requests: `forerun train` trains drafts",
}
API = Api(
    (
        Generate(
            _form(CHAT, _OF_CHATS, _OF_COMPLETIONS, COMPLETIONS),
            partial(_read, CHAT, chats.conversation, _num_top_logprobs),
            chat_answer,
            ChatStream,
            in_batches=True,
            reads_chats=True,
            also=("/chat/completions",),  # as llama-server has it
        ),
        Generate(
            _form(COMPLETIONS, _OF_COMPLETIONS, _OF_CHATS, CHAT),
            partial(_read, COMPLETIONS, _prompts, lambda given: given.get("logprobs")),
            completion_answer,
            CompletionStream,
            in_batches=True,
        ),
        Look("/v1/models", _models, also=("/models",)),
        Look("/v1/models/{name:path}", _model),
    ),
    plain_error,
    below=("",),
    absent=_ABSENT,
)
