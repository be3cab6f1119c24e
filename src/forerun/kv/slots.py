"""What a KV cache knows of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forerun.kv.prefix import Path


class Room(NamedTuple):
    """What a slot holds and may still take, in tokens and blocks."""

    length: int  # tokens that are kept
    slack: (
        int  # tokens that its own blocks have room for; below 0 where it must copy its last block before it may write
    )
    next_blocks: int  # that one more token takes


@dataclass(slots=True)
class Slot:
    """One sequence: its blocks, how many tokens are kept, and which of its blocks others may find.

    may_be_cut: it was cut below what it had published, so its last block may be a published one; False = it is not.
    """

    table: list[int]
    path: Path
    length: int
    may_be_cut: bool = False
