"""What a KV cache knows of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forerun.kv.prefix import Path


class Room(NamedTuple):
    """What a slot holds and may still take: tokens that are kept, tokens that its own blocks have room for behind

    those (without a block that it has to copy before it may write), and blocks that one more token takes.
    """

    length: int
    slack: int
    next_blocks: int


@dataclass(slots=True)
class Slot:
    """One sequence: its blocks, how many tokens are kept, and which of its blocks others may find.

    may_be_cut: it was cut below what it had published and has not been written to since.
    """

    table: list[int]
    path: Path
    length: int
    may_be_cut: bool = False
