"""The sources that models are read from: config, small files, and weights one at a time.

Each file format is one module of this folder, found by scanning. The module defines `recognises(path) -> bool`, which
looks only at names and first bytes, and `open_source(path) -> Source`.
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
    """Where and how a tensor is stored. dtype: the dtype that `Source.blocks` yields. scheme: None = not quantised.

    was: the kind of a quantised matrix in words, if few or no operators compute with it, so that `blocks` yields
    numbers. floats: the scheme of a matrix of 8-bit floats, for operators that pack such a matrix.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme | None = None
    was: str | None = None
    floats: Scheme | None = None


class Source(Protocol):
    """A model on the disk. Opening it reads config.json; no weight is read before `blocks` is asked for it.

    folder: the folder with config.json, tokenizer.json, tokenizer_config.json, generation_config.json and chat
    templates. A format that has these inside of one large file writes them to a folder of the cache.
    """

    folder: Path
    config: Mapping[str, Any]  # config.json

    @property
    def names(self) -> Any:
        """The tensor names of the format, as naming.Names; None = as checkpoints of the family are published."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Every weight by its name in the files. Only headers are read."""

    def check(self, with_tokenizer: bool) -> None:
        """Raise UserError for faults that file names show: no weights, foreign weights, a foreign tokenizer."""

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor in order, at most BLOCK_BYTES at a time.

        A block may be a view of the file: drop it before you ask for the next.
        """

    def close(self) -> None:
        """Close the files once the weights are in memory; a later read opens them again."""


class Wrapped:
    """A source that takes everything but its tensors from another source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def folder(self) -> Path:
        """See `Source.folder`."""
        return self.source.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """See `Source.config`."""
        return self.source.config

    def check(self, with_tokenizer: bool) -> None:
        """See `Source.check`."""
        self.source.check(with_tokenizer)


class QuantisedSource(Source, Protocol):
    """A format with quantised tensors, which have a scheme."""

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a quantised tensor as it is stored; `blocks` yields the same weights as numbers."""


def open_source(path: Path) -> Source:
    """Open the model at a path, by the first format that recognises it.

    Raises NotFound or UnsupportedModel where no format does, with advice for the files that are there.
    """
    files = sorted(file for folder in __path__ for file in Path(folder).glob("[!_]*.py"))
    formats = (importlib.import_module(f"{__name__}.{file.stem}") for file in files)
    reader = next((module for module in formats if module.recognises(path)), None)
    if reader is None:
        refusals.refuse_path(path)
    return cast(Source, reader.open_source(path))
