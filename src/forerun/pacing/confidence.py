"""Stop after a token that the drafter itself finds unlikely (transformers' assistant_confidence_threshold).

The unlikely token stays in the draft and is verified. So whether a token is drafted depends only on the tokens before
it, and the output's distribution stays as it is. Dropping the unlikely token would change the distribution
(docs/exactness.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.config import DEFAULT_SPEC_LENGTH
from forerun.pacing import Pacing
from forerun.pacing.cost import Costs
from forerun.pacing.uncertainty import confidence
from forerun.registry import option
from forerun.sampling.arithmetic import Row
from forerun.types import Probs, Sequence


@dataclass(frozen=True)
class Options:
    """How likely a drafted token must be for another token to follow it."""

    threshold: float = option(0.4, "probability of the last drafted token, by the drafter", min=0.0, max=1.0)


class ConfidencePacing(Pacing):
    """The policy that grants `spec_length` tokens and ends a draft after the first unlikely token."""

    reads_logits = True

    def __init__(self, options: Options, spec_length: int) -> None:
        self.options, self.spec_length = options, spec_length

    def wanted(self, seq: Sequence) -> int:
        return self.spec_length

    def go_behind(self, seq: Sequence, depth: int, token: int, draft_probs: Probs, logits: Row | None = None) -> bool:
        return confidence(token, draft_probs, logits) >= self.options.threshold


def build(options: Options, spec_length: int | None, costs: Costs) -> Pacing:
    """Return the policy; the longest draft is spec_length, or 5 where it is not given."""
    return ConfidencePacing(options, spec_length or DEFAULT_SPEC_LENGTH)
