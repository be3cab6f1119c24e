"""Bodies of /v1/messages and /v1/messages/count_tokens (the API of Anthropic), and answers to them.

`system`, as a text or in blocks, becomes the first message. Messages of one role that follow each other become one.
Where the last message is the assistant's, the answer goes on right behind its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, shown
from forerun.serve.bodies import (
    NO_CALLS,
    ONE_ANSWER,
    Form,
    Given,
    Job,
    Message,
    Neutral,
    Refused,
    Usage,
    check,
    flag,
    params_of,
    report_of,
    status_of,
    texts_of,
    variables,
    wants_report,
)
from forerun.serve.events import event

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.text.tokenizer import Tokenizer

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
_KINDS = frozenset(("text",))
_ROLES = ("user", "assistant", "system")  # the last one is what newer agents remind the model with, in between


def _has_kind(*kinds: str) -> Any:
    return lambda value: isinstance(value, dict) and value.get("type") in kinds


_NEUTRAL: Mapping[str, Neutral] = {
    "tools": (([],), NO_CALLS),
    "tool_choice": (_has_kind("none", "auto"), NO_CALLS),
    "n": ((1,), ONE_ANSWER),
    "mcp_servers": (([],), NO_CALLS),
    "thinking": (_has_kind("disabled"), "the model is not told to think"),
    "output_config": (({},), "the model is not told how long to think, and its output is not held to a schema"),
    "context_management": (({}, {"edits": []}), "a conversation is not shortened here"),
    "container": ((), "nothing is executed here"),
}
_INERT = frozenset(("metadata", "service_tier", "cache_control", "inference_geo"))
_OWN = {"model", "messages", "system", "max_tokens", "stop_sequences", "stream", "chat_template_kwargs"}
FORM = Form(MESSAGES, _OWN, _INERT, _NEUTRAL)
_KIND_OF = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


def read_body(
    body: object,
    model: str,
    defaults: Mapping[str, Any] | None = None,
    served_names: Seq[str] = (),
    *,
    ignore_unsupported: bool = False,
) -> Job:
    """What a body asks for; see `openai.read_body`."""
    read = check(FORM, body, served_names, ignore_unsupported=ignore_unsupported)
    if "max_tokens" not in read.fields:
        raise Refused("there is no max_tokens: this API wants it", "max_tokens")
    names = {"max_tokens": "max_tokens", "stop_sequences": "stop"}
    return _job(read, model, defaults or {}, names)


def read_count(body: object, model: str, served_names: Seq[str] = (), *, ignore_unsupported: bool = False) -> Job:
    """What a body of COUNT_TOKENS asks for: the conversation whose tokens are counted."""
    return _job(check(FORM, body, served_names, ignore_unsupported=ignore_unsupported), model, {}, {})


def _job(read: Given, model: str, defaults: Mapping[str, Any], names: Mapping[str, str]) -> Job:
    given = read.fields
    messages = _messages(given.get("system"), given.get("messages"))
    return Job(
        MESSAGES,
        model,
        params_of(given, {"max_tokens": None, **defaults}, names, None),
        messages=messages,
        variables=variables(given),
        continue_final_message=messages[-1]["role"] == "assistant",
        stream=flag(given, "stream"),
        report=wants_report(given),
        ignored=tuple(read.ignored or ()),
    )


def _messages(system: Any, given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        example = '[{"role": "user", "content": "hello"}]'
        raise Refused(f"messages={shown(given)} is not possible: it must be a list such as {example}", "messages")
    made: list[dict[str, str]] = []
    if system:
        made.append({"role": "system", "content": texts_of(system, "system", _KINDS)})
    for i, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else message
        if role not in _ROLES:
            raise Refused(f"messages[{i}] has the role {shown(role)}: it must be user or assistant", f"messages[{i}]")
        text = texts_of(message.get("content"), f"messages[{i}].content", _KINDS)
        if made and made[-1]["role"] == role:
            made[-1]["content"] += f"\n{text}"
        else:
            made.append({"role": role, "content": text})
    return [*made]


# ---------------------------------------------------------------------------------------------------------- answers


def answer_body(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, *, answer_id: str, created_s: int
) -> dict[str, Any]:
    """The whole answer: a message with one block of text."""
    made = {
        **_message(job, answer_id),
        "content": [{"type": "text", "text": outputs[0].text}],
        **_ending(outputs[0]),
        "usage": _usage(Usage.of(outputs, job.params)),
    }
    return made | ({"forerun": report_of(outputs)} if job.report else {})


def error_answer(error: ForerunError, request_id: str | None = None) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body of an answer that is an error."""
    status = status_of(error)[0]
    kind = _KIND_OF.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


class Stream:
    """The events of one answer."""

    def __init__(self, job: Job, prompts: Seq[Seq[int]], tokenizer: Tokenizer, answer_id: str, created_s: int) -> None:
        self._job, self._id, self._num_prompt_tokens = job, answer_id, len(prompts[0])

    def begin(self) -> bytes:
        """The message, still empty, and its block. The tokens found in the cache are said at the end."""
        message = {
            **_message(self._job, self._id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(self._num_prompt_tokens, 0, 0)),
        }
        block = {"type": "text", "text": ""}
        return (
            _event("message_start", message=message)
            + _event("content_block_start", index=0, content_block=block)
            + _event("ping")
        )

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """What a chunk adds; nothing where its text is held back."""
        delta = {"type": "text_delta", "text": chunk.text}
        return _event("content_block_delta", index=0, delta=delta) if chunk.text else b""

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """Why the text ends, and the usage."""
        usage = _usage(Usage.of(outputs, self._job.params))
        more = {"forerun": report_of(outputs)} if self._job.report else {}
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=_ending(outputs[0]), usage=usage, **more)
            + _event("message_stop")
        )

    def fail(self, error: ForerunError) -> bytes:
        """An error behind the first event."""
        return event(error_answer(error)[1], "error")


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _message(job: Job, answer_id: str) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": job.model}


def _ending(output: RequestOutput) -> dict[str, Any]:
    reason = _STOP_REASONS.get(str(output.finish_reason))
    return {"stop_reason": "stop_sequence" if output.stop_text else reason, "stop_sequence": output.stop_text}


def _usage(usage: Usage) -> dict[str, Any]:
    """input_tokens: those that were not found in the cache, as this API counts them."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
