"""The registry of methods: finds them by name, makes their options, and tells what would work for an unknown name.

The methods of one kind are the files of one package, which is called their room. A scan of the package's folder finds
the files. `name:option=value,...` becomes the validated Options of a method. A field of an Options dataclass carries
`metadata={"help": ..., "min": ..., "max": ...}` (min and max optional). If a caller gives an option by its name in
another engine, the error message gives forerun's name. These names come from data/peers.json. docs/coming-from.md shows
them, and a test compares the two. This module does not import numpy.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.resources
import importlib.util
import inspect
import itertools
import json
import numbers
import operator
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forerun.errors import BadOption, shown

T = TypeVar("T")
REQUIRED: Any = dataclasses.MISSING  # in the place of a default: the option must be given


def option(default: Any, help: str, **about: Any) -> Any:
    """Return a field of a dataclass of options or results. help: the meaning of the field, in words.

    about: further metadata. Some say what values are allowed: the range, which applies to each entry if there are
    several (`check_range`), and the unit of numbers. Others say how a command shows the option, if this does not follow
    from the field (cli/signatures.py): flag, aliases, takes (a type), envvar, panel (of the help text), methods (the
    room of the methods that the option names), is_written (the option names a file to write), usual (the default as
    help shows it), everyday (`chat` and `lab` have the option), and measured (commands that measure have it).
    """
    return dataclasses.field(default=default, metadata={"help": help, **about})


def inherited(cls: type[Any], name: str, default: Any, **about: Any) -> Any:
    """Return the option `name` of a base class with another default.

    about: further metadata that differ from the base class's, as in `option`.
    """
    return dataclasses.field(default=default, metadata={**cls.__dataclass_fields__[name].metadata, **about})


def with_fields(cls: type[T]) -> type[T]:
    """Add the help of each field to a dataclass's docstring, so that help() shows it."""
    lines = []
    for one in dataclasses.fields(cls):  # type: ignore[arg-type]
        if "help" not in one.metadata:
            continue
        unit = f", {one.metadata['unit']}" if "unit" in one.metadata else ""
        default = "" if one.default is dataclasses.MISSING else f" [default: {one.default!r}]"
        head = f"    {one.name}{unit}: "
        note = f"; {one.metadata['note']}" if "note" in one.metadata else ""
        lines.append(
            textwrap.fill(one.metadata["help"] + note + default, 100, initial_indent=head, subsequent_indent=" " * 8)
        )
    cls.__doc__ = "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), "Fields:", "\n".join(lines)])
    return cls


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the command-line flag of an option, such as --max-tokens."""
    return str(field.metadata.get("flag", f"--{field.name.replace('_', '-')}"))


KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
MAX_NESTED = 20  # how deep the parentheses of a spec may be nested
_METHOD = re.compile(r"^class Options\b", re.MULTILINE)
LONGEST_GUESSED = 100  # for names of at most so many characters, the nearest known name is looked for


def names(package: str) -> tuple[str, ...]:
    """Return the sorted names of the methods in a room: its files with a class `Options`. No file is imported."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return _names(tuple((folder, os.stat(folder).st_mtime_ns) for folder in folders if os.path.isdir(folder)))


@functools.cache
def _names(folders: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Return the names of the methods in folders. folders: pairs of a path and the folder's modification time.

    Results are cached until a folder changes.
    """
    files = [file for folder, _ in folders for file in Path(folder).glob("*.py") if not file.name.startswith("_")]
    return tuple(sorted(file.stem for file in files if _METHOD.search(file.read_text(encoding="utf-8"))))


def stated(package: str, constant: str) -> dict[str, str]:
    """Map each file or folder of a room that defines a constant to the constant's value. No file is imported.

    Backends are found in this way: they are the files and folders of ops/ that define a NAME.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    pattern = re.compile(rf'^{constant} = "?([^"#\n]*?)"?(?:  #.*)?$', re.MULTILINE)
    constants = {}
    for file in sorted(
        file for folder in folders for end in ("*.py", "*/__init__.py") for file in Path(folder).glob(end)
    ):
        if (match := pattern.search(file.read_text(encoding="utf-8"))) is not None:
            constants[file.parent.name if file.name == "__init__.py" else file.stem] = match[1]
    return constants


def load(package: str, name: str, what: str) -> types.ModuleType:
    """Import the module of one method. Raises BadOption for an unknown name, with the list of known names."""
    known = names(package)
    if name not in known:
        raise BadOption(unknown(what, name, known))
    return importlib.import_module(f"{package}.{name}")


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the error sentence for a name that does not exist, with the most similar name that exists."""
    return f"there is no {what} {shown(name)}{_one_of(name, known)}"


def not_among(option: str, value: str, known: Iterable[str]) -> str:
    """Return the error sentence for a value that an option does not take, with the most similar value that it takes."""
    return f"{option}={shown(value)} is not possible{_one_of(value, known)}"


def _one_of(name: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence: the known name that is most similar to `name`, and all known names."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= LONGEST_GUESSED else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{hint}: it must be one of {', '.join(known)}"


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Parse 'lookup:max_n=3,min_n=1' to ('lookup', {'max_n': '3', 'min_n': '1'}).

    A comma in parentheses is part of a value, so that a value may be a spec itself: cascade:inner=(lookup:max_n=3). The
    parentheses stay in the value; `unwrapped` or `parse_list` takes them off. Raises BadOption for any other form.
    """
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, _split(rest, ",", spec)):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise BadOption(f"{shown(part)} in {shown(spec)} is not an option: write name:option=value,option=value")
        options[key.strip()] = value.strip()
    return name, options


def parse_list(text: str) -> list[str]:
    """Parse '(lookup:max_n=8)+suffix' to ['lookup:max_n=8', 'suffix']. Raises BadOption if an entry is empty."""
    entries = [unwrapped(part) for part in _split(text, "+", text)]
    if not all(entries):
        raise BadOption(f"{shown(text)} is no list: write entries with + between them, as in a+(b:option=value)")
    return entries


def parse_specs(texts: Iterable[str]) -> list[str]:
    """Return the specs of a repeated flag. A text may hold several: 'auto,svip:h=0.3,x=2' is auto and svip:h=0.3,x=2.

    Texts are split at commas. A part with an = before any colon is a further option of the spec before it. Equal specs
    are returned once.
    """
    specs = list[str]()
    for text in texts:
        for i, part in enumerate(_split(text, ",", text)):
            if i > 0 and "=" in part.partition(":")[0]:
                specs[-1] += f",{part}"
            elif part.strip():
                specs.append(part.strip())
    return list(dict.fromkeys(specs))


def _split(text: str, separator: str, whole: str) -> list[str]:
    """Split a text at the separators outside of parentheses. whole: the text that an error message shows."""
    parts, start, depth = [], 0, 0
    for match in re.finditer(f"[(){re.escape(separator)}]", text):
        character = match[0]
        depth += (character == "(") - (character == ")")
        if depth < 0 or depth > MAX_NESTED:
            break
        if character == separator and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    if depth > MAX_NESTED:
        raise BadOption(f"{shown(whole)} has more than {MAX_NESTED} parentheses in one another: write it with fewer")
    if depth:
        raise BadOption(
            f"{shown(whole)} has a parenthesis without its counterpart: write name:option=(name:option=value)"
        )
    return [*parts, text[start:]]


def about(module: types.ModuleType) -> str:
    """Return the first paragraph of the docstring of a method's file, as one line."""
    return _first_paragraph(module.__doc__ or "")


def abouts(package: str) -> dict[str, str]:
    """Return the name of each method in a room, with what `about` returns for it. No file is imported."""
    known = names(package)
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    files = [path for folder in folders for name in known if (path := Path(folder) / f"{name}.py").is_file()]
    said = {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}
    return {name: _first_paragraph(said[name]) for name in known}


def _first_paragraph(text: str) -> str:
    """Return the first paragraph of a text, as one line."""
    return " ".join(text.split("\n\n")[0].split())


def unwrapped(value: str) -> str:
    """Return a value without the parentheses around it; parentheses inside the value stay."""
    value = value.strip()
    depths = list(itertools.accumulate((c == "(") - (c == ")") for c in value))
    is_enclosed = len(value) > 1 and value[0] == "(" and min(depths[:-1]) > 0 == depths[-1]
    return unwrapped(value[1:-1]) if is_enclosed else value


def make_options(cls: type[Any], values: Mapping[str, Any], method: str = "") -> Any:
    """Make an Options instance from texts or values, checked by `checked`."""
    return cls(**checked(cls, values, method))


def checked(cls: type[Any], values: Mapping[str, Any], method: str = "") -> dict[str, Any]:
    """Convert texts or values to the types of a dataclass's fields, check them against their ranges and return them.

    Raises BadOption; the message names `method:option`, the value and what would work.
    """
    hints = _hints(cls)  # type: ignore[arg-type]  # for mypy a type is not hashable
    fields = {f.name: f for f in dataclasses.fields(cls)}
    converted = {}
    for key, value in values.items():
        if key not in fields:
            raise BadOption(
                unknown(f"option of {shown(method)} called", key, fields)
                if fields
                else f"{shown(method)} takes no options"
            )
        label = f"{method}:{key}" if method else key
        converted[key] = _convert(value, hints[key], label)
        check_range(converted[key], fields[key].metadata, f"{label}={shown(converted[key])}", label)
    return converted


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    return typing.get_type_hints(cls)


def _convert(value: Any, hint: Any, name: str) -> Any:
    """Return the value in the type of its field. A text is parsed. None stays None where the type allows None."""
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
    raise BadOption(f"{name}={shown(value)} is not possible: it must be {KINDS.get(kind, kind.__name__)}", name)


def check_fields(options: Any) -> None:
    """Raise BadOption for a field of a dataclass whose value is outside of the field's range or choices.

    The message names the field's flag. Each entry of a tuple is checked.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        choices = field.metadata.get("choices")
        for one in value if isinstance(value, tuple) else (value,):
            said = f"{one:g}" if isinstance(one, float) else str(one)
            check_range(one, field.metadata, f"{flag_of(field)} {said}")
            if choices is not None and one not in choices:
                raise BadOption(
                    f"{flag_of(field)} {shown(one)} is not possible: it must be one of {', '.join(choices)}"
                )


def check_range(value: Any, about: Mapping[str, Any], said: str, option: str | None = None) -> None:
    """Raise BadOption for a value outside of its field's range.

    about: the field's metadata. said: the name and the value, with which the message begins. option: the name of the
    option, if the message begins with that name (BadOption).
    """
    low, above, high = about.get("min"), about.get("above"), about.get("max")
    if value is None or (low is None and above is None and high is None) or value in about.get("also", ()):
        return
    if (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high):
        return
    must = about.get("range") or _range(value, low, above, high)
    raise BadOption(f"{said} is not possible: it must be {must}", option)


def _range(value: Any, low: Any, above: Any, high: Any) -> str:
    """Return a range in words, as an interval if a bound is excluded or a float has an integer as lower bound."""
    if high is None:
        return f"at least {low}" if above is None else f"above {above}"
    if above is not None or (isinstance(value, float) and isinstance(low, int)):
        return f"in {'(' if low is None else '['}{above if low is None else low}, {high}]"
    return f"in {low} .. {high}"


# ------------------------------------------------------------------------------------- names that other engines use

DOCUMENT = "docs/coming-from.md"
_WHOLE = ("forerun ", "LLM.")  # names of commands and methods begin like this, and are the same in every place
_HOMES = {"prompt": "LLM.generate", "prompt_file": "forerun generate", "system": "forerun chat"}


@dataclass(frozen=True)
class PeerOption:
    """One option of another engine.

    theirs: the option's spellings in that engine. ours: what to use in forerun; () = forerun has no counterpart. Each
    entry of ours is a name (of EngineConfig, SamplingParams or a command's parameter), a name with the value to give,
    or a command. note: the difference between both; may be empty.
    """

    peer: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    note: str


@functools.cache
def _peers() -> Mapping[str, Any]:
    text = importlib.resources.files("forerun").joinpath("data/peers.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


@functools.cache
def peer_options() -> list[PeerOption]:
    """Return the table of other engines' options, taken from their sources and documentation of 2025 and 2026."""
    return [PeerOption(r["peer"], tuple(r["theirs"]), tuple(r["ours"]), r["note"]) for r in _peers()["options"]]


def peer_values() -> list[list[str]]:
    """Return the values that forerun does not have and other engines do, each as [option, pattern, answer].

    forerun has an option of the same name. pattern: a regex for the value. answer: what to use in forerun.
    """
    values: list[list[str]] = _peers()["values"]
    return values


@dataclass(frozen=True)
class Place:
    """The place where one of forerun's options is given.

    text: the option as it is written at that place. home: the class or command that has the option; "" = the class or
    command to which the unknown name was given.
    """

    text: str
    home: str = ""


def normal(spelling: str) -> str:
    """Return `--max-model-len`, `max-model-len` or `max_model_len` as `max_model_len`; keep short flags like `-md`."""
    is_short = spelling.startswith("-") and not spelling.startswith("--")
    return spelling if is_short else spelling.removeprefix("--").replace("-", "_")


def answer(spelling: str, find: Callable[[str], Place]) -> str | None:
    """Return a sentence that tells forerun's name for another engine's option, or that forerun has no such option.

    Returns None if no other engine has an option of this name. find: returns the place of one of forerun's options,
    from its name or name=value. Engines with the same answer are named together.
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
    """Return the sentence of `answer` for an unknown option name, or None if no other engine has such an option.

    known: the names that are possible where the unknown name was given. Forerun's other names belong to `home`.
    variable_prefix: the prefix of environment variables, which are written in capitals.
    """

    def find(entry: str) -> Place:
        ours, _, value = entry.partition("=")
        written = f'{ours}="{value}"' if value else ours
        if ours not in known:
            return Place(written, _HOMES.get(ours, home))
        return Place(f"{variable_prefix}{ours.upper()}{entry[len(ours) :]}" if variable_prefix else written)

    return answer(name, find)


def by_value(name: str, value: str) -> str | None:
    """Return the error message for an option's value that only other engines have, or None for any other value."""
    for option, pattern, text in peer_values():
        if option == name and re.fullmatch(pattern, value, re.IGNORECASE):
            return f"{name}={shown(value)} is not possible: {text.format(value=value)}"
    return None


def _written(places: Seq[Place]) -> str:
    """Return places as text. If all places have the same home, the text names the home once, at the end."""
    if len({place.home for place in places}) == 1:
        home = places[0].home
        return _joined([place.text for place in places]) + (f" of {home}" if home else "")
    return _joined([_written([place]) for place in places])


def _joined(texts: Seq[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
