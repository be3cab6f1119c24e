"""Reads GGUF files, the format of llama.cpp, which hold config, tokenizer and weights. Most weights are quantised.

A model is one file or several pieces. config.json and the tokenizer's files are written to a folder of the cache
(FORERUN_CACHE_DIR, or else ~/.cache/forerun). A hash of the file's header names the folder. Weights are read from the
file on demand.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from forerun.errors import UnsupportedModel
from forerun.host_tensor import HELD_AS, Array, HostTensor
from forerun.models.gguf.config import ROPE_TENSORS, family_of, read_config
from forerun.models.gguf.header import MAGIC, Entry, Header, read_model
from forerun.models.gguf.tokenizer import NO_CUTTING, guesses_cutting, write_tokenizer
from forerun.models.kept_folder import kept_folder
from forerun.models.naming import Gguf, Names
from forerun.models.source import BLOCK_BYTES, Stored
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, StoredRows

LOG = logging.getLogger(__name__)
SUFFIX = ".gguf"
SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
VERSION = 3  # of the written files: increased with every change of their content
MOST_NEXT_BLOCKS = 64  # multi-token prediction blocks
COPIES = 4  # copies of a block's float32 weights in memory at most, while the block is unpacked


def recognises(path: Path) -> bool:
    """Whether a path is a file whose name ends with .gguf, or which begins with the magic bytes of GGUF."""
    return path.is_file() and (path.suffix.lower() == SUFFIX or _first_bytes(path) == MAGIC)


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, as many as MAGIC has; no bytes where the file is unreadable."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError:
        return b""


class GgufFile:
    """A source of a model in one GGUF file or in several pieces. Opening the file reads everything but the weights.

    path: the file, or any piece. header: a header to use in place of the header in the file. beside: name prefixes of
    tensors that do not belong to the model.
    """

    def __init__(self, path: Path, header: Header | None = None, beside: tuple[str, ...] = ()) -> None:
        self.path = path
        self._header: Header = _each_expert(read_model(path) if header is None else header)
        self._rope_factors = self._read_rope_factors()
        self.config: Mapping[str, Any] = read_config(self._header, self._rope_factors, path)
        self._gguf = family_of(self._header, path)[2]
        self._beside = (*_next_blocks(self.config, self._header, self._gguf), *beside)
        for name in self._header.tensors:
            if name not in ROPE_TENSORS and not self._is_beside(name) and self._gguf.names.ours(name) is None:
                raise UnsupportedModel(
                    f"{path} holds the tensor {name!r:.80}, which no {self.config['model_type']} has: use another file"
                )

    @property
    def names(self) -> Names:
        """The map of tensor names for the family's GGUF files."""
        return self._gguf.names

    @cached_property
    def folder(self) -> Path:
        """The cache folder with config.json and the tokenizer's files. Missing files are written first."""
        key = f"{VERSION} {tokenizers.__version__} {self._header.digest}".encode()
        key += b"".join(factors.tobytes() for factors in self._rope_factors.values())
        name = f"gguf/{hashlib.sha256(key).hexdigest()[:32]}"
        return kept_folder(name, SMALL_FILES, self._write_small_files, f"the tokenizer of {self.path}")

    def check(self, with_tokenizer: bool) -> None:
        """Log a warning if the file does not say how its tokenizer cuts texts. All else was checked at opening."""
        if with_tokenizer and guesses_cutting(self._header.metadata):
            LOG.warning(NO_CUTTING, self.path)

    def close(self) -> None:
        """Close the file, or all pieces."""
        for file in {entry.file for entry in self._header.tensors.values()}:
            file.close()

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """The stored form of each tensor of the model, by its name in the file."""
        entries = self._header.tensors
        return {
            name: self._stored(entry)
            for name, entry in entries.items()
            if name not in ROPE_TENSORS and not self._is_beside(name)
        }

    @cached_property
    def next_tensors(self) -> Mapping[str, Stored]:
        """The stored form of each tensor outside of the model, such as the tensors of multi-token prediction blocks."""
        return {name: self._stored(entry) for name, entry in self._header.tensors.items() if self._is_beside(name)}

    def _is_beside(self, name: str) -> bool:
        """Whether a tensor lies outside of the model, for example in a multi-token prediction block."""
        return name.startswith(self._beside)

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor, see `Source.blocks`. Quantised rows are dequantised to float32.

        From norms, the offset that the file's writer added is subtracted (`Gguf.stored_offset`).
        """
        inner = name.split(".", 2)[-1]
        offset = self._gguf.stored_offset if "norm" in name and not inner.startswith(self._gguf.as_stored) else 0.0
        for rows in self._whole(name):
            yield HostTensor.of(rows.float32() - np.float32(offset)).to(rows.dtype) if offset else rows

    def _whole(self, name: str) -> Iterator[HostTensor]:
        """Yield all rows of a tensor, dequantised, with the values in the file; norms still have their offset."""
        entry = self._header.tensors[name]
        if entry.type.unpack is None:
            for numbers in self._rows(name):
                yield HostTensor(numbers, entry.type.dtype)
            return
        for rows in self._quantised_rows(name):
            yield HostTensor.of(rows.dequantise().reshape(-1, *entry.shape[1:]))

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a quantised tensor as it is stored, with its rows in the order of published checkpoints."""
        entry = self._header.tensors[name]
        turned = self._rows_of_a_head(name)
        assert entry.type.scheme is not None
        num_out, num_in = entry.shape
        stored = StoredRows(entry.file, entry.type.number, entry.start)
        if turned > 1:
            stored = stored.chosen(_turned_back(np.arange(num_out), turned).tolist())
        return QuantisedMatrix(entry.type.scheme, (num_out, num_in), partial(self._quantised_rows, name), stored)

    # --------------------------------------------------------------------------------------------------------- weights

    def _stored(self, entry: Entry) -> Stored:
        scheme = entry.type.scheme if len(entry.shape) == 2 else None
        return Stored(entry.file.path, entry.shape, entry.type.dtype, scheme)

    def _quantised_rows(self, name: str) -> Iterator[QuantisedRows]:
        entry = self._header.tensors[name]
        assert entry.type.unpack is not None
        for rows in self._rows(name):
            yield entry.type.unpack(rows)

    def _rows(self, name: str) -> Iterator[Array]:
        """Yield a tensor's rows in the order of published checkpoints.

        A quantised row is yielded as the stored bytes, uint8 [blocks of the row, bytes of a block].
        """
        entry = self._header.tensors[name]
        turned = self._rows_of_a_head(name)
        num_rows = 1 if len(entry.shape) == 1 and entry.type.unpack else entry.shape[0]
        row_bytes = entry.num_bytes // num_rows
        step = max(1, BLOCK_BYTES // COPIES * entry.type.num_bytes // entry.type.block // 4 // row_bytes)
        step = -(-step // turned) * turned
        for first in range(0, num_rows, step):
            rows = self._read(entry, first * row_bytes, min(step, num_rows - first) * row_bytes)
            yield _turned_back(rows, turned) if turned > 1 else rows

    def _read(self, entry: Entry, start: int, num_bytes: int) -> Array:
        numbers = entry.file.read_whole(entry.start + start, num_bytes)
        if entry.type.unpack is None:
            return numbers.view(HELD_AS[entry.type.dtype]).reshape(-1, *entry.shape[1:])
        return numbers.reshape(-1, entry.shape[-1] // entry.type.block, entry.type.num_bytes)

    def _rows_of_a_head(self, name: str) -> int:
        """Return the number of rows of a head if the tensor is a q or k in llama.cpp's row order; 1 for other tensors.

        In llama.cpp's order, the rows of the two halves of a head alternate, because llama.cpp rotates neighbouring
        rows together. In published checkpoints, row i and row i + head_dim / 2 are rotated together.
        """
        is_turned = self._gguf.turned and (".attn_q." in name or ".attn_k." in name)
        return int(self.config["head_dim"]) if is_turned else 1

    def _read_rope_factors(self) -> dict[str, NDArray[np.float32]]:
        factors = {}
        for name in ROPE_TENSORS:
            entry = self._header.tensors.get(name)
            if entry is None:
                continue
            if entry.type.name != "F32" or len(entry.shape) != 1:
                raise UnsupportedModel(f"{entry.file} has no float32 vector as {name}: fetch it again")
            factors[name] = entry.file.read(entry.start, entry.num_bytes).view(np.float32)
        return factors

    # ---------------------------------------------------------------------------------------------------- small files

    def _write_small_files(self, folder: Path) -> None:
        text = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        rows = self._header.tensors["token_embd.weight"].shape[0]
        write_tokenizer(self._header.metadata, rows, self.path, folder)


def _each_expert(header: Header) -> Header:
    """Return a header in which each stacked tensor (ffn_up_exps) becomes one tensor per expert (ffn_up_exps.0 ...).

    The gate of a shared expert, which is a vector in the file, becomes a matrix of one row.
    """
    tensors = dict[str, Entry]()
    for name, entry in header.tensors.items():
        module, _, ending = name.rpartition(".")
        if module.endswith("ffn_gate_inp_shexp") and len(entry.shape) == 1:  # the only row of a matrix
            entry = replace(entry, shape=(1, *entry.shape))
        if not module.endswith("_exps") or len(entry.shape) != (3 if ending == "weight" else 2):
            tensors[name] = entry
            continue
        num, each = entry.shape[0], entry.num_bytes // entry.shape[0]
        for i in range(num):
            tensors[f"{module}.{i}.{ending}"] = replace(
                entry, shape=entry.shape[1:], start=entry.start + i * each, num_bytes=each
            )
    return replace(header, tensors=tensors)


def _next_blocks(config: Mapping[str, Any], header: Header, gguf: Gguf) -> tuple[str, ...]:
    """Return the prefixes of tensor names in the multi-token prediction blocks, which follow the model's last block."""
    num = 0 if gguf.next_blocks is None else header.metadata.get(f"{gguf.architecture}.{gguf.next_blocks}", 0)
    first = config.get("num_hidden_layers")
    if type(num) is not int or type(first) is not int or not 0 <= num <= MOST_NEXT_BLOCKS:
        return ()
    return tuple(f"blk.{i}." for i in range(first, first + num))


def _turned_back(rows: Array, turned: int) -> Array:
    """Reorder rows from llama.cpp's order to the order of published checkpoints, see `GgufFile._rows_of_a_head`.

    rows: the rows of one or more whole heads. turned: the number of rows of a head.
    """
    halves = rows.reshape(-1, turned // 2, 2, *rows.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(rows.shape))


def open_source(path: Path) -> GgufFile:
    """Return the source of a GGUF file."""
    return GgufFile(path)
