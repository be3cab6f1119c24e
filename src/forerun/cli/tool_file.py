"""Lets a model call the functions of a Python file. Signatures and docstrings give the schemas of the functions."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from forerun.errors import BadOption, NotFound, UserError, shown
from forerun.text.parts import ToolCall

_JSON = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", type(None): "null"}
_ARGUMENT = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s+(.+)$")
MOST_CHARS = 20_000  # of a result, so that it leaves room for the conversation


class ToolFile:
    """The public functions of a Python file. To find them, the file is run as a separate module.

    Raises NotFound where there is no file. Raises BadOption for a file that fails, for a file that has no function, and
    for a function that `schema_of` refuses.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise NotFound(f"there is no file {path}: name a Python file whose functions the model may call")
        self._functions = _functions(path)
        if not self._functions:
            raise BadOption(f"{path} has no function that a model may call: define one, without _ before its name")
        self.schemas = [schema_of(function) for function in self._functions.values()]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions."""
        return tuple(self._functions)

    def run(self, call: ToolCall) -> str:
        """Run a call and return the result as a text for the model, cut to MOST_CHARS characters.

        A text is returned as it is, any other value as JSON, and an exception as a line that begins with "error:".
        """
        function = self._functions.get(call.name)
        if function is None:
            return f"error: there is no function {call.name}"
        try:
            result = function(**call.values())
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except UserError as error:
            return f"error: {error}"
        except Exception as error:  # the model may mend its call
            return f"error: {type(error).__name__}: {error}"
        return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} ... ({len(text):,} characters in all)"


def _functions(path: Path) -> dict[str, Callable[..., Any]]:
    """Return the public functions that are defined in the file itself, in the order of their lines."""
    spec = importlib.util.spec_from_file_location(f"forerun_tools_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BadOption(f"{path} is no Python file: name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadOption(f"{path} fails ({type(error).__name__}: {error}): mend it") from error
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function, in the form in which chat templates take tools.

    The docstring's first paragraph describes the function. An indented line such as "city: the name of a city" (below
    "Args:") describes a parameter. Raises BadOption for a parameter that has no type, that has a type unknown to JSON,
    or that cannot be given by name.
    """
    doc = inspect.getdoc(function) or ""
    said = {match[1]: match[2] for line in doc.splitlines() if (match := _ARGUMENT.match(line))}
    hints = typing.get_type_hints(function)
    properties = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise BadOption(f"{function.__name__} has the parameter {name}, which cannot be called by its name")
        if name not in hints:
            raise BadOption(f"{function.__name__}({name}) has no type: write one, such as {name}: str")
        described = {"description": said[name]} if name in said else {}
        properties[name] = {**_schema(hints[name], f"{function.__name__}({name})"), **described}
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    head = re.split(r"\n\s*\n", doc, maxsplit=1)[0].replace("\n", " ")
    described = {"name": function.__name__, "description": head, "parameters": parameters}
    return {"type": "function", "function": described}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _JSON:
        return {"type": _JSON[hint]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(one, where) for one in inner]}
    if hint in (list, tuple, set) or origin in (list, set):
        return {"type": "array", **({"items": _schema(inner[0], where)} if inner else {})}
    if origin is dict:
        return {"type": "object"}
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return {"enum": [one.value for one in hint]}
    raise BadOption(f"{where} has the type {shown(hint)}: take str, int, float, bool, list, dict, Literal or a union")
