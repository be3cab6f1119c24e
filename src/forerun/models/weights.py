"""The weights of a source as tensors: each is read when it is asked for, checked, and kept nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from forerun.errors import CapacityError, UnsupportedModel
from forerun.models.source import QuantisedSource, Source
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme


class StoredWeights(Mapping[str, Tensor | QuantisedMatrix]):
    """Name -> a new tensor of this type on this device, by reading the file each time.

    packs_scheme: which quantised tensors are given as they are stored, to be read when they are packed; the others are
    dequantised. Raises UnsupportedModel for weights that are no finite numbers, CapacityError where there is no memory.
    """

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        packs_scheme: Callable[[Scheme], bool] = lambda scheme: False,
    ) -> None:
        self.source, self.dtype, self.device, self.packs_scheme = source, dtype, device, packs_scheme

    def __getitem__(self, name: str) -> Tensor | QuantisedMatrix:
        stored = self.source.tensors[name]
        scheme = stored.scheme or stored.floats
        if scheme is not None and self.packs_scheme(scheme):
            return self._checked(name, cast(QuantisedSource, self.source).quantised(name))
        shape = stored.shape
        try:
            tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        except RuntimeError as error:  # torch's OutOfMemoryError is one, and a CPU's refusal is a plain one
            raise no_room(torch.Size(shape).numel() * self.dtype.itemsize, self.device) from error
        self.read(name, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.tensors)

    def __len__(self) -> int:
        return len(self.source.tensors)

    def read(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`, which has its shape, block by block."""
        first = 0
        for block in self.source.blocks(name):
            rows = out[first : first + len(block)]
            rows.copy_(block)
            if not _is_finite(rows):
                raise UnsupportedModel(self._fault(name, block, out.dtype))
            first += len(block)

    def _checked(self, name: str, matrix: QuantisedMatrix) -> QuantisedMatrix:
        """Return a matrix that checks scales and minimums as they are read: if they are finite, so are all weights.

        A scale counts with the largest number that it is multiplied by: one of float32 can be finite where a weight is
        not.
        """
        most = matrix.scheme.most

        def blocks() -> Iterator[QuantisedRows]:
            for rows in matrix.blocks():
                if matrix.scheme.floats and bool((rows.codes & 127 == 127).any()):
                    raise UnsupportedModel(self._fault(name, rows.dequantise(), torch.float32))
                scales, minimums = (rows.scales, rows.super_scales), (rows.minimums, rows.super_minimums)
                for part, factor in ((scales, most), (minimums, 1)):
                    for numbers in part:
                        if numbers is not None and not _is_finite(found := numbers.float() * factor):
                            raise UnsupportedModel(self._fault(name, found, torch.float32))
                yield rows

        return replace(matrix, blocks=blocks)

    def _fault(self, name: str, block: Tensor, dtype: torch.dtype) -> str:
        file, wanted = self.source.tensors[name].file, str(dtype).removeprefix("torch.")
        if block.isfinite().all():
            most = float(block.abs().max())
            return f"{name} in {file} holds numbers up to {most:.2g}, which are beyond {wanted}: choose another dtype"
        found = "NaN" if block.isnan().any() else "infinite numbers"
        return f"{name} in {file} holds {found}: fetch the file again, or name another checkpoint"


def same(source: Source, name: str, other: str) -> bool:
    """Whether two tensors of a source are equal, type included."""
    a, b = source.tensors[name], source.tensors[other]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return all(torch.equal(x, y) for x, y in zip(source.blocks(name), source.blocks(other), strict=True))


def _is_finite(tensor: Tensor) -> bool:
    """Whether every number is. Where one is not their sum is none either, and a sum is the cheapest pass there is."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def no_room(num_bytes: int, device: torch.device) -> CapacityError:
    """The refusal of weights for which there is no memory."""
    return CapacityError(
        f"there is no memory for weights of {num_bytes / 1e9:.1f} GB on {device}: choose a smaller model, or "
        "dtype='bfloat16'; forerun plan says what fits"
    )
