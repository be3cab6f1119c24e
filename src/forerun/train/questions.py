"""Reads questions of users from published files of conversations. Drafters learn from a target's answers to them.

A file is JSON lines or a JSON list. A list that is cut short is read up to the cut. An entry is a text, an object with
a `prompt`, a `question` or an `instruction`, or an object with a conversation: `conversations` as in ShareGPT,
`messages`, or `turns`. The question of a conversation is the first turn, if a user wrote this turn.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from forerun.errors import UnsupportedModel, shown
from forerun.text.files import read_text_file

LOG = logging.getLogger(__name__)
BETWEEN = re.compile(r"[\s,]*")
TEXTS = ("prompt", "question", "instruction")
PEOPLE = ("human", "user")


def read_questions(paths: Seq[Path]) -> list[str]:
    """Return the different questions in the files `paths`, in order. Entries without a question are left out.

    Raises NotFound for a file that cannot be read, BadOption for text that is not UTF-8, and UnsupportedModel for a
    file of another kind or without a question.
    """
    questions = dict[str, None]()
    for path in paths:
        texts = [text for entry in _entries(path) if (text := _question(entry).strip())]
        if not texts:
            raise UnsupportedModel(
                f"there is no question in {shown(str(path))}: name a file of JSON or JSON lines with texts, "
                f"or objects with conversations, messages, turns, {', '.join(TEXTS[:-1])} or {TEXTS[-1]}"
            )
        questions |= dict.fromkeys(texts)
    return list(questions)


def _entries(path: Path) -> Iterator[Any]:
    text = read_text_file(path, "file of questions")
    try:
        if path.suffix == ".json":
            yield from _listed(text, path)
            return
        for line in text.split("\n"):  # JSON may contain other line separators
            if line.strip():
                yield json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"the file {shown(str(path))} is not JSON ({error}): name another") from error


def _listed(text: str, path: Path) -> list[Any]:
    """Return the entries of a JSON list. If the text is cut short, return the complete entries before the cut.

    A JSON value that is not a list is returned as the only entry. Raises ValueError if there is no complete entry.
    """
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except ValueError:
        decoder = json.JSONDecoder()
        entries = list[Any]()
        at = text.find("[") + 1
        while at := BETWEEN.match(text, at).end():  # type: ignore[union-attr]
            try:
                entry, at = decoder.raw_decode(text, at)
            except ValueError:
                break
            entries.append(entry)
        if not entries:
            raise
        LOG.warning("%s is cut short: its %d entries before that are read", path, len(entries))
        return entries


def _question(entry: Any) -> str:
    """Return the question of an entry: its text, or its first turn if a user wrote that turn. Otherwise return ""."""
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, Mapping):
        return ""
    for name in ("conversations", "messages", "turns"):
        if isinstance(turns := entry.get(name), list) and turns:
            return _first_turn(turns[0])
    return next((text for name in TEXTS if isinstance(text := entry.get(name), str)), "")


def _first_turn(turn: Any) -> str:
    if isinstance(turn, str):
        return turn
    if not isinstance(turn, Mapping) or turn.get("from", turn.get("role")) not in PEOPLE:
        return ""
    text = turn.get("value", turn.get("content"))
    return text if isinstance(text, str) else ""
