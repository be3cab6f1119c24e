"""The reference operators: one row's bits in row_by_row mode, one row's numbers in fast mode (docs/exactness.md)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.blocks import Plain, Rope
from forerun.ops import load_model, reference
from forerun.ops.reference import ACTIVATIONS, ReferenceOps, run_mask
from forerun.ops.torch import TorchModel, empty_weights
from forerun.types import CacheView, RaggedBatch
from ops.native_cases import Same, Session, by_value, one_by_one, path_to, random_weights, tokens_of

CONFIG = Plain("llama", 77, 44, 2, 6, 2, 10, 51, 1e-5, 256, rope=Rope(), tied=True, windows=(None, 9)).spec


def make_model(row_by_row: bool, dtype: torch.dtype = torch.float32, *, joined: bool = True) -> TorchModel:
    weights = random_weights(CONFIG, dtype)
    if joined:
        weights = {n: out.copy_(weights[n]) for n, out in empty_weights(CONFIG, dtype, "cpu").items()}
    return load_model(CONFIG, weights, ReferenceOps(row_by_row=row_by_row))


def plain(model: TorchModel, tokens: list[int]) -> Tensor:
    """One token at a time, alone, contiguous: what plain decoding computes."""
    return one_by_one(Session(model, 0), tokens)


MODES = [pytest.param(True, torch.equal, id="row_by_row"), pytest.param(False, by_value, id="fast")]


@pytest.mark.parametrize(("row_by_row", "same"), MODES)
@pytest.mark.parametrize("layout", [16, 0], ids=["paged", "contiguous"])
def test_chunks_and_neighbours_do_not_matter(row_by_row: bool, same: Same, layout: int) -> None:
    model, text = make_model(row_by_row), tokens_of(33, 1)
    expected = plain(model, text)
    session = Session(model, layout)
    found = [
        session.run({1: tokens_of(19, 2), 2: text[:7]})[19:],
        session.run({2: text[7:8]}),
        session.run({2: text[8:25], 1: tokens_of(1, 3), 3: tokens_of(5, 4)})[:17],
        session.run({3: tokens_of(2, 5), 2: text[25:]})[2:],
    ]
    assert same(torch.cat(found), expected)


@pytest.mark.parametrize(("row_by_row", "same"), MODES)
def test_tree_rows_are_chain_rows(row_by_row: bool, same: Same) -> None:
    model, context = make_model(row_by_row), tokens_of(18, 6)
    tree, parents = tokens_of(8, 7), [-1, 0, 0, 1, 2, 1, 4, -1]
    session = Session(model)
    session.run({0: context, 1: tokens_of(5, 8)})
    rows = session.run({1: tokens_of(3, 9), 0: tree}, {0: parents}, {0: [0, 2, 4], 1: []})[3:]
    for node in range(len(tree)):
        path = path_to(node, parents)
        assert same(rows[path], plain(model, context + [tree[i] for i in path])[len(context) :])
    # The kept path is the chain in the cache too: what follows is computed from it.
    assert same(session.run({0: [11]}), plain(model, context + [tree[i] for i in (0, 2, 4)] + [11])[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_row_by_row_is_invariant_in_every_type(dtype: torch.dtype) -> None:
    model, text = make_model(True, dtype), tokens_of(21, 10)
    assert torch.equal(Session(model).run({0: text}), plain(model, text))


def test_activations_are_what_they_are_defined_as() -> None:
    """On both sides of every bound; gpt-oss bounds the gate above and what it multiplies on both sides."""
    x, up = [i / 4 for i in range(-40, 41)], [math.sin(i) * 12 for i in range(81)]

    def sigmoid(number: float) -> float:
        return 1 / (1 + math.exp(-number))

    root = math.sqrt(2 / math.pi)
    expected = {
        "silu": [a * sigmoid(a) for a in x],
        "gelu": [a * (1 + math.erf(a / math.sqrt(2))) / 2 for a in x],
        "gelu_tanh": [a * (1 + math.tanh(root * (a + 0.044715 * a**3))) / 2 for a in x],
        "relu": [max(a, 0.0) for a in x],
        "clamped_silu": [a * sigmoid(1.702 * a) for a in x],
    }
    assert expected.keys() == ACTIVATIONS.keys()
    ops, (rows, ups) = ReferenceOps(), torch.tensor([[x], [up]], dtype=torch.float64)
    for act, numbers in expected.items():
        assert ops.activated(act, rows)[0].tolist() == pytest.approx(numbers, abs=1e-12)  # type: ignore[arg-type]
        if act != "clamped_silu":
            products = [a * b for a, b in zip(numbers, up, strict=True)]
            assert ops.gated(act, rows, ups)[0].tolist() == pytest.approx(products, abs=1e-12)  # type: ignore[arg-type]
    gates = [min(a, 7) * sigmoid(1.702 * min(a, 7)) for a in x]
    bounded = [a * (min(max(b, -7), 7) + 1) for a, b in zip(gates, up, strict=True)]
    assert ops.gated("clamped_silu", rows, ups)[0].tolist() == pytest.approx(bounded, abs=1e-12)


def test_only_row_by_row_promises_invariance() -> None:
    assert ReferenceOps(row_by_row=True).row_invariant
    assert not ReferenceOps().row_invariant


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 17, 64])
def test_each_operator_on_one_row_among_many(num_rows: int) -> None:
    ops = ReferenceOps(row_by_row=True)
    x, y, weight, bias = torch.randn(num_rows, 77), torch.randn(num_rows, 77), torch.randn(53, 77), torch.randn(53)
    q, cos, sin = torch.randn(num_rows, 3, 10), torch.randn(num_rows, 1, 10), torch.randn(num_rows, 1, 10)
    norm = torch.randn(77)
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda a: ops.linear(a, weight, bias), (x,)),
        (lambda a: ops.rms_norm(a, norm, 1e-5), (x,)),
        (ops.silu_mul, (x, y)),
        (ops.rope, (q, cos, sin)),
    ]
    for op, rows in cases:
        together = op(*rows)
        for i in range(num_rows):
            assert torch.equal(together[i : i + 1], op(*(r[i : i + 1].clone() for r in rows)))


def test_joined_and_separate_projections_agree() -> None:
    joined, separate = (Session(make_model(False, joined=j)).run({0: tokens_of(12, 11)}) for j in (True, False))
    assert by_value(joined, separate)


def test_large_matrices_with_and_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, ops = torch.randn(1024, 1100), torch.randn(1024), ReferenceOps()
    for num_rows in (0, 1, 6, 40):
        x = torch.randn(num_rows, 1100)
        expected = x.double() @ weight.double().T + bias.double()
        fast = ops.linear(x, weight, bias)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_ONEDNN_LINEAR", None)
            slow = ops.linear(x, weight, bias)
        for found in (fast, slow):
            assert found.shape == expected.shape
            assert torch.allclose(found.double(), expected, atol=1e-3, rtol=0)


def test_gradients_flow_where_they_are_wanted() -> None:
    weight = torch.randn(1100, 1000, requires_grad=True)
    ReferenceOps().linear(torch.randn(3, 1000), weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_masks_by_logical_position(window: int | None) -> None:
    """A chain written as a tree has the chain's mask; a row sees window positions at most, its own included."""
    cached, n = 5, 4
    batch = RaggedBatch(torch.zeros(n), torch.zeros(n), [0, n], [0], [cached])
    tree = RaggedBatch(torch.zeros(n), torch.zeros(n), [0, n], [0], [cached], [0], [1, 3, 7, 15])
    masks = [run_mask(CacheView(b, torch.zeros(n), [torch.zeros(cached + n)]), 0, window) for b in (batch, tree)]
    assert torch.equal(masks[0], masks[1])
    for i in range(n):
        position = cached + i
        first = 0 if window is None else max(0, position - window + 1)
        assert torch.nonzero(masks[0][i] == 0).flatten().tolist() == list(range(first, position + 1))
