"""The types of tensors in a GGUF file, and the blocks of the quantised ones as integers with the scales of groups.

Each weight is exactly that of the file. A block is 32 or 256 weights in a row: ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.ops.quantised import QuantisedRows, Scheme

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


def _with_zero(scheme: Scheme, codes: Tensor, scales: Tensor, super_scales: Tensor | None = None) -> QuantisedRows:
    assert scheme.zero is not None
    zeros = torch.full(scales.shape, scheme.zero, dtype=torch.uint8)
    return QuantisedRows(scheme, codes.flatten(1), scales, zeros, super_scales=super_scales)


Q4_ZERO, Q5_ZERO = Scheme(4, 32, "zero", F16, zero=8), Scheme(5, 32, "zero", F16, zero=16)
Q8_ZERO = Scheme(8, 32, "zero", F16, zero=128)
Q4_MINIMUM, Q5_MINIMUM = Scheme(4, 32, "minimum", F16), Scheme(5, 32, "minimum", F16)
K4, K5 = Scheme(4, 32, "minimum", F16, 256), Scheme(5, 32, "minimum", F16, 256)
K6 = Scheme(6, 16, "zero", F16, 256, zero=32)

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
)
# By their number in a file.
TYPES = {kind.number: kind for kind in _TYPES}
# The others, for messages.
_OTHERS = (
    "Q4_2=4 Q4_3=5 Q8_1=9 Q2_K=10 Q3_K=11 Q8_K=15 IQ2_XXS=16 IQ2_XS=17 IQ3_XXS=18 IQ1_S=19 IQ4_NL=20 IQ3_S=21 "
    "IQ2_S=22 IQ4_XS=23 I8=24 I16=25 I32=26 I64=27 F64=28 IQ1_M=29 TQ1_0=34 TQ2_0=35 MXFP4=39 NVFP4=40"
)
NAMES = {int(number): name for name, number in (entry.split("=") for entry in _OTHERS.split())}
