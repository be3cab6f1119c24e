"""The head of the drafter eagle as a model: its sizes, its weights, and one forward that Runner runs.

One class computes the heads of `forerun train head`, of EAGLE-1 and 2, of EAGLE-3 and of 3.1. They differ in a few
switches of EagleConfig, and in which norms, biases and matrices they have: what a head has no weights for is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import EMBEDDING, Spec, weight_shapes
from forerun.config import Quantization
from forerun.drafters import head_files
from forerun.drafters.head_matrices import Weight, dense_of, joined_product, quantised
from forerun.errors import InternalError, UnsupportedModel, shown
from forerun.kv.cache import BlockCache
from forerun.models.opened import read_config
from forerun.models.saving import config_to_dict
from forerun.ops import load_model
from forerun.ops.quantised import QuantisedMatrix
from forerun.ops.quantising import scheme_of
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import Projections, TorchModel
from forerun.types import Model, RaggedBatch, Stop

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

    decoder: Spec
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
    return {name: shape for name, shape in weight_shapes(config.decoder).items() if name != EMBEDDING}


class Logits(Protocol):
    """What makes logits of rows, as Model.logits does."""

    def __call__(self, hidden: Tensor, num_ids: int | None = None) -> Tensor: ...


@dataclass(frozen=True)
class _Head:
    """An LM head of a head's own."""

    ops: ReferenceOps
    product: Projections

    def __call__(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        return self.product.apply(self.ops, hidden)[0][:, :num_ids].float()


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
        weights: Mapping[str, Weight],
        ids: Tensor,
        target: Model,
        quantization: str,
        num_ids: int | None = None,
    ) -> None:
        self.head_config, self.config, self.ids, self._target = config, config.decoder, ids, target
        self.device, self.ops, self.cache_dtype = target.device, target.ops, target.cache_dtype
        self.weight_dtype, self.activation_dtype = target.weight_dtype, target.activation_dtype
        own = {
            name: weight if isinstance(weight, QuantisedMatrix) else weight.to(self.device, self.weight_dtype)
            for name, weight in weights.items()
        }
        self._rounded = None if quantization == "none" else Quantization.parse(quantization)
        norms = {n: w for n, w in own.items() if isinstance(w, Tensor) and w.ndim == 1 and n.endswith(".weight")}
        self._norms = {name: weight.to(self.activation_dtype) for name, weight in norms.items()}
        self._fc, self._input = (self._product(own, [n]) if f"{n}.weight" in own else None for n in ("fc", "input"))
        self._embedding: Any = own.get(OWN_EMBEDDING)
        self._model, self._logits = self._made(own, num_ids)
        if hasattr(self._model, "best"):
            self.best = self._model.best
        self._ahead = self._made_ahead()
        if self._ahead is not None:
            self.run_ahead = self._run_ahead
            self.tells_confidence = bool(self._model.tells_confidence)

    def _made(self, own: Mapping[str, Weight], num_ids: int | None) -> tuple[Any, Logits]:
        """The layers as a model, and what makes logits of its rows.

        A head whose layers are a decoder's runs as one, with its rows of the target's LM head as its own. Others have
        blocks that no backend runs whole: their products are packed one by one.
        """
        c = self.config
        shapes = {name: own[name] for name in layer_shapes(self.head_config)}
        if c.final_norm is not None and c.blocks[0].pre_attention is not None:
            whole = self._whole(shapes, self._target.head(self.ids.tolist()).to(self.weight_dtype))
            return whole, whole.logits
        model = TorchModel(c, cast(Mapping[str, Tensor], shapes), self.ops, self._product)
        if OWN_HEAD not in own and len(self.ids) == num_ids:
            return model, self._target.logits
        rows = own[OWN_HEAD] if OWN_HEAD in own else self._target.head(self.ids.tolist()).to(self.weight_dtype)
        head = self._product({OWN_HEAD: rows}, ["lm_head"])
        self._head_bytes = head.nbytes
        return model, _Head(self.ops, head)

    def _whole(self, weights: Mapping[str, Weight], rows: Tensor) -> Any:
        """The layers and rows of an LM head as a decoder; matrices that are rounded as asked for stay as they are."""
        stored = [weight for weight in weights.values() if isinstance(weight, QuantisedMatrix)]
        wanted = None if self._rounded is None else scheme_of(self._rounded.bits, self._rounded.group)
        is_rounded = bool(stored) and all(weight.scheme == wanted for weight in stored)
        if is_rounded and self._rounded is not None and wanted is not None and self.ops.packs_scheme(wanted):
            head = quantised(rows, scheme_of(max(8, wanted.bits), wanted.group))
            return load_model(self.config, cast(Mapping[str, Tensor], {EMBEDDING: head, **weights}), self.ops)
        dense = {name: dense_of(weight).to(self.device, self.weight_dtype) for name, weight in weights.items()}
        whole = load_model(self.config, {EMBEDDING: rows, **dense}, self.ops)
        return whole if self._rounded is None or is_rounded else whole.rounded(self._rounded)

    tells_confidence = False  # whether `run_ahead` is there and takes stops
    joins_ahead = False  # whether it takes the target's rows as they are
    _head_bytes = 0

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a pass reads, about: the weights of its layers, and of its LM head where it is its own."""
        return int(self._model.bytes_per_pass) + self._head_bytes

    def _made_ahead(self) -> Any:
        """How a greedy draft is made in one call, where the layers and the target are native; else None."""
        if not (hasattr(self._model, "run_ahead") and hasattr(self._target, "ahead")):
            return None
        if self._embedding is not None or self._input is None:
            return None
        norms = [self._norms.get(f"{name}.weight") for name in SIDES]
        [(matrix, _)] = self._input.parts
        own = self.ids.tolist(), norms, self._eps, matrix
        if self._fc is None or "input_norm.weight" in self._norms or self.head_config.target_size is not None:
            return self._target.ahead(*own)
        [(layers, bias)] = self._fc.parts
        if bias is not None:
            return self._target.ahead(*own)
        self.joins_ahead = True
        layer_norms = [self._norms.get(f"fc_norm.{i}.weight") for i in range(len(self.head_config.layers))]
        return self._target.ahead(*own, layer_norms, layers, head_files.LARGEST)

    @property
    def _eps(self) -> float:
        norm = self.config.blocks[0].pre_mlp
        return 0.0 if norm is None else norm.eps

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
        own = replace(batch, tokens=[0] * len(tokens))
        if self._input is not None:
            x = self._product_of([self._embedded(tokens), features], SIDES, self._input)
            return self._ran(own, cache, x, {}, taps)
        # EAGLE-3: attention reads both, and the residual stream begins with the features.
        normed = self._normed(features, SIDES[1])
        both = torch.cat((self._normed(self._embedded(tokens), SIDES[0]), normed), -1)
        x = normed if self.head_config.norm_before_residual else features
        return self._ran(own, cache, x, {"read": both}, taps)

    def _run_ahead(
        self,
        batch: RaggedBatch,
        lengths: list[int],
        cache: BlockCache,
        num_ids: int,
        layers: Seq[int] | None,
        hidden: Tensor | None,
        stops: Seq[Stop] = (),
        layer_rows: Seq[Tensor] = (),
    ) -> list[list[int]] | None:
        """Its own ids of the likeliest tokens behind each run, in one call.

        hidden [T, H]: features of the runs' rows. layer_rows: if it `joins_ahead`, in their place the target's rows
        behind each layer [T, H]. The rest is as for CpuModel.run_ahead.
        """
        given = batch, lengths, cache, num_ids, layers, hidden, self._ahead, stops, layer_rows
        found: list[list[int]] | None = self._model.run_ahead(*given)
        return found

    def _ran(
        self,
        batch: RaggedBatch,
        cache: BlockCache,
        x: Tensor,
        read: Mapping[str, Tensor],
        taps: Mapping[int, Tensor] | None,
    ) -> Tensor:
        """The layers over rows x. read: what the first one's attention reads in its place, if anything."""
        own = dict(zip([self.config.num_layers], (taps or {}).values(), strict=False))
        out: Tensor = self._model.forward(batch, cache, None, x, own, **read)
        for rows in (taps or {}).values():
            rows.copy_(out if self.head_config.norm_output else own[self.config.num_layers])
        return out

    def wait(self) -> None:
        """A head waits as its target does."""
        self._target.wait()

    def rounded(self, quantization: Quantization) -> Model:
        """A head is rounded when it is made."""
        raise InternalError("a head is no target, and has no rounded copy")

    def embed(self, ids: Seq[int]) -> Tensor:
        """Rows without features [n, H]: zeros."""
        return torch.zeros(len(ids), self.config.hidden_size, dtype=self.activation_dtype, device=self.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [R, H]."""
        return self._model.norm(hidden)  # type: ignore[no-any-return]

    def head(self, ids: Seq[int]) -> Tensor:
        """A head is no target."""
        raise InternalError("a head is no target, and shows no rows of its LM head")

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """hidden [R, H] -> logits of its own ids [R, n], or of all that the target's matrix has where it reads that."""
        return self._logits(hidden, num_ids)

    def _embedded(self, tokens: list[int]) -> Tensor:
        if self._embedding is None:
            return self._target.embed(tokens).to(self.activation_dtype)
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        return F.embedding(ids, self._embedding).to(self.activation_dtype)

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        """Rows behind a norm; as they are where the head has none of that name."""
        weight = self._norms.get(f"{name}.weight")
        return rows if weight is None else self.ops.rms_norm(rows, weight, self._eps)

    def _product_of(self, parts: Seq[Tensor], names: Seq[str], matrix: Projections | None) -> Tensor:
        """[norm(a) | norm(b) | ...] times a matrix. names: of the norms; without one a part is as it is."""
        assert matrix is not None
        [(weight, bias)] = matrix.parts
        norms = [self._norms.get(f"{name}.weight") for name in names]
        return self.ops.join(parts, norms, self._eps, weight, bias)

    def _product(self, weights: Mapping[str, Any], names: list[str]) -> Projections:
        return joined_product(self._target, self._rounded, weights, names)
