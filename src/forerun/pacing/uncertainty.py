"""How sure a drafter is of its next token: the entropy and the confidence of its distribution.

Policies look at the softmax of the logits, at temperature 1 and without filters. At temperature 0 the drafter draws
from a point mass, which has entropy 0 however unsure the model is. A drafter without logits, such as a lookup, has only
the distribution that it draws from.
"""

from __future__ import annotations

import math

from forerun.sampling import arithmetic
from forerun.sampling.arithmetic import Row
from forerun.types import Probs


def entropy_nats(draft_probs: Probs, logits: Row | None) -> float:
    """Return H = -sum p ln p of softmax(logits) [V], or of draft_probs where there are no logits."""
    if logits is not None:
        return arithmetic.entropy_of_logits(logits)
    return 0.0 if draft_probs.point is not None else arithmetic.entropy(draft_probs.weights)


def normalized_entropy(draft_probs: Probs, logits: Row | None) -> float:
    """Return the entropy divided by the entropy of a uniform distribution over the possible ids, in [0, 1]."""
    if logits is not None:
        num_ids = int((logits > -math.inf).sum())
    else:
        num_ids = 1 if draft_probs.point is not None else len(draft_probs.weights)
    return entropy_nats(draft_probs, logits) / math.log(max(2, num_ids))


def confidence(token: int, draft_probs: Probs, logits: Row | None) -> float:
    """Return the probability of a drawn token by softmax(logits) [V], or by draft_probs where there are no logits."""
    return arithmetic.chance(logits, token) if logits is not None else draft_probs.at(token)
