"""Ollama's API: the bodies and answers of /api/chat, /api/generate and /api/show, and the lists of models.

Follows docs/api.md of Ollama. An answer is a stream of JSON lines unless `stream` is false. `options` become fields of
SamplingParams. Options of Ollama's runner (num_thread, num_gpu, ...) change no text, and are accepted without effect.
Models are started with the server, so no request fetches, makes or unloads a model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, NotFound, shown
from forerun.registry import unknown
from forerun.serve.absent import VECTORS
from forerun.serve.bodies import (
    ONE_ANSWER,
    Body,
    Form,
    Given,
    Job,
    Message,
    Refused,
    check_value,
    params_of,
    report_of,
    status_of,
    variables,
    wants_report,
)
from forerun.serve.events import as_json
from forerun.serve.fields import (
    EFFORT,
    FLAG,
    NAME,
    OBJECT,
    OF_PARAMS,
    TEXT,
    TOOLS,
    Fields,
    Schema,
    array,
    by_reader,
    either,
    honoured,
    inert,
    integer,
    limited,
    neutral,
    noted,
    one_of,
    required,
    structure,
)
from forerun.serve.routes import Api, Count, Counted, Generate, Look, Models, Reader
from forerun.serve.schemas import whole
from forerun.serve.tools import THINKING, listed, tool_request
from forerun.text.parts import Part, Reasoning, Text, ToolCall
from forerun.text.tools import AUTO, ToolRequest
from forerun.version import __version__

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.serve.served import Served
    from forerun.text.tokenizer import Tokenizer

CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
LINES = "application/x-ndjson"
FOLLOWED = "0.13.0"  # the version of Ollama whose API this follows; clients look up features by it
_ROLES = ("system", "user", "assistant", "tool")
# Option -> field of SamplingParams.
OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "num_predict": "max_tokens",
    "draft_num_predict": "spec_length",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
CONTEXT = "num_ctx"
# Options that say how Ollama's runner computes, and what it keeps of a conversation that it cuts.
RUNNER = frozenset(
    (
        *("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap"),
        *("use_mlock", "logits_all", "mirostat_tau", "mirostat_eta", "tensor_split"),
    )
)
_CUT = "tokens are cut by top_k, top_p and min_p"
_OFF: Fields = {
    "typical_p": neutral((1, 1.0), _CUT),
    "tfs_z": neutral((1, 1.0), _CUT),
    "mirostat": neutral((0, 0.0), _CUT),
    "vocab_only": neutral((False,), "an answer needs all of the model"),
    "embedding_only": neutral((False,), "answers are texts"),
}
# Options about what repeat_penalty counts -> the values that are true here, and what is counted here, in words.
_PENALISED: Mapping[str, tuple[Seq[Any], str]] = {
    "repeat_last_n": ((-1, 0), "the whole text; say -1"),
    "penalize_newline": ((True,), "ends of lines, too"),
}
_WINDOW = "repeat_last_n"
_UNLIMITED = (-1, -2)  # as num_predict: until the end, and until the context is full
_NO_TIME = re.compile(r"[+-]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")  # in the form of Go's durations


_NO_LOGPROBS = "answers of this API have none here; ask /v1/chat/completions"
_OF_PARAMS: dict[str, Schema] = {
    **{name: OF_PARAMS[ours] for name, ours in OPTIONS.items()},
    "num_predict": either(one_of(*_UNLIMITED), OF_PARAMS["max_tokens"]),
    "stop": limited("stop", either(NAME, array(NAME))),
}
# The fields of the object `options`.
_OF_OPTIONS: Fields = {
    **by_reader(**_OF_PARAMS),
    **honoured(
        num_ctx=integer(1),
        **{
            name: {"description": f"any value, but {json.dumps(allowed)} beside repeat_penalty, which counts {counts}"}
            for name, (allowed, counts) in _PENALISED.items()
        },
    ),
    **_OFF,
    **inert("it says how Ollama's runner computes", *RUNNER),
}
_BOTH: Fields = {
    **honoured(
        model=TEXT,
        stream=FLAG,
        think=either(FLAG, EFFORT),
        chat_template_kwargs=OBJECT,
    ),
    **by_reader(
        options=structure((), **{name: field.described for name, field in _OF_OPTIONS.items()}),
        format=either(one_of("", "json"), OBJECT),
    ),
    "logprobs": neutral((False,), _NO_LOGPROBS),
    "top_logprobs": neutral((0,), _NO_LOGPROBS),
    "n": neutral((1,), ONE_ANSWER),
    **inert("models stay as long as the server runs", "keep_alive"),
    **inert("a prompt that is too long is refused, and never cut", "truncate"),
    **inert("a context that is full ends the answer, and is not moved on", "shift"),
}
_CALL = structure(("function",), function=structure(("name",), name=NAME, arguments=OBJECT))
_MESSAGE = structure(
    ("role", "content"), role=one_of(*_ROLES), content=TEXT, thinking=TEXT, tool_name=TEXT, tool_calls=array(_CALL)
)
_OF_CHATS: Fields = {**_BOTH, **by_reader(messages=array(_MESSAGE), tools=TOOLS)}
_OF_PROMPTS: Fields = {
    **_BOTH,
    **honoured(prompt=TEXT, suffix=TEXT, system=TEXT, raw=FLAG),
    "images": neutral(([],), "the model reads texts alone"),
    "template": neutral(("",), "the model's own chat template is used; with raw the prompt goes as it is"),
    "context": neutral(([],), "conversations are sent as messages to /api/chat"),
}
_OF_SHOW: Fields = {
    "model": required(TEXT, "name one of those that /api/tags lists"),
    **noted("verbose", "system", "template", "options"),
}
_NAMES = {"name": "model"}  # as older clients call it


# --------------------------------------------------------------------------------------------------------- requests


def _read(
    url: str,
    talk: Callable[[Body], tuple[list[Message], tuple[str, ...], str | None]],
    read: Given,
    model: str,
    defaults: Mapping[str, Any],
) -> Job:
    """Return the Job of a body.

    talk: a function that takes the fields of a body and returns the messages, the prompts, and the prompt to use if the
    model has no chat template. A body without messages and prompt asks only to load the model, or with keep_alive 0 to
    unload the model. For such a body the Job generates nothing, because the model is already loaded and stays loaded.
    read: the fields of the body. model: the model's name in the answer. defaults: default values for fields of
    SamplingParams.
    """
    given, options = read.fields, _options(read)
    effort, thinks = _think(given.get("think"))
    messages, prompts, without_template = talk(given)
    return Job(
        url,
        model,
        params_of({**given, **options, **_format(given.get("format"))}, defaults, OPTIONS, None),
        prompts=prompts,
        suffix=(given.get("suffix") or None) if prompts else None,
        messages=None if prompts else messages,
        without_template=without_template,
        variables=variables(given),
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
        tools=_tools(given),
        effort=effort,
        thinks=thinks,
        stream=given.get("stream", True),
        report=wants_report(given),
        ignored=tuple(read.ignored),
        given={} if messages or prompts else {"done_reason": _done_reason(read.body.get("keep_alive"))},
        context=_context(given.get("options") or {}),
    )


def _done_reason(keep_alive: Any) -> str:
    """Return the done_reason for a body without messages and prompt: "unload" if keep_alive is 0, otherwise "load"."""
    is_none = _NO_TIME.fullmatch(keep_alive) if isinstance(keep_alive, str) else keep_alive == 0
    return "unload" if is_none and keep_alive is not False else "load"


def _options(read: Given) -> dict[str, Any]:
    """Return the sampling parameters in the field `options` of a body. The returned keys are Ollama's names.

    Raises Refused for an invalid option, unless the server may ignore the option.
    """
    options = read.fields.get("options", {})
    found = dict[str, Any]()
    if not isinstance(options, Mapping):
        raise Refused(f"options={shown(options)} is not possible: it must be an object", "options")
    for name, value in options.items():
        field = _OF_OPTIONS.get(name)
        value = value if field is None or field.schema is None else whole(value, field.schema)
        if value is None or (field is not None and field.inert):
            continue
        try:
            if field is None:
                raise Refused(unknown("option", name, _OF_OPTIONS), f"options.{name}", code="unknown_parameter")
            check_value(f"options.{name}", value, field)
            if name in _PENALISED:
                _check_penalised(name, value, options)
        except Refused as error:
            read.ignore(error)
            continue
        if name in OPTIONS:
            found[name] = value
    if options.get(_WINDOW) == 0:
        found["repeat_penalty"] = 1.0
    if found.get("num_predict") in _UNLIMITED:
        found["num_predict"] = None
    if isinstance(found.get("stop"), str):
        found["stop"] = [found["stop"]]
    return found


def _check_penalised(name: str, value: Any, options: Mapping[str, Any]) -> None:
    """Raise Refused for an option that would change which tokens repeat_penalty penalises.

    Without a repeat_penalty, any value of the option is permitted.
    """
    allowed, counts = _PENALISED[name]
    if value not in allowed and options.get("repeat_penalty") not in (None, 1, 1.0):
        message = f"options.{name}={shown(value)} is not possible: repeat_penalty counts {counts}"
        raise Refused(message, f"options.{name}", code="unsupported_parameter")


def _context(options: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the path and the value of num_ctx, the option by which a client asks for a context length in tokens.

    Returns None if the body does not have this option.
    """
    value = options.get(CONTEXT)
    return None if value is None else (f"options.{CONTEXT}", int(value))


def _format(given: Any) -> dict[str, Any]:
    """Convert the field `format`, "json" or a JSON schema, to fields of SamplingParams. Raises Refused."""
    if given in (None, ""):
        return {}
    if given == "json":
        return {"json_object": True}
    if isinstance(given, Mapping):
        return {"json_schema": given}
    raise Refused(f"format={shown(given)} is not possible: it must be 'json', or a JSON schema", "format")


def _think(given: Any) -> tuple[str | None, bool | None]:
    """Convert the field `think` to a reasoning effort, such as "low", and a flag that turns reasoning on or off.

    A value that the field does not give is None.
    """
    return (None, given) if given is None or isinstance(given, bool) else (given, None)


def _tools(given: Mapping[str, Any]) -> ToolRequest | None:
    functions = [tool.get("function", tool) for tool in listed(given.get("tools", []))]
    for i, function in enumerate(functions):
        if not isinstance(function, Mapping):
            raise Refused(f"tools[{i}].function={shown(function)} is not possible: it must be an object", "tools")
    return tool_request(functions, AUTO, True)


def _of_prompt(body: Body) -> tuple[list[Message], tuple[str, ...], str | None]:
    """Return the messages, the prompts, and the prompt for a model without a chat template, of an /api/generate body.

    The field `prompt` becomes a message of the user. With `raw` or a suffix, it becomes a prompt instead, and the last
    value is None.
    """
    prompt, system, suffix = (body.get(name, "") for name in ("prompt", "system", "suffix"))
    if not prompt:
        return [], (), None
    if body.get("raw") or suffix:
        return [], (prompt,), None
    begun: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*begun, {"role": "user", "content": prompt}], (), prompt


def _of_chat(body: Body) -> tuple[list[Message], tuple[str, ...], str | None]:
    """Convert the messages of a body of /api/chat to the form of chat templates. Raises Refused.

    Returns the messages, no prompts, and None, because this route has no prompt for a model without a chat template.
    """
    given = body.get("messages", [])
    if not isinstance(given, list):
        example = '[{"role": "user", "content": "hello"}]'
        raise Refused(f"messages={shown(given)} is not possible: it must be a list such as {example}", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)], (), None


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else message
    if role not in _ROLES:
        raise Refused(f"{where} has the role {shown(role)}: it must be one of {', '.join(_ROLES)}", where)
    if message.get("images"):
        raise Refused(f"{where} has images: the model reads texts alone", f"{where}.images")
    content = message.get("content")
    entry = dict[str, Any](role=role)
    if content is not None and not isinstance(content, str):
        raise Refused(f"{where}.content={shown(content)} is not possible: it must be a text", f"{where}.content")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Refused(f"{where}.tool_calls={shown(calls)} is not possible: it must be a list of objects", where)
    if content or not calls:
        entry["content"] = content or ""
    if calls:
        entry["tool_calls"] = [{"type": "function", **call} for call in calls]
    if message.get("thinking"):
        entry["reasoning_content"] = message["thinking"]
    if role == "tool":
        name = message.get("tool_name", message.get("name"))
        entry |= {} if name is None else {"name": name}
        entry |= {} if "tool_call_id" not in message else {"tool_call_id": message["tool_call_id"]}
    return entry


# ---------------------------------------------------------------------------------------------------------- answers


def answer(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, answer_id: str, created_s: int
) -> dict[str, Any]:
    """Return the body of a whole answer, as sent without streaming."""
    if not outputs:
        return {**_head(job), **_said(job, {}), "done": True, **job.given}
    output = outputs[0]
    said: dict[str, Any] = {"content": output.content}
    if output.reasoning:
        said["thinking"] = output.reasoning
    if output.tool_calls:
        said["tool_calls"] = [_call(i, call) for i, call in enumerate(output.tool_calls)]
    body = {**_head(job), **_said(job, said), **_ending(output)}
    return body | ({"forerun": report_of(outputs)} if job.report else {})


def error_answer(error: ForerunError, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON body with which this API reports an error."""
    return status_of(error)[0], {"error": str(error)}


class Stream:
    """Makes the JSON lines of one streamed answer; see `routes.Events`."""

    def __init__(self, job: Job, prompts: Seq[Seq[int]], tokenizer: Tokenizer, answer_id: str, created_s: int) -> None:
        self._job, self._num_calls = job, 0

    def begin(self) -> bytes:
        """Return no bytes, because this API's first line already has text."""
        return b""

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return the lines for a chunk of the answer; no bytes if the chunk adds nothing."""
        parts = chunk.parts
        if parts is None:
            parts = [Text(chunk.text)] if chunk.text else []
        return b"".join(self._line(self._part(part)) for part in parts)

    def _part(self, part: Part) -> dict[str, Any]:
        match part:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"content": "", "thinking": text}
            case ToolCall():
                self._num_calls += 1
                return {"content": "", "tool_calls": [_call(self._num_calls - 1, part)]}

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """Return the last line, with the reason why the answer ended, token counts and durations."""
        if not outputs:
            return _as_line({**_head(self._job), **_said(self._job, {}), "done": True, **self._job.given})
        more = {"forerun": report_of(outputs)} if self._job.report else {}
        return _as_line({**_head(self._job), **_said(self._job, {}), **_ending(outputs[0]), **more})

    def fail(self, error: ForerunError) -> bytes:
        """Return the line that reports an error after the response's status has been sent."""
        return _as_line(error_answer(error)[1])

    def _line(self, said: Mapping[str, Any]) -> bytes:
        return _as_line({**_head(self._job), **_said(self._job, said), "done": False})


def _as_line(piece: Mapping[str, Any]) -> bytes:
    return as_json(piece) + b"\n"


def _head(job: Job) -> dict[str, Any]:
    return {"model": job.model, "created_at": _time(datetime.now(UTC))}


def _time(at: datetime) -> str:
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _said(job: Job, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a piece of an answer in the form that the job's route, /api/chat or /api/generate, gives to a piece.

    said: the fields of the piece, such as content, thinking and tool_calls.
    """
    entry = {"content": "", **said}
    if job.url == CHAT:
        return {"message": {"role": "assistant", **entry}}
    return {"response": entry.pop("content"), **entry}


def _call(number: int, call: ToolCall) -> dict[str, Any]:
    function = {"index": number, "name": call.name, "arguments": call.values()}
    return {"id": f"call_{call.id}", "function": function}


def _ending(output: RequestOutput) -> dict[str, Any]:
    """Return the fields that end an answer: done_reason, token counts, and durations in nanoseconds."""
    report = output.report
    begun_s = report.scheduled_at_s or report.arrived_at_s
    first_s = report.first_token_at_s or report.ended_at_s or begun_s
    last_s = report.ended_at_s or first_s
    return {
        "done": True,
        "done_reason": output.finish_reason,
        "total_duration": _nanoseconds(last_s - report.arrived_at_s),
        "load_duration": 0,
        "prompt_eval_count": len(output.prompt_ids),
        "prompt_eval_duration": _nanoseconds(first_s - begun_s),
        "eval_count": len(output.token_ids),
        "eval_duration": _nanoseconds(last_s - first_s),
    }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


# ------------------------------------------------------------------------------------------------ what is served


def tags(models: Models, key: str) -> dict[str, Any]:
    """Return the list of models for /api/tags. Each model has the name that appears in answers.

    key: not used (see `Look`).
    """
    return {"models": [{**_known(one), "modified_at": _at(models.started_s)} for one in models.all]}


def running(models: Models, key: str) -> dict[str, Any]:
    """Return all models as running models, because every model stays loaded. key: not used (see `Look`)."""
    far = "9999-12-31T23:59:59Z"
    return {
        "models": [
            {**_known(one), "expires_at": far, "size_vram": 0, "context_length": one.llm.engine.max_seq_len}
            for one in models.all
        ]
    }


def version(models: Models, key: str) -> dict[str, Any]:
    """Return the version of Ollama whose API this server follows, and the version of forerun.

    key: not used (see `Look`).
    """
    return {"version": FOLLOWED, "forerun": __version__}


def _named(texts: Reader, read: Given) -> Counted:
    """Return the name of the model that a body of /api/show asks for, and the names of ignored fields.

    texts: reads the bodies of the model. read: the fields of the body.
    """
    return {"model": texts.name}, tuple(read.ignored)


def show(models: Models, named: dict[str, Any]) -> dict[str, Any]:
    """Return the details of a model: its chat template, its default parameters, its size and its capabilities."""
    service = models.of(named["model"])
    llm, spec = service.llm, service.llm.checkpoint.model.config
    template, capabilities = "", ["completion"]
    with suppress(NotFound):  # a base model has none
        source = llm.chat_template
        template = source.text
        capabilities += ["tools"] if source.answer_marks.dialect is not None else []
        capabilities += ["thinking"] if source.reads & THINKING else []
    named = {ours: theirs for theirs, ours in OPTIONS.items()}
    lines = [f"{named[name]} {json.dumps(value)}" for name, value in llm.usual_fields.items() if name in named]
    kind = spec.model_type
    return {
        "modelfile": f"# forerun serve {service.name}",
        "parameters": "\n".join(lines),
        "template": template,
        "details": _details(service),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": spec.num_weights,
            f"{kind}.context_length": llm.engine.max_seq_len,
            f"{kind}.embedding_length": spec.hidden_size,
            f"{kind}.block_count": spec.num_layers,
        },
        "capabilities": capabilities,
        "modified_at": _at(models.started_s),
    }


def _known(service: Served) -> dict[str, Any]:
    """Return a model's entry in the lists of models.

    The entry's size is the number of bytes of weights that a pass reads. The entry's digest is a hash of the model's
    name, because there is no digest of the model's files.
    """
    return {
        "name": service.name,
        "model": service.name,
        "size": service.llm.checkpoint.model.bytes_per_pass,
        "digest": hashlib.sha256(service.name.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Served) -> dict[str, Any]:
    model = service.llm.checkpoint.model
    kind, num = model.config.model_type, model.config.num_weights
    return {
        "parent_model": "",
        "format": "",
        "family": kind,
        "families": [kind],
        "parameter_size": f"{num / 1e9:.1f}B" if num >= 10**9 else f"{num / 1e6:.0f}M",
        "quantization_level": model.precision,
    }


def _at(seconds: int) -> str:
    return _time(datetime.fromtimestamp(seconds, UTC))


_FIXED = "models are not fetched or changed by requests: start `forerun serve` with the ones that are to be served"


def _answering(url: str, fields: Fields, talk: Callable[[Body], Any]) -> Generate:
    form = Form(url, fields, other_names=_NAMES, grammars=("format",))
    return Generate(form, partial(_read, url, talk), answer, Stream, LINES, b"")


API = Api(
    (
        _answering(CHAT, _OF_CHATS, _of_chat),
        _answering(GENERATE, _OF_PROMPTS, _of_prompt),
        Count(Form(SHOW, _OF_SHOW, other_names=_NAMES, is_of_an_answer=False), _named, show),
        Look("/api/tags", tags),
        Look("/api/ps", running),
        Look("/api/version", version),
    ),
    error_answer,
    below=("/api",),
    is_lax=True,
    absent={
        **dict.fromkeys(("/api/embed", "/api/embeddings"), VECTORS),
        **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/"), _FIXED),
    },
)
