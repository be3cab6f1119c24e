"""Draw each token from all tokens with equal probability: a floor for comparisons, and a hard case for tests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun.drafters import Drafter, Target
from forerun.drafters.shared.chains import draw_chains
from forerun.sampling.arithmetic import mass
from forerun.types import Budget, Coins, Draft, Probs, Sequence


@dataclass(frozen=True)
class Options:
    """No options."""


class RandomDrafter(Drafter):
    """A drafter that draws every token from the same distribution."""

    def __init__(self, probs: Probs) -> None:
        self._probs = probs

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return draw_chains(seqs, budget, coins, lambda seq, drafted: self._probs)


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter, which draws from all ids of the target that stand for a token, with equal probability."""
    weights = np.ones(target.num_ids)
    weights[list(target.holes)] = 0
    return RandomDrafter(Probs(dense=weights / mass(weights)))
