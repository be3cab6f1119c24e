"""The file of answers: torn lines, wrong files, a second writer, a full disk."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import BadOption, CapacityError
from forerun.serve.answers import AnswerFile

pytestmark = pytest.mark.once("no engine runs: the file of answers alone")


def answer(custom_id: str, status: int = 200) -> dict[str, Any]:
    response = {"status_code": status, "request_id": "req_0", "body": {"text": "é\u2028\n" * 3}}
    return {"id": "batch_req_0", "custom_id": custom_id, "response": response, "error": None}


def written(path: Path, *custom_ids: str) -> bytes:
    with AnswerFile(path) as answers:
        answers.recover(custom_ids)
        answers.append([answer(custom_id) for custom_id in custom_ids])
    return path.read_bytes()


def test_every_torn_line_is_cut_off_and_nothing_else(tmp_path: Path) -> None:
    """Killed after any number of bytes, with and without the zeros that a power cut leaves."""
    path = tmp_path / "out.jsonl"
    whole = written(path, "a", "b")
    torn = written(tmp_path / "other.jsonl", "c")
    for length in range(len(torn)):
        for zeros in (b"", b"\0\0"):
            path.write_bytes(whole + torn[:length] + zeros)
            with AnswerFile(path) as answers:
                answers.recover("abc")
                assert answers.finished == {"a", "b"}
                assert path.read_bytes() == whole
    with AnswerFile(path) as answers:
        answers.recover("abc")
        answers.append([answer("c", 400)])
        assert (answers.finished, answers.num_failed) == ({"a", "b", "c"}, 1)
    with AnswerFile(path) as answers:
        answers.recover("abc")
        assert (answers.finished, answers.num_failed) == ({"a", "b", "c"}, 1)


def test_a_custom_id_may_be_any_text(tmp_path: Path) -> None:
    ids = ("\ud800", "é\u2028", '"\n', "a" * 5000)
    written(tmp_path / "out.jsonl", *ids)
    with AnswerFile(tmp_path / "out.jsonl") as answers:
        answers.recover(ids)
        assert answers.finished == set(ids)


WRONG = {
    "notes": (b"my notes, without an end of line", "does not end with an answer of forerun batch"),
    "lines": (b"my notes\n", "line 1 of .* is not an answer"),
    "requests": (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n',
        "line 1 .* not an answer",
    ),
    "numbers": (b"7\n", "line 1 of .* is not an answer"),
    "another input": (
        json.dumps(answer("x")).encode() + b"\n",
        "line 1 of .* answers 'x', which the input does not ask",
    ),
    "twice": ((json.dumps(answer("a")).encode() + b"\n") * 2, "line 2 of .* answers 'a' once more"),
    "a hole": (
        b'{"id": "batch_req_1", "custom\n' + json.dumps(answer("a")).encode() + b"\n",
        "line 1 of .* is not an answer",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, case: str) -> None:
    content, sentence = WRONG[case]
    for tail in (b"", b'{"id": "batch_'):
        if tail and not content.endswith(b"\n"):
            continue
        path = tmp_path / "out.jsonl"
        path.write_bytes(content + tail)
        with pytest.raises(BadOption, match=sentence), AnswerFile(path) as answers:
            answers.recover("ab")
        assert path.read_bytes() == content + tail


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile(path), pytest.raises(BadOption, match="another process is writing"), AnswerFile(path):
        pass
    with AnswerFile(path):
        pass


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(BadOption, match="is not a file"), AnswerFile(Path("/dev/null")):
        pass


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The size of a file is limited so that the second append ends in the middle of its line."""
    path = tmp_path / "out.jsonl"
    whole = written(path, "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with AnswerFile(path) as answers:
        answers.recover("abc")
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 40, hard))
        try:
            with pytest.raises(CapacityError, match="make room and run the same command again"):
                answers.append([answer("b")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes()[: len(whole)] == whole
        answers.append([answer("c")])  # the next append does not go on behind half a line
        assert [json.loads(line)["custom_id"] for line in path.read_text().split("\n")[:-1]] == ["a", "c"]
        assert answers.finished == {"a", "c"}
