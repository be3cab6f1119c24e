"""The layouts of quantised matrices in checkpoints: GPTQ, AWQ, FP8, MXFP4 and compressed-tensors.

config.json names the layout of a checkpoint (`layout_of`). In a `Layout`, a matrix consists of codes, scales and zero
points, each in a separate tensor, whose name begins with the matrix's name. These tensors become QuantisedRows without
rounding. In `Floats`, a matrix consists of 8-bit floats and scales. Operators that do not compute with 8-bit floats get
the matrix in float32. Sources: AutoGPTQ's and AutoAWQ's packers of 2024, compressed-tensors 0.20, transformers 5's FP8
and FBGEMM quantisers, and the model card of gpt-oss for MXFP4.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.errors import UnsupportedModel
from forerun.host_tensor import Array, Floats as Float32, HostTensor
from forerun.models.refusals import KEYS, READABLE
from forerun.ops.quantised import MXFP4, QuantisedRows, Scheme, mxfp4

SCALE_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
FLOAT8 = "F8_E4M3"  # as safetensors names it
INTEGERS, BYTES = frozenset({"I8", "I32", "I64"}), frozenset({"U8"})
BLOCKS = "_blocks"  # suffix of tensors with the codes of MXFP4
SCALES = ("weight_scale_inv", "weight_scale")
INPUT_SCALES = frozenset({"input_scale", "input_scale_ub"})
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where AutoAWQ puts output channel i of 8 among the nibbles of a word

Read = Callable[[str, slice, slice], HostTensor]  # (part, rows, columns) -> that slice of a stored tensor
Shapes = Mapping[str, tuple[int, ...]]  # of the parts of one matrix


@dataclass(frozen=True)
class Layout:
    """A layout in which one tensor holds a matrix's codes, and other tensors hold the matrix's scales and zero points.

    codes: the last part of the name of the tensor with the codes. parts: the last parts of the other tensors' names.
    """

    method: str
    codes: str
    parts: frozenset[str]
    bits: int | None = None  # from the configuration; None = from the shapes
    zero_shift: int = 0  # added to a stored zero point
    may_permute: bool = False  # whether inputs may be in another order than groups
    types: frozenset[str] = INTEGERS  # of the tensor with the integers

    def matrix_of(self, name: str, dtype: str) -> tuple[str, dict[str, str]] | None:
        """If a tensor holds the codes of a matrix, return the matrix's name, and the names of its tensors by part.

        Returns None for any other tensor. name, dtype: of the tensor in the file. An MXFP4 matrix stacks all experts,
        and has the name of the tensor with its codes.
        """
        if dtype not in self.types:
            return None
        if self.method == "MXFP4":
            scales = name.replace(BLOCKS, "_scales")
            return None if scales == name else (name, {"blocks": name, "scales": scales})
        prefix, _, part = name.rpartition(".")
        if part != self.codes:
            return None
        return f"{prefix}.weight", {part: f"{prefix}.{part}" for part in (self.codes, *sorted(self.parts))}

    def scheme_of(self, shapes: Shapes, scales: str) -> tuple[tuple[int, int], Scheme]:
        """Return the shape (outputs, inputs) and the scheme of a matrix.

        shapes: the shapes of the matrix's tensors. scales: the dtype of its scales in the file. Raises ValueError, with
        the reason, for a matrix that cannot be read.
        """
        if self.method == "MXFP4":
            return _blocks_of_floats(shapes, scales), MXFP4
        if scales not in SCALE_DTYPES:
            raise ValueError(f"its scales have type {scales}")
        num_out, num_in, bits, group = _SIZES[self.codes](self, shapes)
        if bits not in (4, 8) or group < 1 or num_in % group:
            raise ValueError(f"its shapes {sorted(shapes.items())} fit neither 4 nor 8 bits in groups of equal size")
        is_symmetric = self.method == "compressed-tensors" and "weight_zero_point" not in shapes
        zero = 1 << (bits - 1) if is_symmetric else None
        return (num_out, num_in), Scheme(bits, group, "zero", SCALE_DTYPES[scales], zero=zero)

    def rows(self, scheme: Scheme, shapes: Shapes, num_in: int, chosen: range, read: Read) -> QuantisedRows:
        """Read the rows `chosen` of a matrix; chosen.start must be a multiple of 32.

        shapes: the shapes of the matrix's tensors. num_in: the number of inputs. read: reads a slice of a tensor.
        """
        if self.method == "MXFP4":
            some = slice(chosen.start, chosen.stop)
            pairs = read("blocks", some, ALL).values
            codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(len(pairs), -1)
            return mxfp4(codes, read("scales", some, ALL).values)
        codes, scales, zeros = _ROWS[self.codes](self, scheme, shapes, chosen, read)
        return QuantisedRows(
            scheme, np.ascontiguousarray(codes[:, :num_in]), scales.contiguous(), np.ascontiguousarray(zeros)
        )


@dataclass(frozen=True)
class Floats:
    """A layout of matrices of 8-bit floats (FLOAT8) with one scale per matrix, per row, or per block.

    scales: the possible names of the tensor with the scales; each matrix has one such tensor. others: the names of
    tensors that only serve to round inputs, and are not read. block: the number of rows and the number of columns that
    share a scale; None = both numbers follow from the shape of the scales.
    """

    method: str
    scales: tuple[str, ...]
    others: frozenset[str]
    block: tuple[int, int] | None = None

    def spans(self, shape: tuple[int, int], scales: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of rows and of columns that share a scale. Raises ValueError for shapes that do not fit."""
        rows, columns = shape
        if self.block is not None and scales == tuple(-(-n // span) for n, span in zip(shape, self.block, strict=True)):
            return self.block
        spans = {(): shape, (1,): shape, (1, 1): shape, (rows,): (1, columns), (rows, 1): (1, columns)}
        if scales not in spans:
            raise ValueError(f"its scales have shape {list(scales)}, which fits no matrix of {list(shape)}")
        return spans[scales]

    @staticmethod
    def scheme(num_in: int, group: int, scales: str) -> Scheme | None:
        """Return the scheme for operators that compute with 8-bit floats; None if `group` does not divide `num_in`.

        num_in: the number of columns of the matrix. group: the number of columns that share a scale. scales: the dtype
        of the scales in the file.
        """
        return None if num_in % group else Scheme(8, group, "zero", SCALE_DTYPES[scales], zero=0, floats=True)


def floats(
    numbers: HostTensor, scales: HostTensor, first: int, spans: tuple[int, int], scheme: Scheme
) -> QuantisedRows:
    """Return rows of a matrix of 8-bit floats as QuantisedRows, without change of their values.

    scheme: see `Floats.scheme`. `widened` explains the other parameters.
    """
    row_scales = scales[np.arange(first, first + len(numbers)) // spans[0]]
    return QuantisedRows(scheme, np.ascontiguousarray(numbers.values), row_scales, np.zeros(row_scales.shape, np.uint8))


def widened(numbers: HostTensor, scales: HostTensor, first: int, spans: tuple[int, int]) -> Float32:
    """Return rows of a matrix of 8-bit floats as float32 weights, multiplied by their scales.

    numbers: [R, I], the stored rows from row `first` on. scales: [O', I'], all scales of the matrix. spans: the number
    of rows and the number of columns that share a scale.
    """
    rows = np.arange(first, first + len(numbers)) // spans[0]
    columns = np.arange(numbers.shape[1]) // spans[1]
    return numbers.float32() * scales.float32()[rows][:, columns]


def in_order(rows: QuantisedRows, groups: npt.NDArray[np.int64]) -> Float32:
    """Return `rows` dequantised to float32, for a matrix in which the inputs of one group are not adjacent.

    groups: int64 [I], the group of each input.
    """
    assert rows.zeros is not None
    zeros = rows.zeros.astype(np.float32)
    return (rows.codes.astype(np.float32) - zeros[:, groups]) * rows.scales.float32()[:, groups]


def layout_of(raw: Mapping[str, Any]) -> Layout | Floats | None:
    """Return the layout of quantised weights that config.json describes; None where the weights are not quantised.

    Raises UnsupportedModel, naming the setting, for a setting that is not supported.
    """
    for key in KEYS:
        value = raw.get(key)
        if not value:
            continue
        method = value.get("quant_method") if isinstance(value, Mapping) else None
        if not isinstance(method, str) or method not in _READERS:
            said = f"{key}={value!r:.60}" if method is None else f"quant_method={method!r:.60} in {key}"
            raise UnsupportedModel(f"config.json sets {said}, which is not read: {_WAY_OUT}")
        return _READERS[method](_Settings(key, value))
    return None


def said_scheme(raw: Mapping[str, Any], num_in: int, *, is_expert: bool = False) -> Scheme | None:
    """Return the scheme of a layer's matrices as far as config.json (`raw`) tells, for plans without the weights.

    Returns None for dense matrices, for 8-bit floats, and where the inputs of a group may not be adjacent. num_in: the
    number of inputs. is_expert: whether the matrices belong to experts; in MXFP4 checkpoints, all other matrices are
    dense. Of several groups of settings in config.json, the group with the most bits counts. Raises as `layout_of`.
    """
    layout = layout_of(raw)
    if not isinstance(layout, Layout) or layout.may_permute:
        return None
    if layout.method == "MXFP4":
        return MXFP4 if is_expert and num_in % MXFP4.group == 0 else None
    said = next(raw[key] for key in KEYS if raw.get(key))
    bits = layout.bits or 4
    group = said.get("group_size")
    is_symmetric = False
    if layout.bits is None:
        weights = max((group["weights"] for group in said["config_groups"].values()), key=lambda w: w["num_bits"])
        bits = weights["num_bits"]
        group = weights.get("group_size")
        is_symmetric = weights.get("symmetric") is True
    if not isinstance(group, int) or group < 1 or num_in % group:
        group = num_in  # one scale for each output, which is written -1 or null
    return Scheme(bits, group, "zero", "float16", zero=1 << (bits - 1) if is_symmetric else None)


_WAY_OUT = f"name the unquantised original, or one quantised as {READABLE}"


@dataclass(frozen=True)
class _Settings:
    """Checks the settings of an object inside config.json. where: the object's name, for messages."""

    where: str
    values: Mapping[str, Any]

    def want(self, name: str, *allowed: object, why: str = "is not read") -> Any:
        """Return the value of a setting. Raises UnsupportedModel, naming the setting, for a value not in `allowed`.

        name: the name of the setting. why: the reason in the message, as words that follow "which".
        """
        value = self.values.get(name)
        if value not in allowed:
            raise UnsupportedModel(f"config.json sets {name}={value!r:.60} in {self.where}, which {why}: {_WAY_OUT}")
        return value


def _gptq(settings: _Settings) -> Layout:
    """Read the settings of GPTQ. With desc_act=true, the tensor g_idx holds the group of each input.

    Version 1 of the format stores each zero point minus 1.
    """
    permutes = settings.want("desc_act", False, True, None)
    version = settings.want("checkpoint_format", None, "gptq", "gptq_v2")
    bits = settings.want("bits", 4, 8)
    parts = frozenset({"qzeros", "scales", "g_idx"})
    return Layout("GPTQ", "qweight", parts, bits, 0 if version == "gptq_v2" else 1, may_permute=bool(permutes))


def _awq(settings: _Settings) -> Layout:
    version = settings.values.get("version")
    if not isinstance(version, str) or version.lower() != "gemm":
        settings.want("version", "gemm")
    settings.want("zero_point", True)
    return Layout("AWQ", "qweight", frozenset({"qzeros", "scales"}), settings.want("bits", 4))


def _fp8(settings: _Settings) -> Floats:
    """Read the settings of FP8. DeepSeek's files have one scale per block, vLLM's files one per matrix.

    The names of DeepSeek's scales end with _inv, although weights are multiplied by these scales.
    """
    settings.want("activation_scheme", None, "dynamic", "static")
    block = settings.values.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if block is not None and not is_pair:
        settings.want("weight_block_size", None)
    return Floats("FP8", SCALES, INPUT_SCALES, None if block is None else (block[0], block[1]))


def _mxfp4(settings: _Settings) -> Layout:
    settings.want("dequantize", None, False, True)
    return Layout("MXFP4", "blocks", frozenset({"scales"}), types=BYTES)


def _float_quantized(settings: _Settings, groups: Mapping[str, Any]) -> Floats:
    blocks = set()
    for name, group in groups.items():
        inner = _Settings(f"{name} of {settings.where}", group)
        inner.want("format", "float-quantized", None)
        weights = _Settings(f"weights of {inner.where}", group.get("weights") or {})
        weights.want("num_bits", 8)
        weights.want("type", "float")
        weights.want("strategy", "tensor", "channel", "block")
        weights.want("actorder", None, False)
        inner.want("output_activations", None)
        blocks.add(tuple(weights.values.get("block_structure") or ()))
    if len(blocks) > 1:
        settings.want("config_groups", why="has blocks of several sizes")
    block = blocks.pop()
    return Floats("compressed-tensors", SCALES, INPUT_SCALES, (int(block[0]), int(block[1])) if block else None)


def _compressed_tensors(settings: _Settings) -> Layout | Floats:
    formats = ("pack-quantized", "int-quantized")
    groups = settings.values.get("config_groups")
    settings.want("quantization_status", None, "compressed", "frozen")
    settings.want("kv_cache_scheme", None)
    sparse = settings.values.get("sparsity_config") or {}
    if sparse:
        _Settings(f"sparsity_config of {settings.where}", sparse).want("format", None, "dense")
    if settings.values.get("transform_config"):
        settings.want("transform_config", None, {}, why="transforms activations and is not read")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        settings.want("config_groups", why="names no scheme of weights")
    assert isinstance(groups, Mapping)
    overall = settings.want("format", *formats, "float-quantized", "mixed-precision")
    if overall == "float-quantized":
        return _float_quantized(settings, groups)
    used, orders = set(), set()
    for name, group in groups.items():
        inner = _Settings(f"{name} of {settings.where}", group)
        used.add(inner.want("format", *formats, None) or overall)
        weights = _Settings(f"weights of {inner.where}", group.get("weights") or {})
        weights.want("num_bits", 4, 8)
        weights.want("type", "int")
        weights.want("strategy", "group", "channel")
        orders.add(weights.want("actorder", None, False, "static", "weight", "group", "dynamic"))
        inner.want("output_activations", None)
        if inputs := group.get("input_activations"):
            _Settings(f"input_activations of {inner.where}", inputs).want("dynamic", True)
    if len(used) != 1 or not used <= set(formats):
        settings.want("format", *formats, why="mixes formats and is not read")
    codes = "weight_packed" if used == {"pack-quantized"} else "weight"
    parts = frozenset({"weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"})
    return Layout("compressed-tensors", codes, parts, may_permute=not orders.isdisjoint({"group", "dynamic"}))


_READERS: Mapping[str, Callable[[_Settings], Layout | Floats]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda settings: Floats("FBGEMM", SCALES, INPUT_SCALES),
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
}

# ------------------------------------------------------------------------------------------------------------- shapes


def _sizes_qweight(layout: Layout, shapes: Shapes) -> tuple[int, int, int, int]:
    """Return the number of outputs, the number of inputs, the bits and the group size, for GPTQ and AWQ.

    A word of GPTQ packs consecutive inputs, so qweight is [I * bits / 32, O]. A word of AWQ packs outputs, so qweight
    is [I, O * bits / 32]. The scales are [I / group, O].
    """
    bits = layout.bits or 4
    per_word = 32 // bits
    rows, columns = shapes["qweight"]
    num_in, num_out = (rows, columns * per_word) if layout.method == "AWQ" else (rows * per_word, columns)
    num_groups = shapes["scales"][0]
    _want(shapes, "scales", (num_groups, num_out))
    _want(shapes, "qzeros", (num_groups, -(-num_out // per_word)))
    return num_out, num_in, bits, _group(num_in, num_groups)


def _sizes_packed(layout: Layout, shapes: Shapes) -> tuple[int, int, int, int]:
    """Return the number of outputs, the number of inputs, the bits and the group size, for compressed-tensors.

    A word of codes packs consecutive inputs: [O, I * bits / 32]. A word of zero points packs consecutive outputs.
    """
    num_out, num_words = shapes["weight_packed"]
    num_groups = shapes["weight_scale"][1]
    _want(shapes, "weight_scale", (num_out, num_groups))
    zeros = shapes.get("weight_zero_point")
    num_in = shapes["weight_shape"][1]  # the tensor's numbers, not its shape
    bits = next((b for b in (4, 8) if -(-num_in * b // 32) == num_words), 0)
    if shapes["weight_shape"][0] != num_out or (zeros is not None and zeros != (-(-num_out * bits // 32), num_groups)):
        raise ValueError(f"its shapes {sorted(shapes.items())} contradict each other")
    return num_out, num_in, bits, _group(num_in, num_groups)


def _sizes_int(layout: Layout, shapes: Shapes) -> tuple[int, int, int, int]:
    num_out, num_in = shapes["weight"]
    num_groups = shapes["weight_scale"][1]
    for name in ("weight_scale", "weight_zero_point"):
        if name in shapes:
            _want(shapes, name, (num_out, num_groups))
    return num_out, num_in, 8, _group(num_in, num_groups)


_SIZES = {"qweight": _sizes_qweight, "weight_packed": _sizes_packed, "weight": _sizes_int}


def _blocks_of_floats(shapes: Shapes, scales: str) -> tuple[int, int]:
    """Return the number of outputs and the number of inputs of an MXFP4 matrix.

    The codes are [O, I / 32, 16]. A byte has two codes; its lower half is the first. The scales are [O, I / 32].
    """
    num_out, num_groups, num_bytes = shapes["blocks"]
    if num_bytes != MXFP4.group // 2 or scales not in BYTES:
        raise ValueError(f"its blocks have {num_bytes} bytes, and its scales the type {scales}")
    _want(shapes, "scales", (num_out, num_groups))
    return num_out, num_groups * MXFP4.group


def _group(num_in: int, num_groups: int) -> int:
    return num_in // num_groups if num_groups and num_in % num_groups == 0 else 0


def _want(shapes: Shapes, name: str, shape: tuple[int, ...]) -> None:
    if shapes[name] != shape:
        raise ValueError(f"its {name} has shape {list(shapes[name])} where {list(shape)} fits")


# --------------------------------------------------------------------------------------------------------------- rows

Parts = tuple[Array, HostTensor, Array]  # codes [R, I], scales [R, groups], zeros [R, groups]
ALL = slice(None)


def unpack(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
    """Return the integers in int32 words [R, C], the lowest bits of a word first, as uint8 [R, C * 32 / bits]."""
    if bits == 8 and sys.byteorder == "little":
        return np.ascontiguousarray(words).view(np.uint8)
    shifts = np.arange(0, 32, bits, dtype=np.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).astype(np.uint8).reshape(len(words), -1)


def pack(integers: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Return integers packed into int32 words, as `unpack` reads them. A row's last word is filled up with zeros."""
    per_word = 32 // bits
    missing = -integers.shape[-1] % per_word
    whole = np.pad(integers, ((0, 0), (0, missing))).astype(np.uint32)
    shifted = whole.reshape(len(whole), -1, per_word) << np.arange(0, 32, bits, dtype=np.uint32)
    words: npt.NDArray[np.int32] = np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)
    return words


def _rows_qweight(layout: Layout, scheme: Scheme, shapes: Shapes, chosen: range, read: Read) -> Parts:
    bits, columns = scheme.bits, slice(chosen.start, chosen.stop)
    packed = slice(chosen.start * bits // 32, -(-chosen.stop * bits // 32))
    zeros = unpack(read("qzeros", ALL, packed).values, bits)
    if layout.method == "AWQ":
        codes, zeros = (_in_order(x) for x in (unpack(read("qweight", ALL, packed).values, bits), zeros))
        codes = codes.T
    else:
        codes = unpack(read("qweight", ALL, columns).T.contiguous().values, bits)
    return codes, read("scales", ALL, columns).T, (zeros[:, : len(chosen)] + layout.zero_shift).T


def _in_order(integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return integers.reshape(len(integers), -1, 8)[..., list(AWQ_ORDER)].reshape(len(integers), -1)


def _rows_packed(layout: Layout, scheme: Scheme, shapes: Shapes, chosen: range, read: Read) -> Parts:
    rows, bits = slice(chosen.start, chosen.stop), scheme.bits
    scales = read("weight_scale", rows, ALL)
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    if "weight_zero_point" in shapes:
        packed = slice(chosen.start * bits // 32, -(-chosen.stop * bits // 32))
        zeros = unpack(read("weight_zero_point", packed, ALL).T.contiguous().values, bits)[:, : len(chosen)].T
    return unpack(read("weight_packed", rows, ALL).values, bits), scales, zeros


def _rows_int(layout: Layout, scheme: Scheme, shapes: Shapes, chosen: range, read: Read) -> Parts:
    """Read the rows `chosen` of a matrix of int8 codes. Adds 128 to codes and zero points, which makes them uint8."""
    rows = slice(chosen.start, chosen.stop)
    scales = read("weight_scale", rows, ALL)
    zeros = np.full(scales.shape, 128, np.uint8)
    if "weight_zero_point" in shapes:
        zeros = _from_0(read("weight_zero_point", rows, ALL))
    return _from_0(read("weight", rows, ALL)), scales, zeros


def _from_0(integers: HostTensor) -> Array:
    return np.ascontiguousarray(integers.values).view(np.uint8) ^ 128


_ROWS = {"qweight": _rows_qweight, "weight_packed": _rows_packed, "weight": _rows_int}
