"""What is derived of a model is kept in the cache, and made for the process alone where that cannot be written."""

from pathlib import Path

import pytest

from forerun.errors import CapacityError
from forerun.models.kept_folder import kept_folder


def made(name: str, times: list[Path]) -> Path:
    def write(folder: Path) -> None:
        times.append(folder)
        (folder / "a").write_text("text")

    return kept_folder(name, ["a"], write, "the tokenizer of a file")


def test_it_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    times = list[Path]()
    assert [made("some/folder", times) for _ in range(2)] == [tmp_path / "some/folder"] * 2
    assert len(times) == 1
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["folder"], "nothing half written is left"


def test_a_cache_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path / "file"))
    times = list[Path]()
    folder = made("one", times)
    assert (folder / "a").read_text() == "text"
    assert (made("one", times), len(times)) == (folder, 1), "once for each process"
    assert "the tokenizer of a file cannot be written to" in caplog.text
    assert "set FORERUN_CACHE_DIR to a folder" in caplog.text


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))

    def write(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    said = r"the tokenizer cannot be written to .*No space left on device.*set FORERUN"
    with pytest.raises(CapacityError, match=said):
        kept_folder("two", ["a"], write, "the tokenizer")
