"""No drafting: every draft is empty, which is plain decoding through the same step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.drafters import Drafter, Target
from forerun.types import Budget, Coins, Draft, Sequence


@dataclass(frozen=True)
class Options:
    """No options."""


class NoDrafter(Drafter):
    """A drafter that proposes nothing."""

    draws = "point"

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return Draft.empty(len(seqs))


def build(options: Options, target: Target) -> Drafter:
    """Return the drafter for plain decoding."""
    return NoDrafter()
