"""The losses that draft models and heads can be trained with, in float32.

`ce` learns one token: the text's next one, or the target's likeliest. `kl` learns the target's whole distribution.
`alpha` raises the acceptance rate itself: a token drawn from the draft's q is accepted by the target's p with
probability sum_x min(p(x), q(x)) (Leviathan et al. 2023, definition of beta and corollary 3.6). The loss is 1 minus
this probability: the rate of rejection, which is also the total variation.
"""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadOption, shown
from forerun.train.config import LossName

HELP = "kl: the target's distribution, alpha: what is accepted at temperature 1, ce: the target's likeliest id"


def check(name: str) -> None:
    """Raise BadOption for a name that is not the name of a loss."""
    if name not in get_args(LossName):
        raise BadOption(f"loss {shown(name)} is unknown: it must be ce, kl or alpha")


def by_row(name: str, draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the named loss of each row, [R]. Raises BadOption for an unknown name.

    draft_logits, target_logits: [R, n], both for the same ids.
    """
    check(name)
    if name == "ce":
        return F.cross_entropy(draft_logits, target_logits.argmax(-1), reduction="none")
    if name == "alpha":
        return 1 - overlap(draft_logits, target_logits)
    p = target_logits.softmax(-1)
    return F.cross_entropy(draft_logits, p, reduction="none") + (p * target_logits.log_softmax(-1)).sum(-1)


def cross_entropy(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per token. logits [R, V], next_tokens [R]."""
    return F.cross_entropy(logits, next_tokens)


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the mean over rows of KL(p || q) in nats. p is from target_logits, q from draft_logits, both [R, V]."""
    return by_row("kl", draft_logits, target_logits).mean()


def imbalance(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return how unevenly a router spreads rows over n experts: from 1 (equally) to n (all rows to one expert).

    scores [R, n]: the router's softmax. chosen [R, k]: the experts that each row takes. The imbalance is n sum_i f_i
    P_i, where f_i is the share of choices that fell on expert i, and P_i is the expert's mean score. Only P_i has a
    gradient (Fedus, Zoph, Shazeer 2021, arXiv 2101.03961, equations 4 to 6).
    """
    num_experts = scores.shape[-1]
    share = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()
    return num_experts * (share * scores.mean(0)).sum()


def overlap(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return sum_x min(p(x), q(x)) per row, [R]: the chance that one draft token is accepted at temperature 1."""
    return torch.minimum(draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1)


def agreement(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the share of rows where both have the same argmax: the chance of acceptance at temperature 0."""
    return (draft_logits.argmax(-1) == target_logits.argmax(-1)).float().mean()


def loss_of(name: LossName, logits: Tensor, next_tokens: Tensor, target_logits: Tensor | None) -> Tensor:
    """Return the mean of the named loss. `ce` learns the next tokens of the text.

    Raises BadOption for `kl` and `alpha` without a target, and for an unknown name.
    """
    check(name)
    if name == "ce":
        return cross_entropy(logits, next_tokens)
    if target_logits is None:
        raise BadOption(f"loss {name} learns from a target's distribution: give --teacher PATH")
    return by_row(name, logits, target_logits).mean()
