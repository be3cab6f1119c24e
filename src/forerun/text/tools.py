"""Tools that a model may call: their names and the schemas of their parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.errors import BadOption, shown

A_TOOL = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'


NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _takes_nothing(parameters: Mapping[str, Any]) -> bool:
    """Return whether a schema means a function without parameters.

    Such a schema has an empty `properties`, and does not say whether further properties are allowed. JSON Schema itself
    would then allow any properties.
    """
    says_no_more = parameters.keys() <= {"type", "properties", "required", "title", "description", "$schema"}
    return says_no_more and parameters.get("properties") == {} and not parameters.get("required")


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call, by name, each with the JSON schema of its parameters."""

    schemas: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, tools: Seq[Mapping[str, Any]]) -> Tools:
        """Read tools as chat templates take them. Raises BadOption for tools that are not possible.

        Each tool must have a different name. The parameters of a tool must be an object (a JSON schema) or missing.
        """
        schemas: dict[str, Mapping[str, Any]] = {}
        for i, tool in enumerate(tools):
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name:
                raise BadOption(f"tools[{i}] is {shown(dict(tool))}, which has no name: it must be {A_TOOL}")
            if name in schemas:
                raise BadOption(f"two tools are called {shown(name)}: give each a name of its own")
            parameters = function.get("parameters")
            if parameters is not None and not isinstance(parameters, Mapping):
                raise BadOption(f"the parameters of the tool {shown(name)} must be a JSON schema, an object")
            schemas[name] = parameters if parameters and not _takes_nothing(parameters) else NOTHING
        return cls(schemas)

    def __contains__(self, name: object) -> bool:
        return name in self.schemas

    def __iter__(self) -> Iterator[str]:
        return iter(self.schemas)

    def only(self, name: str) -> Tools:
        """Return only the tool with this name."""
        return Tools({name: self.schemas[name]})

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter of the tool `name` may have; empty if the schema states no type."""
        properties = self.schemas.get(name, {}).get("properties")
        return frozenset(kinds(properties.get(parameter))) if isinstance(properties, Mapping) else frozenset()


MOST_THINKING_TOKENS = 1 << 16
AUTO, NONE, REQUIRED = "auto", "none", "required"
NO_TOOLS = (
    "this model's chat template does not know tools, so the model cannot be told of them: leave out tools, or take a "
    "model whose template knows them"
)


@dataclass(frozen=True)
class ToolRequest:
    """The tools of a request. choice: auto, required (at least one call), or the name of the tool to call.

    parallel: whether an answer may have more than one call. strict: the names of tools whose arguments must match their
    schemas. given: the tools as chat templates take them.
    """

    tools: Tools
    choice: str = AUTO
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    given: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, tools: Seq[Mapping[str, Any]], choice: str = AUTO, parallel: bool = True) -> ToolRequest | None:
        """Make a tool request from tools as chat templates take them; None if no tool may be called.

        Raises BadOption as `Tools.of` does, and for a choice that is not possible.
        """
        parsed = Tools.of(tools)
        if choice not in (AUTO, NONE) and choice not in (*parsed, *((REQUIRED,) if tools else ())):
            known = ", ".join(parsed) or "none"
            raise BadOption(f"tool_choice={shown(choice)} is not possible: the tools are {known}")
        if not tools or choice == NONE:
            return None
        functions = [tool.get("function", tool) for tool in tools]
        strict = frozenset(one["name"] for one in functions if one.get("strict") is True)
        return cls(parsed, choice, parallel, strict, tuple(tools))

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice != AUTO


def limit_of(value: object, name: str = "max_thinking_tokens") -> int | None:
    """Return `value`, if it is a valid limit of reasoning tokens, or None (no limit). Raises BadOption otherwise."""
    if value is None or (type(value) is int and 0 <= value <= MOST_THINKING_TOKENS):
        return value
    raise BadOption(f"{name}={shown(value)} is not possible: it must be in 0 .. {MOST_THINKING_TOKENS:,}, or left out")


def several(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists under enum or const; an empty list if the schema has neither."""
    return several(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])


def kinds(schema: Any) -> Iterator[str]:
    """Yield the JSON types that a schema or its alternatives state.

    A value under enum or const counts as the type "string" or "other".
    """
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    yield from (one for one in ([kind] if isinstance(kind, str) else several(kind)) if isinstance(one, str))
    for one in choices_of(schema):
        yield "string" if isinstance(one, str) else "other"
    for name in ("anyOf", "oneOf"):
        for choice in several(schema.get(name)):
            yield from kinds(choice)


def json_of(raw: str, types: frozenset[str]) -> str:
    """Convert a value that a model wrote without quotes to JSON. types: the types that the value's schema allows.

    If the schema allows only strings, every value becomes a string. If the schema allows only strings and null, every
    value but null becomes a string. A value that is no valid JSON becomes a string, too.

    A model may still write quotes around a value. In the first two cases, the quotes become part of the string.
    Otherwise the value with its quotes is taken as a JSON string.
    """
    if types != {"string"}:
        word = raw.strip()
        word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
        try:
            value = json.loads(word, parse_constant=no_number)
        except ValueError:
            return json.dumps(raw, ensure_ascii=False)
        if isinstance(value, str):
            return word if not types <= {"string", "null"} or not types else json.dumps(raw, ensure_ascii=False)
        if not (types and types <= {"string", "null"} and value is not None):
            return word
    return json.dumps(raw, ensure_ascii=False)


def no_number(name: str) -> None:
    """Raise ValueError for Infinity and NaN, which Python reads although JSON does not have them."""
    raise ValueError(name)


def inside(text: str) -> str:
    """Return a text with escapes, as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
