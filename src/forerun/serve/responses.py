"""Bodies of /v1/responses, and answers to them. It is stateless: nothing is kept to go on from, whatever `store` says.

`instructions` and the system and developer messages at the beginning become one system message, because chat templates
know one. Follows the API reference of OpenAI (Responses) and the order of its stream events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, shown
from forerun.serve.bodies import (
    NO_CALLS,
    NO_GRAMMAR,
    ONE_ANSWER,
    Form,
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
from forerun.serve.logprobs import chat_logprobs
from forerun.serve.openai import INERT

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.text.tokenizer import Tokenizer

RESPONSES = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
_KINDS = frozenset(("input_text", "output_text", "text"))
_ROLES = ("user", "assistant", "system", "developer")
_STATELESS = "nothing is kept between requests: send the whole conversation as input"


def _has_no_reasoning(value: Any) -> bool:
    """How a summary of the reasoning looks changes nothing where there is none; how much of it there is, would."""
    return isinstance(value, dict) and all(
        value[name] in (None, "none") for name in value if name not in ("summary", "generate_summary")
    )


def _is_plain_text(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) <= {"format", "verbosity"}
        and value.get("format") in (None, {"type": "text"})
        and value.get("verbosity") in (None, "medium")
    )


_NEUTRAL: Mapping[str, Neutral] = {
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "n": ((1,), ONE_ANSWER),
    "background": ((False,), "an answer is given when it is asked for"),
    "prompt": ((), "no prompts are kept here: send its text"),
    "tools": (([],), NO_CALLS),
    "tool_choice": (("none", "auto"), NO_CALLS),
    "parallel_tool_calls": ((True, False), NO_CALLS),
    "max_tool_calls": (lambda value: type(value) is int, NO_CALLS),
    "truncation": (("disabled",), "a conversation is not shortened here"),
    "reasoning": (_has_no_reasoning, "the model is not told how long to think"),
    "text": (_is_plain_text, NO_GRAMMAR),
    "stream_options": (lambda value: isinstance(value, dict) and set(value) <= {"include_obfuscation"}, "no such one"),
}
# What an answer repeats of its body.
_REPEATED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
_OWN = {"model", "input", "instructions", "max_output_tokens", "stop", "stream", "include", "top_logprobs"}
FORM = Form(RESPONSES, _OWN | {"chat_template_kwargs"}, INERT, _NEUTRAL)


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
    given = read.fields
    names = {"max_output_tokens": "max_tokens", "stop": "stop"}
    params = params_of(given, {"max_tokens": None, **(defaults or {})}, names, _num_top_logprobs(given))
    assert isinstance(body, Mapping)
    return Job(
        RESPONSES,
        model,
        params,
        messages=_messages(given.get("instructions"), given.get("input")),
        variables=variables(given),
        stream=flag(given, "stream"),
        report=wants_report(given),
        ignored=tuple(read.ignored or ()),
        given={name: body[name] for name in _REPEATED if name in body},
    )


def _num_top_logprobs(given: Mapping[str, Any]) -> int | None:
    include, num_top = given.get("include", []), given.get("top_logprobs", 0)
    known = (LOGPROBS, "reasoning.encrypted_content")  # of which there is none
    for one in include if isinstance(include, list) else [include]:
        if not isinstance(one, str) or one not in known:
            message = f"include={shown(one)} is not possible: it must be a list of {' and '.join(map(repr, known))}"
            raise Refused(message, "include", code="unsupported_parameter")
    if num_top and LOGPROBS not in include:
        message = f'top_logprobs={shown(num_top)} needs include=["{LOGPROBS}"]: set both or neither'
        raise Refused(message, "top_logprobs")
    return num_top if LOGPROBS in include else None


def _messages(instructions: Any, given: Any) -> list[Message]:
    """The conversation. Raises Refused for items that are no messages of texts."""
    if instructions is not None and not isinstance(instructions, str):
        raise Refused(f"instructions={shown(instructions)} is not possible: it must be a text", "instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        example = '[{"role": "user", "content": "hello"}]'
        raise Refused(f"input={shown(given)} is not possible: it must be a text or a list such as {example}", "input")
    system, messages = [instructions] if instructions else [], list[Message]()
    for i, item in enumerate(items):
        role, text = _message(item, f"input[{i}]")
        if role in ("system", "developer") and not messages:
            system.append(text)
        else:
            messages.append({"role": "system" if role == "developer" else role, "content": text})
    if not messages:
        raise Refused("input has no message of a user: there is nothing to answer", "input")
    return [*([{"role": "system", "content": "\n\n".join(system)}] if system else []), *messages]


def _message(item: Any, where: str) -> tuple[str, str]:
    kind = item.get("type", "message") if isinstance(item, dict) else item
    if kind != "message":
        raise Refused(f"{where} has the type {shown(kind)}: items must be messages, {NO_CALLS}", where)
    role = item.get("role")
    if role not in _ROLES:
        raise Refused(f"{where} has the role {shown(role)}: it must be one of {', '.join(_ROLES)}", where)
    return role, texts_of(item.get("content"), f"{where}.content", _KINDS)


# ---------------------------------------------------------------------------------------------------------- answers


def answer_body(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, *, answer_id: str, created_s: int
) -> dict[str, Any]:
    """The whole answer: a response object, incomplete where max_output_tokens or the context ended it."""
    output = outputs[0]
    logprobs = _logprobs(output.logprobs or [], output.prompt_ids[-1], tokenizer)
    made = _response(job, answer_id, created_s, _status(output))
    made["output"] = [_item(answer_id, output.text, logprobs, "completed" if _is_whole(output) else "incomplete")]
    made["usage"] = _usage(Usage.of(outputs, job.params))
    return made | ({"forerun": report_of(outputs)} if job.report else {})


class Stream:
    """The events of one answer, numbered, in the order of the API."""

    def __init__(self, job: Job, prompts: Seq[Seq[int]], tokenizer: Tokenizer, answer_id: str, created_s: int) -> None:
        self._job, self._tokenizer, self._id, self._created_s = job, tokenizer, answer_id, created_s
        self._left, self._text, self._logprobs, self._num_events = prompts[0][-1], "", list[dict[str, Any]](), 0
        self._place = {"item_id": f"msg_{answer_id}", "output_index": 0, "content_index": 0}

    def begin(self) -> bytes:
        """The response, and an empty message in it."""
        response = _response(self._job, self._id, self._created_s, "in_progress")
        item = {**_item(self._id, "", [], "in_progress"), "content": []}
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=_part("", []))
        )

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """What a chunk adds; nothing where its text is held back."""
        logprobs = _logprobs(chunk.logprobs or [], self._left, self._tokenizer)
        self._left = chunk.token_ids[-1] if chunk.token_ids else self._left
        self._text += chunk.text
        self._logprobs += logprobs
        if not chunk.text and not logprobs:
            return b""
        return self._event("response.output_text.delta", **self._place, delta=chunk.text, logprobs=logprobs)

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """The message as a whole, and the response with its usage."""
        response = answer_body(self._job, outputs, self._tokenizer, answer_id=self._id, created_s=self._created_s)
        item, text, logprobs = response["output"][0], self._text, self._logprobs
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs)
            + self._event("response.content_part.done", **self._place, part=_part(text, logprobs))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{response['status']}", response=response)
        )

    def fail(self, error: ForerunError) -> bytes:
        """An error behind the first event."""
        response = _response(self._job, self._id, self._created_s, "failed")
        response["error"] = {"code": status_of(error)[1] or "server_error", "message": str(error)}
        return self._event("response.failed", response=response)

    def _event(self, name: str, **data: Any) -> bytes:
        self._num_events += 1
        return event({"type": name, "sequence_number": self._num_events - 1, **data}, name)


def _status(output: RequestOutput) -> str:
    return "completed" if _is_whole(output) else "incomplete"


def _is_whole(output: RequestOutput) -> bool:
    return output.finish_reason != "length"


def _response(job: Job, answer_id: str, created_s: int, status: str) -> dict[str, Any]:
    given, params = job.given, job.params
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata") or {},
        "model": job.model,
        "output": [],
        "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "prompt_cache_key": given.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": given.get("user"),
    }


def _item(answer_id: str, text: str, logprobs: list[dict[str, Any]], status: str) -> dict[str, Any]:
    content = [_part(text, logprobs)]
    return {"id": f"msg_{answer_id}", "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(positions: Any, left: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat_logprobs(positions, left, tokenizer)["content"]
    return found


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }
