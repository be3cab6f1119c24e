"""Experts of the CUDA backend: what torch computes, chosen on the device, and the bits of a row whatever is beside it.

Whole models with experts are in test_cuda.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.blocks import Experts, Mlp, Spec
from forerun.config import Quantization
from forerun.ops import cuda
from forerun.ops.cuda.experts import CudaExperts
from forerun.ops.cuda.model import CudaModel
from forerun.ops.cuda.packed import Packed
from forerun.ops.passes import Passed
from forerun.ops.quantised import dequantised
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import TorchExperts, TorchModel
from forerun.ops.torch_parts import normed
from forerun.ops.torch_tensors import tensor_of
from ops.native_blocks import SPECS, _rounded, mixture, random_weights, spec_of
from ops.native_cases import same_bits, seeded
from ops.test_cuda import DEVICE, Text, every_type, needs_triton, operators

__all__ = ["operators"]  # a fixture
WIDE = Experts(5, 2, Mlp(24, "clamped_silu", bias=True), Mlp(24, bias=True), score="sigmoid", router_bias=True)
FOUND = SPECS | {"in parts of K": spec_of([mixture(WIDE)], hidden_size=1032)}
MIXTURES = [*(("experts", i) for i in range(5)), ("gpt_oss, experts", 0), ("gemma4, experts", 0), ("in parts of K", 0)]
every_mixture = pytest.mark.parametrize(("name", "i"), MIXTURES, ids=[f"{name} {i}" for name, i in MIXTURES])


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that run again what a card's graphs would replay, with the same buffers of fixed sizes."""

    def captured(_: CudaModel, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = run()

        def replay() -> None:
            found = run()
            if found is not out:
                out.copy_(found)

        return replay, out

    made = CudaModel.__init__

    def make(self: CudaModel, *args: Any) -> None:
        made(self, *args)
        self._captures = True

    if DEVICE.type == "cpu":
        monkeypatch.setattr(CudaModel, "_captured", captured)
        monkeypatch.setattr(CudaModel, "__init__", make)


def both(spec: Spec, i: int, ops: cuda.CudaOps, dtype: torch.dtype = torch.float32) -> tuple[CudaExperts, TorchExperts]:
    """The experts of a block on the device, and in torch with the same weights in float32."""
    weights = {n: w.to(DEVICE, dtype) for n, w in random_weights(spec, torch.float32, 0).items()}
    own: Any = cuda.load(spec, weights, ops).blocks[i].experts
    exact: Any = TorchModel(spec, {n: w.float() for n, w in weights.items()}).blocks[i].experts
    return own, exact


def rows_of(num: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows behind a norm, of which some choose the same experts, and rows of the stream."""
    y, stream = torch.randn(2, num, width, generator=seeded(7))
    y *= 2 * width**-0.5  # so that the sigmoid tells scores apart
    y[3::5] = y[0::5][: len(y[3::5])] * 1.01
    return y.to(DEVICE, dtype), stream.to(DEVICE)


@needs_triton
@every_mixture
@every_type
def test_experts_are_those_of_torch(
    operators: cuda.CudaOps, name: str, i: int, dtype: torch.dtype, tolerance: float
) -> None:
    """And a row's bits are its own, among 1, 2, 8, 17 and 64 rows."""
    own, exact = both(FOUND[name], i, operators, dtype)
    assert own.up.cut.splits == (1 if name in SPECS else 2 if dtype.itemsize == 2 else 4)
    y, stream = rows_of(64, own.up.num_in, dtype)
    found, _ = own.run(operators, y, stream)
    chosen, _ = exact.chosen(exact_ops := ReferenceOps(), (stream if own.spec.reads_stream else y).float())
    choice = own.choose(normed(own.router_norm, operators, stream if own.spec.reads_stream else y))
    alike = (choice.ids.sort(-1).values == chosen.sort(-1).values).all(-1)
    assert float(alike.float().mean()) > 0.9 if dtype != torch.float32 else bool(alike.all())
    expected, _ = exact.run(exact_ops, y.float(), stream)
    assert float((found - expected)[alike].norm()) <= tolerance * float(expected[alike].norm())
    for first, num in ((0, 1), (63, 1), (5, 2), (8, 8), (20, 17)):
        part = slice(first, first + num)
        assert same_bits(own.run(operators, y[part], stream[part])[0], found[part]), (first, num)


@needs_triton
def test_the_lowest_expert_is_chosen_of_equal_ones(operators: cuda.CudaOps) -> None:
    """What is no number is chosen last, and no expert twice."""
    own, _ = both(SPECS["experts"], 1, operators)
    router = own.router.parts[0][0]
    router.copy_(router[:1].expand_as(router))
    y = torch.randn(3, 44, generator=seeded(8)).to(DEVICE)
    assert own.choose(y).ids.tolist() == [[0, 1]] * 3
    router[2] *= 2.0
    y[0], y[1], y[2] = 1.0, -1.0, torch.nan
    expected = [[2, 0], [0, 1]] if float(router[0].sum()) > 0 else [[0, 1], [2, 0]]
    choice = own.choose(y)
    assert choice.ids.tolist() == [*expected, [0, 1]]
    assert choice.shares[2].isnan().all()


@needs_triton
def test_rows_of_padding_choose_nothing(operators: cuda.CudaOps) -> None:
    own, _ = both(SPECS["experts"], 0, operators)
    y = torch.randn(8, 44, generator=seeded(9)).to(DEVICE)
    alone = own.run(operators, y[:5], y)[0]
    num_chosen = int(own.expert_counts.counts[0, 1])
    own.expert_counts.live = torch.tensor([4, 9, 1, 1, 7, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    found = own.run(operators, y, y)[0]
    assert same_bits(found[:5], alone)
    assert not found[5:].any()
    assert int(own.expert_counts.counts[0, 1]) == num_chosen
    assert set(own.choose(y).ids[5:].flatten().tolist()) == {-1}


@needs_triton
def test_a_model_says_how_many_experts_rows_chose(operators: cuda.CudaOps, graphs: None) -> None:
    """In passes that are filled up, with the rows that a card's graphs give."""
    spec = SPECS["experts"]
    weights = {n: w.to(DEVICE) for n, w in random_weights(spec, torch.float32, 0).items()}
    own, exact = Text(spec, weights, operators), Text(spec, weights, ReferenceOps())
    for run, layers in (([3, 1, 4, 1, 5], None), ([9], None), ([7, 1, 8, 2, 8], None), ([2, 6], [1, 3])):
        passes = list[Passed]()
        for text in (own, exact):
            passes.append(text.model.forward(text.batch({0: run}, {}), text.cache, layers))
            text.model.wait()
            text.cache.keep({0: range(len(run))})
        found, expected = passes
        assert found.num_experts == expected.num_experts
        assert float((found.hidden - expected.hidden).norm()) <= 1e-5 * float(expected.hidden.norm())
        assert len(found.num_experts) == (5 if layers is None else 2)


PACKED = spec_of(
    [
        mixture(Experts(6, 2, Mlp(64), Mlp(64), True)),
        mixture(Experts(5, 3, Mlp(64, "clamped_silu", bias=True), score="softmax_of_chosen", router_bias=True)),
    ],
    hidden_size=128,
)


@needs_triton
@pytest.mark.parametrize("quantization", ["int8:group=32", "int4:group=32"])
def test_packed_experts_are_what_their_codes_stand_for(operators: cuda.CudaOps, quantization: str) -> None:
    """With the bits of each row its own, whatever the other rows choose."""
    weights = {n: w.to(DEVICE).bfloat16() for n, w in random_weights(PACKED, torch.float32, 0).items()}
    wanted = Quantization.parse(quantization)
    own, exact = (Text(PACKED, weights, made) for made in (operators, ReferenceOps()))
    for text in (own, exact):
        text.model = text.model.rounded(wanted)
    experts: Any = own.model.blocks[0].experts
    assert isinstance(experts.up.first, Packed)
    assert isinstance(experts.down.first, Packed)
    found, expected = own.run({0: list(range(5))}), exact.run({0: list(range(5))})
    alike = (found - expected).norm(dim=-1) <= 0.06 * expected.norm(dim=-1)
    assert float(alike.float().mean()) > 0.7  # a choice may fall the other way
    assert same_bits(torch.cat([own.run({1: [token]}) for token in range(5)]), found)
    experts.expert_counts.live = None
    y, stream = rows_of(40, 128, torch.bfloat16)
    whole = experts.run(operators, y, stream)[0]
    for first, num in ((0, 1), (39, 1), (8, 8), (20, 17)):
        part = slice(first, first + num)
        assert same_bits(experts.run(operators, y[part], stream[part])[0], whole[part]), (first, num)


@needs_triton
def test_experts_that_are_not_packed_alike_are_multiplied_all_the_same(operators: cuda.CudaOps) -> None:
    spec = spec_of([mixture(Experts(3, 2, Mlp(64)))], hidden_size=64)
    weights: dict[str, Any] = {n: w.bfloat16() for n, w in random_weights(spec, torch.float32, 0).items()}
    for name, bits in (("0.up_proj", 8), ("0.gate_proj", 8), ("1.up_proj", 4), ("1.gate_proj", 4), ("2.down_proj", 4)):
        name = f"model.layers.0.mlp.experts.{name}.weight"
        weights[name] = _rounded(weights[name].float(), bits)
    own: Any = cuda.load(spec, {n: w.to(DEVICE) if isinstance(w, Tensor) else w for n, w in weights.items()}, operators)
    wide = {n: w.float() if isinstance(w, Tensor) else tensor_of(dequantised(w, "float32")) for n, w in weights.items()}
    exact: Any = TorchModel(spec, {n: w.to(DEVICE) for n, w in wide.items()})
    y, stream = rows_of(5, 64, torch.bfloat16)
    found = own.blocks[0].experts.run(operators, y, stream)[0]
    expected = exact.blocks[0].experts.run(ReferenceOps(), y.float(), stream)[0]
    assert float((found - expected).norm()) <= 0.06 * float(expected.norm())
