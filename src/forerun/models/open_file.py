"""A file of weights that is opened only once for all tensors that are read from it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import BinaryIO

import numpy as np

from forerun.errors import UnsupportedModel
from forerun.host_tensor import Array, empty


class OpenFile:
    """A file of weights. The first read opens the file. `close` or the garbage collection of this object closes it.

    The file is not mapped into memory, because pages that were read would stay resident. A read after `close` opens the
    file again. Raises OSError as `open` does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: BinaryIO | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def stream(self) -> BinaryIO:
        """The open file. The file position is the end of the last read."""
        if self._stream is None:
            self._stream = self.path.open("rb")
            self._end = weakref.finalize(self, self._stream.close)
        return self._stream

    def fileno(self) -> int:
        """Return the file descriptor, for kernels that read the file themselves."""
        return self.stream.fileno()

    def read(self, start: int, num_bytes: int) -> Array:
        """Return `num_bytes` bytes from offset `start` on, as uint8. If the file ends earlier, return fewer bytes."""
        numbers = empty((num_bytes,), np.uint8)
        self.stream.seek(start)
        num_read = self.stream.readinto(numbers)  # type: ignore[attr-defined]
        return numbers[:num_read]

    def read_whole(self, start: int, num_bytes: int) -> Array:
        """Return exactly `num_bytes` bytes from offset `start` on, as uint8.

        Raises UnsupportedModel if the file ends earlier.
        """
        numbers = self.read(start, num_bytes)
        if len(numbers) < num_bytes:
            raise UnsupportedModel(f"{self} has become shorter while it was read: fetch it again")
        return numbers

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._stream is not None:
            self._end()
            self._stream = None
