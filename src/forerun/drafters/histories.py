"""The committed tokens of each sequence, in arrays that numpy can search. Drafters that look into texts keep one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from forerun.drafters import Seen
from forerun.types import Sequence


class Histories:
    """Reads each committed token once. The arrays must not be viewed by numpy while they grow."""

    def __init__(self) -> None:
        self._texts: dict[int, array[int]] = {}

    def read(self, seq: Sequence, stop: int | None = None) -> array[int]:
        """Return the committed tokens of a sequence: all, or at least the first `stop`."""
        text = self._texts.setdefault(seq.id, array("i"))
        text.extend(seq.tokens[len(text) : stop])
        return text

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Read a prompt chunk by chunk, so that little is left to read when drafting begins."""
        for seq, own in zip(seqs, seen, strict=True):
            self.read(seq, own.start + len(own.kept))

    def forget(self, seq: Sequence) -> None:
        """Drop the tokens of a sequence."""
        self._texts.pop(seq.id, None)
