"""Weights that are quantised while they are read.

Every matrix of the layers gets the bits that are asked for; the embedding and the LM head get 8 bits at least, because
their rounding shows in every logit. Biases and the final norm stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.blocks import Spec, weights
from forerun.config import Quantization
from forerun.errors import BadOption
from forerun.models.source import Source, Stored
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.quantising import BLOCK_WEIGHTS, is_rounded, quantise, scheme_for


class QuantisingSource:
    """A source whose matrices are rounded when they are read. Raises BadOption where that is not possible."""

    def __init__(self, source: Source, spec: Spec, quantization: Quantization) -> None:
        self.source, self.quantization = source, quantization
        self.tensors: Mapping[str, Stored] = planned(source.tensors, spec, quantization)

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


def planned(tensors: Mapping[str, Stored], spec: Spec, quantization: Quantization) -> dict[str, Stored]:
    """Return the tensors of a source as they are when matrices have been rounded. Raises as `QuantisingSource`."""
    rounded = {weight.name: weight for weight in weights(spec) if is_rounded(weight)}
    made = {}
    for name, stored in tensors.items():
        if stored.scheme is not None:
            raise BadOption(
                f"quantization={str(quantization)!r} is not possible: {stored.file} is quantised already ({name}: "
                f"{stored.scheme}): leave it out, or name the unquantised original"
            )
        made[name] = stored
        if name in rounded:
            scheme = scheme_for(rounded[name], quantization)
            made[name] = Stored(stored.file, stored.shape, torch.float32, scheme)
    return made
