"""Checks values of fields against JSON schemas. Supports the part of JSON Schema that fields.py uses.

The messages are worded like the messages of all other checks of bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import ge, gt, le
from typing import Any

from forerun.errors import shown
from forerun.registry import unknown
from forerun.serve.fields import MOST, Schema
from forerun.serve.refused import Refused

# JSON type -> its types in Python, its name in words, and what bounds of its length count.
_TYPES: Mapping[str, tuple[Any, str, str]] = {
    "string": (str, "a text", " characters"),
    "boolean": (bool, "true or false", ""),
    "integer": (int, "a whole number", ""),
    "number": (int | float, "a number", ""),
    "array": (list, "a list", " entries"),
    "object": (Mapping, "an object", " fields"),
    "null": (type(None), "null", ""),
    "any": (object, "any value", ""),
}
_SIMPLE = frozenset((int, str))  # types of values in which there is no float
# Bounds of a number, or of the length of anything else.
_BOUNDS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    **dict.fromkeys(("minimum", "minLength", "minItems"), (ge, "at least")),
    "exclusiveMinimum": (gt, "more than"),
    **dict.fromkeys(("maximum", "maxLength", "maxItems", "maxProperties"), (le, "at most")),
}


def check_schema(where: str, value: Any, schema: Schema) -> None:
    """Raise Refused for a value that a schema does not permit. where: the path of the value in the body."""
    if (refusal := _refusal(where, value, schema)) is not None:
        raise refusal


def whole(value: Any, schema: Schema) -> Any:
    """Return a value with floats that have no fraction as ints, wherever the schema permits whole numbers.

    Clients in languages without integers send floats, and JSON has one type of numbers.
    """
    ways = schema.get("anyOf", (schema,))
    if isinstance(value, float):
        takes_whole = any(way.get("type") == "integer" for way in ways)
        return int(value) if takes_whole and value.is_integer() else value
    if isinstance(value, list) and not _SIMPLE.issuperset(map(type, value)):
        items: Schema = next((way["items"] for way in ways if "items" in way), {})
        return [whole(one, items) for one in value]
    if isinstance(value, Mapping):
        known: Schema = next((way["properties"] for way in ways if "properties" in way), {})
        return {name: whole(one, known[name]) if name in known else one for name, one in value.items()}
    return value


def _refusal(where: str, value: Any, schema: Schema) -> Refused | None:
    """Return the error for a value that a schema does not permit; None if the schema permits the value."""
    if "anyOf" in schema:
        refusals = [_refusal(where, value, way) for way in schema["anyOf"] if _is_of_type(value, way)]
        if None in refusals or (len(refusals) == 1 and isinstance(value, list | Mapping)):
            return None if None in refusals else refusals[0]
    elif _is_of_type(value, schema) and _is_in_bounds(value, schema):
        return next(filter(None, _refusals_inside(where, value, schema)), None)
    return Refused(f"{where}={shown(value)} is not possible: it must be {_words(schema)}", where)


def _refusals_inside(where: str, value: Any, schema: Schema) -> Iterator[Refused | None]:
    """Yield the error, or None, for each entry of a list or each field of an object. A null field counts as absent."""
    if isinstance(value, list):
        yield from (_refusal(f"{where}[{i}]", one, schema.get("items", {})) for i, one in enumerate(value))
    if isinstance(value, Mapping):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for name, one in value.items():
            if name not in known and others is False:
                yield Refused(f"{where} has the wrong field: {unknown('field', name, known)}", f"{where}.{name}")
            elif one is not None:
                yield _refusal(f"{where}.{name}", one, known.get(name, others))
        for name in schema.get("required", ()):
            if value.get(name) is None:
                yield Refused(f"{where} has no {name}: it must be {_words(known[name])}", f"{where}.{name}")


def _is_of_type(value: Any, schema: Schema) -> bool:
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = _TYPES[schema.get("type", "any")][0]
    return isinstance(value, kind) and isinstance(value, bool) <= (kind in (bool, object))


def _is_in_bounds(value: Any, schema: Schema) -> bool:
    size = len(value) if isinstance(value, str | list | Mapping) else value
    return all(compare(size, schema[key]) for key, (compare, _) in _BOUNDS.items() if key in schema)


def _words(schema: Schema) -> str:
    """Return a description in words of the values that a schema permits."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_words, schema["anyOf"])))
    if "enum" in schema:
        values = ", ".join(one if isinstance(one, str) else shown(one) for one in schema["enum"])
        return f"one of {values}" if len(schema["enum"]) > 1 else values
    _, noun, unit = _TYPES[schema.get("type", "any")]
    bounds = [(word, schema[key]) for key, (_, word) in _BOUNDS.items() if schema.get(key, MOST) != MOST]
    if unit and bounds[:1] == [("at least", 1)]:
        return f"{noun} that is not empty"
    limits = " and ".join(f"{word} {bound:,}{unit}" for word, bound in bounds if bound or not unit)
    return f"{noun} of {limits}" if limits else noun
