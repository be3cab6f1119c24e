"""The file of answers: torn lines, wrong files, a second writer, a full disk."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import little_room
from forerun.errors import BadOption, CapacityError
from forerun.serve.answers import AnswerFile, answer_id

pytestmark = pytest.mark.once("no engine runs: the file of answers alone")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the answers are."""
    return tmp_path / "out.jsonl"


@contextmanager
def recovered(path: Path, custom_ids: Iterable[str], **how: bool) -> Iterator[AnswerFile]:
    """The file of answers to an input with these requests."""
    with AnswerFile(path) as answers:
        answers.recover(dict.fromkeys(custom_ids, "0a"), **how)
        yield answers


def answer(custom_id: str, status: int = 200) -> dict[str, Any]:
    response = {"status_code": status, "request_id": "req_0", "body": {"text": "é\u2028\n" * 3}}
    return {"id": "batch_req_0", "custom_id": custom_id, "response": response, "error": None}


def written(path: Path, *custom_ids: str) -> bytes:
    with recovered(path, custom_ids) as answers:
        answers.append([answer(custom_id) for custom_id in custom_ids])
    return path.read_bytes()


def test_every_torn_line_is_cut_off_and_nothing_else(tmp_path: Path, path: Path) -> None:
    """Killed after any number of bytes, with and without the zeros that a power cut leaves."""
    whole = written(path, "a", "b")
    torn = written(tmp_path / "other.jsonl", "c")
    for length in range(len(torn)):
        for zeros in (b"", b"\0\0"):
            path.write_bytes(whole + torn[:length] + zeros)
            with recovered(path, "abc") as answers:
                assert answers.finished == {"a", "b"}
                assert path.read_bytes() == whole
    with recovered(path, "abc") as answers:
        answers.append([answer("c", 400)])
        assert (answers.finished, answers.refused) == ({"a", "b", "c"}, ["c"])
    with recovered(path, "abc") as answers:
        assert (answers.finished, answers.refused) == ({"a", "b", "c"}, ["c"])


def test_what_was_appended_is_on_the_disk(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When `append` returns, and when answers were dropped: all bytes of the file, and its name in the folder."""
    synced = dict[str, int]()
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        file = os.fstat(fd)
        synced[f"{file.st_dev}:{file.st_ino}"] = file.st_size

    def is_synced(place: Path) -> bool:
        file = os.stat(place)
        size = synced.get(f"{file.st_dev}:{file.st_ino}")
        return size is not None and (place.is_dir() or size == file.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    with recovered(path, "abc") as answers:
        assert is_synced(tmp_path)
        for custom_id in "ab":
            answers.append([answer(custom_id, 200 if custom_id == "a" else 400)])
            assert is_synced(path)
    synced.clear()
    with recovered(path, "abc", retry_refused=True) as answers:
        assert answers.dropped
        assert is_synced(path)
        assert is_synced(tmp_path)


def test_a_custom_id_may_be_any_text(tmp_path: Path) -> None:
    ids = ("\ud800", "é\u2028", '"\n', "a" * 5000)
    written(tmp_path / "out.jsonl", *ids)
    with recovered(tmp_path / "out.jsonl", ids) as answers:
        assert answers.finished == set(ids)


LINE = json.dumps(answer("a")).encode() + b"\n"
NO_ANSWER = "line 1 of .* is not an answer"
WRONG = {
    "notes": (b"my notes, without an end of line", "does not end with an answer of forerun batch"),
    "lines": (b"my notes\n", NO_ANSWER),
    "requests": (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n', NO_ANSWER),
    "numbers": (b"7\n", NO_ANSWER),
    "another input": (LINE.replace(b'"a"', b'"x"'), "line 1 of .* answers 'x', which the input does not ask"),
    "twice": (LINE * 2, "line 2 of .* answers 'a' once more"),
    "a hole": (b'{"id": "batch_req_1", "custom\n' + LINE, NO_ANSWER),
}


@pytest.mark.parametrize(("content", "sentence"), WRONG.values(), ids=WRONG)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: bytes, sentence: str) -> None:
    for tail in (b"", b'{"id": "batch_'):
        if tail and not content.endswith(b"\n"):
            continue
        path = tmp_path / "out.jsonl"
        path.write_bytes(content + tail)
        with pytest.raises(BadOption, match=sentence), recovered(path, "ab"):
            pass
        assert path.read_bytes() == content + tail


def test_one_writer_at_a_time(path: Path) -> None:
    with AnswerFile(path), pytest.raises(BadOption, match="another process is writing"), AnswerFile(path):
        pass
    with AnswerFile(path):
        pass


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(BadOption, match="is not a file"), AnswerFile(Path("/dev/null")):
        pass


def test_a_full_disk_loses_nothing(path: Path) -> None:
    """The size of a file is limited so that the second append ends in the middle of its line."""
    whole = written(path, "a")
    with recovered(path, "abc") as answers:
        full = pytest.raises(CapacityError, match="make room and run the same command again")
        with full, little_room(len(whole) + 40):
            answers.append([answer("b")])
        assert path.read_bytes()[: len(whole)] == whole
        answers.append([answer("c")])  # the next append does not go on behind half a line
        assert [json.loads(line)["custom_id"] for line in path.read_text().split("\n")[:-1]] == ["a", "c"]
        assert answers.finished == {"a", "c"}


def marked(custom_id: str, digest: str) -> dict[str, Any]:
    return {**answer(custom_id), "id": answer_id(digest)}


def test_answers_to_requests_that_have_changed_are_replaced_only_if_that_is_wanted(tmp_path: Path, path: Path) -> None:
    """Those of an earlier version, which have no digest, count as they are."""
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with recovered(path, "abcd") as answers:
        answers.append([marked("a", "0a"), marked("b", "0b"), answer("c"), marked("d", "0c")])
    path.chmod(0o640)
    before = path.read_bytes() + b'{"id": "batch_req_12'
    path.write_bytes(before)
    with pytest.raises(BadOption, match=r"answers to 2 requests \('b', 'd'\) that ask"), recovered(path, "abcd"):
        pass
    assert path.read_bytes() == before
    lines = before.splitlines(keepends=True)
    with recovered(link, "abcd", redo_changed=True) as answers:
        assert (answers.dropped, answers.finished, answers.num_unmarked) == (["b", "d"], {"a", "c"}, 1)
        assert path.read_bytes() == lines[0] + lines[2]
        with pytest.raises(BadOption, match="another process is writing"), AnswerFile(path):
            pass
        answers.append([marked("b", "0a"), marked("d", "0a")])
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    with recovered(path, "abcd") as answers:
        assert (answers.dropped, answers.finished) == ([], set("abcd"))
    assert sorted(os.listdir(tmp_path)) == ["link.jsonl", "out.jsonl"]


def test_a_writer_that_waits_for_a_file_that_is_replaced_does_not_get_it(path: Path) -> None:
    """It has the old file open already: what it wrote there would be lost."""
    with recovered(path, "a") as answers:
        answers.append([marked("a", "0b")])
    with path.open("rb") as old, recovered(path, "a", redo_changed=True), pytest.raises(BlockingIOError):
        fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_where_there_is_no_room_for_the_new_file_the_old_one_stays(tmp_path: Path, path: Path) -> None:
    with recovered(path, "ab") as answers:
        answers.append([marked("a", "0b"), marked("b", "0a")])
    before = path.read_bytes()
    with little_room(20), pytest.raises(CapacityError, match="make room"), recovered(path, "ab", redo_changed=True):
        pass
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["out.jsonl"]
