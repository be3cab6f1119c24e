"""The native operators against the reference ones, on every instruction set that this machine has.

The reference computes in float64 what the kernel computes in float32. With bfloat16 weights a product's inputs are
rounded to bfloat16 first; the products of two such numbers are exact in float32 already.
"""

from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.blocks import Act
from forerun.errors import InternalError
from forerun.ops.reference import ACTIVATIONS, ReferenceOps
from ops.native_cases import BFLOAT16, FLOAT32, INF, NAN, TINY, close, needs_native, normal, ops_of, same_bits, seeded
from refusals import refusal

pytestmark = needs_native

SIZES = [1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130]
UNIT = 2.0**-24  # relative rounding error of a float32 operation
ROW_COUNTS = (1, 2, 5, 14, 15, 33)


def whole_numbers(seed: int, *shape: int) -> Tensor:
    """Small whole numbers, exact in both types: their products and sums are exact in every order."""
    return torch.randint(-8, 9, shape, generator=seeded(seed)).float()


def sum_tolerance(x: Tensor, weight: Tensor) -> Tensor:
    """Return the error bound of a sum of n products in any order: n u sum |x w| (Higham 2002, section 3.1)."""
    return (2 * weight.shape[1] + 2) * UNIT * (x.abs() @ weight.abs().T) + TINY


# ---------------------------------------------------------------------------------------------------------- products


def test_products_of_whole_numbers_are_exact(isa: str, dtype: torch.dtype) -> None:
    """Every odd shape, with and without bias: sums that no order of summing changes must be right to the last bit."""
    ops = ops_of(isa)
    for i, num_out in enumerate(SIZES):
        for j, num_in in enumerate(SIZES):
            num_rows = ROW_COUNTS[(i + j) % len(ROW_COUNTS)]
            x, weight = whole_numbers(1, num_rows, num_in), whole_numbers(2, num_out, num_in)
            bias = whole_numbers(3, num_out) if (i + j) % 2 else None
            expected = ReferenceOps().linear(x.double(), weight.double(), None if bias is None else bias.double())
            assert torch.equal(ops.linear(x, ops.pack(weight.to(dtype), bias)), expected.float()), (num_out, num_in)


@pytest.mark.parametrize(("num_in", "num_out", "num_rows"), [(257, 33, 3), (1024, 65, 16), (1000, 96, 64), (31, 1, 70)])
def test_products_of_random_numbers(isa: str, dtype: torch.dtype, num_in: int, num_out: int, num_rows: int) -> None:
    x, weight, bias = normal(1, num_rows, num_in), normal(2, num_out, num_in).to(dtype), normal(3, num_out)
    found = ops_of(isa).linear(x, ops_of(isa).pack(weight, bias))
    x, wide = x.to(dtype).double(), weight.double()
    expected = ReferenceOps().linear(x, wide, bias.double())
    assert close(found, expected, sum_tolerance(x, wide) + 2 * UNIT * expected.abs())


def test_products_keep_infinities_and_nan(isa: str, dtype: torch.dtype) -> None:
    """NaN and infinities in inputs, weights and bias must not be multiplied by the zeros that pad odd shapes."""
    for num_in, num_out in ((1, 1), (5, 3), (33, 35), (64, 32), (129, 70)):
        x, weight, bias = (whole_numbers(s, *n) for s, n in ((1, (9, num_in)), (2, (num_out, num_in)), (3, (num_out,))))
        x[1, -1], x[3, num_in // 2], x[5, 0] = INF, -INF, NAN
        weight[0, -1], weight[-1, 0], weight[num_out // 2, num_in // 2] = INF, NAN, -INF
        bias[-1] = -INF
        expected = ReferenceOps().linear(x.double(), weight.double(), bias.double())
        assert close(ops_of(isa).linear(x, ops_of(isa).pack(weight.to(dtype), bias)), expected, 0)


def test_every_nan_stays_one(isa: str, dtype: torch.dtype) -> None:
    """Those, too, whose upper half alone would be infinity, and those that rounding would carry over into 0."""
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32)
    x = bits.view(FLOAT32)[:, None].repeat(1, 3)
    assert bool(ops_of(isa).linear(x, ops_of(isa).pack(torch.ones(2, 3, dtype=dtype))).isnan().all())


def nearest_float32(number: Fraction) -> np.float32:
    """The nearest one; of two that are as near, the one whose last bit is 0."""
    guess = np.float32(float(number))
    near = [np.nextafter(guess, np.float32(-INF)), guess, np.nextafter(guess, np.float32(INF))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - number), int(x.view(np.uint32)) & 1))


def test_a_product_and_its_sum_are_rounded_once(isa: str) -> None:
    """c + a b by two weights: sums half between two floats, next to there, of denormals, and of what cancels."""
    random = np.random.default_rng(1)
    b = random.standard_normal(24).astype(np.float32)
    b[:8] = [1, 1 + 2.0**-23, 1 - 2.0**-24, 3, 2.0**-12, 1 + 2.0**-12, 1e-20, 2.0**-126]
    a = random.standard_normal(400).astype(np.float32)
    c = random.standard_normal(400).astype(np.float32)
    c[:100] = np.ldexp(np.float32(1), random.integers(-3, 30, 100))
    a[50:100] = np.ldexp(c[50:100], -24)  # half of the last place, times b
    a[100:150], c[100:150] = 2.0**-24, 1 + random.integers(0, 4, 50) * np.float32(2.0**-23)
    c[150:200] = -(a[150:200] * b[9])  # what is left is what was rounded off
    a[200:250], c[200:250] = a[200:250] * np.float32(2.0**-120), c[200:250] * np.float32(2.0**-127)
    a[250:300], c[250:300] = 2.0**-30, 2.0**-126
    x = torch.tensor(np.stack((np.ones_like(b), b), axis=1))
    found = ops_of(isa).linear(x, ops_of(isa).pack(torch.tensor(np.stack((c, a), axis=1)))).numpy()
    for row, factor in zip(found, b, strict=True):
        wanted = [
            nearest_float32(Fraction(float(left)) * Fraction(float(factor)) + Fraction(float(added)))
            for left, added in zip(a, c, strict=True)
        ]
        assert np.array_equal(row, wanted)


def test_denormal_inputs_and_weights_in_float32(isa: str) -> None:
    """Whole multiples of the least denormal number: exact, nothing is flushed."""
    ops, least = ops_of(isa), 2.0**-149
    for a, b in ((least, 1.0), (1.0, least)):
        x, weight = whole_numbers(1, 5, 37) * a, whole_numbers(2, 41, 37) * b
        expected = x.double() @ weight.double().T
        assert bool(expected.any())
        assert torch.equal(ops.linear(x, ops.pack(weight)), expected.float())


def test_denormal_inputs_and_weights_in_bfloat16(isa: str) -> None:
    """Denormal numbers and sums are 0, as for the instruction of AVX-512.

    The error is below the least normal number for each input times its weight, and once more for each sum.
    """
    ops, least = ops_of(isa), 2.0**-133
    for a, b in ((least, 1.0), (1.0, least)):
        x, weight = whole_numbers(1, 5, 37) * a, whole_numbers(2, 41, 37) * b
        expected = x.double() @ weight.double().T
        found = ops.linear(x, ops.pack(weight.to(BFLOAT16)))
        assert close(found, expected, TINY * (x.abs() @ weight.abs().T + 37) + expected.abs())
        assert not found[expected.abs() < TINY].any()


def test_products_write_their_rows_and_nothing_beside_them(isa: str, dtype: torch.dtype) -> None:
    """Panels are padded, and blocks of rows have any size; what lies in front of the rows and behind them stays."""
    for num_out in (1, 15, 31, 33, 65):
        weight = whole_numbers(1, num_out, 20)
        packed = ops_of(isa).pack(weight.to(dtype))
        for num_rows in (1, 3, 14, 15, 25, 33):
            x, memory = whole_numbers(2, num_rows, 20), torch.full((num_rows + 2, num_out), NAN)
            ops_of(isa).backend.linear(packed.handle, x.data_ptr(), num_rows, memory[1].data_ptr())
            assert torch.equal(memory[1:-1], x @ weight.T)
            assert bool(memory[[0, -1]].isnan().all())


def test_no_rows_are_no_rows(isa: str, dtype: torch.dtype) -> None:
    ops, packed = ops_of(isa), ops_of(isa).pack(torch.ones(5, 7, dtype=dtype))
    assert ops.linear(torch.empty(0, 7), packed).shape == (0, 5)
    assert ops.add_linear(torch.empty(0, 5), torch.empty(0, 7), packed).shape == (0, 5)


def test_products_added_to_a_residual(isa: str, dtype: torch.dtype) -> None:
    """The result has one more rounding than the product, and the residual is not changed."""
    ops = ops_of(isa)
    for num_in, num_out, num_rows in ((3, 1, 1), (17, 31, 2), (65, 33, 15), (300, 100, 40)):
        x, residual, weight = normal(1, num_rows, num_in), normal(2, num_rows, num_out), normal(3, num_out, num_in)
        packed = ops.pack(weight.to(dtype), normal(4, num_out))
        before = residual.clone()
        assert same_bits(ops.add_linear(residual, x, packed), residual + ops.linear(x, packed))
        assert same_bits(residual, before)


@pytest.mark.parametrize("biases", [False, True])
def test_gated_feed_forward(isa: str, dtype: torch.dtype, biases: bool) -> None:
    """residual + down(silu(gate x) * up x), every odd width: the same bits as its parts one after the other."""
    ops = ops_of(isa)
    for num_in, width, num_out, num_rows in ((3, 1, 5, 1), (17, 15, 3, 2), (31, 33, 65, 16), (64, 130, 40, 29)):
        x, residual = normal(1, num_rows, num_in), normal(2, num_rows, num_out)
        gate, up = (normal(s, width, num_in).to(dtype) for s in (3, 4))
        down = ops.pack(normal(5, num_out, width).to(dtype), normal(6, num_out) if biases else None)
        gate_bias, up_bias = (normal(s, width) if biases else None for s in (7, 8))
        both = torch.cat((gate_bias, up_bias)) if gate_bias is not None and up_bias is not None else None
        found = ops.add_gated(residual, x, ops.pack([gate, up], both, paired=True), down)
        between = ops.silu_mul(ops.linear(x, ops.pack(gate, gate_bias)), ops.linear(x, ops.pack(up, up_bias)))
        assert same_bits(found, ops.add_linear(residual, between, down))


def test_gated_feed_forward_keeps_infinities_and_nan(isa: str) -> None:
    ops, x, residual = ops_of(isa), whole_numbers(1, 7, 9), whole_numbers(2, 7, 5)
    x[1, 3], x[2, 0], x[4, 8] = INF, -INF, NAN
    gate, up, down = whole_numbers(3, 19, 9), whole_numbers(4, 19, 9), whole_numbers(5, 5, 19)
    reference = ReferenceOps()
    between = reference.silu_mul(reference.linear(x.double(), gate.double()), reference.linear(x.double(), up.double()))
    expected = residual.double() + reference.linear(between, down.double())
    found = ops.add_gated(residual, x, ops.pack([gate, up], paired=True), ops.pack(down))
    assert bool(expected.isnan().any())
    assert close(found, expected, 1e-5 * (between.abs() @ down.double().abs().T))


def test_padding_between_two_products_meets_no_infinity(isa: str, dtype: torch.dtype) -> None:
    """Where the width is odd, the place behind it is 0 times infinity: it must not reach the second product."""
    ops = ops_of(isa)
    gate, up, down = (whole_numbers(s, *n).abs() + 1 for s, n in ((1, (19, 8)), (2, (19, 8)), (3, (5, 19))))
    x = torch.ones(3, 8)
    x[1, 2] = INF
    gate_up = ops.pack([gate.to(dtype), up.to(dtype)], paired=True)
    found = ops.add_gated(torch.zeros(3, 5), x, gate_up, ops.pack(down.to(dtype)))
    assert found[1].tolist() == [INF] * 5
    assert bool(found[::2].isfinite().all())


# ----------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("consume", [False, True])
def test_packed_matrices_unpack_to_the_same_bits(isa: str, dtype: torch.dtype, consume: bool) -> None:
    """Weights are unpacked as they were: alone, in parts, paired, in odd shapes, with NaN and denormal numbers."""
    for num_out in (1, 3, 16, 17, 32, 33, 65):
        for num_in in (1, 2, 5, 31, 64, 129):
            weight = normal(num_out, num_out, num_in)
            weight.view(-1)[:: 1 + num_out // 2] = torch.tensor(NAN)
            weight.view(-1)[-1] = 2.0**-133
            parts = [weight.to(dtype), (weight * 3).to(dtype)]
            expected = torch.cat(parts)
            for paired in (False, True):
                given = [p.clone() for p in parts]
                assert same_bits(ops_of(isa).pack(given, paired=paired, consume=consume).unpack(), expected)
            more = [*parts, parts[0][:1]]
            assert same_bits(ops_of(isa).pack(more).unpack(), torch.cat(more))


def test_large_matrices_are_packed_by_threads_and_give_their_source_back(isa: str) -> None:
    weight = normal(1, 1000, 1030)
    expected = weight.clone()
    assert same_bits(ops_of(isa, 3).pack(weight, consume=True).unpack(), expected)
    assert not torch.equal(weight, expected)


def test_what_cannot_be_packed_or_multiplied_is_refused(isa: str) -> None:
    ops = ops_of(isa)
    assert "float64" in refusal(InternalError, ops.pack, torch.ones(2, 2, dtype=torch.float64))
    assert "packed together" in refusal(InternalError, ops.pack, [torch.ones(2, 2), torch.ones(2, 3)])
    with pytest.raises(InternalError, match="no product by themselves"):
        ops.linear(torch.ones(1, 2), ops.pack([torch.ones(2, 2), torch.ones(2, 2)], paired=True))
    with pytest.raises(InternalError, match=r"\(1, 3\) do not fit a width of 2"):
        ops.linear(torch.ones(1, 3), ops.pack(torch.ones(2, 2)))


# ------------------------------------------------------------------------------------------------------ row by row


@pytest.mark.parametrize("width", [1, 3, 16, 17, 52, 64, 2048, 2051])
def test_rms_norm(isa: str, width: int) -> None:
    """Numbers from 1e-15 to 1e15, whose squares stay within float32: within 8 roundings, whatever the width."""
    x = normal(1, 31, width) * 10.0 ** torch.arange(-15, 16)[:, None]
    weight = normal(2, width)
    for eps in (1e-5, 1e-30):
        found = ops_of(isa).rms_norm(x, weight, eps)
        wide = x.double()
        expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
        assert close(found, expected, 8 * UNIT * expected.abs() + 2.0**-149)


def test_rms_norm_keeps_infinities_and_nan(isa: str) -> None:
    x = normal(1, 4, 37)
    x[1, 36], x[2, 0], x[3] = INF, NAN, 0.0
    weight = normal(2, 37)
    weight[5] = INF
    reference = ReferenceOps()
    for eps in (1e-5, 0.0):
        assert close(ops_of(isa).rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps), 1e-5)
    assert ops_of(isa).rms_norm(x.view(2, 2, 37), weight, 1e-5).shape == (2, 2, 37)


def test_silu_is_as_exact_as_its_exponential(isa: str) -> None:
    """Within 4 roundings over all of the range of e^-x; then 0, or the input itself."""
    gate = torch.linspace(-87.2, 87.2, 100_003)
    found = ops_of(isa).silu_mul(gate[None], torch.ones(1, len(gate)))[0]
    wide = gate.double()
    expected = wide / (1 + torch.exp(-wide))
    assert close(found, expected, 4 * UNIT * expected.abs())
    ends = torch.tensor([[-1e4, -200.0, -89.0, 89.0, 200.0, 1e4, 3e38, -3e38, 0.0, -0.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 89.0, 200.0, 1e4, 3e38, 0.0, 0.0, 0.0]])
    assert close(ops_of(isa).silu_mul(ends, torch.ones_like(ends)), expected, 4e-37)


@pytest.mark.parametrize("width", [1, 5, 16, 31, 67])
def test_silu_mul(isa: str, width: int) -> None:
    gate, up = normal(1, 9, width) * 30, normal(2, 9, width)
    expected = ReferenceOps().silu_mul(gate.double(), up.double())
    assert close(ops_of(isa).silu_mul(gate, up), expected, 5 * UNIT * expected.abs() + TINY)
    special = torch.tensor([INF, -INF, NAN, 1.0, 0.0])
    gate, up = special.repeat_interleave(5)[None], special.repeat(5)[None]
    assert close(ops_of(isa).silu_mul(gate, up), ReferenceOps().silu_mul(gate, up), 1e-6)


@pytest.mark.parametrize("act", get_args(Act))
@pytest.mark.parametrize("width", [1, 16, 67])
def test_activations_by_themselves_and_as_gates(isa: str, act: Act, width: int) -> None:
    gate = normal(1, 9, width) * 8
    up = normal(2, 9, width) * 8
    ops = ops_of(isa)
    alone = gate.double().clamp(max=7) if act == "clamped_silu" else gate.double()
    one = torch.full_like(gate, 0 if act == "clamped_silu" else 1)  # which adds 1 to what it is multiplied by
    for found, expected in (
        (ops.gated(act, gate, up), ReferenceOps().gated(act, gate.double(), up.double())),
        (ops.gated(act, gate, one), ACTIVATIONS[act](alone)),
    ):
        assert close(found, expected, 1e-6 * expected.abs() + 2e-6)


@pytest.mark.parametrize("width", [1, 5, 16, 52, 130])
def test_layer_norm(isa: str, width: int) -> None:
    x = normal(1, 9, width) * 3 + 1
    weight = normal(2, width)
    bias = normal(3, width)
    ops = ops_of(isa)
    for parts in ((weight, bias), (weight, None), (None, None)):
        wide = [None if part is None else part.double() for part in parts]
        expected = ReferenceOps().layer_norm(x.double(), wide[0], wide[1], 1e-5)
        assert close(ops.layer_norm(x, *parts, 1e-5), expected, 1e-5)
    assert ops.layer_norm(x.view(3, 3, width), weight, bias, 1e-5).shape == (3, 3, width)


@pytest.mark.parametrize("dim", [2, 8, 20, 32, 64, 80, 128])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_rotary_positions_are_the_reference_bit_for_bit(isa: str, dim: int, num_heads: int) -> None:
    """Two products and a sum, each rounded once, so that both backends do the same operations."""
    x, cos, sin = normal(1, 7, num_heads, dim), normal(2, 7, 1, dim), normal(3, 7, 1, dim)
    x[2, 0, 0], x[3, 0, -1] = 2.0**-149, -INF
    assert same_bits(ops_of(isa).rope(x, cos, sin), ReferenceOps().rope(x, cos, sin))
    x[4, 0, 0], x[5, 0, 1] = NAN, INF
    assert close(ops_of(isa).rope(x, cos, sin), ReferenceOps().rope(x, cos, sin), 0)


def test_the_dtype_that_auto_means(isa: str) -> None:
    assert ops_of(isa).row_invariant
    assert ops_of(isa).auto_dtype("cpu", "float32") == "bfloat16"


def test_torch_is_kept_to_one_thread_beside_native_operators(isa: str) -> None:
    """Within `alone`; the caller's number comes back, behind an exception, too. The reference computes with them."""

    def fail() -> None:
        with ops_of(isa).alone():
            assert torch.get_num_threads() == 1
            raise RuntimeError("a step failed")

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ReferenceOps().alone():
            assert torch.get_num_threads() == 3
        assert "a step failed" in refusal(RuntimeError, fail)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
