"""The file of answers of a batch: whole lines, each there once, safe on the disk before it counts as written.

The process may be killed at any moment. What is then in the file is whole lines and at most one torn one at the end,
which the next run cuts off. A lock keeps a second process out for as long as the first one lives.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Collection, Mapping, Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import Any

from forerun.errors import BadOption, CapacityError, shown

ID_PREFIX = "batch_req_"
_BEGINNING = f'{{"id": "{ID_PREFIX}'.encode()  # of every line: what else a file ends with is not ours to cut off
_OK = 200


class AnswerFile:
    """Opened and locked on entering, made where it is not there. Nothing in it is touched before `recover`.

    Raises BadOption, on entering, where another process holds it, or where it is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished: set[str] = set()  # custom_ids that have their line
        self.num_failed = 0  # of them, those whose answer is an error
        self._fd = -1
        self._size_bytes = 0  # of the whole lines

    def __enter__(self) -> AnswerFile:
        is_new = not self.path.exists()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise BadOption(f"the output {str(self.path)!r} is not a file: a run could not go on from it; name one")
            self._lock()
            if is_new:
                _sync_folder(self.path.resolve().parent)
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        os.close(self._fd)

    def recover(self, asked: Collection[str]) -> None:
        """Read what earlier runs have written, and cut off a torn line. asked: the custom_ids of the input.

        Raises BadOption, with nothing cut off, where the file is not the output of that input.
        """
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self._check_torn(line)
                    break
                self._take(number, line, asked)
                self._size_bytes += len(line)
        os.ftruncate(self._fd, self._size_bytes)

    def append(self, answers: Seq[Mapping[str, Any]]) -> None:
        """Add a line for each answer; when this returns, all of them are on the disk. Raises CapacityError if full."""
        if not answers:
            return
        data = b"".join(map(_line, answers))
        try:
            os.ftruncate(self._fd, self._size_bytes)  # the rest of an append that was interrupted
            _write_at(self._fd, data, self._size_bytes)
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise CapacityError(
                f"the output file {str(self.path)!r} cannot grow ({error.strerror}): make room and run the same "
                "command again, which goes on from here"
            ) from error
        self._size_bytes += len(data)
        for answer in answers:
            self._count(answer)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadOption(
                f"another process is writing {str(self.path)!r}: wait for it, or name another output file"
            ) from None

    def _take(self, number: int, line: bytes, asked: Collection[str]) -> None:
        """One line of an earlier run."""
        another, where = "name the output file of this input, or a new one", f"line {number} of {str(self.path)!r}"
        try:
            answer = json.loads(line)
            custom_id = answer["custom_id"]
            is_ours = isinstance(custom_id, str) and isinstance(answer["response"]["status_code"], int)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_ours = False
        if not is_ours:
            raise BadOption(f"{where} is not an answer of forerun batch: {another}")
        if custom_id not in asked:
            raise BadOption(f"{where} answers {shown(custom_id)}, which the input does not ask: {another}")
        if custom_id in self.finished:
            raise BadOption(f"{where} answers {shown(custom_id)} once more: delete one of the two lines")
        self._count(answer)

    def _count(self, answer: Mapping[str, Any]) -> None:
        self.finished.add(answer["custom_id"])
        self.num_failed += answer["response"]["status_code"] != _OK

    def _check_torn(self, line: bytes) -> None:
        """A line without an end is cut off only if a run can have left it; after a power cut it may end in zeros."""
        line = line.rstrip(b"\0")
        if line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
            raise BadOption(
                f"{str(self.path)!r} does not end with an answer of forerun batch: name the output file of this input, "
                "or a new one"
            )


def _line(answer: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair in a custom_id
        return json.dumps(answer).encode() + b"\n"


def _write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all of it, in as many calls as it takes."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _sync_folder(folder: Path) -> None:
    """Make the name of a new file as durable as its content."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
