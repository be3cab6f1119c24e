"""Tensors on the host: numpy's arrays, with the names of the types that numpy does not know.

bfloat16 is stored as uint16 and floats of 8 bits as uint8, with the name of the type beside the array. If there is a
native extension, large arrays lie in the extension's memory, aligned and in huge pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun import native
from forerun.errors import InternalError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

# The type in which numpy stores the numbers of each type, by the name that torch, safetensors and config.json share.
HELD_AS: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(held)
    for name, held in {
        "float64": np.float64,
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": np.uint16,
        "float8_e4m3fn": np.uint8,
        "int64": np.int64,
        "int32": np.int32,
        "int16": np.int16,
        "int8": np.int8,
        "uint8": np.uint8,
        "bool": np.bool_,
    }.items()
}
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")
LARGEST = {"float32": float(np.finfo(np.float32).max), "bfloat16": 3.3895313892515355e38, "float16": 65504.0}
ALIGNED_BYTES = 1 << 16  # from this size on, arrays lie in the extension's memory; numpy's serves smaller ones as well


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype, which is given as a name, a torch dtype or a numpy dtype."""
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else _name_of(dtype)


def _name_of(dtype: object) -> str:
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else np.dtype(dtype).name  # type: ignore[call-overload]


@dataclass(frozen=True, eq=False, slots=True)
class HostTensor:
    """An array and the name of its type. values: an array of the type in which numpy stores `dtype` (HELD_AS)."""

    values: Array
    dtype: str

    def __post_init__(self) -> None:
        if self.values.dtype != HELD_AS[self.dtype]:
            raise InternalError(f"{self.dtype} is held as {HELD_AS[self.dtype]}, and was given as {self.values.dtype}")

    @classmethod
    def of(cls, values: npt.ArrayLike) -> HostTensor:
        """Return an array as a tensor of the array's type."""
        array = np.asarray(values)
        return cls(array, array.dtype.name)

    @classmethod
    def empty(cls, shape: Seq[int], dtype: str) -> HostTensor:
        """Return an uninitialised tensor. Raises MemoryError if there is not enough memory."""
        return cls(empty(shape, HELD_AS[dtype]), dtype)

    @classmethod
    def joined(cls, parts: Seq[HostTensor], axis: int = 0) -> HostTensor:
        """Return tensors of one type joined along an axis."""
        (dtype,) = {part.dtype for part in parts}
        return parts[0] if len(parts) == 1 else cls(np.concatenate([part.values for part in parts], axis), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all dimensions."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.values.ndim

    @property
    def nbytes(self) -> int:
        """The bytes of all numbers."""
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> HostTensor:
        """Return the part of the tensor at `index`, an index as in numpy."""
        return replace(self, values=self.values[index])

    @property
    def T(self) -> HostTensor:  # noqa: N802 - numpy's word
        """A view with the dimensions in reverse order."""
        return replace(self, values=self.values.T)

    def reshape(self, *shape: int) -> HostTensor:
        """Return the same numbers in other dimensions; one of the dimensions may be -1."""
        return replace(self, values=self.values.reshape(shape))

    def contiguous(self) -> HostTensor:
        """Return a tensor with its numbers back to back in memory: this tensor if that holds, otherwise a copy."""
        return self if self.values.flags.c_contiguous else replace(self, values=np.ascontiguousarray(self.values))

    def copy(self) -> HostTensor:
        """Return a copy that shares no memory, with the numbers back to back."""
        copied = HostTensor.empty(self.shape, self.dtype)
        np.copyto(copied.values, self.values)
        return copied

    def to(self, dtype: str) -> HostTensor:
        """Return the tensor in another dtype, or the tensor itself if it has this dtype.

        Floats are rounded to nearest, ties to even; narrower types are rounded from float32. Integers are converted by
        numpy.
        """
        if dtype == self.dtype:
            return self
        if self.dtype in FLOATS and dtype in FLOATS:
            return HostTensor(_converted(self, dtype), dtype)
        if self.dtype in ("bfloat16", "float8_e4m3fn"):
            return self.to("float32").to(dtype)
        if dtype == "bfloat16":
            return HostTensor(self.values.astype(np.float32), "float32").to(dtype)
        return HostTensor(self.values.astype(HELD_AS[dtype]), dtype)

    def float32(self) -> Floats:
        """Return the values as numpy's float32, without a copy if they are float32 already."""
        return self.to("float32").values

    def is_finite(self) -> bool:
        """Return whether every number is finite."""
        if self.dtype not in FLOATS:
            return True
        if self.dtype == "bfloat16":
            return not bool(np.any((self.values & 0x7F80) == 0x7F80))
        if self.dtype == "float8_e4m3fn":
            return not bool(np.any((self.values & 0x7F) == 0x7F))
        # If a number is not finite, the sum is not either, and a sum is the cheapest pass over the numbers.
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(self.values.sum())) or bool(np.isfinite(self.values).all())


def empty(shape: Seq[int], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array. Raises MemoryError if there is not enough memory.

    If there is a native extension, an array of ALIGNED_BYTES or more lies in the extension's memory.
    """
    held, extension = np.dtype(dtype), native.extension()
    num_bytes = math.prod(shape) * held.itemsize
    if extension is None or num_bytes < ALIGNED_BYTES:
        return np.empty(shape, held)
    return extension.empty(num_bytes).view(held).reshape(shape)  # type: ignore[no-any-return]


def address(values: Array | None) -> int:
    """Return the address at which the memory of a contiguous array begins; 0 for None."""
    if values is None:
        return 0
    if not values.flags.c_contiguous:
        raise InternalError("kernels read arrays whose numbers lie back to back")
    return values.__array_interface__["data"][0]  # type: ignore[no-any-return]


def _converted(tensor: HostTensor, dtype: str) -> Array:
    """Return floats as another type of floats.

    The native kernels convert the floats if they can run, otherwise numpy does. Both give the same bits.
    """
    if dtype == "float8_e4m3fn":
        raise InternalError("numbers are not rounded to floats of 8 bits")
    if native.isa() == "reference":
        return _converted_by_numpy(tensor, dtype)
    source = np.ascontiguousarray(tensor.values)
    target = empty(tensor.shape, HELD_AS[dtype])
    if source.size:
        native.extension().convert(
            kernels(native.isa()), address(source), tensor.dtype, address(target), dtype, source.size
        )
    return target


@cache
def kernels(isa: str) -> Any:
    """Return the kernels that convert and round weights. The kernels have their own threads, which sleep when idle."""
    return native.extension().Backend(isa, native.num_threads())


def _converted_by_numpy(tensor: HostTensor, dtype: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        if tensor.dtype == "bfloat16":
            wide = (tensor.values.astype(np.uint32) << 16).view(np.float32)
        elif tensor.dtype == "float8_e4m3fn":
            wide = float8_numbers()[tensor.values]
        else:
            wide = tensor.values.astype(np.float32)
        wide = np.asarray(wide)  # a single number has become a scalar
        if dtype != "bfloat16":
            return wide.astype(HELD_AS[dtype])
        bits = wide.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, bits >> 16 | 0x40, rounded).astype(np.uint16)


@cache
def float8_numbers() -> Floats:
    """Return the number that each of the 256 codes of e4m3 stands for (OCP 8-bit Floating Point, table 1)."""
    codes = np.arange(256)
    exponents = codes >> 3 & 15
    mantissas = (codes & 7).astype(np.float64)
    normal, denormal = (1 + mantissas / 8) * 2.0 ** (exponents - 7), mantissas * 2.0**-9
    magnitudes = np.where(exponents > 0, normal, denormal)
    magnitudes[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -magnitudes, magnitudes).astype(np.float32)
