"""The same draft length in every step: K = spec_length (Leviathan et al. 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.pacing import Pacing
from forerun.types import Sequence


@dataclass(frozen=True)
class Options:
    """No options: the length is the engine's spec_length."""


class FixedPacing(Pacing):
    """Grants `spec_length` tokens to everybody."""

    def __init__(self, spec_length: int) -> None:
        self.spec_length = spec_length

    def budget(self, seqs: Seq[Sequence]) -> list[int]:
        return [self.spec_length] * len(seqs)


def build(options: Options, spec_length: int) -> Pacing:
    """A policy that always grants `spec_length` tokens."""
    return FixedPacing(spec_length)
