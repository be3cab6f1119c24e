"""Products of weights of 4 and 8 bits on a CUDA device: of every kind, and how they lie in memory.

Where there is no card the kernel runs under Triton's interpreter, which runs no text of a card's instructions: what
these texts compute is tried here by a few lines that know their instructions.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.ops import cuda
from forerun.ops.cpu.packed import packs as packed_on_cpu
from forerun.ops.cuda.packed import Packed, packs
from forerun.ops.quantised import QuantisedRows, Scheme
from forerun.ops.torch_tensors import host_of
from ops.native_cases import same_bits, seeded
from ops.test_cuda import DEVICE, needs_triton, operators
from ops.test_quantised import SCHEMES, matrix_of, rows_of, weights_of

__all__ = ["operators"]  # a fixture
pytestmark = needs_triton
# How far a product may be off, in shares of its length: float32 sums of exact products, which a card cuts.
OFF = 1e-5 if DEVICE.type == "cuda" else 4e-6
PACKED = {name: scheme for name, scheme in SCHEMES.items() if packs(scheme)}


def packed(rows: QuantisedRows) -> Packed:
    return Packed.of(matrix_of(rows), DEVICE)


def exact(x: Tensor, rows: QuantisedRows) -> Tensor:
    """The product of the rounded inputs and of what the codes stand for, in float64."""
    return x.bfloat16().double() @ weights_of(rows).to(DEVICE).double().T


def test_all_kinds_of_files_are_packed_but_odd_groups() -> None:
    assert PACKED == SCHEMES
    assert not packs(Scheme(4, 24, "zero", "float16"))
    assert packs(Scheme(8, 11008, "zero", "float16", zero=128))
    assert packs(Scheme(8, 576, "zero", "float16", zero=128))


@pytest.mark.parametrize("name", PACKED)
def test_a_product_is_that_of_what_codes_stand_for(operators: cuda.CudaOps, name: str) -> None:
    """Of an odd number of outputs, and of inputs that fill no step, where the groups allow it."""
    scheme = PACKED[name]
    num_in = 512 if scheme.super_group == 256 or scheme.group == 256 else 3 * max(scheme.group, scheme.super_group)
    rows = rows_of(scheme, 72, num_in)
    matrix = packed(rows)
    weights = weights_of(rows)
    # Bytes have no zeros: where a group has one, or a minimum beside it, a product of floats stands for both.
    assert float((matrix.float().cpu() - weights).abs().max()) <= 2.0**-20 * float(weights.abs().max())
    x = torch.randn(9, num_in, generator=seeded(3)).to(DEVICE)
    whole = operators.linear(x, matrix)
    size = (x.bfloat16().abs() @ weights.to(DEVICE).abs().bfloat16().T).norm()
    assert float((whole - exact(x, rows)).norm()) <= OFF * float(size)
    for first, num in ((0, 1), (3, 2), (1, 8)):
        assert same_bits(operators.linear(x[first : first + num], matrix), whole[first : first + num])


@pytest.mark.parametrize(
    "scheme",
    [Scheme(4, group, "zero", "bfloat16") for group in (16, 32, 64, 128)]
    + [Scheme(8, group, "zero", "float16", zero=128) for group in (16, 32, 64, 128, 384)],
    ids=str,
)
def test_groups_of_all_sizes_and_rows_of_all_tiles(operators: cuda.CudaOps, scheme: Scheme) -> None:
    """384 inputs are three steps of one program."""
    rows = rows_of(scheme, 70, 384)
    matrix = packed(rows)
    assert torch.equal(matrix.float().cpu(), weights_of(rows))
    x, bias = torch.randn(65, 384, generator=seeded(4)).to(DEVICE), torch.randn(70, generator=seeded(5)).to(DEVICE)
    whole = operators.linear(x, matrix, bias)
    expected = exact(x, rows) + bias.double()
    assert float((whole - expected).norm()) <= OFF * float(expected.norm())
    for first, num in ((0, 1), (64, 1), (7, 2), (3, 8), (20, 17), (1, 64)):
        assert same_bits(operators.linear(x[first : first + num], matrix, bias), whole[first : first + num])


@pytest.mark.parametrize("group", [16, 128, 384])
def test_floats_of_8_bits_are_multiplied_as_they_are(operators: cuda.CudaOps, group: int) -> None:
    """All of them, those below the least normal one too; a scale of a row, of a group, or of a block."""
    scheme = Scheme(8, group, "zero", "float32", zero=0, floats=True)
    assert packs(scheme)
    assert not packed_on_cpu(scheme)
    codes = torch.randint(0, 256, (70, 384), generator=seeded(8)).to(torch.uint8)
    codes[codes & 127 == 127] = 1
    codes[0, :256] = torch.arange(256).clamp(max=254) & ~(torch.arange(256) == 127)
    scales = torch.rand(70, 384 // group, generator=seeded(9)) / 64
    rows = QuantisedRows(scheme, codes.numpy(), host_of(scales), np.zeros(scales.shape, np.uint8))
    assert torch.equal(weights_of(rows), codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(group, 1))
    matrix = packed(rows)
    assert matrix.kind == "fp8"
    assert torch.equal(matrix.float().cpu(), weights_of(rows))
    x = torch.randn(18, 384, generator=seeded(4)).to(DEVICE)
    whole, expected = operators.linear(x, matrix), exact(x, rows)
    assert float((whole - expected).norm()) <= OFF * float(expected.norm())
    for first, num in ((0, 1), (17, 1), (3, 8)):
        assert same_bits(operators.linear(x[first : first + num], matrix), whole[first : first + num])


def test_inputs_beyond_a_row_are_not_read(operators: cuda.CudaOps) -> None:
    """A step reaches behind 96 inputs, where other rows, or numbers that are none, may lie."""
    rows = rows_of(Scheme(4, 32, "zero", "bfloat16"), 40, 96)
    wide = torch.full((5, 128), torch.nan)
    wide[:, :96] = torch.randn(5, 96, generator=seeded(6))
    x = wide.bfloat16().to(DEVICE)[:, :96]
    expected = exact(x, rows)
    assert float((operators.linear(x, packed(rows)) - expected).norm()) <= OFF * float(expected.norm())


@pytest.mark.parametrize("name", ["gptq", "q6_k", "q4_k", "gptq8"])
def test_outputs_are_taken_and_joined_as_they_are(name: str) -> None:
    """From a place within a tile on, too; what begins a tile is no copy."""
    parts = [rows_of(PACKED[name], num, 256, seed) for seed, num in ((0, 128), (1, 40), (2, 72))]
    matrices = [packed(rows) for rows in parts]
    for chosen in ((0, 1), (1, 2, 0), (0, 2)):
        whole = Packed.joined([matrices[i] for i in chosen])
        expected = torch.cat([matrices[i].float() for i in chosen])
        assert whole.shape == expected.shape
        assert torch.equal(whole.float(), expected)
        for first, stop in ((0, 40), (64, 130), (40, 112), (3, 4), (5, 5)):
            assert torch.equal(whole[first:stop].float() if stop > first else expected[:0], expected[first:stop])
        assert torch.equal(whole[[7, 100, 7]], expected[[7, 100, 7]])
        assert whole[64:130].codes.data_ptr() == whole.codes[1:].data_ptr()
    assert len(whole[5:5]) == 0


def test_rows_are_read_in_blocks_of_any_size() -> None:
    blocks = [rows_of(PACKED["q4_k"], num, 256, seed) for seed, num in enumerate((32, 96, 12))]
    assert torch.equal(Packed.of(matrix_of(*blocks), DEVICE).float().cpu(), weights_of(*blocks))


def test_scales_of_k_quants_take_their_own_bits() -> None:
    """Bytes of Q4_K: 0.5 of a code, 2 for 32 weights, two factors of 2 bytes for 256."""
    assert packed(rows_of(PACKED["q4_k"], 64, 512)).nbytes == 64 * 512 * (0.5 + 2 / 32 + 4 / 256)
    assert packed(rows_of(PACKED["q6_k"], 64, 512)).nbytes == 64 * 512 * (1 + 1 / 16 + 2 / 256)
    assert packed(rows_of(PACKED["q4_0"], 64, 512)).nbytes == 64 * 512 * (0.5 + 2 / 32)


def test_a_thread_multiplies_what_it_loads() -> None:
    """As it is compiled for a card: nothing moves between threads in the loop, nothing spills, 64 rows need one."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_code", "90", "int4, groups of 128", "fp8"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names, *lines = [line.split(" | ") for line in done.stdout.splitlines()]
    found = [dict(zip(names, line, strict=True)) for line in lines]
    assert [counts["rows"] for counts in found] == ["16", "32", "64"] * 2
    assert {(counts["conversions"], counts["spilled"]) for counts in found} == {("0", "0")}
    assert {counts["matrix"] for counts in found} == {found[0]["matrix"]}  # in the same order of K for all tiles
    assert max(float(counts["all"]) for counts in found) < 6


# ------------------------------------------------------------------------------------------- texts of instructions


def run(text: str, num_outputs: int, *inputs: int) -> list[int]:
    """Run the few instructions that the texts use -> halves of 16 bits. bfloat16 pairs are exact here, or it fails."""
    found: dict[str, int] = {f"${num_outputs + i}": word & 0xFFFFFFFF for i, word in enumerate(inputs)}
    for line in re.sub(r"[{}]\s*$|^\s*{", "", text).split(";"):
        name, _, rest = line.strip().partition(" ")
        operands = [part.strip(" {}") for part in rest.split(",")]
        if not name or name.startswith("."):
            continue
        if name == "mov.b32" and len(operands) == 3:
            low, high, word = operands
            found[low], found[high] = found[word] & 0xFFFF, found[word] >> 16
            continue
        target, *values = operands
        words = [found[v] if v in found else int(v, 0) for v in values]
        if name == "lop3.b32":
            a, b, c, table = words
            found[target] = sum(
                (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32)
            )
        elif name == "fma.rn.bf16x2":
            parts = [[number(w >> shift & 0xFFFF) for w in words] for shift in (0, 16)]
            low, high = (half(a * b + c) for a, b, c in parts)
            found[target] = low | high << 16
        else:
            second = words[1] if len(words) > 1 else 0
            known = {"mov": words[0], "and": words[0] & second, "shr": words[0] >> second, "shl": words[0] << second}
            found[target] = known[name[:3]] & 0xFFFFFFFF
    return [found[f"${i}"] for i in range(num_outputs)]


def number(bits: int) -> float:
    return float(torch.tensor(bits << 16, dtype=torch.int64).to(torch.uint32).view(torch.float32))


def half(value: float) -> int:
    rounded = torch.tensor(value, dtype=torch.float64).to(torch.bfloat16)
    assert float(rounded) == value
    return int(rounded.view(torch.uint16))


@pytest.mark.usefixtures("operators")  # whose import of the kernels is the first one, and so for the interpreter
def test_texts_of_instructions_take_codes_apart_exactly() -> None:
    from forerun.ops.cuda import kernels as cuda_kernels

    def values(text: object, num: int, *words: int) -> list[float]:
        return [number(bits) for bits in run(str(getattr(text, "value", text)), num, *words)]

    less = [cuda_kernels.LESS_128.value + zero * cuda_kernels.TWICE.value for zero in (3, 16)]
    for word in (0x76543210, 0xFEDCBA98, 0xF0F0F0F0, 0x0F0F0F0F):
        nibbles = [word >> 4 * i & 15 for i in range(8)]
        order = (0, 4, 1, 5, 2, 6, 3, 7)  # e is the half of a register, and j and h say which register
        assert values(cuda_kernels.INT4_TEXT, 8, word, *less) == [nibbles[i] - (3 if i % 4 < 2 else 16) for i in order]
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for code in range(256):
        word = code | (255 - code) << 8 | (code ^ 0x55) << 16 | (code ^ 0xAA) << 24
        codes = [word >> 8 * i & 255 for i in (0, 2, 1, 3)]
        assert values(cuda_kernels.INT8_TEXT, 4, word) == [c - 256 * (c > 127) for c in codes]
        if all(c & 127 != 127 for c in codes):  # no numbers
            assert values(cuda_kernels.FP8_TEXT, 4, word) == [floats[c] for c in codes]
