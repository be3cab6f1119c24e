"""Reads and writes safetensors files. Such a file has a header that describes tensors, and the bytes of the tensors.

github.com/huggingface/safetensors describes the format: eight bytes with the length of the header, a JSON object with
the type, shape and offsets of each tensor, then the bytes of all tensors. The safetensors library opens a file anew for
each access, parses the whole header, and maps the file into memory, where pages that were read stay resident. With tens
of thousands of tensors, as in models with experts, loading spends most of its time on this. So the module reads a
header once, and then reads tensors by their offsets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import UnsupportedModel
from forerun.host_tensor import HELD_AS, HostTensor
from forerun.models.open_file import OpenFile
from forerun.text.files import unreadable

TYPES = {  # safetensors' names of types -> HostTensor's names
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
WORDS = {name: word for word, name in TYPES.items()}
METADATA, LENGTH_BYTES = "__metadata__", 8
MOST_HEADER_BYTES = 100_000_000  # as in the library; a header of 30,000 tensors has some 5 MB


@dataclass(frozen=True)
class Entry:
    """A tensor in a file's header. dtype: the dtype's name in safetensors. start: the tensor's offset in the file."""

    file: OpenFile
    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int

    def rows(self, first: int, end: int) -> HostTensor:
        """Read the rows `first` to `end` - 1.

        Raises UnsupportedModel for an unknown dtype, and if the file has become shorter.
        """
        row_bytes = self.num_bytes // max(1, self.shape[0])
        return self._read(first * row_bytes, (end - first) * row_bytes).reshape(end - first, *self.shape[1:])

    def whole(self) -> HostTensor:
        """Read the whole tensor. Raises as `rows`."""
        return self._read(0, self.num_bytes).reshape(*self.shape)

    def _read(self, start: int, num_bytes: int) -> HostTensor:
        if self.dtype not in TYPES:
            raise UnsupportedModel(f"{self.file} has a tensor of type {self.dtype}, which is not read here: convert it")
        numbers = self.file.read_whole(self.start + start, num_bytes)
        return HostTensor(numbers.view(HELD_AS[TYPES[self.dtype]]), TYPES[self.dtype])


def read_header(file: OpenFile) -> dict[str, Entry]:
    """Read the header of a file, and return its tensors by name. Raises NotFound or UnsupportedModel for a bad file."""
    try:
        num_bytes = int.from_bytes(file.read(0, LENGTH_BYTES).tobytes(), "little")
        size = file.stream.seek(0, 2)
        if size < LENGTH_BYTES or num_bytes > min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
            raise ValueError("it ends within its header")
        said = json.loads(file.read(LENGTH_BYTES, num_bytes).tobytes())
        first = LENGTH_BYTES + num_bytes
        entries = {name: _entry(file, first, **about) for name, about in said.items() if name != METADATA}
        _check_places(entries, first, size)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(file.path, error, "a readable safetensors file") from error
    return entries


def _entry(file: OpenFile, first: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    """Return the Entry of one tensor. first: the offset in the file at which the bytes of all tensors begin.

    dtype, shape, data_offsets: the tensor's values in the header. Raises ValueError for impossible values.
    """
    begin, end = data_offsets
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end - begin)):
        raise ValueError("a tensor has a size or a place that is no number")
    num_bytes = math.prod(shape) * HELD_AS[TYPES[dtype]].itemsize if dtype in TYPES else end - begin
    if num_bytes != end - begin:
        raise ValueError(f"a tensor of shape {shape} and type {dtype} has {end - begin} bytes")
    return Entry(file, tuple(shape), dtype, first + begin, num_bytes)


def _check_places(entries: Mapping[str, Entry], first: int, size: int) -> None:
    """Raise ValueError unless the tensors follow one another without gaps, up to the end of the file."""
    end = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            raise ValueError(f"{name!r:.80} does not begin where the tensor before it ends")
        end += entry.num_bytes
    if end != size:
        raise ValueError(f"it has {size:,} bytes and its tensors end at {end:,}, as where a download was cut short")


def write(path: Path, tensors: Mapping[str, HostTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Tensors with the widest dtypes come first, so that every tensor is aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].values.itemsize, name))
    header: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    at = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {"dtype": WORDS[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in names:
            file.write(np.ascontiguousarray(tensors[name].values).reshape(-1).view(np.uint8).tobytes())
