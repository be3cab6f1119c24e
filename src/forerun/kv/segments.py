"""The files of blocks on disk: a *segment* is a pair, NAME.kv with the rows and NAME.idx with an entry for each block.

An entry has 128 bytes. It is written after its rows, and holds their hash. So a process that is killed while writing
leaves nothing that could be read as another block. An entry also counts how often its block was *used*: by sequences
that began with the block, or that ran the same tokens again.

A segment is removed as a whole. Before that, its used blocks are *carried* to another segment. The number of uses of a
carried block is halved, and rounded down. So a block that is not used again is carried once or twice, and then lost.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

ROWS, ENTRIES = ".kv", ".idx"
MOST_USES = 3  # more are not counted: a text of many turns is worth no more than the common beginning of a few texts
_ENTRY = struct.Struct("<32s64sBB2xIQQ")
_SUM = struct.Struct("<Q")  # the hash of the entry itself
ENTRY_BYTES = _ENTRY.size + _SUM.size


class Entry(NamedTuple):
    """One block of a segment: its key, tokens, kind of layers and number of uses, and the place of its rows.

    num_bytes: the size of the rows. start: the offset of the rows in their file. sum: the hash of the rows.
    """

    key: bytes
    tokens: bytes
    kind: int
    uses: int
    num_bytes: int
    start: int
    sum: int

    def packed(self) -> bytes:
        """Return the bytes of the entry in its file."""
        packed = _ENTRY.pack(*self)
        return packed + _SUM.pack(xxhash.xxh3_64_intdigest(packed))

    def rows(self, descriptor: int) -> memoryview | None:
        """Read the rows from an open file of rows. Returns None if the rows are damaged or incomplete."""
        rows = os.pread(descriptor, self.num_bytes, self.start)
        is_whole = len(rows) == self.num_bytes and xxhash.xxh3_64_intdigest(rows) == self.sum
        return memoryview(rows) if is_whole else None


def entries_in(data: bytes) -> Iterator[Entry | None]:
    """Yield each entry in the bytes of a file of entries; None in place of an erased or damaged entry."""
    for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        packed, total = data[at : at + _ENTRY.size], _SUM.unpack_from(data, at + _ENTRY.size)[0]
        yield Entry._make(_ENTRY.unpack(packed)) if total == xxhash.xxh3_64_intdigest(packed) else None


@dataclass(eq=False)
class Segment:
    """A file with the rows of some blocks, and a file with their entries. num_read: how many entries were read."""

    path: Path  # without an ending
    rows: int  # a file descriptor, which is closed when no reference to the segment is left
    num_read: int = 0

    def __del__(self) -> None:
        os.close(self.rows)

    @classmethod
    def opened(cls, path: Path) -> Segment:
        """Open an existing segment."""
        return cls(path, os.open(path.with_suffix(ROWS), os.O_RDONLY | os.O_CLOEXEC))

    @property
    def entries(self) -> Path:
        """The path of the file of entries."""
        return self.path.with_suffix(ENTRIES)

    def rewrite(self, entries: Mapping[int, bytes]) -> None:
        """Overwrite entries in their file. entries: the new bytes, by number of the entry.

        Also sets the file's modification time, even if `entries` is empty, because this time counts as the time of the
        segment's last use. Does nothing if the file no longer exists or may not be written to.
        """
        with suppress(OSError), open(self.entries, "r+b") as file:
            for number, entry in entries.items():
                os.pwrite(file.fileno(), entry, number * ENTRY_BYTES)
            os.utime(file.fileno())


class Writer:
    """Makes a new segment in a folder, and writes blocks to it. The folder is made if it does not exist.

    Only their owner can read the folder and the files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        path, flags = folder / secrets.token_hex(8), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.segment = Segment(path, os.open(path.with_suffix(ROWS), flags | os.O_RDWR, 0o600))
        self._entries = os.open(path.with_suffix(ENTRIES), flags | os.O_WRONLY, 0o600)
        self.num_bytes = 0  # of rows

    def __del__(self) -> None:
        if hasattr(self, "_entries"):
            os.close(self._entries)

    @property
    def is_removed(self) -> bool:
        """Whether another process has removed the files, so that anything written to them is lost."""
        return os.fstat(self._entries).st_nlink == 0

    def add(self, key: bytes, tokens: bytes, kind: int, uses: int, rows: memoryview) -> Entry:
        """Write the rows of a block, and then its entry."""
        entry = Entry(key, tokens, kind, uses, rows.nbytes, self.num_bytes, xxhash.xxh3_64_intdigest(rows))
        _write_all(self.segment.rows, rows, entry.start)
        _write_all(self._entries, memoryview(entry.packed()), self.segment.num_read * ENTRY_BYTES)
        self.segment.num_read += 1
        self.num_bytes += rows.nbytes
        return entry


class Carried(NamedTuple):
    """A block that was used, and its segment, which is about to be removed."""

    segment: Segment
    entry: Entry

    @property
    def num_bytes(self) -> int:
        """The bytes that the block takes in both files of a segment."""
        return self.entry.num_bytes + ENTRY_BYTES


def used_blocks(path: Path) -> list[Carried]:
    """Return the used blocks of a segment; no blocks where the segment cannot be read any more."""
    with suppress(OSError):
        segment = Segment.opened(path)
        return [
            Carried(segment, entry)
            for entry in entries_in(segment.entries.read_bytes())
            if entry is not None and entry.uses
        ]
    return []


def carry(blocks: Iterable[Carried], num_bytes: int) -> None:
    """Write blocks to new segments, as many as fit into `num_bytes` bytes in all.

    A block stays in the folder (shelf) of its model. The blocks with the most uses are written first. Where blocks have
    equally many uses, the oldest is written first. So a block of a text is never dropped before its continuation.
    """
    writers = dict[Path, Writer]()
    for block in sorted(blocks, key=lambda block: -block.entry.uses):
        num_bytes -= block.num_bytes
        if num_bytes < 0:
            return
        key, tokens, kind, uses, *_ = block.entry
        if (rows := block.entry.rows(block.segment.rows)) is not None:
            shelf = block.segment.path.parent
            writer = writers[shelf] = writers.get(shelf) or Writer(shelf)
            writer.add(key, tokens, kind, uses // 2, rows)


def remove(path: Path) -> None:
    """Remove both files of a segment: first the file of entries, then the file of rows. A missing file is no error."""
    for ending in (ENTRIES, ROWS):
        path.with_suffix(ending).unlink(missing_ok=True)


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        num = os.pwrite(descriptor, data, at)
        data, at = data[num:], at + num
