"""The head of the drafter eagle as a model: its sizes, its weights, and one forward that Runner runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.config import Quantization
from forerun.drafters import head_files
from forerun.drafters.head_matrices import Product
from forerun.errors import InternalError, UnsupportedModel, shown
from forerun.kv.cache import BlockCache
from forerun.models.layers import Decoder, DecoderConfig, parameter_shapes
from forerun.models.loading import read_config
from forerun.models.runner import Model
from forerun.models.saving import config_to_dict
from forerun.types import RaggedBatch

EMBEDDING = "model.embed_tokens.weight"  # of a decoder: here the LM head's rows, for nothing is looked up
SIDES = ("embedding_norm", "hidden_norm")


@dataclass(frozen=True)
class EagleConfig:
    """The sizes of a head. decoder: its layer, as a decoder over the ids that it drafts, tied to its LM head.

    layers: behind which of the target's layers it reads.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """For config.json; a layer id is that of the layer whose input is read, as published EAGLE-3 heads count."""
        own = {"architectures": ["ForerunEagle"], "eagle_aux_hidden_state_layer_ids": list(self.layers)}
        return {**config_to_dict(self.decoder), **own}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EagleConfig:
        """Read what `to_json` wrote. Raises UnsupportedModel for what would be computed wrongly."""
        rest = dict(raw)
        layers = rest.pop("eagle_aux_hidden_state_layer_ids", None)
        if not isinstance(layers, list) or not layers or not all(type(k) is int and k >= 0 for k in layers):
            raise UnsupportedModel(
                f"config.json has eagle_aux_hidden_state_layer_ids={shown(str(layers))}: it must list layers"
            )
        config = cls(read_config(rest), tuple(layers))
        if config.decoder.num_layers != 1:
            raise UnsupportedModel(f"config.json has num_hidden_layers={config.decoder.num_layers}: a head has 1")
        return config


def input_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights before the layer.

    fc_norm: of each of the target's rows, before `fc` joins them. embedding_norm, hidden_norm: of what `input` joins.
    """
    h, num = config.decoder.hidden_size, len(config.layers)
    norms = {f"{name}.weight": (h,) for name in (*(f"fc_norm.{i}" for i in range(num)), *SIDES)}
    return {**norms, "fc.weight": (h, h * num), "input.weight": (h, 2 * h)}


def layer_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights of the layer and of the norm behind it."""
    return {name: shape for name, shape in parameter_shapes(config.decoder).items() if name != EMBEDDING}


class EagleModel:
    """A head as a model that Runner runs: a token's row is its embedding beside the features given in its place.

    The batch's tokens are the target's ids. `forward` returns the rows behind the final norm, and the residual stream
    as the tap behind its one layer: what the next step takes for features. ids [n]: the target's ids of its own.
    """

    def __init__(
        self, config: EagleConfig, weights: Mapping[str, Tensor], ids: Tensor, target: Model, quantization: str
    ) -> None:
        self.head_config, self.config, self.ids, self._target = config, config.decoder, ids, target
        self.device, self.ops, self.cache_dtype = target.device, target.ops, target.cache_dtype
        self.weight_dtype, self.activation_dtype = target.weight_dtype, target.activation_dtype
        own = {name: weight.to(self.device, self.weight_dtype) for name, weight in weights.items()}
        rounded = None if quantization == "none" else Quantization.parse(quantization)
        self._norms = {n: w.to(self.activation_dtype) for n, w in own.items() if w.ndim == 1}
        self._fc, self._input = (self._matrix(own[f"{name}.weight"], rounded) for name in ("fc", "input"))
        rows = target.head(ids.tolist()).to(self.weight_dtype)
        layer = Decoder(config.decoder, {EMBEDDING: rows, **{n: own[n] for n in layer_shapes(config)}}, self.ops)
        self.layer = layer if rounded is None else layer.rounded(rounded)
        self.compiled = self.layer.compiled

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a pass reads, about: the weights of its layer."""
        return self.layer.bytes_per_pass

    def joined(self, features: Seq[Tensor]) -> Tensor:
        """The target's rows [n, H] behind each of the layers, as features of the head [n, H]."""
        parts = []
        for i, rows in enumerate(features):
            rows = rows.to(self.activation_dtype).clamp(-head_files.LARGEST, head_files.LARGEST)
            parts.append(self._normed(rows, f"fc_norm.{i}"))
        return self.ops.linear(torch.cat(parts, -1), self._fc)

    def forward(
        self,
        batch: RaggedBatch,
        cache: BlockCache,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """hidden [T, H]: features of each row; None = zeros."""
        tokens = batch.ids()[0]
        features = self.embed(tokens) if hidden is None else hidden.to(self.activation_dtype)
        embedded = self._target.embed(tokens).to(self.activation_dtype)
        sides = self._normed(embedded, SIDES[0]), self._normed(features, SIDES[1])
        x = self.ops.linear(torch.cat(sides, -1), self._input)
        return self.layer.forward(replace(batch, tokens=[0] * len(tokens)), cache, None, x, taps)

    def rounded(self, quantization: Quantization) -> Model:
        """A head is rounded when it is made."""
        raise InternalError("a head is no target, and has no rounded copy")

    def embed(self, ids: Seq[int]) -> Tensor:
        """Rows without features [n, H]: zeros."""
        return torch.zeros(len(ids), self.config.hidden_size, dtype=self.activation_dtype, device=self.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [R, H]."""
        return self.layer.norm(hidden)

    def head(self, ids: Seq[int]) -> Tensor:
        """Rows of its LM head, by its own ids, float32 [n, H]."""
        return self.layer.head(ids)

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """hidden [R, H] -> logits of its own ids [R, n]."""
        return self.layer.logits(hidden, num_ids)

    def best(self, hidden: Tensor, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Its own id and value of the largest logit of each of these rows; only with native operators."""
        return self.layer.best(hidden, rows, num_ids)

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        return self.ops.rms_norm(rows, self._norms[f"{name}.weight"], self.config.norm_eps)

    def _matrix(self, weight: Tensor, rounded: Quantization | None) -> Any:
        """A matrix as the operators take it."""
        return Product.of(self._target, [weight], None, rounded).matrix
