"""Weights that are quantised while they are read.

Every matrix of the layers gets the bits that are asked for; the embedding and the LM head get 8 bits at least, because
their rounding shows in every logit. Biases and the final norm stay as they are.

The weights of a layer's two norms are multiplied into the matrices that read them, and become ones. The function stays,
and a channel that a norm makes a hundred times as large as its neighbours is no longer one when activations are rounded
together with them; SmoothQuant (Xiao et al. 2023) moves such factors into matrices, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.config import Quantization
from forerun.errors import BadOption
from forerun.models.source import Source, Stored
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.quantising import quantise, scheme_of

LAYERS = "model.layers."
ENDS = ("model.embed_tokens.weight", "lm_head.weight")  # 8 bits under 4
GROUPS = {8: (16, 32, 64, 128), 4: (32, 64, 128)}
# Of a layer: matrices -> the norm whose output they read.
READS = {
    "input_layernorm.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "post_attention_layernorm.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
BLOCK_WEIGHTS = 1 << 18  # rounded at a time, which takes some ten times as many floats meanwhile


class QuantisingSource:
    """A source whose matrices are rounded when they are read. Raises BadOption where that is not possible."""

    def __init__(self, source: Source, quantization: Quantization) -> None:
        self.source, self.quantization = source, quantization
        for name, stored in source.tensors.items():
            if stored.scheme is not None:
                raise BadOption(
                    f"quantization={str(quantization)!r} is not possible: {stored.file} is quantised already ({name}: "
                    f"{stored.scheme}): leave it out, or name the unquantised original"
                )
            if scheme := self._scheme(name, stored):
                _refuse_group(quantization, scheme, name, stored.shape[1])

    @property
    def folder(self) -> Path:
        """See `Source.folder`."""
        return self.source.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """See `Source.config`."""
        return self.source.config

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """See `Source.tensors`."""
        made = {}
        for name, stored in self.source.tensors.items():
            scheme = self._scheme(name, stored)
            made[name] = stored if scheme is None else Stored(stored.file, stored.shape, torch.float32, scheme)
        return made

    def check(self, with_tokenizer: bool) -> None:
        """See `Source.check`."""
        self.source.check(with_tokenizer)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """See `Source.blocks`."""
        scheme = self.tensors[name].scheme
        if scheme is None:
            for block in self.source.blocks(name):
                yield torch.ones_like(block) if name.startswith(LAYERS) and name.endswith(tuple(READS)) else block
            return
        for rows in self._rows(name, scheme):
            yield rows.dequantise()

    def quantised(self, name: str) -> QuantisedMatrix:
        """See `QuantisedSource.quantised`."""
        stored = self.tensors[name]
        assert stored.scheme is not None
        num_out, num_in = stored.shape
        return QuantisedMatrix(stored.scheme, (num_out, num_in), partial(self._rows, name, stored.scheme))

    def _scheme(self, name: str, stored: Stored) -> Scheme | None:
        if len(stored.shape) != 2:
            return None
        return scheme_of(8 if name in ENDS else self.quantization.bits, self.quantization.group)

    def _factors(self, name: str) -> Tensor | None:
        """The norm's weights [I] that a matrix is multiplied by."""
        norm = next((norm for norm, names in READS.items() for read in names if name.endswith("." + read)), None)
        if norm is None or not name.startswith(LAYERS):
            return None
        layer = ".".join(name.split(".")[: LAYERS.count(".") + 1])
        return torch.cat([block.float() for block in self.source.blocks(f"{layer}.{norm}")])

    def _rows(self, name: str, scheme: Scheme) -> Iterator[QuantisedRows]:
        step, factors = max(1, BLOCK_WEIGHTS // self.tensors[name].shape[1]), self._factors(name)
        for block in self.source.blocks(name):
            for first in range(0, len(block), step):
                rows = block[first : first + step]
                rows = rows if factors is None else rows.float() * factors
                if not bool(rows.isfinite().all()):
                    raise BadOption(
                        f"quantization={str(self.quantization)!r} is not possible: {name} in "
                        f"{self.tensors[name].file} holds numbers that are not finite: fetch the file again"
                    )
                yield quantise(rows, scheme)


def _refuse_group(quantization: Quantization, scheme: Scheme, name: str, num_in: int) -> None:
    if num_in % scheme.group:
        possible = [str(group) for group in GROUPS[quantization.bits] if num_in % group == 0]
        way_out = f"{' and '.join(possible)} do" if len(possible) > 1 else f"{''.join(possible) or 'no group'} does"
        raise BadOption(
            f"quantization={str(quantization)!r} is not possible: groups of {quantization.group} do not divide the "
            f"{num_in} inputs of {name}; {way_out}"
        )
