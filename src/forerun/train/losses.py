"""The losses with which draft models and heads can be trained, computed in float32.

`ce` learns a single token: the next token of the text, or the target's likeliest token. `kl` learns the target's whole
distribution. `alpha` maximises the acceptance rate: a token drawn from the draft's distribution q is accepted with
probability sum_x min(p(x), q(x)), where p is the target's distribution (Leviathan et al. 2023, definition of beta and
corollary 3.6). The loss `alpha` is 1 minus this probability, which is the total variation between p and q.
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
    """Raise BadOption if `name` is not the name of a loss."""
    if name not in get_args(LossName):
        raise BadOption(f"loss {shown(name)} is unknown: it must be ce, kl or alpha")


def by_row(name: str, draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the loss `name` of each row, [R]. Raises BadOption for an unknown name.

    draft_logits, target_logits [R, n]: the logits of draft and target for the same ids.
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
    """Return the imbalance of a router over n experts: from 1 (rows spread equally) to n (all rows to one expert).

    scores [R, n]: the router's softmax. chosen [R, k]: the experts that are chosen for each row. The imbalance is
    n sum_i f_i P_i, where f_i is the share of expert i among all choices, and P_i is the mean score of expert i. Only
    P_i has a gradient (Fedus, Zoph, Shazeer 2021, arXiv 2101.03961, equations 4 to 6).
    """
    num_experts = scores.shape[-1]
    share = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()
    return num_experts * (share * scores.mean(0)).sum()


def overlap(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return sum_x min(p(x), q(x)) of each row, [R]: the probability that a drafted token is accepted at temperature 1.

    p is the target's distribution, and q the draft's.
    """
    return torch.minimum(draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1)


def agreement(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the share of rows where draft and target have the same argmax: the acceptance rate at temperature 0."""
    return (draft_logits.argmax(-1) == target_logits.argmax(-1)).float().mean()


def loss_of(name: LossName, logits: Tensor, next_tokens: Tensor, target_logits: Tensor | None) -> Tensor:
    """Return the mean of the loss `name` over all rows. `ce` learns next_tokens [R], the next tokens of the text.

    logits, target_logits [R, V]. Raises BadOption for `kl` and `alpha` without target_logits, and for an unknown name.
    """
    check(name)
    if name == "ce":
        return cross_entropy(logits, next_tokens)
    if target_logits is None:
        raise BadOption(f"loss {name} learns from a target's distribution: give --teacher PATH")
    return by_row(name, logits, target_logits).mean()
