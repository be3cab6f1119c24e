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
            scheme = scheme_of(8 if name in ENDS else quantization.bits, quantization.group)
            _refuse_group(quantization, scheme, name, stored.shape[1])
            made[name] = Stored(stored.file, stored.shape, torch.float32, scheme)
    return made


def _refuse_group(quantization: Quantization, scheme: Scheme, name: str, num_in: int) -> None:
    if num_in % scheme.group:
        possible = [str(group) for group in GROUPS[quantization.bits] if num_in % group == 0]
        way_out = f"{' and '.join(possible)} do" if len(possible) > 1 else f"{''.join(possible) or 'no group'} does"
        raise BadOption(
            f"quantization={str(quantization)!r} is not possible: groups of {quantization.group} do not divide the "
            f"{num_in} inputs of {name}; {way_out}"
        )
