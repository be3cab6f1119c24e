"""Draft while an entropy bound on the acceptance stays above a threshold that adapts (AdaEDL, 2410.18351).

Agrawal et al. 2024 give a lower bound of a token's acceptance: 1 - sqrt(k_e H(q)), where H(q) is the entropy of the
draft's distribution in nats (section 3). They stop before a token if this bound is below lambda. lambda follows the
share of drafted tokens that were accepted, as in Draft & Verify (Zhang et al. 2023, arXiv 2309.08168, equation 6):

    share <- 0.5 share + 0.5 accepted / drafted
    lambda <- 0.9 lambda + 0.1 (lambda + 0.01 if share < 0.9, else lambda - 0.01)

lambda does not change where the share is at least 0.9 and the draft had its longest length. Each request has its own
lambda and share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass

from forerun.config import AUTO_SPEC_LENGTH
from forerun.pacing import Pacing
from forerun.pacing.cost import Costs
from forerun.pacing.uncertainty import entropy_nats
from forerun.registry import option
from forerun.sampling.arithmetic import Row
from forerun.types import Probs, Sequence, StepReport

STEP, KEEP = 0.01, 0.9  # of the threshold


@dataclass(frozen=True)
class Options:
    """The factor of the bound, the first threshold, and the share of accepted tokens that the threshold aims at."""

    entropy_factor: float = option(0.2, "k_e of the bound, 1 / nats", min=0.0)
    threshold: float = option(0.4, "first threshold (lambda)", min=0.0, max=1.0)
    goal: float = option(0.9, "share of drafted tokens to be accepted", min=0.0, max=1.0)


@dataclass
class _Controller:
    threshold: float
    share: float = 1.0
    granted: int = 0


class AdaEdlPacing(Pacing):
    """The policy that ends a draft before a token that is likely to be rejected."""

    reads_logits = True

    def __init__(self, options: Options, spec_length: int) -> None:
        self.options, self.spec_length = options, spec_length
        self._requests: dict[int, _Controller] = {}

    def budget(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        granted = super().budget(seqs, limits)
        for seq, most in zip(seqs, granted, strict=True):
            self._of(seq.id).granted = most
        return granted

    def wanted(self, seq: Sequence) -> int:
        return self.spec_length

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs, logits: Row | None = None) -> bool:
        bound = 1 - math.sqrt(max(0.0, self.options.entropy_factor * entropy_nats(draft_probs, logits)))
        return bound >= self._of(seq.id).threshold

    def observe(self, report: StepReport) -> None:
        for round_ in report.sequences:
            controller = self._of(round_.sequence_id)
            if not round_.num_drafted:
                # Nothing was drafted, so nothing can be accepted: a threshold that stops every draft comes down again.
                controller.threshold = max(0.0, controller.threshold - (1 - KEEP) * STEP * (controller.granted > 0))
                continue
            controller.share = 0.5 * controller.share + 0.5 * round_.num_accepted / round_.num_drafted
            if controller.share < self.options.goal:
                controller.threshold += (1 - KEEP) * STEP
            elif round_.num_drafted < controller.granted:
                controller.threshold -= (1 - KEEP) * STEP
            controller.threshold = min(1.0, max(0.0, controller.threshold))

    def end(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)

    def facts(self, seq: Sequence) -> Mapping[str, float]:
        controller = self._of(seq.id)
        return {"threshold": controller.threshold, "accepted_share": controller.share}

    def _of(self, request: int) -> _Controller:
        return self._requests.setdefault(request, _Controller(self.options.threshold))


def build(options: Options, spec_length: int | None, costs: Costs) -> Pacing:
    """Return the policy; the longest draft is spec_length, or 16 where it is not given."""
    return AdaEdlPacing(options, spec_length or AUTO_SPEC_LENGTH)
