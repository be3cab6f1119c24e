"""Reads conversations and tools in the form of OpenAI's chats. Routes of several APIs take this form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import shown
from forerun.serve.bodies import Body, Given, Message, Refused, variables
from forerun.serve.fields import (
    CONTENT,
    FLAG,
    NAME,
    OBJECT,
    TEXT,
    TOOLS,
    Fields,
    array,
    by_reader,
    either,
    honoured,
    one_of,
    required,
    structure,
)
from forerun.serve.tools import listed, tool_request
from forerun.text.chat import ROLES
from forerun.text.tools import A_TOOL, AUTO, ToolRequest

A_CONVERSATION = '[{"role": "user", "content": "hello"}]'
_CALL = structure(
    ("id", "type", "function"),
    id=TEXT,
    type=one_of("function"),
    function=structure(("name", "arguments"), name=NAME, arguments=TEXT),
)
_MESSAGE = structure(
    ("role", "content"),
    role=one_of(*ROLES),
    content=CONTENT,
    tool_calls=array(_CALL),
    tool_call_id=TEXT,
    reasoning_content=TEXT,
)
_CHOICE = either(
    one_of("none", "auto", "required"),
    structure(("type", "function"), type=one_of("function"), function=structure(("name",), name=NAME)),
)
# The fields for the chat template; the other fields of a chat are about the answer.
FIELDS: Fields = {
    "messages": required(array(_MESSAGE, 1), f"it must be a list such as {A_CONVERSATION}", is_read=True),
    **by_reader(tools=TOOLS),
    **honoured(chat_template_kwargs=OBJECT, continue_final_message=FLAG, add_generation_prompt=FLAG),
}
CHOICE: Fields = {**by_reader(tool_choice=_CHOICE), **honoured(parallel_tool_calls=FLAG)}


def conversation(read: Given) -> dict[str, Any]:
    """Return the conversation in a body, as fields of a Job. Raises Refused.

    Reads the fields of a body that FIELDS and CHOICE list.
    """
    given = read.fields
    goes_on = given.get("continue_final_message", False)
    if goes_on and given.get("add_generation_prompt") is True:
        raise Refused("add_generation_prompt and continue_final_message exclude one another: set one of them")
    return {
        "messages": _messages(given.get("messages")),
        "tools": _tools(given, read.ignored),
        "variables": variables(given),
        "continue_final_message": goes_on,
        "add_generation_prompt": None if goes_on else given.get("add_generation_prompt", True),
    }


def _tools(given: Body, ignored: list[str]) -> ToolRequest | None:
    """Return the functions of a chat and the choice among them; None if no function may be called. Raises Refused.

    Tools of other types are left out, and added to the list `ignored`.
    """
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
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools"), list):
            form = '{"mode": "auto", "tools": [...]}'
            message = f"tool_choice.allowed_tools={shown(allowed)} is not possible: it must be {form}"
            raise Refused(message, "tool_choice.allowed_tools")
        names = [_name(tool) for tool in allowed["tools"]]
        functions = [function for function in functions if function.get("name") in names]
        choice = allowed.get("mode", AUTO)
    elif isinstance(choice, Mapping):
        choice = _name(choice)
    if not isinstance(choice, str):
        form = '{"type": "function", "function": {"name": "..."}}'
        message = f"tool_choice={shown(choice)} is not possible: it must be none, auto, required or {form}"
        raise Refused(message, "tool_choice")
    return tool_request(functions, choice, given.get("parallel_tool_calls", True))


def _name(tool: Any) -> Any:
    """Return the name "f" in a tool {"type": "function", "function": {"name": "f"}}; None if the tool has no name."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _messages(messages: Any) -> list[Message]:
    """Check the messages of a conversation, and return them in the form that chat templates know.

    Raises Refused for a malformed message, and for a part of a message that is not text.
    """
    ok = isinstance(messages, list) and messages
    if not ok or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        message = f"messages={shown(messages)} is not possible: it must be a list such as {A_CONVERSATION}"
        raise Refused(message, "messages")
    for i, message in enumerate(messages):
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else part
            if kind not in ("text", "refusal"):
                problem = f"messages[{i}] has a part of type {shown(kind)}: the model reads texts alone"
                raise Refused(problem, f"messages[{i}].content")
    return [_known(message) for message in messages]


def _known(message: Message) -> Message:
    """Return a message in the form that chat templates know.

    The role developer becomes system, refusals become texts, and calls of custom tools become calls of functions.
    """
    made = {**message}
    parts = message.get("content")
    calls = message.get("tool_calls")
    if made["role"] == "developer":
        made["role"] = "system"  # templates know the older name alone, and would drop the message silently
    if parts == []:
        made["content"] = ""
    elif isinstance(parts, list):
        refused = {i: {"type": "text", "text": p.get("refusal")} for i, p in enumerate(parts) if p["type"] == "refusal"}
        made["content"] = [refused.get(i, part) for i, part in enumerate(parts)]
    if isinstance(calls, list):
        made["tool_calls"] = [_function(call) for call in calls]
    return made


def _function(call: Any) -> Any:
    """Convert a call of a custom tool, which takes a text, to a call of a function with the only argument "input".

    Any other call is returned unchanged.
    """
    custom = call.get("custom") if isinstance(call, Mapping) and call.get("type") == "custom" else None
    if not isinstance(custom, Mapping):
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return {"id": call.get("id"), "type": "function", "function": function}
