"""Methods are files: scan a room for them, and turn `name:option=value,...` into their validated Options.

A field of an Options dataclass carries `metadata={"help": ..., "min": ..., "max": ...}` (min and max optional).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import numbers
import operator
import pkgutil
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from forerun.errors import BadOption


def names(package: str) -> list[str]:
    """Names of the methods in a room: its modules without a leading underscore, sorted. Imports none of them."""
    path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))


def load(package: str, name: str, what: str) -> types.ModuleType:
    """The module of one method. Raises BadOption with the list of known names."""
    known = names(package)
    if name not in known:
        raise BadOption(unknown(what, name, known))
    return importlib.import_module(f"{package}.{name}")


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist, with the nearest one that does."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"there is no {what} {name!r}{hint}: it must be one of {', '.join(known)}"


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """'lookup:max_n=3,min_n=1' -> ('lookup', {'max_n': '3', 'min_n': '1'}). Raises BadOption on anything else."""
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise BadOption(f"{part!r} in {spec!r} is not an option: write name:option=value,option=value")
        options[key.strip()] = value.strip()
    return name, options


def make_options(cls: type[Any], values: Mapping[str, Any], method: str = "") -> Any:
    """An Options instance from texts or values, checked against the type and range of each field.

    Raises BadOption naming `method:option`, the value and what would work.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    made = {}
    for key, value in values.items():
        if key not in fields:
            raise BadOption(
                unknown(f"option of {method!r} called", key, fields) if fields else f"{method!r} takes no options"
            )
        label = f"{method}:{key}" if method else key
        made[key] = _convert(value, hints[key], label)
        _check_range(made[key], fields[key].metadata, label)
    return cls(**made)


def _convert(value: Any, hint: Any, name: str) -> Any:
    """The value as its field's type: texts are parsed, None is kept where the hint has None."""
    kinds = typing.get_args(hint) or (hint,)
    kind = next(k for k in kinds if k is not type(None))
    if value is None and type(None) in kinds:
        return None
    try:
        if isinstance(value, str) and kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if isinstance(value, str):
            return kind(value)
        if kind in (int, float) and isinstance(value, bool):
            raise TypeError
        if kind is int:
            return operator.index(value)
        if kind is float and isinstance(value, numbers.Real):
            return float(value)
        if isinstance(value, kind):
            return value
    except (TypeError, ValueError, KeyError, OverflowError):
        pass
    raise BadOption(f"{name}={value!r} is not possible: it must be of type {kind.__name__}")


def _check_range(value: Any, metadata: Mapping[str, Any], name: str) -> None:
    low, high = metadata.get("min"), metadata.get("max")
    if value is None or (low is None and high is None):
        return
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"in {low} .. {high}"
        raise BadOption(f"{name}={value!r} is not possible: it must be {bounds}")
