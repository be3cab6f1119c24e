"""Adapt the draft length to the entropy (EGAG): few tokens for an unsure drafter, many for a sure drafter.

The proposal names use_egag, gamma_min, gamma_max and egag_ema_beta and gives no formula. The following formula is used
once per round. H is the entropy of the distribution that the drafter's first pass gives (temperature 1, no filters),
and V is the number of ids that can be drawn from it:

    Hn = H / ln V,    s <- beta s + (1 - beta) Hn,    z = clip(s / h_ref, 0, 1)
    gamma = gamma_min + floor((gamma_max - gamma_min) (1 - z) + 1/2)

Over a large vocabulary Hn is small even where the drafter is unsure (2 nats over 128,256 ids give 0.17). So the length
would hardly change with h_ref = 1. Unless it is given, h_ref is the 90th percentile of the last values of Hn. The
length depends on the round's first distribution and on earlier rounds, and never on a drawn token. So the output's
distribution stays as it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forerun.config import DEFAULT_SPEC_LENGTH
from forerun.errors import BadOption
from forerun.pacing import Pacing
from forerun.pacing.cost import Costs
from forerun.pacing.uncertainty import normalized_entropy
from forerun.registry import option
from forerun.sampling.arithmetic import Row
from forerun.types import Probs, Sequence

REMEMBERED = 256  # values of Hn that are kept; h_ref is their percentile
FEWEST = 16  # with fewer values of Hn, h_ref is 1
PERCENTILE = 90.0


@dataclass(frozen=True)
class Options:
    """Bounds of the draft length, and how entropy moves the length between them."""

    gamma_min: int = option(1, "tokens drafted where the drafter is unsure", min=1, max=64)
    gamma_max: int | None = option(None, "tokens drafted where it is sure; none = spec_length", min=1, max=64)
    ema_beta: float = option(0.0, "weight of the past in the smoothed entropy, below 1", min=0.0, max=0.999)
    h_ref: float | None = option(
        None, "normalised entropy that counts as unsure; none = the 90th percentile", min=1e-6, max=1.0
    )

    def __post_init__(self) -> None:
        if self.gamma_max is not None and self.gamma_min > self.gamma_max:
            raise BadOption(
                f"entropy:gamma_min={self.gamma_min} is not possible: it must be at most gamma_max={self.gamma_max}"
            )


@dataclass
class _Round:
    """A request's smoothed entropy, its last round's entropy, and the length that followed from them."""

    smoothed: float
    normalized: float
    length: int


class EntropyPacing(Pacing):
    """The policy that grants gamma_max tokens, and ends a draft at the length that follows from the first entropy."""

    reads_logits = True

    def __init__(self, options: Options, longest: int) -> None:
        self.options, self.longest = options, longest
        self._rounds: dict[int, _Round] = {}
        self._seen: deque[float] = deque(maxlen=REMEMBERED)

    def wanted(self, seq: Sequence) -> int:
        return self.longest

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs, logits: Row | None = None) -> bool:
        if depth == 0:
            self._begin(seq, normalized_entropy(draft_probs, logits))
        return depth < self._rounds[seq.id].length

    def end(self, seq: Sequence) -> None:
        self._rounds.pop(seq.id, None)

    def facts(self, seq: Sequence) -> Mapping[str, float]:
        last = self._rounds.get(seq.id)
        if last is None:
            return {}
        return {"entropy_normalized": last.normalized, "entropy_smoothed": last.smoothed, "gamma": float(last.length)}

    def _begin(self, seq: Sequence, now: float) -> None:
        """Choose the length of a round. now: the normalised entropy of the round's first distribution."""
        before, beta = self._rounds.get(seq.id), self.options.ema_beta
        smoothed = now if before is None else beta * before.smoothed + (1 - beta) * now
        self._seen.append(now)
        z = min(1.0, smoothed / self._reference())
        span = self.longest - self.options.gamma_min
        self._rounds[seq.id] = _Round(smoothed, now, self.options.gamma_min + math.floor(span * (1 - z) + 0.5))

    def _reference(self) -> float:
        if self.options.h_ref is not None:
            return self.options.h_ref
        return max(1e-6, float(np.percentile(self._seen, PERCENTILE))) if len(self._seen) >= FEWEST else 1.0


def build(options: Options, spec_length: int | None, costs: Costs) -> Pacing:
    """Return the policy. The longest draft is gamma_max, else spec_length, else 5 tokens.

    Raises BadOption if gamma_min is larger than the longest draft.
    """
    longest = options.gamma_max or spec_length or DEFAULT_SPEC_LENGTH
    if longest < options.gamma_min:
        raise BadOption(
            f"entropy:gamma_min={options.gamma_min} is not possible: it must be at most spec_length={longest}"
        )
    return EntropyPacing(options, longest)
