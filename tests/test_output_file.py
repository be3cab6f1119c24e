"""Files that commands write are whole or as they were, wherever they lie."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.conftest import little_room
from forerun.output_file import write_whole

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that anybody can enter, unlike `tmp_path`."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_full_disk_leaves_the_old_file_and_is_said_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text("old")
    with little_room(), pytest.raises(OSError, match="File too large") as error:
        write_whole(file, "x" * 100)
    assert error.value.filename == str(file)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.json", "old")]


def test_a_link_and_what_others_may_read_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "out.json", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file)
    write_whole(link, "new")
    assert (link.is_symlink(), file.read_text(), file.stat().st_mode & 0o777) == (True, "new", 0o600)


def test_a_pipe_is_written_as_it_stands(tmp_path: Path) -> None:
    pipe, texts = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "new")
    reader.join(60)
    assert (texts, pipe.is_fifo()) == (["new"], True)


def test_a_pipe_by_its_number_is_written_as_it_stands() -> None:
    """As --json /dev/stdout names one: what the link leads to is no path."""
    ours, theirs = os.pipe()
    write_whole(Path(f"/dev/fd/{theirs}"), "new")
    os.close(theirs)
    with os.fdopen(ours) as reader:
        assert reader.read() == "new"


def test_a_file_in_a_folder_of_others_is_written_as_it_stands(folder: Path) -> None:
    """As one that is mounted by itself into a container, which cannot be replaced either."""
    file = folder / "out.json"
    file.write_text("old, and longer")
    file.chmod(0o666)
    folder.chmod(0o555)
    if (child := os.fork()) == 0:
        code = 1
        try:
            if os.getuid() == 0:  # who may write anywhere
                os.setuid(NOBODY)
            write_whole(file, "new")
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert (status, file.read_text()) == (0, "new")
    folder.chmod(0o755)
