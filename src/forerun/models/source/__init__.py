"""Where a model is read from: its config, its small files, and its weights one at a time.

A file format is one file of this folder, found by scanning. It defines `recognises(path) -> bool`, from the name and
the names of files in it alone, and `open_source(path) -> Source`.
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

# Tensors of the parts of all experts, [experts, outputs, inputs], by the ends of their names -> their dimensions.
STACKED_SIZES = {None: 3, "_bias": 2, "_blocks": 4, "_scales": 3}
STACKED = re.compile(r".*\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales)?")


@dataclass(frozen=True)
class Stored:
    """Where and how a tensor is stored; dtype: of what `Source.blocks` gives. scheme: None = not quantised.

    was: what a quantised matrix is that few operators compute with, or none, so that `blocks` gives numbers for it.
    floats: the scheme of one of 8-bit floats, for operators that pack it.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme | None = None
    was: str | None = None
    floats: Scheme | None = None


class Source(Protocol):
    """A model on the disk. Opening it reads config.json; no weight is read before `blocks` is asked for it.

    folder: where config.json, tokenizer.json, tokenizer_config.json, generation_config.json and chat templates are. A
    format that has them inside of one large file writes them to a folder of its own.
    """

    folder: Path
    config: Mapping[str, Any]  # config.json

    @property
    def names(self) -> Any:
        """What the format calls each tensor, as naming.Names; None = as checkpoints of the family are published."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Every weight by its name in the files; only headers are read."""

    def check(self, with_tokenizer: bool) -> None:
        """Raise UserError for what the names of the files show: no weights, foreign ones, a foreign tokenizer."""

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """The rows of a tensor in order, at most BLOCK_BYTES at a time.

        They may be views of the file: each is to be let go before the next is asked for.
        """

    def close(self) -> None:
        """Let go of the files, when the weights are in memory; what is read behind that opens them again."""


class QuantisedSource(Source, Protocol):
    """A format that has quantised tensors: those with a scheme."""

    def quantised(self, name: str) -> QuantisedMatrix:
        """A quantised tensor as it is stored; `blocks` has the same weights as numbers."""


def open_source(path: Path) -> Source:
    """The model at a path, by the first format that recognises it.

    Raises NotFound or UnsupportedModel where none does, in the words of what is there instead.
    """
    files = sorted(file for folder in __path__ for file in Path(folder).glob("[!_]*.py"))
    formats = (importlib.import_module(f"{__name__}.{file.stem}") for file in files)
    found = next((module for module in formats if module.recognises(path)), None)
    if found is None:
        refusals.refuse_path(path)
    return cast(Source, found.open_source(path))
