"""BFCL, the Berkeley Function Calling Leaderboard, version 4: questions that are answered by calls of functions.

Patil et al. 2025, "The Berkeley Function Calling Leaderboard", ICML. Only questions of one turn are read. Longer
questions need the results of called functions, but forerun runs no function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.suites import Conversation

TITLE = "BFCL"
LICENCE = "Apache-2.0"
HOME = "berkeley-function-call-leaderboard/bfcl_eval/data of github.com/ShishirPatil/gorilla"
PACKAGE, MODULE = "bfcl-eval", "bfcl_eval"
KINDS = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple")
FILES = tuple(f"data/BFCL_v4_{kind}.json" for kind in KINDS)
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}  # BFCL's names for JSON's types


def conversation(line: Mapping[str, Any]) -> Conversation | None:
    """Read a question of one turn with its functions. Return None for a question of several turns."""
    turns = line["question"]
    if len(turns) != 1:
        return None
    name = str(line["id"])
    kind = next((kind for kind in sorted(KINDS, key=len, reverse=True) if name.startswith(kind)), "other")
    return Conversation(name, kind, (tuple(turns[0]),), tuple(map(tool, line["function"])))


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function as a tool of the chat API, in which names have no dots."""
    about = {"name": str(function["name"]).replace(".", "_"), "description": str(function["description"])}
    return {"type": "function", "function": {**about, "parameters": _schema(function["parameters"])}}


def _schema(value: Any) -> Any:
    """Return a schema in which BFCL's names of types are replaced by JSON's."""
    if isinstance(value, Mapping):
        return {key: _named(one) if key == "type" else _schema(one) for key, one in value.items()}
    return [_schema(one) for one in value] if isinstance(value, list) else value


def _named(value: Any) -> Any:
    return TYPES.get(value.lower(), value) if isinstance(value, str) else _schema(value)
