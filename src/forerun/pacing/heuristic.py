"""Draft two tokens more after a fully accepted draft, and one token less otherwise (transformers' "heuristic").

Each request has its own draft length. The length depends on committed tokens alone, which are known before the next
draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.config import AUTO_SPEC_LENGTH, DEFAULT_SPEC_LENGTH
from forerun.pacing import Pacing
from forerun.pacing.cost import Costs
from forerun.types import Sequence, StepReport

MORE, LESS = 2, 1  # tokens


@dataclass(frozen=True)
class Options:
    """No options: the first draft of a request has spec_length tokens."""


class HeuristicPacing(Pacing):
    """The policy that changes each request's draft length by the result of its last draft."""

    def __init__(self, first: int, most: int) -> None:
        self.first, self.most = first, most
        self._lengths: dict[int, int] = {}

    def wanted(self, seq: Sequence) -> int:
        return self._lengths.get(seq.id, self.first)

    def observe(self, report: StepReport) -> None:
        for round_ in report.sequences:
            if round_.num_drafted:
                length = self._lengths.get(round_.sequence_id, self.first)
                is_whole = round_.num_accepted == round_.num_drafted
                moved = min(length + MORE, self.most) if is_whole else max(length - LESS, 1)
                self._lengths[round_.sequence_id] = moved

    def end(self, seq: Sequence) -> None:
        self._lengths.pop(seq.id, None)

    def facts(self, seq: Sequence) -> Mapping[str, float]:
        return {"spec_length": float(self.wanted(seq))}


def build(options: Options, spec_length: int | None, costs: Costs) -> Pacing:
    """Return the policy. The first draft of a request has spec_length tokens, or 5 where it is not given.

    A draft's length never exceeds 16, or spec_length where spec_length is larger.
    """
    first = spec_length or DEFAULT_SPEC_LENGTH
    return HeuristicPacing(first, max(first, AUTO_SPEC_LENGTH))
