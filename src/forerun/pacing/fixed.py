"""Draft the same number of tokens in every step: K = spec_length (Leviathan et al. 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.config import DEFAULT_SPEC_LENGTH
from forerun.pacing import Pacing
from forerun.pacing.cost import Costs
from forerun.types import Sequence


@dataclass(frozen=True)
class Options:
    """No options: the length is the engine's spec_length."""


class FixedPacing(Pacing):
    """The policy that grants `spec_length` tokens to each request that sets no length itself."""

    def __init__(self, spec_length: int) -> None:
        self.spec_length = spec_length

    def wanted(self, seq: Sequence) -> int:
        return self.spec_length

    def levels(self, seqs: Seq[Sequence], num_rows: int) -> int:
        return self.spec_length


def build(options: Options, spec_length: int | None, costs: Costs) -> Pacing:
    """Return a policy that grants spec_length tokens in each step, or 5 where the engine's spec_length is None.

    A request that sets a spec_length gets that number of tokens instead.
    """
    return FixedPacing(spec_length or DEFAULT_SPEC_LENGTH)
