"""Blocks of KV caches in a folder: what one process has read, the next one need not read again.

A folder belongs to one user and may serve several processes. It holds a secret, and a *shelf* for each model that wrote
there, under a hash of everything that decides the bits of a row. A shelf has *segments*, pairs of files: NAME.kv has
the rows of blocks one behind the other, NAME.idx an entry of 128 bytes for each. A process writes to segments of its
own and reads those of all. A segment that is full is not written to again; where the folder has become larger than it
may be, the segment that was used longest ago is removed.

An entry is written when its rows are, and says what they must hash to, so a process may be killed at any moment: what
it was writing is lost, and nothing else. Rows are found under a keyed BLAKE2b hash of the salt and of all tokens up to
the block's end (kv/prefix.py has the chain), and the block's own tokens are compared besides. Whoever can read the
folder can learn what was asked: it is readable by its owner alone.

Rows are read by `preadv` and not through a memory map, because a file that is cut while it is mapped ends the process
that reads it (SIGBUS).
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import xxhash
from torch import Tensor

from forerun import native
from forerun.errors import BadOption

LOG = logging.getLogger(__name__)
FORM = 1  # of the files; others are not read
SECRET, ROWS, ENTRIES, ABOUT = "secret", ".kv", ".idx", "about.json"
SEGMENT_BYTES = 256 << 20  # of rows, at most
LEAST_BYTES = 64 << 20  # of a folder
AHEAD_S = 60.0  # a file's time that lies further in the future is wrong
REFRESH_S = 0.2  # between two looks at what other processes wrote
BLOCK_TOKENS = 16
_ENTRY = struct.Struct("<32s64sB3xIQQ")  # key, tokens, kind, bytes, where they begin, what they hash to
_SUM = struct.Struct("<Q")  # of the entry itself
ENTRY_BYTES = _ENTRY.size + _SUM.size
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Limit(NamedTuple):
    """What the option kv_disk says: how many bytes a folder may hold, and where it is."""

    num_bytes: int
    path: Path

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read '20GB' or '20GB:PATH'. Raises BadOption."""
        amount, _, where = text.partition(":")
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", amount)
        try:
            if match is None:
                raise ValueError
            num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
        except (ValueError, KeyError):
            raise BadOption(f"kv_disk={text!r} is no size: write 20GB, or 20GB:FOLDER") from None
        if num_bytes < LEAST_BYTES:
            raise BadOption(f"kv_disk={text!r} is too small: give {LEAST_BYTES // 10**6}MB at least")
        return cls(num_bytes, Path(where).expanduser() if where else default_path())


def default_path() -> Path:
    """Return the folder that is used where none is named, in the user's cache."""
    return native.cache_folder() / "kv"


class Place(NamedTuple):
    """Where the rows of one block are."""

    segment: Segment
    start: int
    num_bytes: int
    sum: int
    tokens: bytes
    entry: int  # which of the segment's


@dataclass(eq=False)
class Segment:
    """Two files, and how far their entries were read."""

    path: Path  # without an ending
    rows: int  # a descriptor, which is closed when nobody knows the segment any more
    num_read: int = 0
    used_at: float = 0.0

    def __del__(self) -> None:
        os.close(self.rows)

    @property
    def entries(self) -> Path:
        """The file of its entries."""
        return self.path.with_suffix(ENTRIES)


@dataclass(frozen=True)
class Kept:
    """What a shelf holds. used_at: seconds since 1970, of the last use. num_damaged: blocks, where they were read."""

    model: str
    path: Path
    num_blocks: int
    num_tokens: int
    num_bytes: int
    used_at: float
    num_damaged: int = 0


def kept(path: Path, *, verifies: bool = False) -> list[Kept]:
    """Return what each shelf of a folder holds. verifies: whether all rows are read, and compared with their hashes.

    Raises BadOption where the folder is none of forerun's.
    """
    found = []
    for shelf in sorted(_shelves(path)):
        about: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            about = json.loads((shelf / ABOUT).read_text(encoding="utf-8"))
        num_blocks, num_tokens, num_bytes, num_damaged, used_at = 0, 0, 0, 0, 0.0
        for entries in shelf.glob(f"*{ENTRIES}"):
            with suppress(OSError), open(entries.with_suffix(ROWS), "rb") as rows:
                data = entries.read_bytes()
                num_bytes += len(data) + os.fstat(rows.fileno()).st_size
                used_at = max(used_at, entries.stat().st_mtime)
                for entry in _entries(data):
                    num_blocks += entry is not None
                    num_tokens += BLOCK_TOKENS * (entry is not None and entry[2] == 0)
                    num_damaged += verifies and entry is not None and not _is_whole(rows.fileno(), entry)
        found.append(Kept(about.get("model", ""), shelf, num_blocks, num_tokens, num_bytes, used_at, num_damaged))
    return found


def clear(path: Path, model: str | None = None) -> int:
    """Remove the shelves of a model, None = all, and return how many bytes they had. Raises as `kept`."""
    num_bytes = 0
    for one in kept(path):
        if model is None or one.model == model:
            num_bytes += one.num_bytes
            shutil.rmtree(one.path, ignore_errors=True)
    return num_bytes


def _shelves(path: Path) -> list[Path]:
    if not (path / SECRET).exists():
        raise BadOption(f"{str(path)!r} is no folder of kv_disk: name one with --folder")
    return [shelf for shelf in path.iterdir() if shelf.is_dir()]


def _entries(data: bytes) -> Iterator[tuple[Any, ...] | None]:
    """Yield key, tokens, kind, bytes, start and hash of each entry; None for one that is not there, or damaged."""
    for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        entry, total = data[at : at + _ENTRY.size], _SUM.unpack_from(data, at + _ENTRY.size)[0]
        yield _ENTRY.unpack(entry) if total == xxhash.xxh3_64_intdigest(entry) else None


def _is_whole(descriptor: int, entry: tuple[Any, ...]) -> bool:
    *_, num_bytes, start, total = entry
    data = os.pread(descriptor, num_bytes, start)
    return len(data) == num_bytes and bool(xxhash.xxh3_64_intdigest(data) == total)


class Folder:
    """A folder of shelves, no larger than `num_bytes`, and the thread that writes there.

    Raises BadOption for a folder that others can read, or that holds other files. A folder that cannot be written to is
    read; that is said once.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self.segment_bytes = min(SEGMENT_BYTES, num_bytes // 8)
        self.is_writable = True
        self._said = set[str]()
        self._jobs: list[Callable[[], bool]] = []
        self._wake = threading.Condition()
        self._is_open = True
        self.secret = self._secret()
        self._thread = threading.Thread(target=self._write, name="forerun-kv-disk", daemon=True)
        self._thread.start()

    def _secret(self) -> bytes:
        try:
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if is_new:
                self.path.chmod(0o700)
        except OSError as error:
            raise BadOption(f"kv_disk: the folder {str(self.path)!r} cannot be made: {error.strerror}") from None
        file = self.path / SECRET
        known = [name for name in os.listdir(self.path) if not name.startswith(".")]  # which killed processes leave
        if known and SECRET not in known:
            raise BadOption(
                f"kv_disk: {str(self.path)!r} holds other files: name a folder that is empty or does not exist yet"
            )
        if (self.path.stat().st_mode & 0o077) or self.path.stat().st_uid != os.geteuid():
            raise BadOption(
                f"kv_disk: others can read {str(self.path)!r}, and what is kept there tells what was asked: "
                "name a folder of your own, with the mode 0700"
            )
        if not file.exists():
            made = self.path / f".{secrets.token_hex(8)}"
            try:
                made.touch(mode=0o600)
                made.write_bytes(secrets.token_bytes(32))
                with suppress(FileExistsError):
                    os.link(made, file)  # whole, or not at all
                made.unlink()
            except OSError as error:
                why = f"nothing can be written to {str(self.path)!r}: {error.strerror}"
                raise BadOption(f"kv_disk: {why}") from None
        return file.read_bytes()

    def shelf(self, about: Seq[object], record_bytes: Seq[int], model: str = "") -> Shelf:
        """Return the shelf of a model.

        about: all that decides the bits of its rows. record_bytes: of a block of each kind of layers. model: its name.
        """
        name = blake2b(repr((FORM, tuple(about), tuple(record_bytes))).encode(), key=self.secret, digest_size=16)
        return Shelf(self, self.path / name.hexdigest(), list(record_bytes), model)

    def say(self, what: str) -> None:
        """Log a sentence, once for each process."""
        if what not in self._said:
            self._said.add(what)
            LOG.warning("kv_disk %s: %s", self.path, what)

    # -------------------------------------------------------------------------------------------------------- writing

    def add(self, job: Callable[[], bool]) -> None:
        """Let the thread call `job` when it is woken, again and again until it returns False."""
        self._jobs.append(job)

    def wake(self) -> None:
        """Tell the thread that there is something to write."""
        with self._wake:
            self._wake.notify()

    def close(self, within_s: float = 20.0) -> None:
        """Write what waits, for so long at most, and end the thread."""
        with self._wake:
            self._is_open = False
            self._wake.notify()
        self._thread.join(within_s)

    def _write(self) -> None:
        while True:
            busy = False
            for job in list(self._jobs):
                try:
                    busy |= job()
                except Exception:
                    LOG.exception("kv_disk %s: a block was not written", self.path)
            if busy:
                continue
            with self._wake:
                if not self._is_open:
                    return
                self._wake.wait(1.0)

    def failed(self, error: OSError) -> None:
        """Write nothing more: there is no room, or no right to."""
        self.is_writable = False
        self.say(f"nothing more is written there ({error.strerror}); what is there is read")

    # ------------------------------------------------------------------------------------------------- what there is

    def segments(self) -> list[tuple[Path, int, float]]:
        """Return each segment's path without ending, its bytes, and when it was used last, longest ago first.

        A time in the future was a wrong clock's, and counts as 0: such a segment would stay for ever, and what is
        written now would go in its place.
        """
        found, latest = [], time.time() + AHEAD_S
        for entries in self.path.glob(f"*/*{ENTRIES}"):
            with suppress(OSError):
                own, rows = entries.stat(), entries.with_suffix(ROWS).stat()
                used_at = own.st_mtime if own.st_mtime <= latest else 0.0
                found.append((entries.with_suffix(""), own.st_size + rows.st_size, used_at))
        return sorted(found, key=lambda one: one[2])

    def shrink(self, room: int = 0) -> None:
        """Remove segments, those used longest ago first, until the folder has so much room left."""
        found = self.segments()
        num_bytes = sum(size for _, size, _ in found) + room
        for path, size, _ in found:
            if num_bytes <= self.num_bytes:
                return
            remove(path)
            num_bytes -= size


def remove(path: Path) -> None:
    """Remove both files of a segment, the entries first."""
    for ending in (ENTRIES, ROWS):
        path.with_suffix(ending).unlink(missing_ok=True)


class Shelf:
    """The blocks of one model: where each is, by its kind of layers and its key.

    Any thread may ask; one thread writes.
    """

    def __init__(self, folder: Folder, path: Path, record_bytes: list[int], model: str = "") -> None:
        self.folder, self.path, self.record_bytes, self.model = folder, path, record_bytes, model
        self._places: dict[tuple[int, bytes], Place] = {}
        self._segments: dict[str, Segment] = {}
        self._own: Segment | None = None
        self._own_bytes = 0
        self._own_entries = -1
        self._lock = threading.RLock()
        self._looked_at = -1e9
        self.refresh()

    def __len__(self) -> int:
        return len(self._places)

    def key(self, chain: bytes) -> bytes:
        """Return the key of a block on disk: without the secret nobody can tell which texts are here."""
        return blake2b(chain, key=self.folder.secret, digest_size=32).digest()

    def has(self, kind: int, chain: bytes) -> bool:
        """Return whether a block is here already."""
        return (kind, self.key(chain)) in self._places

    def find(self, kind: int, chain: bytes, tokens: Seq[int]) -> Place | None:
        """Return where the rows of a block are, None where it is not here. tokens: its own."""
        place = self._places.get((kind, self.key(chain)))
        return place if place is not None and place.tokens == _packed(tokens) else None

    def refresh(self) -> None:
        """Look for what other processes have written or removed since; not more often than REFRESH_S."""
        if time.monotonic() - self._looked_at < REFRESH_S:
            return
        with self._lock:
            self._looked_at = time.monotonic()
            try:
                names = {
                    entry.name.removesuffix(ENTRIES) for entry in os.scandir(self.path) if entry.name.endswith(ENTRIES)
                }
            except FileNotFoundError:
                names = set[str]()
            except OSError as error:
                self.folder.say(f"it cannot be read: {error.strerror}")
                return
            gone = [self._segments.pop(name) for name in self._segments.keys() - names]
            if gone:
                lost = set(map(id, gone))
                self._places = {key: place for key, place in self._places.items() if id(place.segment) not in lost}
                if self._own is not None and id(self._own) in lost:
                    self._end_own()
            for name in names:
                with suppress(OSError):
                    self._read_entries(name)

    def _read_entries(self, name: str) -> None:
        segment = self._segments.get(name)
        if segment is self._own and segment is not None:
            return
        if segment is None:
            path = self.path / name
            segment = Segment(path, os.open(path.with_suffix(ROWS), os.O_RDONLY | os.O_CLOEXEC))
            self._segments[name] = segment
        with open(segment.entries, "rb") as file:
            file.seek(segment.num_read * ENTRY_BYTES)
            data = file.read()
        end = os.fstat(segment.rows).st_size
        for entry in _entries(data):
            segment.num_read += 1
            if entry is None:
                continue
            key, tokens, kind, num_bytes, start, total = entry
            if kind < len(self.record_bytes) and num_bytes == self.record_bytes[kind] and start + num_bytes <= end:
                self._places[kind, key] = Place(segment, start, num_bytes, total, tokens, segment.num_read - 1)

    # ---------------------------------------------------------------------------------------------------------- rows

    def read(self, kind: int, chain: bytes, place: Place, out: memoryview) -> bool:
        """Read the rows of a block, and return whether they are what was written."""
        segment = place.segment
        try:
            num = os.preadv(segment.rows, [out], place.start)
        except OSError as error:
            self.folder.say(f"a block cannot be read: {error.strerror}")
            num = -1
        if num == place.num_bytes and xxhash.xxh3_64_intdigest(out) == place.sum:
            return True
        if num >= 0:
            self.folder.say("a block is damaged, and its text is read again")
        with self._lock:
            if self._places.get(found := (kind, self.key(chain))) is place:
                del self._places[found]
        with suppress(OSError), open(segment.entries, "r+b") as file:  # so that nobody looks there again
            os.pwrite(file.fileno(), bytes(ENTRY_BYTES), place.entry * ENTRY_BYTES)
        return False

    def used(self, segments: Seq[Segment]) -> None:
        """Take note that these segments were used just now."""
        now = time.monotonic()
        for segment in dict.fromkeys(segments):
            if now - segment.used_at > 1:
                segment.used_at = now
                with suppress(OSError):
                    os.utime(segment.entries)

    def write(self, kind: int, chain: bytes, tokens: Seq[int], rows: memoryview) -> None:
        """Add a block, if it is not here. Called by the writing thread alone."""
        key = self.key(chain)
        if (kind, key) in self._places or not self.folder.is_writable:
            return
        try:
            self._write(kind, key, _packed(tokens), rows)
        except OSError as error:
            self._end_own()
            self.folder.failed(error)

    def _write(self, kind: int, key: bytes, tokens: bytes, rows: memoryview) -> None:
        if self._own is None or self._own_bytes + rows.nbytes > self.folder.segment_bytes:
            self._begin_own()
        own, start = self._own, self._own_bytes
        assert own is not None
        total = xxhash.xxh3_64_intdigest(rows)
        _write_all(own.rows, rows, start)
        entry = _ENTRY.pack(key, tokens, kind, rows.nbytes, start, total)
        at = own.num_read * ENTRY_BYTES
        _write_all(self._own_entries, memoryview(entry + _SUM.pack(xxhash.xxh3_64_intdigest(entry))), at)
        with self._lock:
            self._places[kind, key] = Place(own, start, rows.nbytes, total, tokens, own.num_read)
            own.num_read += 1
            self._own_bytes += rows.nbytes

    def _begin_own(self) -> None:
        self._end_own()
        self.folder.shrink(self.folder.segment_bytes)
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not (about := self.path / ABOUT).exists():
            about.touch(mode=0o600)
            about.write_text(
                json.dumps({"model": self.model, "record_bytes": self.record_bytes}) + "\n", encoding="utf-8"
            )
        path = self.path / secrets.token_hex(8)
        flags = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        rows = os.open(path.with_suffix(ROWS), flags | os.O_RDWR, 0o600)
        with self._lock:
            self._own_entries = os.open(path.with_suffix(ENTRIES), flags | os.O_WRONLY, 0o600)
            self._own, self._own_bytes = Segment(path, rows), 0
            self._segments[path.name] = self._own

    def _end_own(self) -> None:
        """Write to another segment from now on; this one is read as those of others are."""
        with self._lock:
            self._own = None
            if self._own_entries >= 0:
                os.close(self._own_entries)
                self._own_entries = -1


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of weights in memory, by their names; it takes as long as reading them."""
    found = xxhash.xxh3_128()
    for name, weight in sorted(weights, key=lambda one: one[0]):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        found.update(memoryview(weight.detach().contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return found.hexdigest()


def _packed(tokens: Seq[int]) -> bytes:
    return array("i", tokens).tobytes()


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        num = os.pwrite(descriptor, data, at)
        data, at = data[num:], at + num
