"""Public benchmarks as conversations. Each file of this folder describes one benchmark.

A file is a suite if it has the constant TITLE. It also has a LICENCE, a HOME where people get the questions, and a
function `conversation` that reads one line of a file of questions. Where a package of PyPI holds the questions, PACKAGE
and MODULE name the package, and FILES names the files inside of it. This repository does not contain the questions of
public benchmarks. The questions come from the package, or from a file that the user names.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forerun import registry
from forerun.errors import BadOption, NotFound, pip, shown

if TYPE_CHECKING:
    from forerun.engine.prompts import Message

ROOM = "forerun.bench.suites"
Turn = tuple["Message", ...]


@dataclass(frozen=True)
class Conversation:
    """The messages of a user, turn by turn. The model's own answer follows each turn.

    kind: the kind of work. turns: the messages of each turn. tools: the functions that the model may call, as JSON
    schemas.
    """

    id: str
    kind: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Suite:
    """A benchmark's questions. title and licence: as the benchmark's authors write them."""

    name: str
    title: str
    licence: str
    conversations: tuple[Conversation, ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds of work, in the benchmark's order."""
        return list(dict.fromkeys(conversation.kind for conversation in self.conversations))

    def first(self, num: int | None = None, per_kind: int | None = None, kinds: tuple[str, ...] = ()) -> Suite:
        """Return a suite of the first conversations of these kinds.

        num: the most conversations in all; None = no limit. per_kind: the most conversations of each kind; None = no
        limit. kinds: () = all kinds. Raises BadOption for a kind that the suite lacks.
        """
        for kind in kinds:
            if kind not in self.kinds:
                raise BadOption(registry.unknown("kind of work", kind, self.kinds))
        taken = list[Conversation]()
        counts = dict.fromkeys(self.kinds, 0)
        for conversation in self.conversations:
            counts[conversation.kind] += 1
            if conversation.kind in (kinds or counts) and (per_kind is None or counts[conversation.kind] <= per_kind):
                taken.append(conversation)
        return Suite(self.name, self.title, self.licence, tuple(taken[:num]))


def names() -> dict[str, str]:
    """Return the names of all suites, each with its title."""
    return {name.replace("_", "-"): title for name, title in registry.stated(ROOM, "TITLE").items()}


def read(name: str, file: Path | None = None) -> Suite:
    """Read a suite from a file, or from the files of its package where `file` is None.

    Raises BadOption for an unknown suite and for lines that are no questions of the suite, and NotFound where the
    questions are not on this machine.
    """
    if name not in names():
        raise BadOption(registry.unknown("suite", name, names()))
    suite = importlib.import_module(f"{ROOM}.{name.replace('-', '_')}")
    files = [file] if file is not None else _packaged(suite)
    conversations = tuple(one for path in files for one in _conversations(suite, path))
    if not conversations:
        named = ", ".join(shown(str(file)) for file in files)
        raise BadOption(f"{named} holds no question of {suite.TITLE}: name another with --prompt-file")
    return Suite(name, suite.TITLE, suite.LICENCE, conversations)


def _packaged(suite: ModuleType) -> list[Path]:
    """Return the files of a suite's questions. Raises NotFound where no installed package holds them."""
    package = getattr(suite, "PACKAGE", None)
    spec = None if package is None else importlib.util.find_spec(suite.MODULE)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    files = [path for folder in folders for name in suite.FILES if (path := Path(folder) / name).is_file()]
    if files:
        return files
    get = f"`{pip(f'install --no-deps {package}')}`, or " if package is not None else ""
    raise NotFound(f"the questions of {suite.TITLE} are not here: {get}name a file with --prompt-file ({suite.HOME})")


def _conversations(suite: ModuleType, path: Path) -> Iterator[Conversation]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            conversation = suite.conversation(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else "it is of another form"
            raise BadOption(
                f"line {number} of {shown(str(path))} is no question of {suite.TITLE} ({why}): "
                f"name its file with --prompt-file ({suite.HOME})"
            ) from error
        if conversation is not None:
            yield conversation


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()
    except (OSError, EOFError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise NotFound(f"the file {shown(str(path))} cannot be read ({reason}): name another") from error


def said(*texts: str) -> tuple[Turn, ...]:
    """Return one turn of a user for each text. Raises TypeError for a value that is not a text."""
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a turn is a text")
    return tuple(({"role": "user", "content": text},) for text in texts)
