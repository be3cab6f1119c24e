"""The same draft length in every step: K = spec_length (Leviathan et al. 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.config import DEFAULT_SPEC_LENGTH
from forerun.pacing import Pacing
from forerun.types import Sequence


@dataclass(frozen=True)
class Options:
    """No options: the length is the engine's spec_length."""


class FixedPacing(Pacing):
    """Grants `spec_length` tokens to everybody who does not ask for another length."""

    def __init__(self, spec_length: int) -> None:
        self.spec_length = spec_length

    def budget(self, seqs: Seq[Sequence], limits: Seq[int], lags: Seq[int], num_other_rows: int) -> list[int]:
        # A sequence without a drafter has limit 0 anyway: where all are so, no limit has to be worked out.
        wanted = [0 if seq.draft == "none" else seq.params.spec_length or self.spec_length for seq in seqs]
        return [min(pair) for pair in zip(wanted, limits, strict=True)] if any(wanted) else wanted


def build(options: Options, spec_length: int | None) -> Pacing:
    """A policy that always grants as many tokens: the request's spec_length, else the engine's, else 5."""
    return FixedPacing(spec_length or DEFAULT_SPEC_LENGTH)
