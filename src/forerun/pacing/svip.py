"""Draft while the square root of the draft's entropy stays below a threshold (SVIP, Zhang et al. 2024, 2411.18462).

By Pinsker's inequality, the more the distributions of draft and target diverge, the less likely a token is accepted.
The drafter knows only one part of that divergence: its own entropy, which is read before the token is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.config import AUTO_SPEC_LENGTH
from forerun.pacing import Pacing
from forerun.pacing.cost import Costs
from forerun.pacing.uncertainty import entropy_nats
from forerun.registry import option
from forerun.sampling.arithmetic import Row
from forerun.types import Probs, Sequence


@dataclass(frozen=True)
class Options:
    """How unsure the drafter may be."""

    threshold: float = option(1.0, "square root of the entropy in nats, at and above which it stops", min=0.0)


class SvipPacing(Pacing):
    """The policy that ends a draft before a token about which the drafter is too unsure."""

    reads_logits = True

    def __init__(self, options: Options, spec_length: int) -> None:
        self.options, self.spec_length = options, spec_length

    def wanted(self, seq: Sequence) -> int:
        return self.spec_length

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs, logits: Row | None = None) -> bool:
        return math.sqrt(max(0.0, entropy_nats(draft_probs, logits))) < self.options.threshold


def build(options: Options, spec_length: int | None, costs: Costs) -> Pacing:
    """Return the policy; the longest draft is spec_length, or 16 where it is not given."""
    return SvipPacing(options, spec_length or AUTO_SPEC_LENGTH)
