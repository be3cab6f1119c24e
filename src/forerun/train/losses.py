"""The losses that a draft model can be trained with; all are means over positions, in float32.

`ce` learns the text, `kl` learns the target's whole distribution, `alpha` raises the acceptance rate itself: one token
drawn from the draft's q is accepted by the target's p with probability sum_x min(p(x), q(x)) (Leviathan et al. 2023,
definition of beta and corollary 3.6). 1 minus this is the rate of rejection, which is also the total variation.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption, shown

LossName = Literal["ce", "kl", "alpha"]


def cross_entropy(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Compute the mean nats per token: logits [R, V], next_tokens [R]."""
    return F.cross_entropy(logits, next_tokens)


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the mean over rows of KL(p || q) in nats, p from target_logits, q from draft_logits, both [R, V]."""
    log_p = target_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - draft_logits.log_softmax(-1))).sum(-1).mean()


def overlap(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return sum_x min(p(x), q(x)) per row, [R]: the chance that one draft token is accepted at temperature 1."""
    return torch.minimum(draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1)


def rejection(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the mean over rows of 1 - sum_x min(p(x), q(x)): the `alpha` loss, in [0, 1]."""
    return 1 - overlap(draft_logits, target_logits).mean()


def agreement(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the share of rows whose argmax is the same: the chance of acceptance at temperature 0."""
    return (draft_logits.argmax(-1) == target_logits.argmax(-1)).float().mean()


def loss_of(name: LossName, logits: Tensor, next_tokens: Tensor, target_logits: Tensor | None) -> Tensor:
    """Compute the named loss. Raises BadOption for `kl` and `alpha` without a target, and for an unknown name."""
    if name == "ce":
        return cross_entropy(logits, next_tokens)
    if name not in ("kl", "alpha"):
        raise BadOption(f"loss {shown(name)} is unknown: it must be ce, kl or alpha")
    if target_logits is None:
        raise BadOption(f"loss {name} learns from a target's distribution: give --teacher PATH")
    return forward_kl(logits, target_logits) if name == "kl" else rejection(logits, target_logits)
