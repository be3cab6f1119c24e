"""The layers of the drafter dflash as a model: sizes, weights, and the spec that backends compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from forerun.blocks import HEAD, Features, Spec, weight_shapes
from forerun.config import Quantization
from forerun.drafters.shared.head_matrices import Weight, loadable
from forerun.errors import UnsupportedModel, shown
from forerun.host_tensor import HostTensor
from forerun.kv.cache import BlockCache, CacheShape
from forerun.models.configs import size
from forerun.models.opened import read_config
from forerun.models.saving import config_to_dict
from forerun.ops import load_model
from forerun.ops.model import Model
from forerun.ops.passes import Lent
from forerun.sampling.largest import Ids
from forerun.types import RaggedBatch

OWN_KEYS = {  # entries of config.json besides a decoder's
    *("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers"),
    *("is_causal", "mask_token_id", "draft_vocab_size"),
}
BLOCK = 16  # tokens of a block, if a published config does not say
NEUTRAL = {"input_embedding_scale": (1, None), "output_multiplier": (1, None), "final_logit_softcapping": (0, None)}


class ContextModel(Model, Protocol):
    """A model whose blocks attend to earlier tokens through a context: keys and values made of the target's rows."""

    def remember(self, batch: RaggedBatch, cache: BlockCache, layer_rows: Seq[Any]) -> None:
        """Compute the keys and values of the batch's tokens from the target's rows, and write them into the cache.

        layer_rows: the target's rows [n, H] after each layer in DFlashConfig.layers.
        """


@dataclass(frozen=True)
class DFlashConfig:
    """The sizes of a DFlash drafter, as its config.json gives them.

    decoder: the spec of the drafter's layers. layers: the target's layers after which the drafter reads the residual
    stream. block: the number of rows of a block: one for the last committed token, and one for each token to guess.
    mask_id: the id of the mask, which is the input of each row with a token to guess. draft_vocab: the number of ids
    that are drafted; None = all.
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
        """Return the entries of config.json. As in published DFlash models, layer id j means the output of layer j."""
        ids = {"mask_token_id": self.mask_id, "target_layer_ids": [k - 1 for k in self.layers]}
        keys = {
            "architectures": ["ForerunDFlash"],
            "block_size": self.block,
            "num_target_layers": num_target_layers,
            "dflash_config": ids,
        }
        vocab = {} if self.draft_vocab is None else {"draft_vocab_size": self.draft_vocab}
        return {**config_to_dict(self.decoder), **keys, **vocab}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], path: str) -> DFlashConfig:
        """Make the config from a config.json of `to_json`, or of a model of z-lab. path: the folder, for messages.

        Raises UnsupportedModel for settings that forerun does not compute.
        """
        _refuse_others(raw, path)
        nested = dict(raw["dflash_config"])
        layers, mask_id = nested.get("target_layer_ids"), nested.get("mask_token_id", raw.get("mask_token_id"))
        if not isinstance(layers, list) or not layers or not all(type(j) is int and j >= 0 for j in layers):
            raise UnsupportedModel(
                f"{shown(path)} has target_layer_ids={shown(str(layers))} in its dflash_config: it must list layers"
            )
        if type(mask_id) is not int or mask_id < 0:
            raise UnsupportedModel(f"{shown(path)} has mask_token_id={shown(str(mask_id))}: it must be an id")
        block = {"block_size": nested.get("block_size", raw.get("block_size", BLOCK))}
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
    """Raise UnsupportedModel for models that are related to DFlash but compute something else."""
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
    """Return the shapes of the weights of all layers, by their published names."""
    return {
        name.removeprefix("model."): shape
        for name, shape in weight_shapes(config).items()
        if name.startswith("model.layers.")
    }


def shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights by their published names. Where not all ids are drafted, d2t is included."""
    h = config.decoder.hidden_size
    context: dict[str, tuple[int, ...]] = {"fc.weight": (h, h * len(config.layers)), "hidden_norm.weight": (h,)}
    vocab = {} if config.draft_vocab is None else {"d2t": (config.draft_vocab,)}
    return {**context, "norm.weight": (h,), **layer_shapes(config.decoder), **vocab}


def spec_of(config: DFlashConfig, target: Model, num_ids: int) -> Spec:
    """Return the spec of the layers. Each row attends to its whole block, and to a context made of the target's rows.

    num_ids: how many ids are drafted.
    """
    decoder, norm, has_head = config.decoder, config.decoder.final_norm, config.draft_vocab is not None
    whole = [replace(b, attention=b.attention and replace(b.attention, sees="all")) for b in decoder.blocks]
    features = Features(
        target.config.vocab_size,
        decoder.hidden_size,
        num=len(config.layers),
        joined=True,
        input="context",
        context_norm=norm,
    )
    lends = target.config if not has_head and isinstance(target.config, Spec) else decoder
    return replace(
        decoder,
        vocab_size=num_ids,
        blocks=tuple(whole),
        tied=False,
        head=has_head,
        embed_scale=1.0,
        logit_scale=lends.logit_scale,
        logit_softcap=lends.logit_softcap,
        features=features,
    )


def make(
    config: DFlashConfig, weights: Mapping[str, Weight], ids: Ids, target: Model, rounded: Quantization | None
) -> ContextModel:
    """Load the layers with the target's operators. weights: by published names. ids [n]: the ids that are drafted."""
    spec = spec_of(config, target, len(ids))
    named = {f"model.{name}" if name.startswith(("layers.", "norm.")) else name: w for name, w in weights.items()}
    if spec.head:
        named[HEAD] = HostTensor.of(target.head(ids.tolist()))
    lent = Lent(target, ids.tolist())
    ready = loadable(spec, named, target, rounded)
    return cast(ContextModel, load_model(spec, ready, target.ops, device=target.device, lent=lent))
