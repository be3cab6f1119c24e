"""The output file of a batch. No answer is written twice. An answer counts as written only once it is on the disk.

The process may be killed at any moment. The file then holds whole lines, and at most one incomplete line at the end.
The next run cuts off the incomplete line. While one process has the file open, a lock keeps other processes out. The id
of an answer contains the digest of its request, so that a later run can find the requests that have changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from forerun.errors import FULL, BadOption, CapacityError, shown

ID_PREFIX = "batch_req_"
_BEGINNING = f'{{"id": "{ID_PREFIX}'.encode()  # of every line: only a torn line that begins so is cut off
_OK = 200
_NUM_SHOWN = 5  # custom_ids that a message names


def answer_id(digest: str) -> str:
    """Return a new random id for an answer. The id contains `digest`, the digest of the answered request."""
    return f"{ID_PREFIX}{secrets.token_hex(12)}_{digest}"


def _digest_in(own_id: str) -> str:
    """Return the digest in an id that `answer_id` has returned; '' for any other id."""
    return own_id.removeprefix(ID_PREFIX).partition("_")[2] if own_id.startswith(ID_PREFIX) else ""


def some_of(custom_ids: Seq[str]) -> str:
    """Return text for a message: the number of requests, and the first few of their custom_ids."""
    shown = ", ".join(f"{custom_id!r:.80}" for custom_id in custom_ids[:_NUM_SHOWN])
    more = f" and {len(custom_ids) - _NUM_SHOWN:,} more" if len(custom_ids) > _NUM_SHOWN else ""
    return f"{len(custom_ids):,} request{'s' if len(custom_ids) > 1 else ''} ({shown}{more})"


class AnswerFile:
    """The output file of a batch. Entering the context opens and locks the file, and creates it if it is missing.

    The content of the file does not change before `recover` is called. Entering raises BadOption if another process has
    locked the file, or if the path is a device or a pipe. Entering raises OSError if the path cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished: set[str] = set()  # custom_ids that have their line
        self.refused: list[str] = []  # custom_ids whose answer is an error, in order
        self.first_reason = ""  # why the first of these requests was refused
        self.num_unmarked = 0  # answers without a digest: an earlier version wrote them
        self.dropped: list[str] = []  # custom_ids whose answers were taken out, to be answered again
        self._fd = -1
        self._replaced_fd: int | None = None  # the file that `_drop` replaced; it stays locked as long as the new one
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
        if self._replaced_fd is not None:
            os.close(self._replaced_fd)

    def recover(self, asked: Mapping[str, str], *, redo_changed: bool = False, retry_refused: bool = False) -> None:
        """Read the answers of earlier runs, and cut off an incomplete last line.

        asked: custom_id -> digest of each request in the input. redo_changed: whether to remove the answers to requests
        whose digest has changed. retry_refused: whether to remove answers that are errors. Raises BadOption if the file
        is not the output of this input, or if requests have changed and redo_changed is False. After a BadOption the
        file is unchanged.
        """
        changed = self._read(asked)
        refused = self.refused if retry_refused else []
        if (unwanted := [custom_id for custom_id in changed if custom_id not in refused]) and not redo_changed:
            raise BadOption(
                f"{str(self.path)!r} has answers to {some_of(unwanted)} that ask something else now: give "
                "--redo-changed to replace these answers, or name a new output file"
            )
        if dropped := list(dict.fromkeys([*refused, *changed])):
            self._drop(dropped)
            self.dropped = dropped
            self._read(asked)
        os.ftruncate(self._fd, self._size_bytes)

    def _read(self, asked: Mapping[str, str]) -> list[str]:
        """Read the file, and note which requests have answers.

        Returns the custom_ids of requests that have changed since they were answered.
        """
        self.finished = set()
        self.refused = []
        self.num_unmarked = 0
        self._size_bytes = 0
        changed = list[str]()
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n"):
                self._check_torn(line)
                break
            answer = self._take(number, line, asked)
            self._size_bytes += len(line)
            digest = _digest_in(str(answer.get("id")))
            self.num_unmarked += not digest
            if digest and digest != asked[answer["custom_id"]]:
                changed.append(answer["custom_id"])
        return changed

    def _lines(self) -> Iterator[bytes]:
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            yield from file

    def _drop(self, custom_ids: Collection[str]) -> None:
        """Replace the file by a copy without the answers to the given requests.

        If the process is killed meanwhile, either the whole old file or the whole new file remains. Raises
        CapacityError, and keeps the old file, if the disk has no room for the new file.
        """
        dropped, path = frozenset(custom_ids), self.path.resolve()
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with self._full_disk(), os.fdopen(os.dup(fd), "wb") as file:
                whole = (line for line in self._lines() if line.endswith(b"\n"))
                file.writelines(line for line in whole if json.loads(line)["custom_id"] not in dropped)
                file.flush()
                os.fsync(fd)
            os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.replace(name, path)
        except BaseException:
            os.close(fd)
            Path(name).unlink(missing_ok=True)
            raise
        self._fd, self._replaced_fd = fd, self._fd
        _sync_folder(path.parent)

    def append(self, answers: Seq[Mapping[str, Any]]) -> None:
        """Add one line per answer. Return once all lines are on the disk. Raises CapacityError if the disk is full."""
        if not answers:
            return
        data = b"".join(map(_line, answers))
        with self._full_disk():
            os.ftruncate(self._fd, self._size_bytes)  # the rest of an append that was interrupted
            _write_at(self._fd, data, self._size_bytes)
            os.fsync(self._fd)
        self._size_bytes += len(data)
        for answer in answers:
            self._count(answer)

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        """Run the `with` block. Raise CapacityError if the block fails because the disk is full."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise CapacityError(
                f"the output file {str(self.path)!r} cannot grow ({error.strerror}): make room and run the same "
                "command again, which goes on from here"
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadOption(
                f"another process is writing {str(self.path)!r}: wait for it, or name another output file"
            ) from None

    def _take(self, number: int, line: bytes, asked: Collection[str]) -> dict[str, Any]:
        """Parse a line of an earlier run, count the answer in the line, and return the answer.

        number: the number of the line. asked: the custom_ids of the input. Raises BadOption if the line is no answer to
        a request of the input, or if an earlier line has answered the request.
        """
        another = "name the output file of this input, or a new one"
        where = f"line {number} of {str(self.path)!r}"
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
        return answer  # type: ignore[no-any-return]

    def _count(self, answer: Mapping[str, Any]) -> None:
        self.finished.add(answer["custom_id"])
        if answer["response"]["status_code"] != _OK:
            if not self.refused:
                body = answer["response"].get("body")
                error = body.get("error") if isinstance(body, dict) else None
                self.first_reason = str(error.get("message", "")) if isinstance(error, dict) else ""
            self.refused.append(answer["custom_id"])

    def _check_torn(self, line: bytes) -> None:
        """Raise BadOption for an incomplete last line that is not the beginning of an answer.

        Zeros at the end of the line are ignored, because a power cut may leave some there.
        """
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
    """Write all bytes of `data` at `offset` in a file, with as many system calls as are necessary."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk (fsync), so that a new file in the folder survives a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
