"""Reads the header of a GGUF file, or of all pieces of a model: metadata by key, and the place of each tensor.

The reader in the `gguf` package is not used. That reader keeps an array for every string, and takes 4 s for a
vocabulary of 49,152 tokens; the reader here takes 0.1 s. The `gguf` package also trusts the counts and lengths in a
broken file, and may then run forever. The reader here reads nothing beyond the end of the file, and every number has a
bound, far above the numbers in published files.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from forerun.errors import NotFound, UnsupportedModel
from forerun.models.gguf.blocks import NAMES, TYPES, TensorType
from forerun.models.gguf.pieces import pieces_of
from forerun.models.open_file import OpenFile
from forerun.text.files import unreadable

OF_IDS = frozenset({"d2t"})  # tensors of ids, not weights, in drafters' heads
MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # bytes, where general.alignment does not say otherwise
MOST_ENTRIES = 1 << 16
MOST_ITEMS = 1 << 22
MOST_DIMS = 4
MOST_ALIGNMENT = 1 << 16
MOST_KEY_BYTES, MOST_STRING_BYTES = 1 << 16, 1 << 26
CHUNK_BYTES = 1 << 20  # of texts that are read at a time
STRING, ARRAY = 8, 9
# Types of values -> their `struct` formats, little-endian.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Texts:
    """A list of `num` texts in a file, from offset `start` on. The texts are not read until `read` is called.

    A vocabulary and its merges have some 300,000 texts, and most callers need none of them.
    """

    file: OpenFile
    start: int
    num: int

    def read(self) -> list[bytes]:
        """Return the texts. Raises as `read_header`."""
        reader = _Reader(self.file)
        reader.at = self.start
        return reader.texts(self.num, "a list")


Value = bool | int | float | bytes | Texts | np.ndarray[Any, Any]


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. shape: rows first, as in torch. start: the tensor's offset in the file, in bytes."""

    file: OpenFile
    shape: tuple[int, ...]
    type: TensorType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """The header of a file, which is the part before the weights.

    metadata: the values by key; texts are bytes objects, because they may not be UTF-8. digest: a hash of the header's
    bytes.
    """

    metadata: Mapping[str, Value]
    tensors: Mapping[str, Entry]
    digest: str


def read_header(path: Path) -> Header:
    """Read the header of a file. The file stays open until it is closed or the header is dropped.

    Raises NotFound for a file that cannot be read, UnsupportedModel for a file that is not GGUF, is broken, or holds
    unsupported types of tensors.
    """
    try:
        return _Reader(OpenFile(path)).header()
    except OSError as error:
        raise unreadable(path, error) from error


def read_model(path: Path) -> Header:
    """Read the header of a model that is one file or several pieces. path: the file, or any piece.

    The metadata comes from the first piece. The metadata of other pieces has little more than the piece's number.
    Raises as `read_header`, NotFound for a missing piece, and UnsupportedModel for pieces that do not fit together.
    """
    header = read_header(path)
    count, number = _split(header, path)
    if count <= 1:
        return header
    files = [path.with_name(name) for name in pieces_of(path.name)]
    if len(files) != count or number >= count or files[number].name != path.name:
        raise UnsupportedModel(
            f"{path} says that it is piece {number + 1} of {count}, and the others are found by names that end with "
            f"-{number + 1:05d}-of-{count:05d}.gguf: give it and them such names again"
        )
    headers: list[Header] = []
    tensors = dict[str, Entry]()
    for i, file in enumerate(files):
        if not file.exists() and not file.is_symlink():
            raise NotFound(
                f"{file} is not there, piece {i + 1} of the {count} that {path.name} is one of: put all of them into "
                "one folder"
            )
        headers.append(header if i == number else read_header(file))
        if _split(headers[i], file) != (count, i):
            said, at = _split(headers[i], file)
            raise UnsupportedModel(
                f"{file} says that it is piece {at + 1} of {said}, which its name does not: fetch it again"
            )
        for name, entry in headers[i].tensors.items():
            if name in tensors:
                raise UnsupportedModel(
                    f"{file} and {tensors[name].file} both have the tensor {name!r:.80}: fetch all pieces again, from "
                    "one place"
                )
            tensors[name] = entry
    metadata = headers[0].metadata
    if (wanted := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise UnsupportedModel(
            f"{files[0]} says that the {count} pieces have {wanted!r:.80} tensors, and they have {len(tensors)}: fetch "
            "all of them again, from one place"
        )
    return Header(metadata, tensors, hashlib.sha256("".join(piece.digest for piece in headers).encode()).hexdigest())


def _split(header: Header, file: Path) -> tuple[int, int]:
    """Return the number of the model's pieces, and the index of this piece, counted from 0; (1, 0) for a whole file."""
    count, number = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
    if type(count) is not int or type(number) is not int or count < 0 or number < 0:
        raise UnsupportedModel(
            f"{file} sets split.count={count!r:.80} and split.no={number!r:.80}, which must be numbers: fetch it again"
        )
    return (count, number) if count > 1 else (1, 0)


class _Reader:
    """A reader of one file, from the beginning of the file to the end of its header."""

    def __init__(self, source: OpenFile) -> None:
        self.source, self.path, self.file = source, source.path, source.stream
        self.at, self.end = 0, self.file.seek(0, 2)
        self.file.seek(0)

    def header(self) -> Header:
        self._magic()
        num_tensors = self._count("tensors", least_bytes=32)
        num_keys = self._count("keys", least_bytes=13)
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._name("key")
            if key in metadata:
                self._refuse(f"has the key {key!r:.80} twice")
            metadata[key] = self._value(key, self._number("I"))
        places: dict[str, tuple[list[int], TensorType, int]] = {}
        for _ in range(num_tensors):
            name = self._name("tensor")
            if name in places:
                self._refuse(f"has the tensor {name!r:.80} twice")
            places[name] = self._place(name)
        self.file.seek(0)
        digest = hashlib.sha256(self.file.read(self.at)).hexdigest()
        first = self._aligned(metadata)
        self._refuse_cut(first, places)
        tensors = {name: self._entry(name, place, first) for name, place in places.items()}
        self._refuse_overlaps(tensors)
        return Header(metadata, tensors, digest)

    # ------------------------------------------------------------------------------------------------------- the parts

    def _magic(self) -> None:
        if self._take(min(self.end, len(MAGIC)), "its first bytes") != MAGIC:
            raise unreadable(self.path, "it does not begin as a GGUF file does", "a readable GGUF file")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise UnsupportedModel(
                f"{self.path} is a big-endian GGUF file, and forerun reads little-endian ones: fetch one of those"
            )
        if version not in VERSIONS:
            raise UnsupportedModel(
                f"{self.path} is a GGUF file of version {version}, and forerun reads {VERSIONS[0]} and {VERSIONS[1]}: "
                "convert the original again with convert_hf_to_gguf.py of llama.cpp"
            )

    def _count(self, what: str, least_bytes: int) -> int:
        count: int = self._number("Q")
        if count > min(MOST_ENTRIES, (self.end - self.at) // least_bytes):
            self._refuse(f"claims to have {count:,} {what}")
        return count

    def _name(self, what: str) -> str:
        data = self._text(f"the name of a {what}", MOST_KEY_BYTES)
        if not (name := data.decode(errors="replace")).isprintable() or not name.isascii():
            self._refuse(f"has a {what} whose name, {data!r:.80}, is not one of printable ASCII characters")
        return name

    def _value(self, key: str, kind: int) -> Value:
        if kind == STRING:
            return self._text(key, MOST_STRING_BYTES)
        if kind in SCALARS:
            value: bool | int | float = self._number(SCALARS[kind])
            return value
        if kind != ARRAY:
            self._refuse(f"sets {key!r:.80} to a value of the unknown type {kind}")
        item, num = self._number("I"), self._number("Q")
        least_bytes = 8 if item == STRING else struct.calcsize(SCALARS.get(item, "B"))
        if num > min(MOST_ITEMS, (self.end - self.at) // least_bytes):
            self._refuse(f"claims to have {num:,} items in {key!r:.80}")
        if item == STRING:
            start = self.at
            self._skip_texts(num, key)
            return Texts(self.source, start, num)
        if item not in SCALARS:
            self._refuse(f"has items of type {item} in {key!r:.80}, which must be numbers or texts")
        return np.frombuffer(self._take(num * least_bytes, repr(key)), np.dtype("<" + SCALARS[item]))

    def _place(self, name: str) -> tuple[list[int], TensorType, int]:
        num_dims = self._number("I")
        if not 1 <= num_dims <= MOST_DIMS:
            self._refuse(f"gives {name!r:.80} {num_dims:,} dimensions")
        dims = [self._number("Q") for _ in range(num_dims)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES or (TYPES[kind].dtype == "int64" and name not in OF_IDS):
            known = ", ".join(one.name for one in TYPES.values() if one.dtype != "int64")
            raise UnsupportedModel(
                f"{self.path} holds {name!r:.80} as {NAMES.get(kind, f'type {kind}')}, and forerun reads {known}: "
                "fetch the model in one of these types"
            )
        return dims, TYPES[kind], offset

    def _aligned(self, metadata: Mapping[str, Value]) -> int:
        """Return the offset in the file at which the weights begin."""
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            self._refuse(f"sets general.alignment={alignment!r:.80}, which is no such power of two")
        self.alignment = alignment
        return -(-self.at // alignment) * alignment

    def _entry(self, name: str, place: tuple[list[int], TensorType, int], first: int) -> Entry:
        dims, kind, offset = place
        num_weights = math.prod(dims)
        if not all(dims) or dims[0] % kind.block:
            self._refuse(f"gives {name!r:.80} of type {kind.name} the dimensions {dims}")
        num_bytes = num_weights // kind.block * kind.num_bytes
        if offset % self.alignment:
            self._refuse(
                f"puts {name!r:.80} at byte {offset:,} of its weights, which is no multiple of {self.alignment}"
            )
        return Entry(self.source, tuple(reversed(dims)), kind, first + offset, num_bytes)

    def _refuse_cut(self, first: int, places: Mapping[str, tuple[list[int], TensorType, int]]) -> None:
        """Raise UnsupportedModel for a file that ends before its last tensor, as where a download was cut short.

        first: the offset in the file at which the weights begin. places: for each tensor, its dimensions, its type, and
        its offset from `first`.
        """
        ends = [
            first + offset + math.prod(dims) // kind.block * kind.num_bytes for dims, kind, offset in places.values()
        ]
        if (last := max(ends, default=0)) > self.end:
            self._refuse(f"has {self.end:,} bytes and its tensors need {last:,}, as where a download was cut short")

    def _refuse_overlaps(self, tensors: Mapping[str, Entry]) -> None:
        last, end = "", 0
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
            if entry.start < end:
                self._refuse(f"has {name!r:.80} and {last!r:.80} in the same place")
            last, end = name, entry.start + entry.num_bytes

    # ------------------------------------------------------------------------------------------------------- the bytes

    def _number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self._take(struct.calcsize("<" + kind), "its header"))[0]

    def _text(self, where: str, most: int) -> bytes:
        num_bytes: int = self._number("Q")
        if num_bytes > most:
            self._refuse(f"has {num_bytes:,} bytes as a text in {where:.80}")
        return self._take(num_bytes, where)

    def texts(self, num: int, where: str) -> list[bytes]:
        """Read `num` texts. This is faster than `num` calls of `_text`, which cost a microsecond each.

        where: the name of the list, for error messages.
        """
        texts = []
        for data, starts in self._pieces(num, where):
            texts += [data[start + 8 : end] for start, end in itertools.pairwise(starts)]
        return texts

    def _skip_texts(self, num: int, where: str) -> None:
        for _ in self._pieces(num, where):
            pass

    def _pieces(self, num: int, where: str) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the next `num` texts in chunks: (bytes of the chunk, offsets into these bytes).

        Each offset but the last is the start of a text, which begins with its length in eight bytes. The last offset is
        the end of the last text.
        """
        unpack = struct.Struct("<Q").unpack_from
        while num:
            self.file.seek(self.at)
            data = self.file.read(CHUNK_BYTES)
            starts, end, num_bytes = [0], 0, len(data)
            with contextlib.suppress(struct.error):  # the chunk has no further length
                for _ in range(num):
                    end += 8 + unpack(data, end)[0]
                    if end > num_bytes:
                        break
                    starts.append(end)
            if len(starts) < 2:  # a text of a megabyte; `_text` reads it, or refuses it
                self.file.seek(self.at)
                first = self._text(where, MOST_STRING_BYTES)
                data, starts = bytes(8) + first, [0, 8 + len(first)]
            else:
                self.at += starts[-1]
            num -= len(starts) - 1
            yield data, starts
        self.file.seek(self.at)

    def _take(self, num_bytes: int, what: str) -> bytes:
        data = self.file.read(num_bytes) if num_bytes <= self.end - self.at else b""
        if len(data) < num_bytes:
            self._refuse(f"ends within {what:.80}")
        self.at += num_bytes
        return data

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModel(f"{self.path} is not a readable GGUF file (it {what}): fetch it again")
