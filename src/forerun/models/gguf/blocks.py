"""The types of tensors in a GGUF file. Blocks of quantised types are unpacked into integers and scales of groups.

Unpacking rounds nothing: each weight keeps the exact value that the file gives it. A block is 32, 64 or 256 consecutive
weights of a row. The layouts follow ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.host_tensor import HostTensor
from forerun.models.gguf.grids import IQ3_S, IQ3_XXS
from forerun.ops.quantised import E2M1, MXFP4, QuantisedRows, Scheme, mxfp4

F16 = "float16"

Bytes = npt.NDArray[Any]  # uint8
Unpack = Callable[[Bytes], QuantisedRows]


@dataclass(frozen=True)
class TensorType:
    """A type of tensors. number: the type's id in GGUF files. block: weights per block. num_bytes: bytes per block.

    dtype: the dtype in which weights are read. scheme: the scheme of a quantised type. unpack: the function that
    unpacks blocks of a quantised type; it takes the bytes of some rows, uint8 [R, blocks, num_bytes]. Both are None for
    types that are not quantised.
    """

    number: int
    name: str
    block: int
    num_bytes: int
    dtype: str
    scheme: Scheme | None = None
    unpack: Unpack | None = None


def _halves(data: Bytes, at: int) -> HostTensor:
    """Return the float16 number at byte offset `at` of each block, as [R, blocks]. data: uint8 [R, blocks, bytes]."""
    return HostTensor(np.ascontiguousarray(data[..., at : at + 2]).view(np.float16)[..., 0], F16)


def _negative(numbers: HostTensor) -> HostTensor:
    return HostTensor(-numbers.values, numbers.dtype)


def _rows(numbers: Bytes) -> Bytes:
    """Flatten all dimensions but the first: [R, ...] becomes [R, n]."""
    return numbers.reshape(len(numbers), -1)


def _parted(data: Bytes, *sizes: int) -> Bytes:
    """Split the last dimension into dimensions of the sizes `sizes`."""
    return data.reshape(*data.shape[:-1], *sizes)


def _joined(data: Bytes, num: int = 2) -> Bytes:
    """Join the last `num` dimensions into one."""
    return data.reshape(*data.shape[:-num], -1)


def _signed_bytes(numbers: Bytes) -> HostTensor:
    """Reinterpret bytes as int8. Returns [R, n], with each row flattened."""
    return HostTensor.of(_rows(np.ascontiguousarray(numbers)).view(np.int8))


def _nibbles(data: Bytes) -> Bytes:
    """Split bytes [..., n] into nibbles [..., 2 n]: the low nibbles of all n bytes, then the high nibbles."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Return the fifth bit of each of 32 weights, as 16 or 0. Bit i of the four bytes belongs to weight i."""
    return _bits(data) << 4


def _q8_0(data: Bytes) -> QuantisedRows:
    codes = data[..., 2:] ^ 128  # int8 + 128
    return _with_zero(Q8_ZERO, codes, _halves(data, 0))


def _q4_0(data: Bytes) -> QuantisedRows:
    return _with_zero(Q4_ZERO, _nibbles(data[..., 2:]), _halves(data, 0))


def _q5_0(data: Bytes) -> QuantisedRows:
    return _with_zero(Q5_ZERO, _nibbles(data[..., 6:]) | _fifth_bits(data[..., 2:6]), _halves(data, 0))


def _q4_1(data: Bytes) -> QuantisedRows:
    return QuantisedRows(
        Q4_MINIMUM, _rows(_nibbles(data[..., 4:])), _halves(data, 0), minimums=_negative(_halves(data, 2))
    )


def _q5_1(data: Bytes) -> QuantisedRows:
    codes = _nibbles(data[..., 8:]) | _fifth_bits(data[..., 4:8])
    return QuantisedRows(Q5_MINIMUM, _rows(codes), _halves(data, 0), minimums=_negative(_halves(data, 2)))


def _q4_k(data: Bytes) -> QuantisedRows:
    return _two_levels(K4, data, _nibbles(_parted(data[..., 16:], 4, 32)))


def _q5_k(data: Bytes) -> QuantisedRows:
    shifts = np.arange(8, dtype=np.uint8)[:, None]  # bit j of byte l belongs to weight 32 j + l
    high = (data[..., None, 16:48] >> shifts & 1) << 4
    codes = _nibbles(_parted(data[..., 48:], 4, 32))
    return _two_levels(K5, data, codes.reshape(*codes.shape[:-2], 8, 32) | high)


def _two_levels(scheme: Scheme, data: Bytes, codes: Bytes) -> QuantisedRows:
    """Return rows of a K-quant whose blocks have 6-bit scales and minimums in bytes 4 to 15.

    codes: [R, blocks, ...], the codes of the 256 weights of each block, in order.
    """
    low, middle, high = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scales = np.concatenate((low & 63, high & 15 | (low >> 6) << 4), axis=-1)
    minimums = np.concatenate((middle & 63, high >> 4 | (middle >> 6) << 4), axis=-1)
    return QuantisedRows(
        scheme,
        _rows(codes),
        _signed_bytes(scales),
        minimums=HostTensor.of(_rows(minimums)),
        super_scales=_halves(data, 0),
        super_minimums=_halves(data, 2),
    )


def _q6_k(data: Bytes) -> QuantisedRows:
    low = _nibbles(_parted(data[..., :128], 2, 64))  # per half of the block: 64 low nibbles, 64 high ones
    high = _joined(_parted(data[..., 128:192], 2, 1, 32) >> _PAIRS & 3)
    return _with_zero(K6, low | high << 4, _signed_bytes(data[..., 192:208]), super_scales=_halves(data, 208))


def _q2_k(data: Bytes) -> QuantisedRows:
    return QuantisedRows(
        K2,
        _rows(_quarters(data[..., 16:80])),
        _signed_bytes(data[..., :16] & 15),
        minimums=HostTensor.of(_rows(data[..., :16] >> 4)),
        super_scales=_halves(data, 80),
        super_minimums=_halves(data, 82),
    )


def _q3_k(data: Bytes) -> QuantisedRows:
    bits = _joined(data[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1)
    # 16 scales: eight bytes of low nibbles, then four bytes with two high bits for each scale.
    low = _nibbles(data[..., 96:104])
    high = _joined(data[..., None, 104:108] >> _PAIRS & 3)
    codes = _quarters(data[..., 32:96]) | bits << 2
    return _with_zero(K3, codes, _from_32(low | high << 4), super_scales=_halves(data, 108))


_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def _from_32(levels: Bytes) -> HostTensor:
    """Subtract 32 from 6-bit integers. Returns int8, each row flattened."""
    return HostTensor.of(_rows(levels).astype(np.int8) - np.int8(32))


def _quarters(data: Bytes) -> Bytes:
    """Return the 2-bit integers in the 64 bytes of each block, four for each byte.

    The integers of the first 32 bytes come first: the lowest two bits of every byte, then the next two bits of every
    byte, and so on. The integers of the last 32 bytes follow in the same order.
    """
    return _joined(_parted(data, 2, 1, 32) >> _PAIRS & 3, 3)


def _iq4_nl(data: Bytes) -> QuantisedRows:
    return _with_zero(NL4, _nibbles(data[..., 2:]), _halves(data, 0))


def _iq4_xs(data: Bytes) -> QuantisedRows:
    low = _in_turn(data[..., 4:8])
    high = _joined(data[..., 2:4, None] >> _PAIRS[:, 0] & 3)
    codes = _nibbles(_parted(data[..., 8:], 8, 16))
    return _with_zero(XS4, codes, _from_32(low | high << 4), super_scales=_halves(data, 0))


def _mxfp4(data: Bytes) -> QuantisedRows:
    return mxfp4(_rows(_nibbles(data[..., 1:])), np.ascontiguousarray(data[..., 0]))


def _nvfp4(data: Bytes) -> QuantisedRows:
    codes = _nibbles(_parted(data[..., 4:], 4, 8))
    return _with_zero(NV4, codes, HostTensor.of(_E4M3[data[..., :4]].reshape(len(data), -1)))


def _half_of_e4m3(number: int) -> float:
    """Return half the value of an E4M3 byte as ggml reads it: the sign bit is ignored, and byte 127 is 0."""
    exponent, mantissa = number >> 3 & 15, number & 7
    if number == 127:
        return 0.0
    return mantissa / 1024 if exponent == 0 else (8 + mantissa) / 16 * 2.0 ** (exponent - 7)


_E4M3 = np.array([_half_of_e4m3(number) for number in range(256)], np.float16)


def _iq3_s(data: Bytes) -> QuantisedRows:
    fours = data[..., 2:66].astype(np.int32) | _bits(data[..., 66:74]).astype(np.int32) << 8
    codes = _signed(_joined(IQ3_S[fours]), _bits(data[..., 74:106]))
    return _with_zero(S3, codes, _signed_bytes(2 * _in_turn(data[..., 106:110]) + 1), super_scales=_halves(data, 0))


def _iq3_xxs(data: Bytes) -> QuantisedRows:
    # Each word has four times 7 bits of signs, then a 4-bit scale; copied, because words may be unaligned in the file.
    words = np.ascontiguousarray(data[..., 66:]).view(np.uint32)
    signs = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    parity = signs ^ signs >> 4  # the eighth sign makes their number even
    parity = parity ^ parity >> 2
    signs = signs | ((parity ^ parity >> 1) & 1) << 7
    codes = _signed(_joined(IQ3_XXS[data[..., 2:66]]), _bits(_joined(signs).astype(np.uint8)))
    levels = _signed_bytes((2 * (words >> 28 & 15) + 1).astype(np.uint8))
    quarters = HostTensor.of(_halves(data, 0).float32() / np.float32(4))
    return _with_zero(XXS3, codes, levels, super_scales=quarters)


def _in_turn(data: Bytes) -> Bytes:
    """Split bytes [..., n] into nibbles [..., 2 n]: byte 0's low and high nibble, then byte 1's, and so on."""
    return _joined(np.stack((data & 15, data >> 4), axis=-1))


def _bits(data: Bytes) -> Bytes:
    """Split bytes [..., n] into bits [..., 8 n], the lowest bit of each byte first."""
    return _joined(data[..., None] >> np.arange(8, dtype=np.uint8) & 1)


def _signed(digits: Bytes, signs: Bytes) -> Bytes:
    """Return, for each digit (0 to 7) and its sign (1 = minus), the index of its value in the table of `_both_signs`.

    The upper half of that table has the magnitudes of the digits, and the lower half the negative magnitudes.
    """
    codes: Bytes = (digits | 8) ^ signs * 15
    return codes


def _both_signs(magnitudes: tuple[int, ...]) -> tuple[int, ...]:
    return (*(-number for number in reversed(magnitudes)), *magnitudes)


def _with_zero(
    scheme: Scheme, codes: Bytes, scales: HostTensor, super_scales: HostTensor | None = None
) -> QuantisedRows:
    assert scheme.zero is not None
    zeros = np.full(scales.shape, scheme.zero, np.uint8)
    return QuantisedRows(scheme, _rows(codes), scales, zeros, super_scales=super_scales)


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
# float32, because a quarter of a float16 number need not be a float16 number.
XXS3 = Scheme(4, 32, "zero", "float32", 256, 0, _both_signs((4, 12, 20, 28, 36, 44, 52, 62)))

_TYPES = (
    TensorType(0, "F32", 1, 4, "float32"),
    TensorType(1, "F16", 1, 2, "float16"),
    TensorType(30, "BF16", 1, 2, "bfloat16"),
    TensorType(27, "I64", 1, 8, "int64"),  # for ids, which are no weights
    TensorType(8, "Q8_0", 32, 34, "float32", Q8_ZERO, _q8_0),
    TensorType(2, "Q4_0", 32, 18, "float32", Q4_ZERO, _q4_0),
    TensorType(3, "Q4_1", 32, 20, "float32", Q4_MINIMUM, _q4_1),
    TensorType(6, "Q5_0", 32, 22, "float32", Q5_ZERO, _q5_0),
    TensorType(7, "Q5_1", 32, 24, "float32", Q5_MINIMUM, _q5_1),
    TensorType(12, "Q4_K", 256, 144, "float32", K4, _q4_k),
    TensorType(13, "Q5_K", 256, 176, "float32", K5, _q5_k),
    TensorType(14, "Q6_K", 256, 210, "float32", K6, _q6_k),
    TensorType(20, "IQ4_NL", 32, 18, "float32", NL4, _iq4_nl),
    TensorType(23, "IQ4_XS", 256, 136, "float32", XS4, _iq4_xs),
    TensorType(39, "MXFP4", 32, 17, "float32", MXFP4, _mxfp4),
    TensorType(10, "Q2_K", 256, 84, "float32", K2, _q2_k),
    TensorType(11, "Q3_K", 256, 110, "float32", K3, _q3_k),
    TensorType(21, "IQ3_S", 256, 110, "float32", S3, _iq3_s),
    TensorType(18, "IQ3_XXS", 256, 98, "float32", XXS3, _iq3_xxs),
    TensorType(40, "NVFP4", 64, 36, "float32", NV4, _nvfp4),
)
# Readable types by their number in a file.
TYPES = {kind.number: kind for kind in _TYPES}
# The other types, for messages.
_OTHERS = (
    "Q4_2=4 Q4_3=5 Q8_1=9 Q8_K=15 IQ2_XXS=16 IQ2_XS=17 IQ1_S=19 IQ2_S=22 I8=24 I16=25 I32=26 I64=27 F64=28 IQ1_M=29 "
    "TQ1_0=34 TQ2_0=35 Q1_0=41 Q2_0=42"
)
NAMES = {int(number): name for name, number in (entry.split("=") for entry in _OTHERS.split())}
