"""Losses against values worked out by hand."""

import math

import pytest
import torch

from forerun.errors import BadOption
from forerun.train import losses

P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
Q = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])


def test_alpha_loss_by_hand() -> None:
    # Row 1: min sums to 0.2 + 0.3 + 0.2 = 0.7; row 2 is equal: 1. Mean overlap 0.85.
    assert losses.overlap(Q.log(), P.log()).tolist() == pytest.approx([0.7, 1.0])
    assert float(losses.by_row("alpha", Q.log(), P.log()).mean()) == pytest.approx(0.15)


def test_alpha_loss_is_total_variation() -> None:
    torch.manual_seed(0)
    draft, target = torch.randn(50, 9), torch.randn(50, 9)
    variation = 0.5 * (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1).mean()
    assert float(losses.by_row("alpha", draft, target).mean()) == pytest.approx(float(variation), abs=1e-6)


def test_kl_is_zero_at_equality_and_right_by_hand() -> None:
    logits = torch.randn(7, 5)
    assert float(losses.forward_kl(logits, logits + 3.0)) == pytest.approx(0.0, abs=1e-6)
    by_hand = 0.5 * (0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5))  # the second row adds nothing
    assert float(losses.forward_kl(Q.log(), P.log())) == pytest.approx(by_hand)


def test_agreement_compares_the_most_likely() -> None:
    assert float(losses.agreement(Q.log(), P.log())) == 0.5


@pytest.mark.parametrize("name", ["ce", "kl", "alpha"])
def test_gradient_reaches_the_draft_and_descends(name: losses.LossName) -> None:
    torch.manual_seed(1)
    draft, target = torch.randn(20, 6, requires_grad=True), torch.randn(20, 6)
    tokens = target.argmax(-1)
    before = losses.loss_of(name, draft, tokens, target)
    before.backward()  # type: ignore[no-untyped-call]
    assert draft.grad is not None
    assert float(draft.grad.abs().sum()) > 0
    after = losses.loss_of(name, draft.detach() - 0.1 * draft.grad, tokens, target)
    assert float(after) < float(before.detach())


def test_soft_losses_need_a_teacher() -> None:
    with pytest.raises(BadOption, match="--teacher"):
        losses.loss_of("kl", torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), None)
    with pytest.raises(BadOption, match="ce, kl or alpha"):
        losses.loss_of("mse", torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), None)  # type: ignore[arg-type]
