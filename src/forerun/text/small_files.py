"""Reads the files of a checkpoint folder besides the weights, such as config.json and the tokenizer, each only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from forerun.text.json_files import read_json_if_there
from forerun.text.tokenizer import Tokenizer

T = TypeVar("T")


class SmallFiles:
    """The files of a checkpoint besides its weights. A file is read on first use, and its content is kept.

    folder: the checkpoint's folder; None for a model that is only in memory, which has no files.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._read = dict[Path, Any]()

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the object in a JSON file; {} if there is no such file. Raises the errors of `read_json`."""
        return {} if self.folder is None else self.once(self.folder / name, read_json_if_there)

    def once(self, path: Path, read: Callable[[Path], T]) -> T:
        """Return the result of read(path), which is called once for each path."""
        if path not in self._read:
            self._read[path] = read(path)
        read_before: T = self._read[path]
        return read_before

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if there is no tokenizer.json. Raises the errors of `Tokenizer.load`."""
        return None if self.folder is None else Tokenizer.find(self.folder)

    def with_tokenizer(self, tokenizer: Tokenizer | None) -> SmallFiles:
        """Return the same files with another tokenizer, for a model whose vocabulary has grown."""
        others = SmallFiles(self.folder)
        others._read, others.tokenizer = self._read, tokenizer
        return others
