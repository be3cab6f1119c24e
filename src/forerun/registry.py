"""Names: methods are files that a scan of their room finds, and unknown names are answered with what would work.

`name:option=value,...` becomes the validated Options of a method; a field of an Options dataclass carries
`metadata={"help": ..., "min": ..., "max": ...}` (min and max optional). An option that another engine has under its own
name is answered with ours: data/peers.json is the table, docs/coming-from.md shows it, and a test holds the two
together. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.resources
import importlib.util
import json
import numbers
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import BadOption, shown


def names(package: str) -> list[str]:
    """Names of the methods in a room, sorted: its files that hold a class `Options`. None of them is imported."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    files = [file for folder in folders for file in Path(folder).glob("*.py") if not file.name.startswith("_")]
    return sorted(file.stem for file in files if "\nclass Options" in file.read_text(encoding="utf-8"))


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
    return f"there is no {what} {shown(name)}{hint}: it must be one of {', '.join(known)}"


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """'lookup:max_n=3,min_n=1' -> ('lookup', {'max_n': '3', 'min_n': '1'}). Raises BadOption on anything else."""
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise BadOption(f"{shown(part)} in {shown(spec)} is not an option: write name:option=value,option=value")
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
                unknown(f"option of {shown(method)} called", key, fields)
                if fields
                else f"{shown(method)} takes no options"
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
    raise BadOption(f"{name}={shown(value)} is not possible: it must be of type {kind.__name__}")


def _check_range(value: Any, metadata: Mapping[str, Any], name: str) -> None:
    low, high = metadata.get("min"), metadata.get("max")
    if value is None or (low is None and high is None):
        return
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"in {low} .. {high}"
        raise BadOption(f"{name}={shown(value)} is not possible: it must be {bounds}")


# ------------------------------------------------------------------------------------- names that other engines use

DOCUMENT = "docs/coming-from.md"
_WHOLE = ("forerun ", "LLM.")  # a command or a method is written the same everywhere
_HOMES = {"prompt": "LLM.generate", "prompt_file": "forerun generate", "system": "forerun chat"}


@dataclass(frozen=True)
class PeerOption:
    """One option of another engine.

    theirs: spellings of it. ours: what does its work here, () = nothing: a name (of EngineConfig, SamplingParams or a
    command's parameter), a name with the value to give, or a command. note: what differs; may be empty.
    """

    peer: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    note: str


@functools.cache
def _peers() -> Mapping[str, Any]:
    text = importlib.resources.files("forerun").joinpath("data/peers.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


@functools.cache
def peer_options() -> list[PeerOption]:
    """The table of other engines' options, read in their own sources and documentation of 2025 and 2026."""
    return [PeerOption(r["peer"], tuple(r["theirs"]), tuple(r["ours"]), r["note"]) for r in _peers()["options"]]


def peer_values() -> list[list[str]]:
    """Values of other engines for options that are called the same here: option, pattern, answer."""
    values: list[list[str]] = _peers()["values"]
    return values


@dataclass(frozen=True)
class Place:
    """Where an option of ours is. text: how it is written there. home: whose it is, "" = of where it was looked for."""

    text: str
    home: str = ""


def normal(spelling: str) -> str:
    """`--max-model-len`, `max-model-len` and `max_model_len` are one name; a short flag such as `-md` is itself."""
    is_short = spelling.startswith("-") and not spelling.startswith("--")
    return spelling if is_short else spelling.removeprefix("--").replace("-", "_")


def answer(spelling: str, find: Callable[[str], Place]) -> str | None:
    """One sentence on a peer's option: what it is here, or that it is not. None where no peer has the name.

    find: the place of a name of ours, or of a name=value. Peers whose rows agree are named together.
    """
    agreeing: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for row in peer_options():
        if normal(spelling) in map(normal, row.theirs):
            agreeing.setdefault((row.ours, row.note), []).append(
                f"{row.peer}'" if row.peer[-1] == "s" else f"{row.peer}'s"
            )
    if not agreeing:
        return None
    parts = []
    for (ours, note), peers in agreeing.items():
        places = [Place(entry) if entry.startswith(_WHOLE) else find(entry) for entry in ours]
        what = f"is {_written(places)} here" if ours else "has no counterpart here"
        parts.append(f"{_joined(peers)} {spelling} {what}" + (f": {note}" if note else ""))
    return "; ".join(parts) + (f"; see {DOCUMENT}" if ": " in parts[-1] else f": see {DOCUMENT}")


def by_name(name: str, known: Collection[str], home: str, variable_prefix: str = "") -> str | None:
    """The answer to an unknown keyword or key.

    known: names that are possible where it was found; any other name of ours belongs to `home`. variable_prefix: of
    environment variables, which are written in capitals.
    """

    def find(entry: str) -> Place:
        ours, _, value = entry.partition("=")
        written = f'{ours}="{value}"' if value else ours
        if ours not in known:
            return Place(written, _HOMES.get(ours, home))
        return Place(f"{variable_prefix}{ours.upper()}{entry[len(ours) :]}" if variable_prefix else written)

    return answer(name, find)


def by_value(name: str, value: str) -> str | None:
    """The answer to a peer's value for an option that is called the same here; None where nobody has it."""
    for option, pattern, text in peer_values():
        if option == name and re.fullmatch(pattern, value, re.IGNORECASE):
            return f"{name}={shown(value)} is not possible: {text.format(value=value)}"
    return None


def _written(places: Seq[Place]) -> str:
    """Places that share a home are joined before it is named."""
    if len({place.home for place in places}) == 1:
        home = places[0].home
        return _joined([place.text for place in places]) + (f" of {home}" if home else "")
    return _joined([_written([place]) for place in places])


def _joined(texts: Seq[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
