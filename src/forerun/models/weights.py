"""The weights of a source, on the host. Each access reads a weight from its file and checks it, without a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import numpy as np

from forerun.blocks import itemsize
from forerun.errors import UnsupportedModel
from forerun.host_tensor import Array, HostTensor
from forerun.models.source import QuantisedSource, Source
from forerun.ops.memory import no_room
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme


class StoredWeights(Mapping[str, HostTensor | QuantisedMatrix]):
    """A mapping from names to tensors of type `dtype`. Each access reads the tensor from the file again.

    packs_scheme(scheme): returns whether matrices of this scheme are returned as stored (QuantisedMatrix). Such a
    matrix is read later, when it is packed. Other quantised matrices are dequantised. Raises UnsupportedModel for
    weights that are not finite, CapacityError where memory is too small.
    """

    def __init__(
        self, source: Source, dtype: str, packs_scheme: Callable[[Scheme], bool] = lambda scheme: False
    ) -> None:
        self.source, self.dtype, self.packs_scheme = source, dtype, packs_scheme

    def __getitem__(self, name: str) -> HostTensor | QuantisedMatrix:
        stored = self.source.tensors[name]
        scheme = stored.scheme or stored.floats
        if scheme is not None and self.packs_scheme(scheme):
            return self._checked(name, cast(QuantisedSource, self.source).quantised(name))
        try:
            tensor = HostTensor.empty(stored.shape, self.dtype)
        except MemoryError as error:
            raise no_room(math.prod(stored.shape) * itemsize(self.dtype), "cpu") from error
        first = 0
        for block in self.blocks(name):
            np.copyto(tensor.values[first : first + len(block)], block.values)
            first += len(block)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.tensors)

    def __len__(self) -> int:
        return len(self.source.tensors)

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor in order, in blocks of type `dtype`. Drop each block before you take the next."""
        for block in self.source.blocks(name):
            rows = block.to(self.dtype)
            if not rows.is_finite():
                raise UnsupportedModel(self._fault(name, block, self.dtype))
            yield rows

    def _checked(self, name: str, matrix: QuantisedMatrix) -> QuantisedMatrix:
        """Return the same matrix, but reading its rows raises UnsupportedModel if a weight is not finite.

        Scales and minimums are checked, and 8-bit floats are checked for NaN. A finite float32 scale can overflow when
        it is multiplied by a code. So each scale is first multiplied by the largest code, and the product is checked.
        """
        most = np.float32(matrix.scheme.most)

        def blocks() -> Iterator[QuantisedRows]:
            for rows in matrix.blocks():
                if matrix.scheme.floats and bool((rows.codes & 127 == 127).any()):
                    raise UnsupportedModel(self._fault(name, HostTensor.of(rows.dequantise()), "float32"))
                scales, minimums = (rows.scales, rows.super_scales), (rows.minimums, rows.super_minimums)
                for part, factor in ((scales, most), (minimums, np.float32(1))):
                    for numbers in part:
                        if numbers is not None:
                            self._check(name, numbers, factor)
                yield rows

        return replace(matrix, blocks=blocks)

    def _check(self, name: str, numbers: HostTensor, factor: np.float32) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            largest = HostTensor.of(numbers.float32() * factor)
        if not largest.is_finite():
            raise UnsupportedModel(self._fault(name, largest, "float32"))

    def _fault(self, name: str, block: HostTensor, dtype: str) -> str:
        file, numbers = self.source.tensors[name].file, block.to("float64").values
        if np.isfinite(numbers).all():
            most = float(np.abs(numbers).max())
            return f"{name} in {file} holds numbers up to {most:.2g}, which are beyond {dtype}: choose another dtype"
        kind = "NaN" if np.isnan(numbers).any() else "infinite numbers"
        return f"{name} in {file} holds {kind}: fetch the file again, or name another checkpoint"


def same(source: Source, name: str, other: str) -> bool:
    """Whether two tensors of a source are equal and have the same dtype."""
    a, b = source.tensors[name], source.tensors[other]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    pairs = zip(source.blocks(name), source.blocks(other), strict=True)
    return all(np.array_equal(_numbers(x), _numbers(y)) for x, y in pairs)


def _numbers(block: HostTensor) -> Array:
    return block.values if block.dtype in ("float32", "float64") else block.float32()
