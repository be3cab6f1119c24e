"""Recurrent layers in training: what chunks of texts side by side compute is the recurrence of each, token by token."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from forerun.ops.reference import Gated, ReferenceOps
from forerun.ops.torch import TorchModel
from forerun.train.model import run_windows
from forerun.train.ops import CHUNK_TOKENS, TrainingOps
from support import VOCAB, random_hybrid

HEADS, KEY_DIM, VALUE_DIM = 3, 8, 12


def tokens(num: int, slowest: float, seed: int = 0) -> Gated:
    """Random tokens, of whose decays the smallest is `slowest`."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(num, HEADS, KEY_DIM, generator=generator), dim=-1) for _ in "qk")
    v = torch.randn(num, HEADS, VALUE_DIM, generator=generator)
    beta = torch.rand(num, HEADS, generator=generator)
    decay = slowest + (1 - slowest) * torch.rand(num, HEADS, generator=generator)
    return Gated(*(x.requires_grad_(True) for x in (q, k, v, beta, decay)))


def by_token(gated: Gated, length: int) -> Tensor:
    """What the reference operators make of each sequence alone."""
    ops, state = ReferenceOps(), torch.zeros(HEADS, KEY_DIM, VALUE_DIM)
    outs = []
    for start in range(0, len(gated.q), length):
        own = Gated(*(getattr(gated, field.name)[start : start + length] for field in fields(Gated)))
        outs.append(ops.delta_rule(own, state, range(-1, len(own.q) - 1), 0, ())[0])
    return torch.cat(outs)


@pytest.mark.parametrize("length", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 5])
@pytest.mark.parametrize("slowest", [0.99, 0.0])
def test_values_and_gradients_are_those_of_one_token_after_the_other(length: int, slowest: float) -> None:
    gated = tokens(2 * length, slowest)
    weights = torch.randn(2 * length, HEADS, VALUE_DIM, generator=torch.Generator().manual_seed(1))
    inputs = [getattr(gated, field.name) for field in fields(Gated)]
    expected = by_token(gated, length)
    state = torch.zeros(HEADS, KEY_DIM, VALUE_DIM)
    found, left = TrainingOps(length).delta_rule(gated, state, range(-1, 2 * length - 1), 0, ())
    assert not left
    assert torch.allclose(found, expected, atol=2e-5)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for ours, theirs in zip(torch.autograd.grad((found * weights).sum(), inputs), wanted, strict=True):
        assert theirs.abs().max() > 0 or length == 1  # nothing is known before that could decay
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


def test_a_decay_of_zero_forgets_and_has_finite_gradients() -> None:
    gated = tokens(40, 0.5)
    with torch.no_grad():
        gated.decay[20] = 0.0
    found, _ = TrainingOps(40).delta_rule(gated, torch.zeros(HEADS, KEY_DIM, VALUE_DIM), range(-1, 39), 0, ())
    assert torch.allclose(found, by_token(gated, 40), atol=2e-5)
    assert torch.isfinite(torch.autograd.grad(found.sum(), gated.decay)[0]).all()


class OneByOne(TrainingOps):
    """Operators for the training of one sequence, whose states are the reference's."""

    convolved = ReferenceOps.convolved
    delta_rule = ReferenceOps.delta_rule


def models(length: int) -> tuple[TorchModel, TorchModel]:
    """A hybrid by chunks, and token by token, with the same weights."""
    model = random_hybrid(1)
    weights = {name: weight.detach().clone().requires_grad_(True) for name, weight in model.weights.items()}
    return TorchModel(model.config, weights, TrainingOps(length)), TorchModel(model.config, weights, OneByOne(length))


def test_a_model_of_both_kinds_of_states_computes_what_it_computes_elsewhere() -> None:
    """And so do the gradients of every weight, of texts side by side."""
    training, one_by_one = models(70)
    windows = torch.randint(0, VOCAB, (3, 70), generator=torch.Generator().manual_seed(2))
    found = training.logits(run_windows(training, windows))
    expected = torch.cat([one_by_one.logits(run_windows(one_by_one, row[None])) for row in windows])
    assert torch.allclose(found, expected, atol=1e-3)
    wanted = torch.randint(0, VOCAB, (210,), generator=torch.Generator().manual_seed(3))
    weights = [*training.weights.values()]
    gradients = [torch.autograd.grad(torch.nn.functional.cross_entropy(x, wanted), weights) for x in (found, expected)]
    for name, ours, theirs in zip(training.weights, *gradients, strict=True):
        assert theirs.abs().max() > 0, name
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())), name


def test_a_text_says_nothing_to_the_one_beside_it() -> None:
    training, _ = models(20)
    windows = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(4))
    others = windows.clone()
    others[0] = (others[0] + 1) % VOCAB
    before, after = (run_windows(training, w) for w in (windows, others))
    assert not torch.equal(before[:20], after[:20])
    assert torch.equal(before[20:], after[20:])
