"""A file of texts that a target wrote itself, as token ids. `forerun train sample` writes it, and training reads it.

The file begins with a line that names the format. Then comes a line of JSON with the options, and with fingerprints of
the tokenizer and the weights that wrote the texts. Records follow, each with a checksum. A process that is killed
leaves at most one incomplete record, the last. This record is dropped when the next run opens the file.

Records are in the order of their numbers, and each depends on its number and the options alone. So a file that was
interrupted and continued is equal to an uninterrupted file, byte by byte. The options may not change in between, except
for the texts from which passages are cut.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forerun.errors import BadOption, NotFound, UnsupportedModel, shown
from forerun.text.files import unreadable

LOG = logging.getLogger(__name__)
MAGIC = b"forerun samples 1\n"
HEAD = struct.Struct("<IBBHHI")  # number, kind, temperature * 100, num_given, answer_at, number of ids
KINDS = ("chat", "task", "text")
HELD_OUT_EVERY = 16  # every 16th number is held out
MOST_HEADER_BYTES = 1 << 16
MOST_IDS = 1 << 20  # of one record


@dataclass(frozen=True)
class Sample:
    """One text.

    number: its place in the order of all samples. temperature: the temperature of the answer. ids: the whole text. The
    first `num_given` ids were given to the target, which wrote the rest. answer_at: the index at which the answer
    begins. Where the target wrote the question as well, the question comes before this index, and so do the ids of the
    chat template between question and answer.
    """

    number: int
    kind: str
    temperature: float
    num_given: int
    answer_at: int
    ids: NDArray[np.uint32]

    @property
    def is_held_out(self) -> bool:
        """Whether this text is held out from training."""
        return self.number % HELD_OUT_EVERY == 0

    @property
    def key(self) -> bytes:
        """The bytes of all ids before the answer. Only the first of several samples with the same key is written."""
        return self.ids[: max(self.answer_at, self.num_given)].tobytes()


class SampleWriter:
    """A writer that appends samples to a file. The options of an existing file are checked first.

    options: everything that samples depend on. An existing file must have the same options, except for `texts`.
    num_tokens: the number of ids in the file. next_number: the number of the next sample, which is 1 more than the
    number of the last sample in the file. So duplicates that were left out after the last sample are made once more.
    Raises BadOption for a file with other options, and for a file that another process writes to. Raises
    UnsupportedModel for a file of another kind, and for a file that is damaged before its last record.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self.num_tokens = 0
        self.num_samples = 0
        self.next_number = 0
        self._keys: set[bytes] = set()
        self._width = 2 if options["num_ids"] <= 1 << 16 else 4
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            self._lock()
            end = self._read_on(options) if path.stat().st_size else 0
        except BaseException:
            self._file.close()  # and unlocks it for the next try, with other options
            raise
        self._file.truncate(end)
        self._file.seek(end)
        if end == 0:
            self._file.write(MAGIC + json.dumps(dict(options), sort_keys=True).encode() + b"\n")
            self._file.flush()

    def append(self, sample: Sample) -> bool:
        """Write one sample, unless an earlier sample has the same key. Returns whether the sample was written."""
        self.next_number = sample.number + 1
        if sample.key in self._keys:
            return False
        ids = sample.ids.astype(f"<u{self._width}").tobytes()
        head = HEAD.pack(
            sample.number,
            KINDS.index(sample.kind),
            round(sample.temperature * 100),
            sample.num_given,
            sample.answer_at,
            len(sample.ids),
        )
        self._file.write(head + ids + struct.pack("<I", zlib.crc32(head + ids)))
        self._file.flush()
        self._count(sample)
        return True

    def close(self) -> None:
        """Write everything to the disk, and close the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _lock(self) -> None:
        """Lock the file for this process, until it is closed. Raises BadOption where another process writes to it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadOption(f"another process writes to {shown(str(self.path))}: wait for it, or stop it") from None
        except OSError:
            return  # a file system that knows no locks

    def _read_on(self, options: Mapping[str, Any]) -> int:
        """Check the file's options and count its samples. Returns the offset at which the last whole record ends."""
        with self.path.open("rb") as file:
            had = _read_header(file, self.path)
            wanted = json.loads(json.dumps(dict(options)))
            for name in [*wanted, *had]:
                if had.get(name) == wanted.get(name):
                    continue
                if name == "texts":
                    LOG.warning("%s was begun with passages of other texts (the default ones change when packages are "
                                "installed); it goes on with passages of these", shown(str(self.path)))  # fmt: skip
                    continue
                raise BadOption(
                    f"{shown(str(self.path))} was begun with {name}={shown(str(had.get(name)))}, and this is "
                    f"{shown(str(wanted.get(name)))}: take the same options and model to go on, or another file"
                )
            end = file.tell()
            for sample in _records(file, self.path, self._width):
                self._count(sample)
                end = file.tell()
        return end

    def _count(self, sample: Sample) -> None:
        self._keys.add(sample.key)
        self.num_tokens += len(sample.ids)
        self.num_samples += 1
        self.next_number = sample.number + 1


@dataclass(frozen=True)
class Samples:
    """The content of a file of samples. options: the options that the file was begun with."""

    options: Mapping[str, Any]
    samples: tuple[Sample, ...]

    def split(self, held_out: bool) -> list[Sample]:
        """Return the samples that are held out from training. With held_out = False, return the other samples."""
        return [sample for sample in self.samples if sample.is_held_out == held_out]


def read_samples(path: Path) -> Samples:
    """Return the samples of a file. An incomplete last record is left out, because the file may still grow.

    Raises NotFound where there is no file. Raises UnsupportedModel for a file of another kind, and for a file that is
    damaged before its last record.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {shown(str(path))}: `forerun train sample` makes it")
    with path.open("rb") as file:
        options = _read_header(file, path)
        return Samples(options, tuple(_records(file, path, 2 if options["num_ids"] <= 1 << 16 else 4)))


def begun_with(path: Path) -> Mapping[str, Any]:
    """Return the options of an existing file; {} without a file. Raises UnsupportedModel for a file of another kind."""
    if not path.exists() or not path.stat().st_size:
        return {}
    with path.open("rb") as file:
        return _read_header(file, path)


def stream(samples: Iterable[Sample], end: int) -> NDArray[np.uint32]:
    """Return all ids as one stream. The id `end` is put after each sample that does not end with it already."""
    parts: list[NDArray[np.uint32]] = []
    for sample in samples:
        parts.append(sample.ids)
        if not len(sample.ids) or sample.ids[-1] != end:
            parts.append(np.array([end], dtype=np.uint32))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    what = "a file of `forerun train sample`"
    if file.read(len(MAGIC)) != MAGIC:
        raise unreadable(path, "it begins with other bytes", what)
    line = file.readline(MOST_HEADER_BYTES)
    try:
        options = json.loads(line)
        if not line.endswith(b"\n") or not isinstance(options["num_ids"], int):
            raise ValueError("its header is cut short")
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error, what) from None
    return dict(options)


def _records(file: BinaryIO, path: Path, width: int) -> Iterator[Sample]:
    """Yield the sample of every whole record. Raises UnsupportedModel for a damaged record that is not the last."""
    size = path.stat().st_size
    while True:
        head = file.read(HEAD.size)
        if len(head) < HEAD.size:
            return
        number, kind, temperature, num_given, answer_at, num = HEAD.unpack(head)
        if file.tell() + num * width + 4 > size and num <= MOST_IDS:
            return  # cut short
        body = file.read(num * width) if num <= MOST_IDS else b""
        crc = file.read(4)
        if kind >= len(KINDS) or crc != struct.pack("<I", zlib.crc32(head + body)):
            if file.tell() >= size and num <= MOST_IDS:
                return  # the last record: some of its pages did not reach the disk
            raise UnsupportedModel(
                f"{shown(str(path))} is damaged behind sample {number}: cut it there, or sample into another file"
            )
        ids = np.frombuffer(body, dtype=f"<u{width}").astype(np.uint32)
        yield Sample(number, KINDS[kind], temperature / 100, num_given, answer_at, ids)
