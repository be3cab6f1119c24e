"""The files of blocks on disk: a *segment* is a pair, NAME.kv with the rows and NAME.idx with an entry for each block.

An entry of 128 bytes is written when its rows are, and says what they must hash to: whoever is killed while writing
leaves nothing that is read as something else. It counts, too, how often its block was *used*: by sequences that began
with it, or that ran the same tokens again. A segment is removed as a whole, and blocks of it that were used are
*carried* to another one before, with half of their count: they go when nobody uses them for as long as their next
segment lasts.
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
MOST_USES = 3  # that are counted: a text of many turns is worth no more than what a few texts begin with
_ENTRY = struct.Struct("<32s64sBB2xIQQ")
_SUM = struct.Struct("<Q")  # of the entry itself
ENTRY_BYTES = _ENTRY.size + _SUM.size


class Entry(NamedTuple):
    """One block of a segment: what it is, how often it was used, and where its rows are and what they hash to."""

    key: bytes
    tokens: bytes
    kind: int
    uses: int
    num_bytes: int
    start: int
    sum: int

    def packed(self) -> bytes:
        """Return the bytes of a file."""
        packed = _ENTRY.pack(*self)
        return packed + _SUM.pack(xxhash.xxh3_64_intdigest(packed))

    def rows(self, descriptor: int) -> memoryview | None:
        """Read the rows from their file; None where they are damaged, or not all there."""
        rows = os.pread(descriptor, self.num_bytes, self.start)
        is_whole = len(rows) == self.num_bytes and xxhash.xxh3_64_intdigest(rows) == self.sum
        return memoryview(rows) if is_whole else None


def entries_in(data: bytes) -> Iterator[Entry | None]:
    """Yield each entry; None for one that is not there, or damaged."""
    for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        packed, total = data[at : at + _ENTRY.size], _SUM.unpack_from(data, at + _ENTRY.size)[0]
        yield Entry._make(_ENTRY.unpack(packed)) if total == xxhash.xxh3_64_intdigest(packed) else None


@dataclass(eq=False)
class Segment:
    """Two files, and how far their entries were read."""

    path: Path  # without an ending
    rows: int  # a descriptor, which is closed when nobody knows the segment any more
    num_read: int = 0

    def __del__(self) -> None:
        os.close(self.rows)

    @classmethod
    def opened(cls, path: Path) -> Segment:
        """Open a segment that is there."""
        return cls(path, os.open(path.with_suffix(ROWS), os.O_RDONLY | os.O_CLOEXEC))

    @property
    def entries(self) -> Path:
        """The file of its entries."""
        return self.path.with_suffix(ENTRIES)

    def rewrite(self, entries: Mapping[int, bytes]) -> None:
        """Write entries anew, by their numbers, where the file is still there and may be written to.

        The file's time then counts as the last use, even where no entry changes.
        """
        with suppress(OSError), open(self.entries, "r+b") as file:
            for number, entry in entries.items():
                os.pwrite(file.fileno(), entry, number * ENTRY_BYTES)
            os.utime(file.fileno())


class Writer:
    """A new segment in a folder, which is made where it is not there: only its owner can read either."""

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
        """Whether another process has removed the files: what is written there is lost."""
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
        """The bytes that it will take in both files."""
        return self.entry.num_bytes + ENTRY_BYTES


def used_blocks(path: Path) -> list[Carried]:
    """Return the blocks of a segment that were used, none where it cannot be read any more."""
    with suppress(OSError):
        segment = Segment.opened(path)
        return [
            Carried(segment, entry)
            for entry in entries_in(segment.entries.read_bytes())
            if entry is not None and entry.uses
        ]
    return []


def carry(blocks: Iterable[Carried], num_bytes: int) -> None:
    """Write blocks to new segments of their shelves, as many as so many bytes hold.

    Those that were used most often come first, and of these the first that were written: a text's beginning stays at
    least as long as what goes on behind it.
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
    """Remove both files of a segment, the entries first."""
    for ending in (ENTRIES, ROWS):
        path.with_suffix(ending).unlink(missing_ok=True)


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        num = os.pwrite(descriptor, data, at)
        data, at = data[num:], at + num
