"""OpenAI's /v1/responses: bodies and answers, whose items are messages, reasoning and calls of functions.

`instructions` and the system and developer messages at the beginning become one system message, because chat templates
know only one. Consecutive reasoning, text and calls of the assistant become one message. A response is kept for a while
(kept.py) unless `store` is false. A later request can continue it with `previous_response_id`. Follows OpenAI's API
reference (Responses), also in the order of the stream's events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, shown
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
from forerun.serve.events import event, in_slices, num_values
from forerun.serve.fields import (
    EFFORT,
    FLAG,
    FUNCTION,
    NAME,
    OBJECT,
    OF_PARAMS,
    TEXT,
    THINKING_TOKENS,
    Fields,
    Schema,
    array,
    by_reader,
    either,
    honoured,
    integer,
    neutral,
    one_of,
    or_null,
    required,
    structure,
)
from forerun.serve.formats import params_of_format
from forerun.serve.logprobs import SaidLogprobs, said_logprobs
from forerun.serve.routes import Api, Generate, Look, Models, plain_error
from forerun.serve.tools import listed, thinking_limit, tool_request
from forerun.text.parts import AnswerParts, Part, Reasoning, Span, Text, ToolCall
from forerun.text.tools import AUTO, ToolRequest

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.text.tokenizer import Tokenizer

RESPONSES = "/v1/responses"
_FORMAT = "text.format"
LOGPROBS = "message.output_text.logprobs"
CUSTOM, CUSTOM_CALL, INPUT = "custom", "custom_tool_call", "input"  # tools that take a text in place of arguments
# What else `include` may ask for: hidden reasoning, and results of tools and pictures that do not exist here.
EMPTY = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
_KINDS = frozenset(("input_text", "output_text", "text", "refusal"))
_ROLES = ("user", "assistant", "system", "developer")
# Fields of the body that the answer repeats.
_REPEATED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "tools", "tool_choice", "reasoning"),
    *("text", "prompt_cache_key", "safety_identifier", "user", "previous_response_id", "max_tool_calls"),
)
_TOOL = {"description": None, "parameters": None, "strict": False}  # defaults of a repeated function
MOST_REPEATED = 20_000  # values of a field that the answer repeats

_UNREAD: Schema = {"description": "without effect; the header x-forerun-ignored of the answer says so"}
_CONTENT = either(
    TEXT, array(structure(("type", "text"), type=one_of("input_text", "output_text", "text"), text=TEXT), 1)
)
_ITEM = {
    "type": "object",
    "properties": {"type": one_of("message"), "role": one_of(*_ROLES), "content": _CONTENT},
    "required": ["role", "content"],
}
_FIELDS: Fields = {
    "input": required(either(TEXT, array(_ITEM, 1)), is_read=True),
    **honoured(
        model=TEXT,
        instructions=TEXT,
        stream=FLAG,
        parallel_tool_calls=FLAG,
        max_tool_calls=integer(1),
        reasoning=structure(effort=or_null(EFFORT), summary=_UNREAD, generate_summary=_UNREAD),
        text=structure(format=or_null(OBJECT), verbosity=_UNREAD),
        previous_response_id=TEXT,
        store=FLAG,
        chat_template_kwargs=OBJECT,
    ),
    **by_reader(
        max_output_tokens=OF_PARAMS["max_tokens"],
        stop=OF_PARAMS["stop"],
        include=array(one_of(LOGPROBS, *EMPTY)),
        top_logprobs=OF_PARAMS["logprobs"],
        tools=array({**FUNCTION, "properties": {"type": one_of("function"), **FUNCTION["properties"]}}),
        tool_choice=either(
            one_of("none", "auto", "required"), structure(("type", "name"), type=one_of("function"), name=NAME)
        ),
        max_thinking_tokens=THINKING_TOKENS,
    ),
    "conversation": neutral((), "conversations are not kept here: send previous_response_id, or the whole as input"),
    "n": neutral((1,), ONE_ANSWER),
    "background": neutral((False,), "an answer is given when it is asked for"),
    "prompt": neutral((), "no prompts are kept here: send its text"),
    "truncation": neutral(("disabled", "auto"), "a conversation is not shortened here"),
}


def _read(read: Given, model: str, defaults: Mapping[str, Any]) -> Job:
    given = read.fields
    names = {"max_output_tokens": "max_tokens", "stop": "stop"}
    held = params_of_format({_FORMAT: given.get("text", {}).get("format")}, _FORMAT)
    params = params_of({**given, **held}, {"max_tokens": None, **defaults}, names, _num_top_logprobs(given))
    tools = _tools(given, read.ignored)
    effort = given.get("reasoning", {}).get("effort")
    read.ignored.extend(_unread(given))
    return Job(
        RESPONSES,
        model,
        params,
        messages=_messages(given.get("instructions"), given.get("input")),
        tools=tools,
        effort=effort,
        max_thinking_tokens=thinking_limit(given.get("max_thinking_tokens"), "max_thinking_tokens"),
        items=in_slices(_items(given.get("input"))) if given.get("store", True) else None,
        variables=variables(given),
        stream=given.get("stream", False),
        report=wants_report(given),
        ignored=tuple(read.ignored),
        given=_repeated(read.body),
    )


def _repeated(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the body that the answer repeats.

    Raises Refused for a field with more than MOST_REPEATED values, because writing the field would delay other answers.
    """
    repeated = {name: body[name] for name in _REPEATED if name in body}
    for name, value in repeated.items():
        if num_values(value, MOST_REPEATED) > MOST_REPEATED:
            message = f"{name} has more than {MOST_REPEATED:,} values, which the answer would repeat: leave some out"
            raise Refused(message, name)
    return repeated


def _num_top_logprobs(given: Mapping[str, Any]) -> int | None:
    include, num_top = given.get("include", []), given.get("top_logprobs", 0)
    known = (LOGPROBS, *EMPTY)
    for one in include if isinstance(include, list) else [include]:
        if not isinstance(one, str) or one not in known:
            message = f"include={shown(one)} is not possible: it must be a list of {', '.join(map(repr, known))}"
            raise Refused(message, "include", code="unsupported_parameter")
    if num_top and LOGPROBS not in include:
        message = f'top_logprobs={shown(num_top)} needs include=["{LOGPROBS}"]: set both or neither'
        raise Refused(message, "top_logprobs")
    return num_top if LOGPROBS in include else None


def _tools(given: Mapping[str, Any], ignored: list[str]) -> ToolRequest | None:
    """Return the functions that the client runs, and the choice among them; None if no function may be called.

    Tools that a server would run are left out, and added to the list `ignored`. Raises Refused.
    """
    functions: list[Mapping[str, Any]] = []
    for i, tool in enumerate(listed(given.get("tools", []))):
        if tool.get("type") == "function":
            functions.append(tool)
        elif tool.get("type") == CUSTOM:
            functions.append(_with_input(tool, f"tools[{i}].format", ignored))
        else:
            ignored.append(f"tools[{i}]")
    choice = given.get("tool_choice", AUTO)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        if not isinstance(allowed := choice.get("tools"), list):
            message = f"tool_choice.tools={shown(allowed)} is not possible: it must be a list of tools"
            raise Refused(message, "tool_choice.tools")
        names = [tool.get("name") for tool in allowed if isinstance(tool, Mapping)]
        functions = [function for function in functions if function.get("name") in names]
        choice = choice.get("mode", AUTO)
    elif isinstance(choice, Mapping) and choice.get("type") in ("function", CUSTOM):
        choice = choice.get("name")
    if not isinstance(choice, str):
        form = '{"type": "function", "name": "..."}'
        message = f"tool_choice={shown(choice)} is not possible: it must be none, auto, required or {form}"
        raise Refused(message, "tool_choice")
    if choice == AUTO and not functions:
        return None
    return tool_request(functions, choice, given.get("parallel_tool_calls", True))


def _with_input(tool: Mapping[str, Any], where: str, ignored: list[str]) -> Mapping[str, Any]:
    """Convert a custom tool, whose input is a text, to a function with one text argument. Raises Refused.

    Models only know how to call functions. If the tool limits its input by a regular expression, the argument must
    match the expression. A Lark grammar is only described to the model, and its path `where` is added to the list
    `ignored`.
    """
    form = tool.get("format") or {"type": "text"}
    about = tool.get("description")
    limits = {}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "grammar"):
        raise Refused(f"{where}={shown(form)} is not possible: its type must be text or grammar", "tools")
    if form["type"] == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            wanted = "its syntax must be lark or regex, and its definition a text"
            raise Refused(f"{where}={shown(form)} is not possible: {wanted}", "tools")
        if syntax == "regex":
            limits = {"pattern": f"^(?:{definition})$"}
        else:
            ignored.append(where)
            about = f"{about or ''}\n\nThe input is of this grammar, in Lark's form:\n{definition}".lstrip()
    parameters = {"type": "object", "properties": {INPUT: {"type": "string", **limits}}, "required": [INPUT]}
    function = {"name": tool.get("name"), "parameters": {**parameters, "additionalProperties": False}}
    return {**function, **({"description": about} if about is not None else {}), "strict": bool(limits)}


def _unread(given: Mapping[str, Any]) -> list[str]:
    """Return the paths of the fields in `text` and `reasoning` that have no effect.

    No chat template reads text.verbosity. The options for summaries in `reasoning` have no effect, because reasoning is
    not summarised.
    """
    fields = (("text", "verbosity"), ("reasoning", "summary"), ("reasoning", "generate_summary"))
    return [f"{name}.{inner}" for name, inner in fields if given.get(name, {}).get(inner) is not None]


def _items(given: Any) -> list[Any]:
    """Return the field `input` of a body as a list of items. Raises Refused."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        example = '[{"role": "user", "content": "hello"}]'
        raise Refused(f"input={shown(given)} is not possible: it must be a text or a list such as {example}", "input")
    return items


def _messages(instructions: str | None, given: Any) -> list[Message]:
    """Return a conversation as messages. Raises Refused for an unknown item, and for content that is not text.

    given: the field `input` of the body.
    """
    system = [instructions] if instructions else []
    conversation = _Conversation()
    for i, item in enumerate(_items(given)):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else item
        if kind == "message":
            role, text = _message(item, where)
            if role in ("system", "developer") and not conversation.messages:
                system.append(text)
            else:
                conversation.say(role, text)
        elif kind == "reasoning":
            conversation.think(_reasoning_text(item, where))
        elif kind == "function_call":
            conversation.call(item, where)
        elif kind == CUSTOM_CALL:
            if not isinstance(text := item.get(INPUT), str):
                raise Refused(f"{where}.{INPUT}={shown(text)} is not possible: it must be a text", where)
            conversation.call({**item, "arguments": json.dumps({INPUT: text})}, where)
        elif kind in ("function_call_output", f"{CUSTOM_CALL}_output"):
            conversation.result(item, where)
        else:
            known = f"message, reasoning, function_call, {CUSTOM_CALL}, or one of the last two with _output"
            raise Refused(f"{where} has the type {shown(kind)}: it must be {known}", where)
    if not conversation.messages:
        raise Refused("input has no message of a user: there is nothing to answer", "input")
    opening = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return [*opening, *conversation.messages]


class _Conversation:
    """Builds messages from items. Consecutive reasoning, text and calls of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # of the assistant, while it goes on
        self._names: dict[str, str] = {}  # of the functions that were called, by the id of the call

    def say(self, role: str, text: str) -> None:
        """Add a message. An assistant's text completes the assistant's last message if that message has no text yet."""
        if role == "assistant" and self._turn is not None and "content" not in self._turn:
            self._turn["content"] = text
            return
        self._turn = None
        if role == "assistant":
            self._assistant()["content"] = text
        else:
            self.messages.append({"role": "system" if role == "developer" else role, "content": text})

    def think(self, text: str) -> None:
        """Add reasoning of the assistant. An empty text, as from encrypted reasoning, adds nothing."""
        if self._turn is not None and ("content" in self._turn or "tool_calls" in self._turn):
            self._turn = None
        if text:
            self._assistant()["reasoning_content"] = text

    def call(self, item: Mapping[str, Any], where: str) -> None:
        """Add a function call of the assistant. where: the path of the item in the body. Raises Refused."""
        call_id, name, arguments = (item.get(key) for key in ("call_id", "name", "arguments"))
        if not all(isinstance(value, str) for value in (call_id, name, arguments)):
            raise Refused(f"{where} must have the texts call_id, name and arguments", where)
        self._names[str(call_id)] = str(name)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def result(self, item: Mapping[str, Any], where: str) -> None:
        """Add the result of a function call. where: the path of the item in the body. Raises Refused."""
        self._turn = None
        call_id, output = item.get("call_id"), item.get("output")
        if not isinstance(call_id, str) or output is None:
            raise Refused(f"{where} must have call_id, a text, and output", where)
        text = "" if output == [] else texts_of(output, f"{where}.output", _KINDS)  # some functions bring nothing
        named = {"name": self._names[call_id]} if call_id in self._names else {}
        self.messages.append({"role": "tool", "tool_call_id": call_id, **named, "content": text})

    def _assistant(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def _reasoning_text(item: Mapping[str, Any], where: str) -> str:
    """Return the content of a reasoning item, or its summary if the content is empty; '' if both are empty.

    Both are empty in an item with encrypted reasoning.
    """
    for key, kinds in (("content", {"reasoning_text", "text"}), ("summary", {"summary_text"})):
        if item.get(key):
            return texts_of(item[key], f"{where}.{key}", kinds)
    return ""


def _message(item: Mapping[str, Any], where: str) -> tuple[str, str]:
    role = item.get("role")
    if role not in _ROLES:
        raise Refused(f"{where} has the role {shown(role)}: it must be one of {', '.join(_ROLES)}", where)
    content = item.get("content")
    return role, "" if content == [] and role == "assistant" else texts_of(content, f"{where}.content", _KINDS)


# ---------------------------------------------------------------------------------------------------------- answers


def answer(
    job: Job, outputs: Seq[RequestOutput], tokenizer: Tokenizer, answer_id: str, created_s: int
) -> dict[str, Any]:
    """Return the whole answer as a response object, incomplete if max_output_tokens or the context cut it off."""
    output = outputs[0]
    logprobs = said_logprobs(output, tokenizer)
    answer_parts = output.answer_parts or AnswerParts([Span("text", output.text)] if output.text else [])
    items = _output_items(answer_parts, _Items(job, answer_id), logprobs, is_whole=_is_whole(output))
    return _ended(job, outputs, answer_id, created_s, items)


def _ended(
    job: Job, outputs: Seq[RequestOutput], answer_id: str, created_s: int, items: list[dict[str, Any]]
) -> dict[str, Any]:
    response = _response(job, answer_id, created_s, "completed" if _is_whole(outputs[0]) else "incomplete")
    response["output"] = items
    response["usage"] = _usage(Usage.of(outputs, job.params))
    response["completed_at"] = int(time.time()) if _is_whole(outputs[0]) else None
    return response | ({"forerun": report_of(outputs)} if job.report else {})


def _output_items(
    answer_parts: AnswerParts, begun: _Items, logprobs: list[dict[str, Any]], *, is_whole: bool
) -> list[dict[str, Any]]:
    """Return the output items of an answer. An answer without text, reasoning and calls gets one empty message.

    begun: makes the items without content. logprobs: the log-probabilities for the first text. is_whole: whether the
    answer was not cut off.
    """
    items = []
    for n, one in enumerate(answer_parts.items or [Span("text")]):
        item = begun.item(one, n) | {"status": _status(one, is_whole or n < len(answer_parts.items) - 1)}
        if isinstance(one, ToolCall):
            item |= begun.called(one)
        else:
            is_text = one.kind == "text"
            item["content"] = [_part(one.text, logprobs) if is_text else _thought(one.text)]
            logprobs = [] if is_text else logprobs
        items.append(item)
    return items


class _Items:
    """Makes the output items of one answer, in the form that they have before their content is known."""

    def __init__(self, job: Job, answer_id: str) -> None:
        self._id = answer_id
        tools = job.given.get("tools") or ()
        self._customs = [tool.get("name") for tool in tools if tool.get("type") == CUSTOM]

    def item(self, one: Span | ToolCall, n: int) -> dict[str, Any]:
        """Return the output item for a text, reasoning or call, without content. n: the item's index in the answer."""
        end = f"{self._id}_{n}" if n else self._id
        if isinstance(one, ToolCall):
            names = ("ctc", CUSTOM_CALL, INPUT) if self.is_custom(one) else ("fc", "function_call", "arguments")
            call = {names[2]: "", "call_id": one.id, "name": one.name}
            return {"id": f"{names[0]}_{end}", "type": names[1], "status": "in_progress", **call}
        if one.kind == "reasoning":
            return {"id": f"rs_{end}", "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        message = {"status": "in_progress", "role": "assistant", "content": []}
        return {"id": f"msg_{end}", "type": "message", **message}

    def is_custom(self, one: Span | ToolCall) -> bool:
        """Return whether `one` is a call of a custom tool. A custom tool takes a text in place of arguments."""
        return isinstance(one, ToolCall) and one.name in self._customs

    def called(self, call: ToolCall) -> dict[str, str]:
        """Return the field with a call's input: `arguments` of a function, or `input`, the text for a custom tool."""
        return {INPUT: _input_of(call)} if self.is_custom(call) else {"arguments": call.arguments}


def _input_of(call: ToolCall) -> str:
    """Return the text for a custom tool: the call's argument `input`.

    If the model has not written a text as this argument, return all arguments as the model wrote them.
    """
    value = call.values().get(INPUT)
    return value if isinstance(value, str) else call.arguments


def _status(one: Span | ToolCall, is_whole: bool) -> str:
    """Return the status of an output item: "completed" or "incomplete". A call is always completed.

    is_whole: whether the item was not cut off.
    """
    return "completed" if is_whole or isinstance(one, ToolCall) else "incomplete"


class Stream:
    """Makes the numbered server-sent events of one streamed answer, in the order of OpenAI's API.

    response: the whole answer as a response object; None until `end` is called.
    """

    def __init__(self, job: Job, prompts: Seq[Seq[int]], tokenizer: Tokenizer, answer_id: str, created_s: int) -> None:
        self._job, self._id, self._created_s = job, answer_id, created_s
        self._begun = _Items(job, answer_id)
        self._said = SaidLogprobs(prompts[0][-1], tokenizer)
        self._num_events = 0
        # An item stays open until the next one begins.
        self._parts = AnswerParts()
        self._items = list[dict[str, Any]]()
        self._logprobs: list[dict[str, Any]] = []  # of the open item
        self.response: dict[str, Any] | None = None

    def begin(self) -> bytes:
        """Return the events that announce the response, still without output items."""
        response = _response(self._job, self._id, self._created_s, "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return the events for a chunk of the answer; no bytes if the chunk adds nothing."""
        logprobs = self._said.piece(chunk.logprobs or [], chunk.said)
        parts = chunk.parts
        if parts is None:
            parts = [Text(chunk.text)] if chunk.text or logprobs else []
        events = b""
        for part in parts:
            events += self._part(part, logprobs)
            logprobs = [] if isinstance(part, Text) else logprobs
        return events

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """Return the events that end the last item, and then the last event, which contains the whole response."""
        events = b"" if self._parts.items else self._part(Text(""), [])
        events += self._close(is_whole=_is_whole(outputs[0]))
        self.response = _ended(self._job, outputs, self._id, self._created_s, self._items)
        return events + self._event(f"response.{self.response['status']}", response=self.response)

    def fail(self, error: ForerunError) -> bytes:
        """Return the event that reports an error after the response's status has been sent."""
        response = _response(self._job, self._id, self._created_s, "failed")
        response["error"] = {"code": status_of(error)[1] or "server_error", "message": str(error)}
        return self._event("response.failed", response=response)

    def _part(self, part: Part, logprobs: list[dict[str, Any]]) -> bytes:
        """Return the events for one part of the answer. The part begins a new item, or continues the last item."""
        num, events = len(self._parts.items), b""
        self._parts.add(part)
        if len(self._parts.items) > num:
            events = (self._close() if num else b"") + self._begin(num)
        match part:
            case Text(text) if text or logprobs:
                self._logprobs += logprobs
                events += self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)
            case Reasoning(text):
                events += self._event("response.reasoning_text.delta", **self._place(), delta=text)
        return events

    def _begin(self, n: int) -> bytes:
        one = self._parts.items[n]
        events = self._event("response.output_item.added", output_index=n, item=self._begun.item(one, n))
        if isinstance(one, Span):
            part = _part("", []) if one.kind == "text" else _thought("")
            events += self._event("response.content_part.added", **self._place(), part=part)
        return events

    def _close(self, *, is_whole: bool = True) -> bytes:
        """Complete the open item, and return the events that end it. is_whole: whether the item was not cut off."""
        n = len(self._items)
        one = self._parts.items[n]
        item = self._begun.item(one, n) | {"status": _status(one, is_whole)}
        if isinstance(one, ToolCall):
            given = self._begun.called(one)
            item |= given
            is_custom = self._begun.is_custom(one)
            kind = "response.custom_tool_call_input" if is_custom else "response.function_call_arguments"
            events = self._event(f"{kind}.delta", **self._item_place(), delta=next(iter(given.values())))
            named = {} if is_custom else {"name": one.name}
            events += self._event(f"{kind}.done", **self._item_place(), **named, **given)
        else:
            if one.kind == "text":
                part = _part(one.text, self._logprobs)
                more = {"logprobs": self._logprobs}
                events = self._event("response.output_text.done", **self._place(), text=one.text, **more)
            else:
                part = _thought(one.text)
                events = self._event("response.reasoning_text.done", **self._place(), text=one.text)
            events += self._event("response.content_part.done", **self._place(), part=part)
            item["content"] = [part]
        self._logprobs = []
        self._items.append(item)
        return events + self._event("response.output_item.done", output_index=n, item=item)

    def _item_place(self) -> dict[str, Any]:
        """Return the fields item_id and output_index of the open item."""
        n = len(self._items)
        return {"item_id": self._begun.item(self._parts.items[n], n)["id"], "output_index": n}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _event(self, kind: str, /, **data: Any) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **data}, kind)


def _is_whole(output: RequestOutput) -> bool:
    return output.finish_reason != "length"


def _response(job: Job, answer_id: str, created_s: int, status: str) -> dict[str, Any]:
    given, params = job.given, job.params
    reasoning = given.get("reasoning") or {}
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": given.get("max_tool_calls"),
        "metadata": given.get("metadata") or {},
        "model": job.model,
        "output": [],
        "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "previous_response_id": given.get("previous_response_id"),
        "prompt_cache_key": given.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "store": job.items is not None,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **(given.get("text") or {})},
        "tool_choice": given.get("tool_choice") or AUTO,
        "tools": [_TOOL | tool if tool.get("type") == "function" else tool for tool in given.get("tools") or []],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": given.get("user"),
    }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": usage.prompt_details,
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


# ------------------------------------------------------------------------------------------------------------- kept


def _kept(models: Models, key: str, response_id: str) -> dict[str, Any]:
    return models.kept.get(key, response_id)


def _forgotten(models: Models, key: str, response_id: str) -> dict[str, Any]:
    models.kept.delete(key, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


_ONE = f"{RESPONSES}/{{response_id}}"
API = Api(
    (
        Generate(Form(RESPONSES, _FIELDS, grammars=(_FORMAT,)), _read, answer, Stream, is_kept=True),
        Look(_ONE, _kept, is_slow=True),
        Look(_ONE, _forgotten, method="DELETE"),
    ),
    plain_error,
)
