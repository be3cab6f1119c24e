"""Stores blocks of KV caches in a folder, so that no process must run a prompt that an earlier process has run.

A folder belongs to one user and may serve several processes. It holds a secret, and one *shelf* for each model: a
folder whose name is a hash of everything that decides the bits of the model's cache rows. A shelf has segments
(kv/segments.py). A process writes only to its own segments, and reads all segments. A process that is killed loses only
the block that it was writing. A full segment is not written to again. Where the folder has outgrown its limit, the
segment that was written longest ago is removed. Before that, its used blocks are carried to another segment. A block is
used when it is read from the folder, or found in memory by another sequence. So the common beginning of many texts
stays in the folder longer than their different ends.

A block is found under a keyed BLAKE2b hash of the salt and of all tokens up to the block's end (kv/prefix.py has the
chain). The block's tokens are compared, too. Whoever can read the folder can learn what users asked, so only its owner
can read it.

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
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from forerun import native
from forerun.errors import BadOption, shown
from forerun.host_tensor import HostTensor
from forerun.kv.segments import (
    ENTRIES,
    ENTRY_BYTES,
    MOST_USES,
    ROWS,
    Carried,
    Entry,
    Segment,
    Writer,
    carry,
    entries_in,
    remove,
    used_blocks,
)

LOG = logging.getLogger(__name__)
FORM = 1  # the version of the files' format; a shelf of another version is not found
SECRET, ABOUT = "secret", "about.json"
SEGMENT_BYTES = 256 << 20  # of a segment's rows, at most
LEAST_BYTES = 64 << 20  # the smallest limit of a folder
AHEAD_S = 60.0  # a file's time that lies further in the future is wrong
REFRESH_S = 0.2  # between two looks at what other processes wrote
BLOCK_TOKENS = 16
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Limit(NamedTuple):
    """The option kv_disk: how many bytes a folder may hold, and where the folder is."""

    num_bytes: int
    path: Path

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read '20GB' or '20GB:PATH'. Raises BadOption for other texts, and for a size that is too small."""
        amount, _, where = text.partition(":")
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", amount)
        try:
            if match is None:
                raise ValueError
            num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
        except (ValueError, KeyError):
            raise BadOption(f"kv_disk={text!r} is no size: write 20GB, or 20GB:FOLDER") from None
        if num_bytes < LEAST_BYTES:
            raise BadOption(f"kv_disk={text!r} is too small: give {-(-LEAST_BYTES // 10**6)}MB at least")
        return cls(num_bytes, Path(where).expanduser() if where else default_path())


def default_path() -> Path:
    """Return the folder for a kv_disk option without a path: `kv` in forerun's cache folder of the user."""
    return native.cache_folder() / "kv"


@dataclass(eq=False, slots=True)
class Place:
    """The place of a block on disk: its segment, the number of its entry in the segment, and the entry itself.

    uses: the number of known uses, including uses that are not written to disk yet.
    """

    segment: Segment
    number: int
    entry: Entry
    uses: int


@dataclass(frozen=True)
class Kept:
    """A summary of one model's shelf. used_at: the time of the last use, in seconds since 1970.

    num_damaged: the number of damaged blocks; 0 if the rows were not read.
    """

    model: str
    path: Path
    num_blocks: int
    num_tokens: int
    num_bytes: int
    used_at: float
    num_damaged: int = 0


def kept(path: Path, *, verifies: bool = False) -> list[Kept]:
    """Return a summary of each shelf in a folder. Raises BadOption if the folder is not a folder of kv_disk.

    verifies: whether to read all rows and compare them with their hashes.
    """
    shelves = []
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
                for entry in filter(None, entries_in(data)):
                    num_blocks += 1
                    num_tokens += BLOCK_TOKENS * (entry.kind == 0)
                    num_damaged += verifies and entry.rows(rows.fileno()) is None
        shelves.append(Kept(about.get("model", ""), shelf, num_blocks, num_tokens, num_bytes, used_at, num_damaged))
    return shelves


def kept_of(path: Path, model: str | None = None) -> list[Kept]:
    """Return a summary of each shelf of one model. model: the model's name; None = all models.

    Raises BadOption if `path` is not a folder of kv_disk, or if the named model has no shelf in it.
    """
    shelves = [one for one in kept(path) if model in (None, one.model)]
    if model is not None and not shelves:
        raise BadOption(f"nothing is kept of {shown(model)}: `forerun cache list` shows the models")
    return shelves


def clear(path: Path, model: str | None = None) -> int:
    """Delete the shelves that `kept_of` returns, and return their total bytes. Raises BadOption as `kept_of` does."""
    shelves = kept_of(path, model)
    for one in shelves:
        shutil.rmtree(one.path, ignore_errors=True)
    return sum(one.num_bytes for one in shelves)


def _shelves(path: Path) -> list[Path]:
    if not (path / SECRET).exists():
        raise BadOption(f"{str(path)!r} is no folder of kv_disk: name another with --folder")
    return [shelf for shelf in path.iterdir() if shelf.is_dir()]


class Folder:
    """A folder of at most `num_bytes` bytes with the shelf of each model, and the thread that writes to the folder.

    Raises BadOption for a folder that cannot be made or written to, that belongs to another user, that other users can
    read, or that holds other files. If a write fails later, the folder is still read, and a warning is logged once.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self.segment_bytes = min(SEGMENT_BYTES, num_bytes // 16)
        self.is_writable = True
        self._said = set[str]()
        self._jobs: list[Callable[[], bool]] = []
        self._woken = threading.Event()
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
        known = [
            name for name in os.listdir(self.path) if not name.startswith(".")
        ]  # killed processes leave such files
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
            temporary = self.path / f".{secrets.token_hex(8)}"
            try:
                temporary.touch(mode=0o600)
                temporary.write_bytes(secrets.token_bytes(32))
                with suppress(FileExistsError):
                    os.link(temporary, file)  # whole, or not at all
                temporary.unlink()
            except OSError as error:
                why = f"nothing can be written to {str(self.path)!r}: {error.strerror}"
                raise BadOption(f"kv_disk: {why}") from None
        return file.read_bytes()

    def shelf(self, about: Seq[object], record_bytes: Seq[int], model: str = "") -> Shelf:
        """Return the shelf of a model.

        about: everything that decides the bits of the model's cache rows. record_bytes: see BlockCache.record_bytes.
        model: the model's name.
        """
        name = blake2b(repr((FORM, tuple(about), tuple(record_bytes))).encode(), key=self.secret, digest_size=16)
        return Shelf(self, self.path / name.hexdigest(), list(record_bytes), model)

    def say(self, what: str) -> None:
        """Log the warning `what`, unless the same text was logged before."""
        if what not in self._said:
            self._said.add(what)
            LOG.warning("kv_disk %s: %s", self.path, what)

    # -------------------------------------------------------------------------------------------------------- writing

    def add(self, job: Callable[[], bool]) -> None:
        """Let the writing thread call `job` from now on: after each `wake`, and at least once a second.

        `job` writes a little and returns whether more is to be written. While any job returns True, the thread calls
        all jobs again at once.
        """
        self._jobs.append(job)

    def wake(self) -> None:
        """Wake the writing thread, because there is something to write."""
        self._woken.set()

    def close(self, within_s: float = 20.0) -> None:
        """Write the waiting blocks, for at most `within_s` seconds, and end the thread."""
        self._is_open = False
        self._woken.set()
        self._thread.join(within_s)

    def _write(self) -> None:
        while True:
            is_open, busy = self._is_open, False
            self._woken.clear()  # before the jobs look: work that comes meanwhile wakes it again
            for job in list(self._jobs):
                try:
                    busy |= job()
                except Exception:
                    LOG.exception("kv_disk %s: a block was not written", self.path)
            if busy:
                continue
            if not is_open:
                return
            self._woken.wait(1.0)

    def failed(self, error: OSError) -> None:
        """Stop writing to the folder, because of an error such as a full disk or a lack of permission."""
        self.is_writable = False
        self.say(f"nothing more is written there ({error.strerror}); what is there is read")

    # ------------------------------------------------------------------------------------------------- what there is

    def segments(self) -> list[tuple[Path, int, float]]:
        """Return the segments, sorted by the time of their last write, the oldest first.

        Each item is a segment's path without suffix, the segment's number of bytes, and the time of its last write in
        seconds since 1970. A time in the future comes from a wrong clock, and is replaced by 0. Otherwise such a
        segment would stay for ever, and new segments would be removed instead.
        """
        segments, latest = [], time.time() + AHEAD_S
        for rows in self.path.glob(f"*/*{ROWS}"):  # a killed process may have left rows without entries
            with suppress(OSError):
                state, num_bytes = rows.stat(), 0
                with suppress(FileNotFoundError):
                    num_bytes = rows.with_suffix(ENTRIES).stat().st_size
                written_at = state.st_mtime if state.st_mtime <= latest else 0.0
                segments.append((rows.with_suffix(""), state.st_size + num_bytes, written_at))
        return sorted(segments, key=lambda segment: segment[2])

    def shrink(self, room: int = 0) -> None:
        """Remove the segments that were written longest ago, until `room` more bytes fit into the folder.

        Before the removal, the used blocks of these segments are carried to new segments, at most as many as fit into
        one segment.
        """
        segments = self.segments()
        excess = sum(size for _, size, _ in segments) + room - self.num_bytes
        removed, used, num_bytes = list[Path](), list[Carried](), 0
        for path, size, _ in segments:
            if num_bytes >= excess + min(self.segment_bytes, sum(block.num_bytes for block in used)):
                break
            removed.append(path)
            used += used_blocks(path)
            num_bytes += size
        with suppress(OSError):  # a full disk: the removal below makes room
            carry(used, self.segment_bytes)
        for path in removed:
            remove(path)


class Shelf:
    """The blocks of one model on disk. A block is found by its kind of layers and its prefix key (`chain`).

    Any thread may look blocks up, but only one thread writes.
    """

    def __init__(self, folder: Folder, path: Path, record_bytes: list[int], model: str = "") -> None:
        self.folder, self.path, self.record_bytes, self.model = folder, path, record_bytes, model
        self._places: dict[tuple[int, bytes], Place] = {}
        self._segments: dict[str, Segment] = {}
        self._writer: Writer | None = None
        self._used = deque[Place]()  # uses that are not written yet
        self._lock = threading.RLock()
        self._looked_at = -1e9
        self.refresh()

    def __len__(self) -> int:
        return len(self._places)

    def key(self, chain: bytes) -> bytes:
        """Return the key on disk of the block with the prefix key `chain`.

        Without the folder's secret, the key on disk reveals no text.
        """
        return blake2b(chain, key=self.folder.secret, digest_size=32).digest()

    def use(self, kind: int, chain: bytes) -> bool:
        """Count one use of a block if the block is on the shelf, and return whether it is there.

        kind: the block's kind of layers, as an index. chain: the block's prefix key.
        """
        place = self._places.get((kind, self.key(chain)))
        if place is None:
            return False
        place.uses = min(place.uses + 1, MOST_USES)
        self._used.append(place)
        return True

    def find(self, kind: int, chain: bytes, tokens: Seq[int]) -> Place | None:
        """Return the place of a block; None if the shelf does not have the block.

        kind: the block's kind of layers, as an index. chain: the block's prefix key. tokens: the block's tokens, which
        must be equal, too.
        """
        place = self._places.get((kind, self.key(chain)))
        return place if place is not None and place.entry.tokens == _packed(tokens) else None

    def refresh(self, within_s: float = REFRESH_S) -> None:
        """Look for blocks that other processes have written or removed.

        Does nothing where the last look is less than `within_s` seconds ago.
        """
        if time.monotonic() - self._looked_at < within_s:
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
                if self._writer is not None and id(self._writer.segment) in lost:
                    self._writer = None
            for name in names:
                with suppress(OSError):
                    self._read_entries(name)

    def _read_entries(self, name: str) -> None:
        segment = self._segments.get(name)
        if self._writer is not None and segment is self._writer.segment:
            return
        if segment is None:
            segment = self._segments[name] = Segment.opened(self.path / name)
        with open(segment.entries, "rb") as file:
            file.seek(segment.num_read * ENTRY_BYTES)
            data = file.read()
        end = os.fstat(segment.rows).st_size
        for number, entry in enumerate(entries_in(data), segment.num_read):
            segment.num_read += 1
            if entry is not None and self._can_read(entry, end):
                self._places[entry.kind, entry.key] = Place(segment, number, entry, entry.uses)

    def _can_read(self, entry: Entry, end: int) -> bool:
        """Return whether an entry's rows are as long as a block of the entry's kind, and end before `end`.

        end: the number of bytes in the file of rows.
        """
        is_known = entry.kind < len(self.record_bytes) and entry.num_bytes == self.record_bytes[entry.kind]
        return is_known and entry.start + entry.num_bytes <= end

    # ---------------------------------------------------------------------------------------------------------- rows

    def read(self, kind: int, chain: bytes, place: Place, out: memoryview) -> bool:
        """Read the rows of a block into `out`, and return whether they are intact. The shelf drops a damaged block.

        kind: the block's kind of layers, as an index. chain: the block's prefix key. place: the result of `find`.
        """
        entry = place.entry
        try:
            num = os.preadv(place.segment.rows, [out], entry.start)
        except OSError as error:
            self.folder.say(f"a block cannot be read: {error.strerror}")
            num = -1
        if num == entry.num_bytes and xxhash.xxh3_64_intdigest(out) == entry.sum:
            return True
        if num >= 0:
            self.folder.say("a block is damaged, and its text is read again")
        with self._lock:
            if self._places.get(at := (kind, self.key(chain))) is place:
                del self._places[at]
        place.segment.rewrite({place.number: bytes(ENTRY_BYTES)})  # so that nobody looks there again
        return False

    def write(self, kind: int, chain: bytes, tokens: Seq[int], rows: memoryview, uses: int = 0) -> None:
        """Add a block, or count a use of the block if the shelf has it already.

        kind: the block's kind of layers, as an index. chain: the block's prefix key. uses: the number of known uses of
        a block that is added. Only the writing thread may call this method and `write_uses`.
        """
        if not self.folder.is_writable or self.use(kind, chain):
            return
        try:
            writer = self._writer  # another thread may clear self._writer when it sees that the files are gone
            if writer is None or writer.is_removed or writer.num_bytes + rows.nbytes > self.folder.segment_bytes:
                writer = self._writer = self._begun()
            self._add(writer, self.key(chain), _packed(tokens), kind, min(uses, MOST_USES), rows)
        except OSError as error:
            self._writer = None
            self.folder.failed(error)

    def _add(self, writer: Writer, key: bytes, tokens: bytes, kind: int, uses: int, rows: memoryview) -> None:
        entry = writer.add(key, tokens, kind, uses, rows)
        number = writer.segment.num_read - 1
        with self._lock:
            if self._writer is writer:  # else another process has removed the writer's files just now
                self._places[kind, key] = Place(writer.segment, number, entry, uses)

    def _begun(self) -> Writer:
        """Make room in the folder, begin a new segment, and return the segment's writer."""
        self._writer = None
        self.write_uses()
        # For this segment's blocks, and for blocks that the next `shrink` carries.
        self.folder.shrink(2 * self.folder.segment_bytes)
        self.refresh(0)
        writer = Writer(self.path)
        if not (about := self.path / ABOUT).exists():
            about.touch(mode=0o600)
            about.write_text(
                json.dumps({"model": self.model, "record_bytes": self.record_bytes}) + "\n", encoding="utf-8"
            )
        with self._lock:
            self._segments[writer.segment.path.name] = writer.segment
        return writer

    def write_uses(self) -> None:
        """Write the new numbers of uses of blocks to disk, where other processes and later processes read them."""
        entries = dict[Segment, dict[int, bytes]]()
        while self._used:
            place = self._used.popleft()
            is_there = self._places.get((place.entry.kind, place.entry.key)) is place  # not damaged, nor removed
            changed = entries.setdefault(place.segment, {})
            if is_there and place.uses > place.entry.uses:
                place.entry = place.entry._replace(uses=place.uses)
                changed[place.number] = place.entry.packed()
        for segment, changed in entries.items():
            segment.rewrite(changed)


def weights_digest(weights: Iterable[tuple[str, HostTensor]]) -> str:
    """Return a hash of named weights in memory. This takes as long as reading the weights."""
    digest = xxhash.xxh3_128()
    for name, weight in sorted(weights, key=lambda one: one[0]):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        digest.update(weight.contiguous().values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _packed(tokens: Seq[int]) -> bytes:
    return array("i", tokens).tobytes()
