"""The project's own prompts: six kinds of work, with eight prompts of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.suites import Conversation

TITLE = "work that ships"
LICENCE = "Apache-2.0"
HOME = "src/forerun/data/work.jsonl of this repository"
PACKAGE, MODULE = "forerun", "forerun.data"
FILES = ("work.jsonl",)


def conversation(line: Mapping[str, Any]) -> Conversation:
    """Read a conversation. The model answers the last message."""
    return Conversation(str(line["id"]), str(line["kind"]), (tuple(line["messages"]),))
