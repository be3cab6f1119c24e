"""Counts how often files are opened, by whatever language: the kernel tells it (inotify)."""

import ctypes
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IN_ACCESS, IN_CLOSE_WRITE, IN_CLOSE_NOWRITE, IN_OPEN = 0x1, 0x8, 0x10, 0x20
IN_ISDIR = 0x40000000
EVENT = struct.Struct("iIII")  # the watch, what happened, a cookie, and how many bytes of the name follow


@contextmanager
def counted(*folders: Path) -> Iterator[Counter[str]]:
    """Count the openings of the files that lie in these folders and below, by "FOLDER/NAME"; right behind the block.

    What is read and closed is watched, too, but not counted: equal events behind each other are told as one.
    """
    libc, seen = ctypes.CDLL(None, use_errno=True), Counter[str]()
    descriptor = libc.inotify_init()
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    names = dict[int, str]()
    for folder in folders:
        for place in (folder, *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())):
            mask = IN_OPEN | IN_ACCESS | IN_CLOSE_WRITE | IN_CLOSE_NOWRITE
            watch = libc.inotify_add_watch(descriptor, os.fsencode(place), mask)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            names[watch] = f"{folder.name}{str(place).removeprefix(str(folder))}"

    def read() -> None:
        while True:
            data = os.read(descriptor, 1 << 16)
            while data:
                watch, event, _, length = EVENT.unpack_from(data)
                name = data[EVENT.size : EVENT.size + length].rstrip(b"\0").decode()
                data = data[EVENT.size + length :]
                if name == END:
                    return
                if event & IN_OPEN and not event & IN_ISDIR:
                    seen[f"{names[watch]}/{name}"] += 1

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        (folders[0] / END).touch()
        reader.join()
        (folders[0] / END).unlink()
        os.close(descriptor)


END = "the-end-of-what-is-counted"
