"""The types of tensors in a GGUF file, and the blocks of the quantised ones as integers with the scales of groups.

Each weight is exactly that of the file. A block is 32 or 256 weights in a row: ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.gguf.grids import IQ3_S, IQ3_XXS
from forerun.ops.quantised import E2M1, MXFP4, QuantisedRows, Scheme, mxfp4

F16 = torch.float16

Unpack = Callable[[Tensor], QuantisedRows]


@dataclass(frozen=True)
class TensorType:
    """One type. number: in a file. block: the weights of a block, num_bytes: its bytes. dtype: of what is read.

    scheme, unpack: of a quantised type; `unpack` takes the bytes of some rows, uint8 [R, blocks, num_bytes].
    """

    number: int
    name: str
    block: int
    num_bytes: int
    dtype: torch.dtype
    scheme: Scheme | None = None
    unpack: Unpack | None = None


def _halves(data: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block: [R, blocks]."""
    return data[..., at : at + 2].contiguous().view(F16).squeeze(-1)


def _nibbles(data: Tensor) -> Tensor:
    """Return the low four bits of the last dimension, then the high ones: [..., 2 n]."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Return bit i of four bytes as 16 or 0, for 32 weights."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (data.unsqueeze(-1) >> shifts & 1).flatten(-2) << 4


def _q8_0(data: Tensor) -> QuantisedRows:
    codes = data[..., 2:] ^ 128  # int8 + 128
    return _with_zero(Q8_ZERO, codes, _halves(data, 0))


def _q4_0(data: Tensor) -> QuantisedRows:
    return _with_zero(Q4_ZERO, _nibbles(data[..., 2:]), _halves(data, 0))


def _q5_0(data: Tensor) -> QuantisedRows:
    codes = _nibbles(data[..., 6:]) | _fifth_bits(data[..., 2:6])
    return _with_zero(Q5_ZERO, codes, _halves(data, 0))


def _q4_1(data: Tensor) -> QuantisedRows:
    return QuantisedRows(Q4_MINIMUM, _nibbles(data[..., 4:]).flatten(1), _halves(data, 0), minimums=-_halves(data, 2))


def _q5_1(data: Tensor) -> QuantisedRows:
    codes = _nibbles(data[..., 8:]) | _fifth_bits(data[..., 4:8])
    return QuantisedRows(Q5_MINIMUM, codes.flatten(1), _halves(data, 0), minimums=-_halves(data, 2))


def _q4_k(data: Tensor) -> QuantisedRows:
    codes = _nibbles(torch.unflatten(data[..., 16:], -1, (4, 32)))
    return _two_levels(K4, data, codes)


def _q5_k(data: Tensor) -> QuantisedRows:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)  # bit j of byte l belongs to weight 32 j + l
    high = (data[..., 16:48].unsqueeze(-2) >> shifts & 1) << 4
    codes = _nibbles(torch.unflatten(data[..., 48:], -1, (4, 32)))
    return _two_levels(K5, data, torch.unflatten(codes, -1, (2, 32)).flatten(-3, -2) | high)


def _two_levels(scheme: Scheme, data: Tensor, codes: Tensor) -> QuantisedRows:
    """codes: [R, blocks, ...] with the 256 weights of a block in order. The 6-bit numbers are in bytes 4 to 15."""
    low, middle, high = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scales = torch.cat((low & 63, high & 15 | (low >> 6) << 4), dim=-1)
    minimums = torch.cat((middle & 63, high >> 4 | (middle >> 6) << 4), dim=-1)
    return QuantisedRows(
        scheme,
        codes.flatten(1),
        scales.view(torch.int8).flatten(1),
        minimums=minimums.flatten(1),
        super_scales=_halves(data, 0),
        super_minimums=_halves(data, 2),
    )


def _q6_k(data: Tensor) -> QuantisedRows:
    low = _nibbles(torch.unflatten(data[..., :128], -1, (2, 64)))  # per half of the block: 64 low nibbles, 64 high ones
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = (torch.unflatten(data[..., 128:192], -1, (2, 1, 32)) >> shifts & 3).flatten(-2)
    scales = data[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return _with_zero(K6, low | high << 4, scales, super_scales=_halves(data, 208))


def _q2_k(data: Tensor) -> QuantisedRows:
    return QuantisedRows(
        K2,
        _quarters(data[..., 16:80]).flatten(1),
        (data[..., :16] & 15).view(torch.int8).flatten(1),
        minimums=(data[..., :16] >> 4).flatten(1),
        super_scales=_halves(data, 80),
        super_minimums=_halves(data, 82),
    )


def _q3_k(data: Tensor) -> QuantisedRows:
    bits = (data[..., None, :32] >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1).flatten(-2)
    # Of 16 scales: eight bytes of low nibbles, then four bytes that hold two bits of each.
    low = _nibbles(data[..., 96:104])
    high = (data[..., None, 104:108] >> _PAIRS & 3).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    codes = _quarters(data[..., 32:96]) | bits << 2
    return _with_zero(K3, codes, scales.flatten(1), super_scales=_halves(data, 108))


_PAIRS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)


def _quarters(data: Tensor) -> Tensor:
    """Return the pairs of bits of 64 bytes: of each half its lowest ones first."""
    return (torch.unflatten(data, -1, (2, 1, 32)) >> _PAIRS & 3).flatten(-3)


def _iq4_nl(data: Tensor) -> QuantisedRows:
    return _with_zero(NL4, _nibbles(data[..., 2:]), _halves(data, 0))


def _iq4_xs(data: Tensor) -> QuantisedRows:
    low = torch.stack((data[..., 4:8] & 15, data[..., 4:8] >> 4), dim=-1).flatten(-2)
    high = (data[..., 2:4].unsqueeze(-1) >> _PAIRS.squeeze(-1) & 3).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    codes = _nibbles(torch.unflatten(data[..., 8:], -1, (8, 16)))
    return _with_zero(XS4, codes, scales.flatten(1), super_scales=_halves(data, 0))


def _mxfp4(data: Tensor) -> QuantisedRows:
    return mxfp4(_nibbles(data[..., 1:]).flatten(1), data[..., 0].contiguous())


def _nvfp4(data: Tensor) -> QuantisedRows:
    codes = _nibbles(torch.unflatten(data[..., 4:], -1, (4, 8)))
    return _with_zero(NV4, codes, _E4M3[data[..., :4].int()].flatten(1))


def _half_of_e4m3(number: int) -> float:
    """Return half the number of a byte of E4M3 as ggml reads it: no sign, and 127 is 0."""
    exponent, mantissa = number >> 3 & 15, number & 7
    if number == 127:
        return 0.0
    return mantissa / 1024 if exponent == 0 else (8 + mantissa) / 16 * 2.0 ** (exponent - 7)


_E4M3 = torch.tensor([_half_of_e4m3(number) for number in range(256)], dtype=F16)


def _iq3_s(data: Tensor) -> QuantisedRows:
    fours = data[..., 2:66].int() | _bits(data[..., 66:74]).int() << 8
    levels = torch.stack((data[..., 106:110] & 15, data[..., 106:110] >> 4), dim=-1).flatten(-2)
    codes = _signed(IQ3_S[fours].flatten(-2), _bits(data[..., 74:106]))
    return _with_zero(S3, codes, (2 * levels + 1).view(torch.int8).flatten(1), super_scales=_halves(data, 0))


def _iq3_xxs(data: Tensor) -> QuantisedRows:
    # Of each unit four times 7 bits of signs, then 4 bits of its scale; a copy, for they need not lie at whole words.
    words = data[..., 66:].flatten().clone().view(torch.int32).view(*data.shape[:-1], 8)
    signs = words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21]) & 127
    parity = signs ^ signs >> 4  # the eighth sign makes their number even
    parity = parity ^ parity >> 2
    signs = signs | ((parity ^ parity >> 1) & 1) << 7
    codes = _signed(IQ3_XXS[data[..., 2:66].int()].flatten(-2), _bits(signs.flatten(-2).to(torch.uint8)))
    levels = (2 * (words >> 28 & 15) + 1).to(torch.int8).flatten(1)
    return _with_zero(XXS3, codes, levels, super_scales=_halves(data, 0).float() / 4)


def _bits(data: Tensor) -> Tensor:
    """Return the bits of the last dimension's bytes, the lowest first: [..., 8 n]."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _signed(digits: Tensor, signs: Tensor) -> Tensor:
    """Return codes of a table whose upper half has the magnitudes of digits 0 to 7, the lower their negatives."""
    return (digits | 8) ^ signs * 15


def _both_signs(magnitudes: tuple[int, ...]) -> tuple[int, ...]:
    return (*(-number for number in reversed(magnitudes)), *magnitudes)


def _with_zero(scheme: Scheme, codes: Tensor, scales: Tensor, super_scales: Tensor | None = None) -> QuantisedRows:
    assert scheme.zero is not None
    zeros = torch.full(scales.shape, scheme.zero, dtype=torch.uint8)
    return QuantisedRows(scheme, codes.flatten(1), scales, zeros, super_scales=super_scales)


Q4_ZERO, Q5_ZERO = Scheme(4, 32, "zero", F16, zero=8), Scheme(5, 32, "zero", F16, zero=16)
Q8_ZERO = Scheme(8, 32, "zero", F16, zero=128)
Q4_MINIMUM, Q5_MINIMUM = Scheme(4, 32, "minimum", F16), Scheme(5, 32, "minimum", F16)
K4, K5 = Scheme(4, 32, "minimum", F16, 256), Scheme(5, 32, "minimum", F16, 256)
K6 = Scheme(6, 16, "zero", F16, 256, zero=32)
K2, K3 = Scheme(2, 16, "minimum", F16, 256), Scheme(3, 16, "zero", F16, 256, zero=4)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
NL4, XS4 = Scheme(4, 32, "zero", F16, zero=0, table=IQ4), Scheme(4, 32, "zero", F16, 256, 0, IQ4)
NV4 = Scheme(4, 16, "zero", F16, zero=0, table=E2M1)
S3 = Scheme(4, 32, "zero", F16, 256, 0, _both_signs((1, 3, 5, 7, 9, 11, 13, 15)))
# A quarter of a float16 number need not be one.
XXS3 = Scheme(4, 32, "zero", torch.float32, 256, 0, _both_signs((4, 12, 20, 28, 36, 44, 52, 62)))

_TYPES = (
    TensorType(0, "F32", 1, 4, torch.float32),
    TensorType(1, "F16", 1, 2, torch.float16),
    TensorType(30, "BF16", 1, 2, torch.bfloat16),
    TensorType(8, "Q8_0", 32, 34, torch.float32, Q8_ZERO, _q8_0),
    TensorType(2, "Q4_0", 32, 18, torch.float32, Q4_ZERO, _q4_0),
    TensorType(3, "Q4_1", 32, 20, torch.float32, Q4_MINIMUM, _q4_1),
    TensorType(6, "Q5_0", 32, 22, torch.float32, Q5_ZERO, _q5_0),
    TensorType(7, "Q5_1", 32, 24, torch.float32, Q5_MINIMUM, _q5_1),
    TensorType(12, "Q4_K", 256, 144, torch.float32, K4, _q4_k),
    TensorType(13, "Q5_K", 256, 176, torch.float32, K5, _q5_k),
    TensorType(14, "Q6_K", 256, 210, torch.float32, K6, _q6_k),
    TensorType(20, "IQ4_NL", 32, 18, torch.float32, NL4, _iq4_nl),
    TensorType(23, "IQ4_XS", 256, 136, torch.float32, XS4, _iq4_xs),
    TensorType(39, "MXFP4", 32, 17, torch.float32, MXFP4, _mxfp4),
    TensorType(10, "Q2_K", 256, 84, torch.float32, K2, _q2_k),
    TensorType(11, "Q3_K", 256, 110, torch.float32, K3, _q3_k),
    TensorType(21, "IQ3_S", 256, 110, torch.float32, S3, _iq3_s),
    TensorType(18, "IQ3_XXS", 256, 98, torch.float32, XXS3, _iq3_xxs),
    TensorType(40, "NVFP4", 64, 36, torch.float32, NV4, _nvfp4),
)
# By their number in a file.
TYPES = {kind.number: kind for kind in _TYPES}
# The others, for messages.
_OTHERS = (
    "Q4_2=4 Q4_3=5 Q8_1=9 Q8_K=15 IQ2_XXS=16 IQ2_XS=17 IQ1_S=19 IQ2_S=22 I8=24 I16=25 I32=26 I64=27 F64=28 IQ1_M=29 "
    "TQ1_0=34 TQ2_0=35 Q1_0=41 Q2_0=42"
)
NAMES = {int(number): name for name, number in (entry.split("=") for entry in _OTHERS.split())}
