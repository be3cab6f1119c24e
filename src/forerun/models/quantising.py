"""Weights that are quantised while they are read.

Every matrix of the layers gets the bits that are asked for; the embedding and the LM head get 8 bits at least, because
their rounding shows in every logit. Biases and the final norm stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.config import GROUPS, Quantization
from forerun.errors import BadOption
from forerun.models.source import Source, Stored
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.quantising import quantise, scheme_of

ENDS = ("model.embed_tokens.weight", "lm_head.weight")  # 8 bits under 4
BLOCK_WEIGHTS = 1 << 17  # rounded at a time, which takes some ten times as many floats meanwhile


class QuantisingSource:
    """A source whose matrices are rounded when they are read. Raises BadOption where that is not possible."""

    def __init__(self, source: Source, quantization: Quantization) -> None:
        self.source, self.quantization = source, quantization
        self.tensors: Mapping[str, Stored] = planned(source.tensors, quantization)

    @property
    def folder(self) -> Path:
        """See `Source.folder`."""
        return self.source.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """See `Source.config`."""
        return self.source.config

    def check(self, with_tokenizer: bool) -> None:
        """See `Source.check`."""
        self.source.check(with_tokenizer)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """See `Source.blocks`."""
        scheme = self.tensors[name].scheme
        if scheme is None:
            yield from self.source.blocks(name)
            return
        for rows in self._rows(name, scheme):
            yield rows.dequantise()

    def quantised(self, name: str) -> QuantisedMatrix:
        """See `QuantisedSource.quantised`."""
        stored = self.tensors[name]
        assert stored.scheme is not None
        num_out, num_in = stored.shape
        return QuantisedMatrix(stored.scheme, (num_out, num_in), partial(self._rows, name, stored.scheme))

    def _rows(self, name: str, scheme: Scheme) -> Iterator[QuantisedRows]:
        step = max(1, BLOCK_WEIGHTS // self.tensors[name].shape[1])
        for block in self.source.blocks(name):
            for first in range(0, len(block), step):
                rows = block[first : first + step]
                if not bool(rows.isfinite().all()):
                    raise BadOption(
                        f"quantization={str(self.quantization)!r} is not possible: {name} in "
                        f"{self.tensors[name].file} holds numbers that are not finite: fetch the file again"
                    )
                yield quantise(rows, scheme)


class RoundedWeights(Mapping[str, Tensor | QuantisedMatrix]):
    """Weights that are in memory, each matrix rounded when it is looked up, as `QuantisingSource` rounds a file's.

    shapes: of all weights, by name. read(name, rows) returns rows of a matrix; vector(name) a norm or a bias.
    as_tensors: give what the rounded matrices stand for, in this type; None = as they are packed. Raises BadOption
    where groups do not divide a row.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str, range], Tensor],
        vector: Callable[[str], Tensor],
        quantization: Quantization,
        as_tensors: torch.dtype | None,
    ) -> None:
        self.shapes, self.read, self.vector, self.as_tensors = shapes, read, vector, as_tensors
        self.schemes = {
            name: _scheme(name, shape[1], quantization) for name, shape in shapes.items() if len(shape) == 2
        }

    def __getitem__(self, name: str) -> Tensor | QuantisedMatrix:
        shape = self.shapes[name]
        if name not in self.schemes:
            vector = self.vector(name)
            return vector if self.as_tensors is None else vector.to(self.as_tensors)
        matrix = QuantisedMatrix(self.schemes[name], (shape[0], shape[1]), partial(self._rows, name))
        if self.as_tensors is None:
            return matrix
        return torch.cat([rows.dequantise().to(self.as_tensors) for rows in matrix.blocks()])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _rows(self, name: str) -> Iterator[QuantisedRows]:
        num_rows, num_in = self.shapes[name]
        step = max(1, BLOCK_WEIGHTS // num_in)
        for first in range(0, num_rows, step):
            yield quantise(self.read(name, range(first, min(num_rows, first + step))), self.schemes[name])


def planned(tensors: Mapping[str, Stored], quantization: Quantization) -> dict[str, Stored]:
    """Return the tensors of a source as they are when matrices have been rounded. Raises as `QuantisingSource`."""
    made = {}
    for name, stored in tensors.items():
        if stored.scheme is not None:
            raise BadOption(
                f"quantization={str(quantization)!r} is not possible: {stored.file} is quantised already ({name}: "
                f"{stored.scheme}): leave it out, or name the unquantised original"
            )
        made[name] = stored
        if len(stored.shape) == 2:
            scheme = _scheme(name, stored.shape[1], quantization)
            made[name] = Stored(stored.file, stored.shape, torch.float32, scheme)
    return made


def _scheme(name: str, num_in: int, quantization: Quantization) -> Scheme:
    scheme = scheme_of(8 if name in ENDS else quantization.bits, quantization.group)
    if num_in % scheme.group:
        possible = [str(group) for group in GROUPS[quantization.bits] if num_in % group == 0]
        way_out = f"{' and '.join(possible)} do" if len(possible) > 1 else f"{''.join(possible) or 'no group'} does"
        raise BadOption(
            f"quantization={str(quantization)!r} is not possible: groups of {quantization.group} do not divide the "
            f"{num_in} inputs of {name}; {way_out}"
        )
    return scheme
