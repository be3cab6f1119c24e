"""The sources of models on the disk. A source reads a config, the tokenizer's files, and weights one at a time.

Each module of this folder reads one file format; the modules are found by scanning. A module defines `recognises(path)
-> bool`, which looks only at file names and first bytes, and `open_source(path) -> Source`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from forerun.host_tensor import HostTensor
from forerun.models import refusals
from forerun.ops.memory import BLOCK_BYTES as BLOCK_BYTES
from forerun.ops.quantised import QuantisedMatrix, Scheme

# Tensors that stack all experts, [experts, outputs, inputs]: the ends of their names -> their number of dimensions.
STACKED_SIZES = {None: 3, "_bias": 2, "_blocks": 4, "_scales": 3}
STACKED = re.compile(r".*\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales)?")


@dataclass(frozen=True)
class Stored:
    """How a tensor is stored. file: where it is stored. dtype: the dtype of the rows that `Source.blocks` yields.

    scheme: the scheme of a quantised matrix; None for other tensors. was: the kind of a quantised matrix in words,
    where few or no operators can compute with the matrix as it is stored. Its scheme is then None, and it is read as
    floating-point numbers. floats: the scheme of a matrix of 8-bit floats, for operators that do compute with 8-bit
    floats.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme | None = None
    was: str | None = None
    floats: Scheme | None = None


class Source(Protocol):
    """A model on the disk. Opening it reads config.json. Weights are read only by `blocks`.

    folder: the folder with config.json, tokenizer.json, tokenizer_config.json, generation_config.json and chat
    templates. A format that has all of these inside one large file writes them to a folder of the cache.
    """

    folder: Path
    config: Mapping[str, Any]  # config.json

    @property
    def names(self) -> Any:
        """The tensor names of the format, as naming.Names; None = the names in the family's published checkpoints."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The stored form of every weight, by its name in the files. Only headers are read."""

    def check(self, with_tokenizer: bool) -> None:
        """Raise UserError where file names show that weights are missing, or weights or tokenizer cannot be read."""

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor in order, at most BLOCK_BYTES at a time.

        A block may be a view of the bytes that were read. Drop it before you take the next one.
        """

    def close(self) -> None:
        """Close the files. Call it once the weights are in memory. A later read opens the files again."""


class Wrapped:
    """A source around another source. Its config and folder are the other source's; subclasses define the tensors."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def folder(self) -> Path:
        """The folder of the wrapped source."""
        return self.source.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """The config.json of the wrapped source."""
        return self.source.config

    def check(self, with_tokenizer: bool) -> None:
        """Raise UserError as the wrapped source does."""
        self.source.check(with_tokenizer)


class QuantisedSource(Source, Protocol):
    """A source of a format that may have quantised tensors."""

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a quantised tensor as it is stored. `blocks` yields the same weights as floating-point numbers."""


def open_source(path: Path) -> Source:
    """Open the model at a path, with the first format that recognises the path.

    Raises NotFound or UnsupportedModel where no format recognises it. The advice depends on the files that are there.
    """
    files = sorted(file for folder in __path__ for file in Path(folder).glob("[!_]*.py"))
    formats = (importlib.import_module(f"{__name__}.{file.stem}") for file in files)
    reader = next((module for module in formats if module.recognises(path)), None)
    if reader is None:
        refusals.refuse_path(path)
    return cast(Source, reader.open_source(path))
