"""The conversations that `forerun chat` saves automatically if --kv-disk stores their KV caches.

Each conversation is a file with one line, as `/save` writes it. The folder is in the user's cache, and nobody else can
read it. After every answer, the whole file is replaced at once. If there are more than MOST_KEPT files, the least
recently written files are removed.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.native import cache_folder
from forerun.text.terminal import note

MOST_KEPT = 100
ENDING = ".jsonl"


def default_folder() -> Path:
    """Return the folder of conversations in the user's cache."""
    return cache_folder() / "chats"


class Conversations:
    """The saved conversations of a folder. file: the current conversation's file; None before the first answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: Path | None = None
        self._has_failed = False

    def last(self) -> Path | None:
        """Return the file of the conversation that was written last; None where there is none."""
        files = self._by_time()
        return files[-1] if files else None

    def begin(self) -> None:
        """Let the next answer begin a new file. The current conversation's file stays as it is."""
        self.file = None

    def write(self, messages: Seq[Mapping[str, Any]]) -> None:
        """Write the conversation to its file. If the file cannot be written, warn once, and go on."""
        file = self.file or self.folder / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{secrets.token_hex(4)}{ENDING}"
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
                out.write(json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n")
            os.replace(temporary, file)
            self.file = file
            others = [old for old in self._by_time() if old != file]  # the clock may have been set back
            for old in others[: max(0, len(others) + 1 - MOST_KEPT)]:
                old.unlink(missing_ok=True)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if not self._has_failed:
                note(f"the conversation is not kept: nothing can be written to {self.folder} ({error.strerror})")
            self._has_failed = True

    def _by_time(self) -> list[Path]:
        """Return the files of conversations, the least recently written first."""
        files = list[tuple[int, str, Path]]()
        for file in self.folder.glob(f"*{ENDING}"):
            with suppress(OSError):  # another chat has removed it
                files.append((file.stat().st_mtime_ns, file.name, file))
        return [file for _, _, file in sorted(files)]
