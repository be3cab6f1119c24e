"""Anthropic's /v1/messages and /v1/messages/count_tokens: their bodies and answers.

`system`, a text or a list of blocks, becomes the first message. Consecutive messages of the same role become one
message. If the last message is from the assistant, the answer continues that message. Each tool result in a user
message becomes a separate message. The user message with the other blocks follows the tool results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, shown
from forerun.serve.absent import FILES
from forerun.serve.bodies import (
    ONE_ANSWER,
    Form,
    Given,
    Job,
    Message,
    Refused,
    Usage,
    params_of,
    report_of,
    status_of,
    texts_of,
    variables,
    wants_report,
)
from forerun.serve.events import event
from forerun.serve.fields import (
    CONTENT,
    EFFORT,
    FLAG,
    NAME,
    OBJECT,
    OF_PARAMS,
    TEXT,
    Fields,
    array,
    by_reader,
    honoured,
    inert,
    limited,
    neutral,
    one_of,
    or_null,
    required,
    structure,
)
from forerun.serve.formats import params_of_format
from forerun.serve.routes import Api, Count, Counted, Generate, Reader
from forerun.serve.schemas import check_schema
from forerun.serve.tools import listed, thinking_limit, tool_request
from forerun.text.parts import AnswerParts, Part, Reasoning, Span, Text, ToolCall
from forerun.text.tools import AUTO, NONE, REQUIRED, ToolRequest

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.text.tokenizer import Tokenizer

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
_KINDS = frozenset(("text",))
_ROLES = ("user", "assistant", "system")  # newer agents send system messages in between, as reminders
_BUDGET, _FORMAT = "thinking.budget_tokens", "output_config.format"
_COUNTED: Fields = {
    "messages": required(array(structure(("role", "content"), role=one_of(*_ROLES), content=CONTENT), 1), is_read=True),
    **honoured(model=TEXT, stream=FLAG, chat_template_kwargs=OBJECT, context_management=OBJECT),
    **by_reader(
        system=CONTENT,
        max_tokens=OF_PARAMS["max_tokens"],
        stop_sequences=limited("stop", array(NAME)),
        tools=array(structure(("name", "input_schema"), name=NAME, description=TEXT, input_schema=OBJECT)),
        tool_choice=structure(("type",), type=one_of("auto", "any", "none"), disable_parallel_tool_use=FLAG),
        thinking=structure(
            ("type",), type=one_of("enabled", "disabled", "adaptive"), budget_tokens=OF_PARAMS["max_tokens"]
        ),
        output_config=structure(effort=or_null(EFFORT), format=or_null(OBJECT)),
    ),
    "n": neutral((1,), ONE_ANSWER),
    "mcp_servers": neutral(([],), "servers of tools are not called from here: send their tools"),
    "container": neutral((), "nothing is executed here"),
    **inert("the cache is by the prompt itself", "cache_control"),
    **inert("there is one place", "inference_geo"),
}
_FIELDS: Fields = {**_COUNTED, "max_tokens": required(OF_PARAMS["max_tokens"], is_read=True)}
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


def _read(read: Given, model: str, defaults: Mapping[str, Any]) -> Job:
    return _job(read, model, defaults, {"max_tokens": "max_tokens", "stop_sequences": "stop"})


def _count(texts: Reader, read: Given) -> Counted:
    """Return the number of tokens of a conversation, and the names of ignored fields.

    texts: reads the bodies of the model. read: the fields of the body.
    """
    job = texts.templated(_job(read, texts.name, {}, {}))
    return {"input_tokens": len(texts.encode(job)[0])}, job.ignored


def _job(read: Given, model: str, defaults: Mapping[str, Any], names: Mapping[str, str]) -> Job:
    given, ignored = read.fields, read.ignored
    messages = _messages(given.get("system"), given.get("messages"))
    tools = _tools(given, ignored)
    if given.get("context_management", {}).get("edits"):
        ignored.append("context_management")  # the conversation is sent as it is, and nothing of it is left out
    goes_on = messages[-1]["role"] == "assistant"
    if goes_on and messages[-1].get("tool_calls"):
        raise Refused("the last message calls tools: send what they bring as tool_result, in a message of the user")
    effort = _effort(given.get("output_config", {}), read)
    held = params_of_format({_FORMAT: given.get("output_config", {}).get("format")}, _FORMAT)
    return Job(
        MESSAGES,
        model,
        params_of({**given, **held}, {"max_tokens": None, **defaults}, names, None),
        messages=messages,
        variables=variables(given),
        continue_final_message=goes_on,
        tools=tools,
        effort=effort,
        thinks=_thinks(given.get("thinking", {})),
        max_thinking_tokens=thinking_limit(given.get("thinking", {}).get("budget_tokens"), _BUDGET),
        thinking_wish=_BUDGET,
        stream=given.get("stream", False),
        report=wants_report(given),
        ignored=tuple(ignored),
    )


def _tools(given: Mapping[str, Any], ignored: list[str]) -> ToolRequest | None:
    """Return the tools that the client runs, and the choice among them; None if no tool may be called.

    Anthropic's predefined tools have no schema. They are left out, and added to the list `ignored`. Raises Refused.
    """
    functions = []
    for i, tool in enumerate(listed(given.get("tools", []))):
        if tool.get("type", "custom") != "custom":
            ignored.append(f"tools[{i}]")
            continue
        functions.append({**tool, "parameters": tool.get("input_schema")})
    wanted = given.get("tool_choice", {"type": AUTO})
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    choices = {AUTO: AUTO, NONE: NONE, "any": REQUIRED, "tool": wanted.get("name") if kind == "tool" else None}
    choice = choices.get(kind) if isinstance(kind, str) else None
    if not isinstance(choice, str):
        form = '{"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": "..."}'
        raise Refused(f"tool_choice={shown(wanted)} is not possible: it must be {form}", "tool_choice")
    if choice == AUTO and not functions:
        return None
    one_at_once = wanted.get("disable_parallel_tool_use", False)
    check_schema("tool_choice.disable_parallel_tool_use", one_at_once, FLAG)
    return tool_request(functions, choice, not one_at_once)


def _thinks(thinking: Any) -> bool | None:
    """Return whether the field `thinking` turns thinking on or off; None = the model's default. Raises Refused."""
    kinds = {"enabled": True, "disabled": False, "adaptive": None, None: None}
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if not isinstance(thinking, Mapping) or not isinstance(kind, str | None) or kind not in kinds:
        message = f"thinking={shown(thinking)} is not possible: its type must be enabled, disabled or adaptive"
        raise Refused(message, "thinking")
    return kinds[kind]


def _effort(config: Any, read: Given) -> str | None:
    """Return the reasoning effort in the field `output_config`, such as "low"; None if the body gives no effort.

    config: the value of output_config. read: the fields of the body. Raises Refused for an unsupported field of
    output_config, unless such fields are ignored.
    """
    if not isinstance(config, Mapping):
        raise Refused(f"output_config={shown(config)} is not possible: it must be an object", "output_config")
    for name in config.keys() - {"effort", "format"}:
        if config[name] is None:
            continue
        message = f"output_config.{name}={shown(config[name])} is not possible: it is not built; leave it out"
        read.ignore(Refused(message, f"output_config.{name}", code="unsupported_parameter"))
    effort: str | None = config.get("effort")
    check_schema("output_config.effort", effort, or_null(EFFORT))
    return effort


def _messages(system: Any, given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        example = '[{"role": "user", "content": "hello"}]'
        raise Refused(f"messages={shown(given)} is not possible: it must be a list such as {example}", "messages")
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of tools, by the id of the call
    if system:
        messages.append({"role": "system", "content": texts_of(system, "system", _KINDS)})
    for i, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else message
        if role not in _ROLES:
            raise Refused(f"messages[{i}] has the role {shown(role)}: it must be user or assistant", f"messages[{i}]")
        for one in _of_message(role, message.get("content"), f"messages[{i}].content", names):
            last = messages[-1] if messages else {}
            if last.get("role") == one["role"] != "tool" and "tool_calls" not in last:
                texts = [m["content"] for m in (last, one) if "content" in m]
                messages[-1] = {**last, **one, **({"content": "\n".join(texts)} if texts else {})}
            else:
                messages.append(one)
    return [*messages]


def _of_message(role: str, content: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Convert one message of a body. Return a message for each tool result, and then a message with the other blocks.

    names: id of a tool call -> name of the tool. The tool calls in this message are added to `names`. where: the path
    of `content` in the body.
    """
    if content == [] and role == "assistant":
        return [{"role": role, "content": ""}]
    if not isinstance(content, list) or all(isinstance(b, dict) and b.get("type") == "text" for b in content):
        return [{"role": role, "content": texts_of(content, where, _KINDS)}]
    results = list[dict[str, Any]]()
    texts = list[Any]()
    own = dict[str, Any]()
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        at = f"{where}[{i}]"
        if kind == "tool_result" and role == "user":
            results.append(_result(block, at, names))
        elif kind == "tool_use" and role == "assistant":
            own.setdefault("tool_calls", []).append(_call(block, at, names))
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            if block["thinking"]:
                own["reasoning_content"] = own.get("reasoning_content", "") + block["thinking"]
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # only its maker can read it
        else:
            texts += _texts_in(block)
    if texts:
        own["content"] = texts_of(texts, where, _KINDS)
    return [*results, *([{"role": role, **own}] if own else [])]


def _texts_in(block: Any) -> list[Any]:
    """Convert a document or a search result to text blocks: one each for title and context, then those with the text.

    Any other block is returned unchanged, in a list with one entry. A document without text, such as a PDF, is also
    returned unchanged, and is later refused because of its type.
    """
    kind = block.get("type") if isinstance(block, Mapping) else None
    inside = block.get("content") if kind == "search_result" else block.get("source") if kind == "document" else None
    if isinstance(inside, Mapping) and kind == "document":
        data = inside.get("data") if inside.get("type") == "text" else None
        inside = inside.get("content") if inside.get("type") == "content" else data
    texts = [{"type": "text", "text": inside}] if isinstance(inside, str) else inside
    if not isinstance(texts, list) or not texts:
        return [block]
    about = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return [*({"type": "text", "text": text} for text in about), *texts]


def _call(block: Mapping[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    call_id, name, values = (block.get(key) for key in ("id", "name", "input"))
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(values, dict):
        raise Refused(f"{where} must have id and name, which are texts, and input, an object", where)
    names[call_id] = name
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": values}}


def _result(block: Mapping[str, Any], where: str, names: Mapping[str, str]) -> dict[str, Any]:
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise Refused(f"{where} has no tool_use_id: give it the id of the tool_use that it answers", where)
    blocks = [one for block in content for one in _texts_in(block)] if isinstance(content, list) else content
    text = texts_of(blocks, f"{where}.content", _KINDS) if content else ""
    named = {"name": names[call_id]} if call_id in names else {}
    return {"role": "tool", "tool_call_id": call_id, **named, "content": text}


# ---------------------------------------------------------------------------------------------------------- answers


def answer(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, answer_id: str, created_s: int
) -> dict[str, Any]:
    """Return the whole answer: a message with blocks of text, thinking and tool use."""
    answer_parts = outputs[0].answer_parts or AnswerParts([Span("text", outputs[0].text)])
    body = {
        **_message(job, answer_id),
        "content": [_block(one) for one in answer_parts.items or [Span("text")]],
        **_ending(outputs[0]),
        "usage": _usage(Usage.of(outputs, job.params)),
    }
    return body | ({"forerun": report_of(outputs)} if job.report else {})


def error_answer(error: ForerunError, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON body with which this API reports an error."""
    status = status_of(error)[0]
    kind = _KIND_OF.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id or None}


def _block(one: Span | ToolCall) -> dict[str, Any]:
    """Return a text, a piece of thinking or a tool call as a content block of this API."""
    if isinstance(one, Span):
        return {**_begun(one), "thinking" if one.kind == "reasoning" else "text": one.text}
    return {**_begun(one), "input": one.values()}


def _begun(one: Span | ToolCall) -> dict[str, Any]:
    """Return the content block for `one` with empty content, as a stream announces it.

    The signature of a thinking block is empty, because this server signs nothing.
    """
    if isinstance(one, ToolCall):
        return {"type": "tool_use", "id": f"toolu_{one.id}", "name": one.name, "input": {}}
    if one.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


class Stream:
    """Makes the server-sent events of one streamed answer; see `routes.Events`."""

    def __init__(self, job: Job, prompts: Seq[Seq[int]], tokenizer: Tokenizer, answer_id: str, created_s: int) -> None:
        self._job = job
        self._id = answer_id
        self._num_prompt_tokens = len(prompts[0])
        self._parts = AnswerParts()  # its last item is the block that is open

    def begin(self) -> bytes:
        """Return the events that begin a message.

        The usage in these events counts all prompt tokens as not cached. The event message_delta has the true counts.
        """
        message = {
            **_message(self._job, self._id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(self._num_prompt_tokens, 0, 0)),
        }
        return _event("message_start", message=message) + _event("ping")

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return the events for a chunk of the answer; no bytes if the chunk adds nothing."""
        parts = chunk.parts
        if parts is None:
            parts = [Text(chunk.text)] if chunk.text else []
        return b"".join(map(self._part, parts))

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """Return the events that end the stream. They contain the stop reason and the usage (token counts)."""
        usage = _usage(Usage.of(outputs, self._job.params))
        more = {"forerun": report_of(outputs)} if self._job.report else {}
        events = b"" if self._parts.items else self._part(Text(""))
        return (
            events
            + self._close()
            + _event("message_delta", delta=_ending(outputs[0]), usage=usage, **more)
            + _event("message_stop")
        )

    def _part(self, part: Part) -> bytes:
        """Return the events for one part of the answer. The part begins a new block, or continues the last block."""
        num, events = len(self._parts.items), b""
        self._parts.add(part)
        if len(self._parts.items) > num:
            events = (self._close(num - 1) if num else b"") + _event(
                "content_block_start", index=num, content_block=_begun(self._parts.items[-1])
            )
        delta = None
        match part:
            case Text(text) if text:
                delta = {"type": "text_delta", "text": text}
            case Reasoning(text):
                delta = {"type": "thinking_delta", "thinking": text}
            case ToolCall():
                delta = {"type": "input_json_delta", "partial_json": part.arguments}
        index = len(self._parts.items) - 1
        return events + (_event("content_block_delta", index=index, delta=delta) if delta else b"")

    def _close(self, index: int | None = None) -> bytes:
        return _event("content_block_stop", index=len(self._parts.items) - 1 if index is None else index)

    def fail(self, error: ForerunError) -> bytes:
        """Return the event that reports an error after the response's status has been sent."""
        return event(error_answer(error)[1], "error")


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _message(job: Job, answer_id: str) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": job.model}


def _ending(output: RequestOutput) -> dict[str, Any]:
    reason = _STOP_REASONS.get(str(output.finish_reason))
    reason = "tool_use" if reason == "end_turn" and output.tool_calls else reason
    return {"stop_reason": "stop_sequence" if output.stop_text else reason, "stop_sequence": output.stop_text}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the token counts. In this API, input_tokens does not include tokens that came from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


API = Api(
    (
        Generate(Form(MESSAGES, _FIELDS, grammars=(_FORMAT,)), _read, answer, Stream),
        Count(Form(COUNT_TOKENS, _COUNTED), _count),
    ),
    error_answer,
    below=(MESSAGES,),
    absent={"/v1/messages/batches": FILES},
)
