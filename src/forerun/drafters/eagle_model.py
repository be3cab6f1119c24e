"""The head of the drafter eagle as a model: its sizes, its weights, and one forward that Runner runs.

One class computes the heads of `forerun train head`, of EAGLE-1 and 2, of EAGLE-3 and of 3.1. They differ in a few
switches of EagleConfig, and in which norms, biases and matrices they have: what a head has no weights for is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.config import Quantization
from forerun.drafters import head_files
from forerun.drafters.head_matrices import Product
from forerun.errors import InternalError, UnsupportedModel, shown
from forerun.kv.cache import BlockCache
from forerun.models.layers import Decoder, DecoderConfig, Layer, Projections, Rope, parameter_shapes
from forerun.models.loading import read_config
from forerun.models.runner import Model
from forerun.models.saving import config_to_dict
from forerun.types import RaggedBatch

EMBEDDING = "model.embed_tokens.weight"  # of a decoder: here the LM head's rows, for nothing is looked up
FINAL_NORM = "model.norm.weight"
OWN_EMBEDDING, OWN_HEAD = "embed_tokens.weight", "lm_head.weight"  # of heads that do not use the target's
SIDES = ("embedding_norm", "hidden_norm")


@dataclass(frozen=True)
class EagleConfig:
    """The sizes of a head. decoder: its layers, as a decoder over the ids that it drafts, tied to its LM head.

    layers: behind which of the target's layers it reads; () = behind the target's final norm. The rest is of published
    heads. target_size: the width of the target's rows; None = that of its own. norm_before_residual: the residual
    stream begins with the features behind their norm. norm_output: the next step's features are the rows behind the
    final norm (EAGLE 3.1).
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    target_size: int | None = None
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def reads_size(self) -> int:
        """The width of the target's rows."""
        return self.target_size or self.decoder.hidden_size

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

    The batch's tokens are the target's ids. `forward` returns the rows that the LM head reads; every tap gets what the
    next step takes for features. weights: by our names, of `input_shapes`, `layer_shapes` and what published heads
    have besides. ids [n]: the target's ids of its own; without an LM head of its own it takes their rows of the
    target's, or that one whole where they are all. num_ids: ids of the target.
    """

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Tensor],
        ids: Tensor,
        target: Model,
        quantization: str,
        num_ids: int | None = None,
    ) -> None:
        self.head_config, self.config, self.ids, self._target = config, config.decoder, ids, target
        self.device, self.ops, self.cache_dtype = target.device, target.ops, target.cache_dtype
        self.weight_dtype, self.activation_dtype = target.weight_dtype, target.activation_dtype
        own = {name: weight.to(self.device, self.weight_dtype) for name, weight in weights.items()}
        self._rounded = None if quantization == "none" else Quantization.parse(quantization)
        norms = {n: w for n, w in own.items() if w.ndim == 1 and n.endswith(".weight")}
        self._norms = {name: weight.to(self.activation_dtype) for name, weight in norms.items()}
        self._fc, self._input = (self._product(own, [n]) if f"{n}.weight" in own else None for n in ("fc", "input"))
        self._embedding = own.get(OWN_EMBEDDING)
        self._decoder = None
        if layer_shapes(config).keys() <= own.keys():
            rows = target.head(ids.tolist()).to(self.weight_dtype)
            layer = Decoder(config.decoder, {EMBEDDING: rows, **{n: own[n] for n in layer_shapes(config)}}, self.ops)
            self._decoder = layer if self._rounded is None else layer.rounded(self._rounded)
        else:
            self._make_layers(own, num_ids)
        self.compiled = None if self._decoder is None else self._decoder.compiled
        self._ahead = self._made_ahead()

    def _make_layers(self, own: Mapping[str, Tensor], num_ids: int | None) -> None:
        """Layers that are no decoder's, and the LM head behind them: they are run one operator at a time."""
        c = self.config
        self._head: Projections | None = None
        if OWN_HEAD in own:
            self._head = self._product(own, ["lm_head"])
        elif len(self.ids) != num_ids:
            rows = self._target.head(self.ids.tolist()).to(self.weight_dtype)
            self._head = self._product({OWN_HEAD: rows}, ["lm_head"])
        named = {**own, **self._norms}
        self._layers = [Layer.of(c, named, i, self._product) for i in range(c.num_layers)]
        self._rope = Rope(c.rope, c.head_dim, self.device, self.activation_dtype)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a pass reads, about: the weights of its layers, and of its LM head where it is its own."""
        if self._decoder is not None:
            return self._decoder.bytes_per_pass
        products = [p for layer in self._layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(product.nbytes for product in (*products, *([] if self._head is None else [self._head])))

    @property
    def runs_ahead(self) -> bool:
        """Whether a greedy draft can be had in one call: where the head's operators are native, and the target's."""
        return self._ahead is not None

    def _made_ahead(self) -> Any:
        source = getattr(self._target, "compiled", None)
        if self.compiled is None or source is None or self._embedding is not None or self._input is None:
            return None
        norms = [self._norms.get(f"{name}.weight") for name in SIDES]
        [(matrix, _)] = self._input.parts
        return source.ahead(self.ids.tolist(), norms, self.config.norm_eps, matrix)

    def joined(self, features: Seq[Tensor]) -> Tensor:
        """The target's rows [n, target_size] behind each of the layers, as features of the head [n, H]."""
        parts = [x.to(self.activation_dtype).clamp(-head_files.LARGEST, head_files.LARGEST) for x in features]
        names = [f"fc_norm.{i}" for i in range(len(parts))]
        if self._fc is None or "input_norm.weight" in self._norms:
            normed = torch.cat([self._normed(x, name) for x, name in zip(parts, names, strict=True)], -1)
            rows = self._normed(normed, "input_norm")
            return rows if self._fc is None else self._fc.apply(self.ops, rows)[0]
        return self._product_of(parts, names, self._fc)

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
        if self._input is None:  # EAGLE-3: attention reads both, and the residual stream begins with the features
            normed = self._normed(features, SIDES[1])
            both = torch.cat((self._normed(self._embedded(tokens), SIDES[0]), normed), -1)
            return self._run(batch, cache, normed if self.head_config.norm_before_residual else features, both, taps)
        x = self._product_of([self._embedded(tokens), features], SIDES, self._input)
        if self._decoder is None:
            return self._run(batch, cache, x, None, taps)
        return self._decoder.forward(replace(batch, tokens=[0] * len(tokens)), cache, None, x, taps)

    def run_ahead(
        self,
        batch: RaggedBatch,
        lengths: list[int],
        cache: BlockCache,
        num_ids: int,
        layers: Seq[int] | None,
        hidden: Tensor,
    ) -> list[list[int]] | None:
        """Its own ids of the likeliest tokens behind each run, in one call; only where it `runs_ahead`.

        hidden [T, H]: features of the runs' rows. The rest is as for CpuDecoder.run_ahead.
        """
        assert self._decoder is not None
        tokens = batch.ids()[0]
        x = self._product_of([self._embedded(tokens), hidden], SIDES, self._input)
        own = replace(batch, tokens=[0] * len(tokens))
        return self._decoder.run_ahead(own, lengths, cache, num_ids, layers, x, self._ahead)

    def _run(
        self, batch: RaggedBatch, cache: BlockCache, x: Tensor, read: Tensor | None, taps: Mapping[int, Tensor] | None
    ) -> Tensor:
        """The layers one after the other. read: what the first one's attention reads, see Layer.run."""
        view, rotation = self.ops.plan(cache.view(batch)), self._rope.of(batch)
        for i, layer in enumerate(self._layers):
            x = layer.run(self.config, self.ops, x, rotation, (cache.keys[i], cache.values[i]), view, read)
            read = None
        out = self._normed(x, "model.norm")
        for rows in (taps or {}).values():
            rows.copy_(out if self.head_config.norm_output else x)
        return out

    def rounded(self, quantization: Quantization) -> Model:
        """A head is rounded when it is made."""
        raise InternalError("a head is no target, and has no rounded copy")

    def embed(self, ids: Seq[int]) -> Tensor:
        """Rows without features [n, H]: zeros."""
        return torch.zeros(len(ids), self.config.hidden_size, dtype=self.activation_dtype, device=self.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [R, H]."""
        return self._normed(hidden, "model.norm") if self._decoder is None else self._decoder.norm(hidden)

    def head(self, ids: Seq[int]) -> Tensor:
        """A head is no target."""
        raise InternalError("a head is no target, and shows no rows of its LM head")

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """hidden [R, H] -> logits of its own ids [R, n], or of all that the target's matrix has where it reads that."""
        if self._decoder is not None:
            return self._decoder.logits(hidden, num_ids)
        if self._head is None:
            return self._target.logits(hidden, num_ids)
        return self._head.apply(self.ops, hidden)[0][:, :num_ids].float()

    def best(self, hidden: Tensor, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Its own id and value of the largest logit of each of these rows; only with native operators."""
        assert self._decoder is not None
        return self._decoder.best(hidden, rows, num_ids)

    def _embedded(self, tokens: list[int]) -> Tensor:
        if self._embedding is None:
            return self._target.embed(tokens).to(self.activation_dtype)
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        return F.embedding(ids, self._embedding).to(self.activation_dtype)

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        """Rows behind a norm; as they are where the head has none of that name."""
        weight = self._norms.get(f"{name}.weight")
        return rows if weight is None else self.ops.rms_norm(rows, weight, self.config.norm_eps)

    def _product_of(self, parts: Seq[Tensor], names: Seq[str], matrix: Projections | None) -> Tensor:
        """[norm(a) | norm(b) | ...] times a matrix. names: of the norms; without one a part is as it is."""
        assert matrix is not None
        [(weight, bias)] = matrix.parts
        norms = [self._norms.get(f"{name}.weight") for name in names]
        return self.ops.join(parts, norms, self.config.norm_eps, weight, bias)

    def _product(self, weights: Mapping[str, Tensor], names: list[str]) -> Projections:
        """The matrices of these names, which read the same rows, as one product that the operators take."""
        parts = [weights[f"{name}.weight"] for name in names]
        biases = [weights.get(f"{name}.bias") for name in names]
        bias = None if biases[0] is None else torch.cat([part for part in biases if part is not None])
        made, sizes = Product.of(self._target, parts, bias, self._rounded), [len(part) for part in parts]
        whole = made.matrix, made.bias
        return Projections([whole], sizes, None) if len(parts) == 1 else Projections([], sizes, whole)
