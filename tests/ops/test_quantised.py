"""Products of quantised weights: exact sums of codes, one rounding of the inputs, bits that depend on the row alone."""

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun import native
from forerun.host_tensor import Array, HostTensor
from forerun.ops.cpu.memory import quantised_bytes
from forerun.ops.quantised import E2M1, MXFP4, UNIT, QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.quantising import rounded_by_kernels, rounded_by_numpy, scheme_of
from forerun.ops.torch_tensors import host_of, tensor_of, torch_dtype
from ops.native_cases import (
    ISAS,
    NAN,
    Session,
    make_config,
    needs_native,
    one_by_one,
    ops_of,
    random_weights,
    same_bits,
    seeded,
    tokens_of,
)
from tensors import load_model

pytestmark = needs_native

HALF, BRAIN, SINGLE = "float16", "bfloat16", "float32"
# The largest numbers of both signs, which sums must hold, and some between.
CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
SCHEMES = {
    "q4_0": Scheme(4, 32, "zero", HALF, zero=8),
    "q4_1": Scheme(4, 32, "minimum", HALF),
    "q5_0": Scheme(5, 32, "zero", HALF, zero=16),
    "q5_1": Scheme(5, 32, "minimum", HALF),
    "q8_0": Scheme(8, 32, "zero", HALF, zero=128),
    "q4_k": Scheme(4, 32, "minimum", HALF, 256),
    "q5_k": Scheme(5, 32, "minimum", HALF, 256),
    "q6_k": Scheme(6, 16, "zero", HALF, 256, zero=32),
    "gptq": Scheme(4, 128, "zero", BRAIN),
    "gptq8": Scheme(8, 64, "zero", HALF),
    "channel": Scheme(8, 256, "zero", SINGLE),
    "sixteen": Scheme(8, 16, "minimum", HALF),
    "six": Scheme(6, 32, "minimum", SINGLE),
    "wide levels": Scheme(5, 16, "minimum", SINGLE, 128),
    "zeros of levels": Scheme(6, 16, "zero", HALF, 256),
    "q2_k": Scheme(2, 16, "minimum", HALF, 256),
    "q3_k": Scheme(3, 16, "zero", HALF, 256, zero=4),
    "iq4_nl": Scheme(4, 32, "zero", HALF, zero=0, table=CODEBOOK),
    "iq4_xs": Scheme(4, 32, "zero", HALF, 256, 0, CODEBOOK),
    "mxfp4": MXFP4,
    "nvfp4": Scheme(4, 16, "zero", HALF, zero=0, table=E2M1),
    "wide table": Scheme(4, 32, "zero", SINGLE, 256, 0, CODEBOOK),
    "two": Scheme(2, 32, "zero", HALF, zero=1),
    "three": Scheme(3, 32, "minimum", HALF),
    "halves of a table": Scheme(4, 16, "zero", SINGLE, 256, 0, E2M1),
}
# Of codes, scales and what is subtracted; in a file K-quants take 1/8 less, because their integers have 6 bits there.
BITS_PER_WEIGHT = {"q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_1": 6.0, "q8_0": 8.5, "q4_k": 4 + 2 / 4 + 1 / 8,
                   "q5_k": 5 + 2 / 4 + 1 / 8, "q6_k": 6 + 1 / 2 + 1 / 16, "gptq": 4.25, "channel": 8.25,
                   "q2_k": 2 + 1 + 1 / 8, "q3_k": 3 + 1 / 2 + 1 / 16, "iq4_nl": 4.5, "iq4_xs": 4 + 1 / 4 + 1 / 16,
                   "mxfp4": 4.25, "nvfp4": 5.0}  # fmt: skip
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def rows_of(scheme: Scheme, num_out: int, num_in: int, seed: int = 0) -> QuantisedRows:
    """Random codes and scales."""
    random, groups = seeded(seed), num_in // scheme.group

    def whole(low: int, high: int, *shape: int) -> Array:
        return torch.randint(low, high, shape, generator=random).numpy()

    def small(*shape: int, share: float = 1.0) -> HostTensor:
        return host_of((torch.randn(shape, generator=random) / 16).to(torch_dtype(scheme.scale_dtype)) * share)

    codes = whole(0, 1 << scheme.bits, num_out, num_in).astype(np.uint8)
    zeros = whole(0, 1 << scheme.bits, num_out, groups).astype(np.uint8) if scheme.offset == "zero" else None
    if zeros is not None and scheme.zero is not None:
        zeros.fill(scheme.zero)
    if scheme.powers:
        scales = np.exp2(whole(-30, 4, num_out, groups).astype(np.float32))
        scales[whole(0, 20, num_out, groups) == 0] = 0.0
        return QuantisedRows(scheme, codes, HostTensor.of(scales), zeros)
    if not scheme.super_group:
        minimums = None if zeros is not None else small(num_out, groups)
        return QuantisedRows(scheme, codes, small(num_out, groups), zeros, minimums)
    supers, is_zero = num_in // scheme.super_group, zeros is not None
    return QuantisedRows(
        scheme,
        codes,
        HostTensor.of(whole(-128 if is_zero else 0, 128 if is_zero else 64, num_out, groups).astype(np.int8)),
        zeros,
        None if is_zero else HostTensor.of(whole(0, 64, num_out, groups).astype(np.uint8)),
        small(num_out, supers, share=1 / 16),
        None if is_zero else small(num_out, supers, share=1 / 16),
    )


def matrix_of(*blocks: QuantisedRows) -> QuantisedMatrix:
    num_out = sum(len(rows) for rows in blocks)
    return QuantisedMatrix(blocks[0].scheme, (num_out, blocks[0].codes.shape[1]), lambda: iter(blocks))


def rounded(x: Tensor) -> Tensor:
    """Rows as the product sees them: 32 numbers share a scale of which the largest is 127; float64."""
    units = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    most = units.abs().amax(-1, keepdim=True)
    codes = torch.round(units * torch.where(most > 0, 127 / most, 0))
    return (codes.double() * (most / 127)).flatten(1)[:, : x.shape[1]]


def weights_of(*blocks: QuantisedRows) -> Tensor:
    """What codes and scales stand for."""
    return torch.from_numpy(np.concatenate([rows.dequantise() for rows in blocks]))


def is_unpacked(found: HostTensor, weights: Tensor) -> bool:
    """Whether they are equal but for the last bits, where zero points had to become minimums beside other parts."""
    return bool(((tensor_of(found) - weights).abs() <= 2.0**-21 * weights.abs().max()).all())


def test_rows_are_rounded_in_units_that_files_are_read_in() -> None:
    assert native.extension().UNIT == UNIT


@pytest.mark.filterwarnings("error")  # nobody need know that a square was infinite
@pytest.mark.parametrize("bits", [4, 8])
def test_kernels_round_as_numpy_does(bits: int, isa: str) -> None:
    """Bit for bit: usual rows, of one sign, of zeros, with ties, hardly more than zero, and large ones."""
    for group in (16, 32, 64, 128):
        rows = torch.randn(60, 256, generator=seeded(bits)).numpy()
        rows[10:20] = np.abs(rows[10:20])
        rows[20:30] = -np.abs(rows[20:30])
        rows[30], rows[31:40] = 0, torch.randint(-3, 4, (9, 256), generator=seeded(1))
        rows[40:45] *= 1e-38
        rows[45:50] *= 1e30
        scheme = scheme_of(bits, group)
        found, wanted = rounded_by_kernels(rows, scheme, isa), rounded_by_numpy(rows, scheme)
        assert np.array_equal(found.codes, wanted.codes)
        assert np.array_equal(found.scales.values, wanted.scales.values)
        assert wanted.zeros is not None
        assert np.array_equal(found.zeros, wanted.zeros)


@every_scheme
def test_products_are_those_of_the_weights_in_the_file(scheme: Scheme, isa: str) -> None:
    blocks = [rows_of(scheme, 40, 512, 1), rows_of(scheme, 37, 512, 2)]
    weights = weights_of(*blocks)
    packed = ops_of(isa).pack(matrix_of(*blocks))
    x = torch.randn(19, 512, generator=seeded(3))
    wanted = rounded(x) @ weights.double().T
    scale = rounded(x).abs() @ weights.double().abs().T  # of the terms that are summed
    assert ((ops_of(isa).linear(x, packed) - wanted).abs() <= 4e-6 * scale).all()
    assert same_bits(packed.unpack(), weights)


@pytest.mark.parametrize(("name", "bits"), BITS_PER_WEIGHT.items())
def test_packed_rows_take_the_bytes_of_the_file(name: str, bits: float) -> None:
    assert ops_of(ISAS[0]).pack(matrix_of(rows_of(SCHEMES[name], 64, 512))).nbytes == bits * 64 * 512 / 8


@every_scheme
@pytest.mark.parametrize("paired", [False, True])
def test_the_memory_plan_knows_the_bytes_of_packed_rows(scheme: Scheme, paired: bool) -> None:
    """Of every scheme, of 41 outputs, and with numbers that need float32 or do not."""
    parts = [matrix_of(rows_of(scheme, 41, 512, i)) for i in range(2)]
    assert quantised_bytes(parts, paired=paired) == ops_of(ISAS[0]).pack(parts, paired=paired).nbytes


MIXTURES = ["q4_k q8_0 q6_k", "q6_k q4_k", "gptq channel", "q4_0 q4_1", "iq4_xs q3_k", "mxfp4 iq4_nl"]


@pytest.mark.parametrize("names", MIXTURES)
@pytest.mark.parametrize("num_out", [16, 48, 64])
def test_the_memory_plan_knows_the_bytes_of_mixed_rows(names: str, num_out: int) -> None:
    parts = [matrix_of(rows_of(SCHEMES[name], num_out, 256, i)) for i, name in enumerate(names.split())]
    assert quantised_bytes(parts) == ops_of(ISAS[0]).pack(parts).nbytes
    assert quantised_bytes(parts[:2], paired=True) == ops_of(ISAS[0]).pack(parts[:2], paired=True).nbytes


def check_sums(rows: QuantisedRows, number: int, isa: str) -> None:
    """Of 32 outputs with 160 weights of one number, by the largest inputs of one sign, of the other, and of both."""
    packed, x = ops_of(isa).pack(matrix_of(rows)), torch.full((3, 160), 127.0)
    x[1], x[2, ::2] = -127.0, -127.0
    wanted = torch.tensor([160 * 127.0 * number, -160 * 127.0 * number, 0.0])
    for times in (1, 7):  # three rows each: AVX2 has other code for more than 16
        found = ops_of(isa).linear(x.repeat(times, 1), packed)
        assert torch.equal(found, wanted.repeat(times)[:, None].expand(3 * times, 32))


def rows_of_one_code(bits: int, code: int, num_in: int) -> QuantisedRows:
    """Of 32 outputs, with scales of 1 and minimums of 0."""
    ones, none = (HostTensor.of(np.full((32, num_in // 32), number, np.float16)) for number in (1, 0))
    return QuantisedRows(Scheme(bits, 32, "minimum", HALF), np.full((32, num_in), code, np.uint8), ones, minimums=none)


@pytest.mark.parametrize("code", [0, -1], ids=["least", "most"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_sums_of_extreme_codes_are_exact(bits: int, code: int, isa: str) -> None:
    number = code & (1 << bits) - 1
    check_sums(rows_of_one_code(bits, number, 160), number, isa)


@pytest.mark.parametrize("number", [-127, 127, -15, 16])
def test_sums_of_extreme_numbers_of_a_table_are_exact(number: int, isa: str) -> None:
    """The largest that there are, and the largest that count as small ones."""
    least, most = (-127, 127) if abs(number) == 127 else (-15, 16)
    scheme = Scheme(4, 32, "zero", HALF, zero=0, table=(least,) * 8 + (most,) * 8)
    codes = np.full((32, 160), 3 if number < 0 else 12, np.uint8)
    rows = QuantisedRows(scheme, codes, HostTensor.of(np.ones((32, 5), np.float16)), np.zeros((32, 5), np.uint8))
    check_sums(rows, number, isa)


@pytest.mark.parametrize("scale", [3.0, 2.0**-127, -0.5])
def test_scales_that_are_no_powers_of_two_are_kept_too(scale: float) -> None:
    rows = rows_of(MXFP4, 40, 64)
    rows.scales.values[7, 1] = scale
    assert same_bits(ops_of(ISAS[0]).pack(matrix_of(rows)).unpack(), weights_of(rows))


@every_scheme
def test_bits_of_a_row_depend_on_that_row_alone(scheme: Scheme, isa: str) -> None:
    packed = ops_of(isa).pack(matrix_of(rows_of(scheme, 77, 256)))
    x = torch.randn(70, 256, generator=seeded(4))
    whole = ops_of(isa, 3).linear(x, packed)
    for num_rows in (1, 2, 3, 5, 7, 15, 16, 17, 33):
        assert same_bits(torch.cat([ops_of(isa).linear(part, packed) for part in x.split(num_rows)]), whole)


def test_threads_round_many_rows_for_each_other(isa: str) -> None:
    """Into memory that grows with the widest product so far, and that the next one writes anew."""
    ops, alone = ops_of(isa, 3), ops_of(isa)
    wide = {k: alone.pack(matrix_of(rows_of(SCHEMES["q4_1"], 160, k))) for k in (256, 1024, 512)}
    for turn in range(5):
        for k, packed in wide.items():
            x = torch.randn(150 + turn, k, generator=seeded(turn))
            assert same_bits(ops.linear(x, packed), torch.cat([alone.linear(part, packed) for part in x.split(50)]))


@pytest.mark.skipif(
    "avx512" not in ISAS or not native.extension().has_byte_tiles(),
    reason="this processor multiplies no tiles of bytes",
)
@every_scheme
def test_tiles_of_bytes_give_the_same_bits(scheme: Scheme) -> None:
    """Blocks of 16 rows and parts of one, in more units than are unpacked together."""
    ops, packed = ops_of("avx512"), ops_of("avx512").pack(matrix_of(rows_of(scheme, 77, 768)))
    x = torch.randn(70, 768, generator=seeded(8))
    x[3, 40], x[5] = NAN, 1e-40

    def results(by_tiles: bool) -> list[Tensor]:
        before = native.extension().multiply_tiles(by_tiles)
        try:
            return [ops.linear(x[:num_rows], packed) for num_rows in (33, 36, 37, 40, 41, 48, 70)]
        finally:
            native.extension().multiply_tiles(before)

    assert all(map(same_bits, results(True), results(False)))


@pytest.mark.skipif("avx_vnni" not in ISAS, reason="this processor has no AVX-VNNI")
@every_scheme
def test_products_of_four_bytes_give_the_bits_of_products_of_two(scheme: Scheme) -> None:
    matrix, x = matrix_of(rows_of(scheme, 77, 768)), torch.randn(33, 768, generator=seeded(9))
    x[3, 40], x[5] = NAN, 1e-40
    pairs, fours = ops_of("avx2"), ops_of("avx_vnni")
    for num_rows in (*range(1, 10), 33):
        assert same_bits(pairs.linear(x[:num_rows], pairs.pack(matrix)), fours.linear(x[:num_rows], fours.pack(matrix)))


@pytest.mark.parametrize("size", [1e-36, 9e-37, 3e-37, 1e-38, 1e-40, 1e-45])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_inputs_that_are_hardly_more_than_zero(bits: int, size: float, isa: str) -> None:
    """Their inverse would be infinite. Each set has the same bits: those of the sums, or 0."""
    x = torch.full((2, 64), size)
    x[:, ::3] = 0.0
    x[1, 32:] = 1.0  # the other unit's own
    found = ops_of(isa).linear(x, ops_of(isa).pack(matrix_of(rows_of_one_code(bits, 5, 64))))
    wanted = 5 * float(x[0].double().sum()) if size >= 1e-36 else 0.0
    assert ((found[0].double() - wanted).abs() <= 1e-6 * wanted).all()
    assert (found[1] == 160).all()


def test_a_row_of_no_numbers_spoils_no_other(isa: str) -> None:
    packed = ops_of(isa).pack(matrix_of(rows_of(SCHEMES["q4_1"], 48, 64)))
    x = torch.randn(3, 64, generator=seeded(5))
    clean = ops_of(isa).linear(x, packed)
    for bad in (NAN, float("inf")):
        spoiled = x.clone()
        spoiled[1, 33] = bad
        found = ops_of(isa).linear(spoiled, packed)
        assert found[1].isnan().all()
        assert same_bits(found[::2], clean[::2])


def test_parts_of_different_schemes_are_packed_together(isa: str) -> None:
    """Each in its own format, where panels of 32 outputs end between them."""
    sizes = {"q4_k": 64, "q8_0": 32, "q6_k": 37}
    parts = [rows_of(SCHEMES[name], num_out, 256, num_out) for name, num_out in sizes.items()]
    packed = ops_of(isa).pack(list(map(matrix_of, parts)))
    alone = [ops_of(isa).pack(matrix_of(p)) for p in parts]
    assert same_bits(packed.unpack(), weights_of(*parts))
    assert packed.nbytes == sum(part.nbytes for part in alone)
    x = torch.randn(9, 256, generator=seeded(6))
    wanted = torch.cat([ops_of(isa).linear(x, part) for part in alone], dim=1)
    assert same_bits(ops_of(isa, 2).linear(x, packed), wanted)


@pytest.mark.parametrize("names", [("q4_k", "q6_k"), ("iq4_xs", "q5_k"), ("iq4_nl", "mxfp4"), ("q2_k", "nvfp4")])
@pytest.mark.parametrize("paired", [True, False])
def test_parts_of_one_panel_share_a_format(paired: bool, names: tuple[str, str], isa: str) -> None:
    parts = [rows_of(SCHEMES[name], 48, 256, i) for i, name in enumerate(names)]
    packed = ops_of(isa).pack([matrix_of(part) for part in parts], paired=paired)
    assert is_unpacked(packed.unpack(), weights_of(*parts))


def test_minimums_and_zeros_share_a_format(isa: str) -> None:
    parts = [rows_of(SCHEMES[name], 16, 256, i) for i, name in enumerate(("gptq", "q4_1", "q8_0", "channel"))]
    weights = weights_of(*parts)
    packed = ops_of(isa).pack([matrix_of(part) for part in parts])
    assert is_unpacked(packed.unpack(), weights)
    x = torch.randn(5, 256, generator=seeded(7))
    scale = rounded(x).abs() @ (weights.double().abs().T + 255 * weights.double().abs().amax())
    assert ((ops_of(isa).linear(x, packed) - rounded(x) @ weights.double().T).abs() <= 4e-6 * scale).all()


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_passes_have_the_bits_of_plain_decoding(tie: bool, isa: str) -> None:
    config = make_config(tied=tie, hidden_size=64, ffn_size=96, head_dim=16, num_heads=4, num_kv_heads=2)
    weights = {
        name: matrix_of(rows_of(SCHEMES["q4_1" if "mlp" in name else "q8_0"], *tensor.shape, seed=i))
        if tensor.dim() == 2
        else tensor
        for i, (name, tensor) in enumerate(random_weights(config, torch.bfloat16).items())
    }
    model = load_model(config, weights, ops_of(isa, 2))
    assert (model.weight_bits, model.precision) == ((4, 8), "4-bit and 8-bit weights")
    tokens = tokens_of(40, 1)
    alone, together = Session(model), Session(model)
    found = torch.cat([together.run({0: tokens[:7]}), together.run({0: tokens[7:]})])
    assert same_bits(found, one_by_one(alone, tokens))
