"""Sources of models on the disk. A source reads a model's config, tokenizer files, and weights, tensor by tensor.

Each module of this folder reads one file format. The modules are found by scanning the folder. A module defines
`recognises(path) -> bool`, which looks only at file names and first bytes, and `open_source(path) -> Source`.
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
    """Describes how a tensor is stored.

    file: the file that holds the tensor. dtype: the dtype of the rows that `Source.blocks` yields. scheme: the scheme
    of a quantised matrix; None for other tensors. was: the kind, in words, of a quantised matrix that few or no
    operators can compute with as it is stored; the matrix then has no scheme, and is read as floating-point numbers.
    floats: the scheme of a matrix of 8-bit floats, for operators that compute with 8-bit floats.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme | None = None
    was: str | None = None
    floats: Scheme | None = None


class Source(Protocol):
    """A model on the disk. Making a source reads config.json. Only `blocks` and `quantised` read weights.

    folder: the folder with config.json, tokenizer.json, tokenizer_config.json, generation_config.json and chat
    templates. If a format keeps all of these in one large file, the source writes them to a folder of the cache.
    """

    folder: Path
    config: Mapping[str, Any]  # config.json

    @property
    def names(self) -> Any:
        """The format's map of tensor names (naming.Names); None = the names of the family's published checkpoints."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The stored form of every weight, by its name in the files. Only headers are read."""

    def check(self, with_tokenizer: bool) -> None:
        """Raise UserError if file names show that weights are missing, or that weights have a format that is not read.

        with_tokenizer: whether to refuse a tokenizer in a format that is not read, too.
        """

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor in order, in blocks of at most BLOCK_BYTES.

        A block may be a view of the bytes that were read. Drop each block before you take the next block.
        """

    def close(self) -> None:
        """Close the files. Call this method once the weights are in memory. A later read opens the files again."""


class Wrapped:
    """A source that wraps another source and has the same config and folder. Subclasses define the tensors."""

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
        """Return the quantised matrix `name` as it is stored. `blocks` yields the same weights as floats."""


def open_source(path: Path) -> Source:
    """Open the model at a path with the first format that recognises the path.

    Raises NotFound or UnsupportedModel if no format recognises the path. The message gives advice for the files there.
    """
    files = sorted(file for folder in __path__ for file in Path(folder).glob("[!_]*.py"))
    formats = (importlib.import_module(f"{__name__}.{file.stem}") for file in files)
    reader = next((module for module in formats if module.recognises(path)), None)
    if reader is None:
        refusals.refuse_path(path)
    return cast(Source, reader.open_source(path))
