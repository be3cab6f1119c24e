"""The layers of the drafter dflash: sizes, weights, keys and values of the context, and one pass of a block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forerun.blocks import Spec, weight_shapes
from forerun.config import Quantization
from forerun.drafters import head_files
from forerun.drafters.head_matrices import Product, joined_product
from forerun.errors import UnsupportedModel, shown
from forerun.kv.cache import BlockCache, CacheShape
from forerun.kv.pool import Pool
from forerun.models.configs import size
from forerun.models.opened import read_config
from forerun.models.saving import config_to_dict
from forerun.ops.reference import Scoring
from forerun.ops.rotary import Rotations
from forerun.ops.torch import Normed, Parts, Rotation, TorchBlock, normed
from forerun.types import CacheView, Model, RaggedBatch

OWN_KEYS = {  # of config.json, beside those of a decoder
    *("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers"),
    *("is_causal", "mask_token_id", "draft_vocab_size"),
}
BLOCK = 16  # tokens, where a published config does not say it
NEUTRAL = {"input_embedding_scale": (1, None), "output_multiplier": (1, None), "final_logit_softcapping": (0, None)}
Context = tuple[Tensor, Tensor]  # keys and values of one layer [n, kv_heads, D]


@dataclass(frozen=True)
class DFlashConfig:
    """The sizes of a block drafter.

    decoder: its layers. layers: behind which of the target's layers it reads. block: rows of a pass, the last committed
    token and those that are guessed. mask_id: the id whose embedding stands for a token that is guessed. draft_vocab:
    ids that are drafted; None = all.
    """

    decoder: Spec
    layers: tuple[int, ...]
    block: int
    mask_id: int
    draft_vocab: int | None = None

    @property
    def cache_shape(self) -> CacheShape:
        return self.decoder.cache_shape

    def to_json(self, num_target_layers: int) -> dict[str, Any]:
        """For config.json; a layer id is that of the layer whose output is read, as published DFlash models count."""
        ids = {"mask_token_id": self.mask_id, "target_layer_ids": [k - 1 for k in self.layers]}
        own = {
            "architectures": ["ForerunDFlash"],
            "block_size": self.block,
            "num_target_layers": num_target_layers,
            "dflash_config": ids,
        }
        vocab = {} if self.draft_vocab is None else {"draft_vocab_size": self.draft_vocab}
        return {**config_to_dict(self.decoder), **own, **vocab}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], path: str) -> DFlashConfig:
        """Read what `to_json` wrote, or what z-lab's models have. Raises UnsupportedModel for what is not computed."""
        _refuse_others(raw, path)
        own = dict(raw["dflash_config"])
        layers, mask_id = own.get("target_layer_ids"), own.get("mask_token_id", raw.get("mask_token_id"))
        if not isinstance(layers, list) or not layers or not all(type(j) is int and j >= 0 for j in layers):
            raise UnsupportedModel(
                f"{shown(path)} has target_layer_ids={shown(str(layers))} in its dflash_config: it must list layers"
            )
        if type(mask_id) is not int or mask_id < 0:
            raise UnsupportedModel(f"{shown(path)} has mask_token_id={shown(str(mask_id))}: it must be an id")
        block = {"block_size": own.get("block_size", raw.get("block_size", BLOCK))}
        vocab = size(raw, "draft_vocab_size") if "draft_vocab_size" in raw else None
        rest = {key: value for key, value in raw.items() if key not in (*OWN_KEYS, "mask_token_id", "draft_vocab_size")}
        config = cls(
            read_config(rest), tuple(j + 1 for j in layers), size(block, "block_size", least=2), mask_id, vocab
        )
        if config.decoder.has_windows:
            raise UnsupportedModel(
                f"{shown(path)} has layers with a sliding window, which forerun does not compute for dflash: use one "
                "with full attention"
            )
        return config


def _refuse_others(raw: Mapping[str, Any], path: str) -> None:
    """Raise UnsupportedModel for relatives of DFlash that compute something else."""
    kinds = raw.get("architectures") or []
    other = next((kind for kind in kinds if "DSpark" in str(kind) or "DFlash2" in str(kind)), None)
    if other is not None or not isinstance(raw.get("dflash_config"), Mapping):
        what = "no dflash_config" if other is None else f"the architecture {shown(str(other))}"
        raise UnsupportedModel(
            f"{shown(path)} has {what}, and forerun computes DFlash itself, not DSpark or DFlash 2: name a "
            "DFlashDraftModel, or train one with `forerun train head --method dflash`"
        )
    if raw.get("is_causal"):
        raise UnsupportedModel(f"{shown(path)} has is_causal={raw['is_causal']}: forerun computes whole blocks alone")
    known = {"mask_token_id", "target_layer_ids", "block_size"}
    for key, value in raw["dflash_config"].items():
        if key not in known and value not in NEUTRAL.get(key, ()):
            raise UnsupportedModel(
                f"{shown(path)} sets {shown(str(key))}={shown(str(value))} in its dflash_config, which forerun does "
                "not compute: use a DFlash model without it"
            )


def layer_shapes(config: Spec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights of all layers, under the published names."""
    return {
        name.removeprefix("model."): shape
        for name, shape in weight_shapes(config).items()
        if name.startswith("model.layers.")
    }


def shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, under the published names; d2t where not all ids are drafted."""
    h = config.decoder.hidden_size
    own: dict[str, tuple[int, ...]] = {"fc.weight": (h, h * len(config.layers)), "hidden_norm.weight": (h,)}
    vocab = {} if config.draft_vocab is None else {"d2t": (config.draft_vocab,)}
    return {**own, "norm.weight": (h,), **layer_shapes(config.decoder), **vocab}


class DFlashModel:
    """The layers on the operators of their target, whose embedding and LM head they use.

    ids [n]: those that are drafted, ascending.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        ids: Tensor,
        target: Model,
        rounded: Quantization | None,
    ) -> None:
        self.config, self.ids, self._target, self._ops = config, ids, target, target.ops
        self.device, self.cache_dtype, self._dtype = target.device, target.cache_dtype, target.activation_dtype
        self._fc = Product.of(target, [weights["fc.weight"]], None, rounded)
        own = {name: weight.to(self.device) for name, weight in weights.items()}
        parts = Parts(own, self._dtype, partial(joined_product, target, rounded), apart=True)
        norm = config.decoder.final_norm
        self._norms = {name: Normed.of(parts, name, norm) for name in ("hidden_norm", "norm")}
        self._blocks = [TorchBlock(block, parts, f"layers.{i}.") for i, block in enumerate(config.decoder.blocks)]
        attention = self._blocks[0].attention
        assert attention is not None
        assert attention.spec.rope is not None
        self._rotations = Rotations(attention.spec.rope, attention.spec.head_dim, self.device, self._dtype)
        self._mask = target.embed([config.mask_id]).to(self._dtype)
        self._head = None
        if config.draft_vocab is not None:
            self._head = Product.of(target, [target.head(ids.tolist())], None, rounded)

    def remember(self, taps: Seq[Tensor], slots: Mapping[int, tuple[int, int]], cache: BlockCache) -> None:
        """Write keys and values of committed tokens into the cache, whose rows are reserved.

        taps: the target's rows [n, H] behind each of its layers that are read, for all slots one after the other.
        slots: by slot, the positions of its rows, from and to.
        """
        rows = torch.cat([tap.to(self._dtype).clamp(-head_files.LARGEST, head_files.LARGEST) for tap in taps], -1)
        x = self._normed("hidden_norm", self._fc(rows))
        positions = [position for start, stop in slots.values() for position in range(start, stop)]
        places = torch.cat([cache.rows(slot, start, stop) for slot, (start, stop) in slots.items()])
        rotation = self._rotation(positions)
        for i, block in enumerate(self._blocks):
            k, v = self._keys(block, x, rotation)
            cache.pools[i].write(places, k, v)

    def guess(self, last: Mapping[int, tuple[int, int]], cache: BlockCache) -> Tensor:
        """Rows [B, block - 1, H] behind the final norm: of each token that follows a last one, all at once.

        last: by slot, the last committed token and its position, before which its slot's rows in the cache end.
        """
        size = self.config.block
        anchors = self._target.embed([token for token, _ in last.values()]).to(self._dtype)
        masks = self._mask.expand(len(last), size - 1, -1)
        x = torch.cat((anchors.unsqueeze(1), masks), 1).flatten(0, 1)
        starts = [start for _, start in last.values()]
        rotation = self._rotation([start + i for start in starts for i in range(size)])
        places = [cache.rows(slot, 0, start) for slot, (_, start) in last.items()]
        view = self._ops.plan(_whole_blocks(starts, size, self.device))
        for i, block in enumerate(self._blocks):
            attention = block.attention
            assert attention is not None
            y = normed(block.pre_attention, self._ops, x)
            q = attention.queries(self._ops, attention.project(self._ops, y, "q_proj")["q_proj"], rotation)
            pool = _with_blocks(cache.pools[i], places, *self._keys(block, y, rotation))
            scoring = Scoring(attention.spec.scale, sees_all=True)
            seen = self._ops.attention(q, None, None, pool=pool, view=view, window=None, scoring=scoring)
            x = block.attended(self._ops, x, attention.o.apply(self._ops, seen.flatten(1))[0])
            x = block.fed_forward(self._ops, x, x)
        return torch.unflatten(self._normed("norm", x), 0, (-1, size))[:, 1:]

    def logits(self, rows: Tensor) -> Tensor:
        """rows [R, H] -> logits of its ids [R, n]."""
        if self._head is not None:
            return self._head(rows)
        return self._target.logits(rows)[:, : len(self.ids)]

    def _rotation(self, positions: Seq[int]) -> Rotation:
        return self._rotations.at(torch.tensor(positions, device=self.device), max(positions, default=0) + 1)

    def _keys(self, block: TorchBlock, x: Tensor, rotation: Rotation) -> Context:
        assert block.attention is not None
        found = block.attention.project(self._ops, x, "k_proj")
        return block.attention.keys_values(self._ops, found, rotation)

    def _normed(self, name: str, rows: Tensor) -> Tensor:
        return normed(self._norms[name], self._ops, rows)


def _whole_blocks(starts: Seq[int], size: int, device: torch.device) -> CacheView:
    """Return a view in which the rows of a block see its context, of so many rows, and the block, side by side."""
    ends = list(itertools.accumulate(start + size for start in starts))
    rows = torch.arange(ends[-1], device=device)
    reads = [rows[end - start - size : end] for start, end in zip(starts, ends, strict=True)]
    positions = [start + i for start in starts for i in range(size)]
    run_starts, slots = list(range(0, len(positions) + 1, size)), list(range(len(starts)))
    batch = RaggedBatch([0] * len(positions), positions, run_starts, slots, list(starts))
    return CacheView(batch, torch.cat([read[-size:] for read in reads]), reads)


def _with_blocks(pool: Pool, places: Seq[Tensor], k: Tensor, v: Tensor) -> Pool:
    """Return the context of each block in a pool, and behind it the block's own rows, in the type of these."""
    keys, values, size = list[Tensor](), list[Tensor](), len(k) // len(places)
    for b, rows in enumerate(places):
        own = slice(b * size, (b + 1) * size)
        old_keys, old_values = pool.read(rows)
        keys += (old_keys.to(k.dtype), k[own])
        values += (old_values.to(v.dtype), v[own])
    return Pool(torch.cat(keys), torch.cat(values))
