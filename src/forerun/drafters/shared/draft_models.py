"""Loads a draft model beside its target: chooses the model, makes its cache, and finds the ids that it never drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from forerun import ops
from forerun.blocks import Spec
from forerun.config import AUTO
from forerun.drafters import OwnCheckpoint, Target, needs_a_model
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.drafters.shared.model_options import Draws, Loads, head_rows, rounding
from forerun.drafters.shared.short_vocab import LARGE, ShortVocabulary
from forerun.errors import BadOption, shown
from forerun.kv import KVCache
from forerun.kv.cache import BlockCache
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.runner import Runner
from forerun.ops.model import KeepsCache, Model, ModelConfig
from forerun.text.tokenizer import compare


def over(model: Model, target: Target, options: Draws, holes: Seq[int], layers: Seq[int] | None = None) -> ModelDrafter:
    """Make a drafter that runs the draft model `model` beside the target, with a cache as large as the target's.

    options: how tokens are drawn. holes: ids that are never drafted. layers: the layers that run and are cached; None =
    all.
    """
    cache = cache_for(model, target, layers)
    rows = head_rows("model", options.draft_vocab)
    drafter = ModelDrafter(Runner(model, cache, target.num_ids, holes, layers=layers, head_rows=rows), options)
    if options.draft_vocab == AUTO and drafter.width > LARGE and layers is None:
        drafter.shorten(_short_vocabulary(model.config, target.model.config, drafter.width))
    return drafter


def _short_vocabulary(draft: ModelConfig, target: ModelConfig, num_ids: int) -> ShortVocabulary | None:
    """Return the object that chooses how many ids a draft model drafts; None if the size of a model is unknown.

    The time of a pass is assumed to be proportional to the number of weights.
    """
    if not isinstance(draft, Spec) or not isinstance(target, Spec):
        return None
    head = num_ids * draft.hidden_size
    tables = 0 if draft.tied else draft.vocab_size * draft.hidden_size
    return ShortVocabulary(num_ids, head / (draft.num_weights - tables), draft.num_weights / target.num_weights)


def cache_for(
    model: Model, target: Target, layers: Seq[int] | None = None, *, keeps_all: bool = False, **options: Any
) -> KVCache:
    """Make a KV cache for a draft model, with room for as many tokens as the target's cache.

    layers: the layers that are cached; None = all. keeps_all: whether layers with windows keep all rows, for drafters
    that cannot run a text again. options: engine options that differ for this cache.
    """
    if isinstance(model, KeepsCache):
        return model.own_cache()
    opened, config = target.opened, dataclasses.replace(target.opened.config, **options)
    shape = dataclasses.replace(model.config.cache_shape, windows=None) if keeps_all else model.config.cache_shape
    return BlockCache.of(
        model,
        config.kv_cache_backend,  # type: ignore[arg-type]
        shape=shape if layers is None else shape.only(layers),
        max_batch_size=config.max_batch_size * model.config.num_slots,
        max_seq_len=opened.max_seq_len,
        num_tokens=opened.kv_cache_tokens,
        dtype=ops.kv_dtype(config.kv_cache_dtype, model, must=False),
        prefix_caching=config.prefix_caching,
    )


def holes(checkpoint: Checkpoint, target: Target) -> list[int]:
    """Return the ids that lack a token in the target's tokenizer or in the draft model's tokenizer.

    Such ids are never drafted, because their rows in the LM head are untrained.
    """
    holes = set(target.holes)
    if checkpoint.tokenizer is not None:
        known = checkpoint.tokenizer.id_to_token
        holes |= {i for i in range(min(target.num_ids, checkpoint.model.config.vocab_size)) if i not in known}
    return sorted(holes)


def loaded(method: str, options: Loads, target: Target) -> Checkpoint:
    """Return the draft model that a method's options name.

    Without a name, return the model that the caller has loaded, or else the shipped draft model. Drafters of one engine
    that name the same model share it. Raises BadOption if there is no draft model, or if the options contradict the
    loaded model.
    """
    quantization = rounding(options.quantization)
    if options.path is None and target.loaded_draft is not None:
        if quantization not in (None, AUTO, target.loaded_draft.quantization):
            raise BadOption(
                f"{method}:quantization={shown(quantization)} contradicts the loaded draft model "
                f"({target.loaded_draft.quantization}): load it that way instead"
            )
        return target.loaded_draft
    name = options.path or target.opened.shipped_draft
    model = target.model
    if name is None:
        raise BadOption(needs_a_model(method))
    load = partial(
        load_checkpoint,
        target.opened.open(name),
        dtype=model.weight_dtype,
        device=model.device,
        ops=target.operators,
        with_tokenizer=target.tokenizer is not None,
        quantization=quantization,
        max_seq_len=target.max_seq_len,
    )
    return target.shared(OwnCheckpoint(name, quantization).weights(None), load)


def has_encoder(model: Model) -> bool:
    """Return whether a model is an encoder-decoder."""
    return model.config.encoder is not None


def check_pair(checkpoint: Checkpoint, target: Target) -> None:
    """Raise BadOption or VocabularyMismatch for a draft model that cannot draft for the target.

    BadOption: the draft model is an encoder-decoder, and the target is not. VocabularyMismatch: the tokenizers differ.
    """
    if has_encoder(checkpoint.model) and not has_encoder(target.model):
        raise BadOption(
            f"{checkpoint.name} is an encoder-decoder and the target is none, so it has no source to read: name a "
            "draft model without an encoder"
        )
    if target.tokenizer is not None:
        compare(target.tokenizer, checkpoint.tokenizer or checkpoint.opened.text_tokenizer, checkpoint.name)
