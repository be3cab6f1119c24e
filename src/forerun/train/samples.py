"""Writes and reads files of samples: texts that a target wrote, as token ids, for training.

A file begins with a line that names the format. The next line is JSON with the options, and with fingerprints of the
target's tokenizer and weights. Records follow, each with a checksum. A process that is killed leaves at most one
incomplete record, the last. This record is removed when the next run opens the file.

Records are in the order of their numbers. A record depends only on its number and the options. So a file that was
interrupted and continued is equal to an uninterrupted file, byte by byte. The options must not change in between,
except for the texts from which passages are cut.
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
    """Holds one text that a target wrote.

    number: the sample's place in the order of all samples. kind: chat, task or text (writing.py). temperature: the
    temperature of the answer. ids: the whole text. num_given: the number of ids at the beginning that were given to the
    target; the target wrote the other ids. answer_at: the index of the first id of the answer. If the target also wrote
    the question, the question and the chat template's ids between question and answer come before this index.
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
        """The bytes of all ids before the answer. Of several samples with the same key, only the first is written."""
        return self.ids[: max(self.answer_at, self.num_given)].tobytes()


class SampleWriter:
    """Appends samples to a file. An existing file must have the same options, except for `texts`.

    options: everything that samples depend on. num_tokens: the number of ids in the file. next_number: the number of
    the next sample to write. For an existing file, this is the number of the last sample plus 1, so duplicates that
    were left out after the last sample are generated once more.
    Raises BadOption for a file with other options, and for a file to which another process writes. Raises
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
        """Write all samples to the disk, and close the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _lock(self) -> None:
        """Lock the file until it is closed. Raises BadOption if another process has locked the file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadOption(f"another process writes to {shown(str(self.path))}: wait for it, or stop it") from None
        except OSError:
            return  # a file system that knows no locks

    def _read_on(self, options: Mapping[str, Any]) -> int:
        """Check the file's options and count its samples. Returns the byte offset after the last complete record.

        Raises BadOption for a file with other options.
        """
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
    """Holds the content of a file of samples. options: the options with which the file was begun."""

    options: Mapping[str, Any]
    samples: tuple[Sample, ...]

    def split(self, held_out: bool) -> list[Sample]:
        """Return the held-out samples if held_out is True, or else the samples for training."""
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
    """Return the options with which a file of samples was begun; {} if there is no file or an empty file.

    Raises UnsupportedModel for a file of another kind.
    """
    if not path.exists() or not path.stat().st_size:
        return {}
    with path.open("rb") as file:
        return _read_header(file, path)


def stream(samples: Iterable[Sample], end: int) -> NDArray[np.uint32]:
    """Join the ids of all samples to one stream, [N]. `end` is added after each sample that does not end with `end`."""
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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise unreadable(path, error, what) from None
    return dict(options)


def _records(file: BinaryIO, path: Path, width: int) -> Iterator[Sample]:
    """Yield the sample of each complete record. Raises UnsupportedModel for a damaged record that is not the last.

    width: the bytes of an id.
    """
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
