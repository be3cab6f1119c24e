"""Converts tools and thinking in bodies from the form of each API to one common form.

The model learns only of functions, which the client runs. A tool that the server itself would have to run (a web
search, a shell) is left out. A header of the answer lists the tools that were left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from forerun.errors import BadOption, shown
from forerun.serve.refused import Refused
from forerun.text.tools import AUTO, NONE, REQUIRED, ToolRequest, Tools, limit_of

MOST_TOOLS = 1024
THINKING = frozenset(("enable_thinking", "thinking", "reasoning_effort"))  # template variables that control thinking


def tool_request(functions: Seq[Mapping[str, Any]], choice: str, parallel: bool) -> ToolRequest | None:
    """Return the tools that a body offers; None if no tool may be called. Raises Refused.

    functions: objects with name, description, parameters and strict. choice: AUTO, NONE, REQUIRED, or the name of the
    function to call. parallel: whether an answer may have several calls.
    """
    try:
        Tools.of(functions)
    except BadOption as error:
        raise Refused(str(error), "tools") from None
    names = [function["name"] for function in functions]
    if choice in (REQUIRED, *names) or choice not in (AUTO, NONE):
        if not names:
            raise Refused(f"tool_choice={shown(choice)} is not possible: there are no tools", "tool_choice")
        if choice not in (REQUIRED, *names):
            message = f"tool_choice={shown(choice)} is not possible: the tools are {', '.join(names)}"
            raise Refused(message, "tool_choice")
    if not functions or choice == NONE:
        return None
    strict = frozenset(function["name"] for function in functions if function.get("strict") is True)
    kept = ("name", "description", "parameters")
    tools = tuple(
        {"type": "function", "function": {key: function[key] for key in kept if function.get(key) is not None}}
        for function in functions
    )
    return ToolRequest(Tools.of(tools), choice, parallel, strict, tools)


def listed(tools: Any) -> list[Mapping[str, Any]]:
    """Return `tools`, the value of a body's field. Raises Refused if it is no list of objects, or is too long."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Refused(f"tools={shown(tools)} is not possible: it must be a list of objects", "tools")
    if len(tools) > MOST_TOOLS:
        raise Refused(f"tools has {len(tools):,} entries and may have {MOST_TOOLS:,}: send fewer", "tools")
    return tools


def thinking_limit(value: Any, name: str) -> int | None:
    """Return the limit of the reasoning in tokens; None = no limit. Raises Refused for a value out of range.

    name: the field's name, for the message.
    """
    try:
        return limit_of(value, name)
    except BadOption as error:
        raise Refused(str(error), name) from None


def thinking_variables(reads: frozenset[str], effort: str | None, thinks: bool | None) -> dict[str, Any] | None:
    """Return values for the chat template's variables about thinking; None if no variable is to be set.

    reads: the variables that the template reads. effort: a value of EFFORT in fields.py; None = not given. thinks:
    whether the model is to think at all; None = not given. effort has precedence over thinks.
    """
    values: dict[str, Any] = {}
    if effort is not None and effort != "none" and "reasoning_effort" in reads:
        values["reasoning_effort"] = {"minimal": "low", "xhigh": "high", "max": "high"}.get(effort, effort)
    wanted = thinks if effort is None else effort != "none"
    for name in ("enable_thinking", "thinking"):
        if name in reads and wanted is not None:
            values[name] = wanted
    return values or None
