"""Builds an engine from a loaded target: the KV cache, the drafters, the pacing policy, and the cache rows on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from forerun import drafters, native, ops, pacing
from forerun.config import EngineConfig
from forerun.engine import router
from forerun.engine.engine import Engine
from forerun.engine.opened import Opened, disk_limit
from forerun.engine.router import Router
from forerun.errors import UserError
from forerun.kv.cache import BlockCache
from forerun.kv.disk import Folder, weights_digest
from forerun.kv.keeping import Keeper
from forerun.models.loading import Checkpoint
from forerun.models.runner import Runner
from forerun.ops.model import LoadedModel
from forerun.pacing.cost import Costs, Traits
from forerun.text.unwritten import unwritten_ids
from forerun.version import __version__


def build(
    opened: Opened,
    checkpoint: Checkpoint,
    draft: Checkpoint | None = None,
    own_drafter: Callable[[drafters.Target], drafters.Drafter] | None = None,
) -> Engine:
    """Build the engine of a loaded target. Raises UserError if a drafter or another option is not possible.

    draft: a draft model that the caller has loaded. own_drafter: a function that makes the drafter for requests that
    name no drafter.
    """
    config = opened.config
    target = drafters.Target.of(checkpoint.model, opened, draft)
    runner = Runner(checkpoint.model, _cache(opened, checkpoint.model), target.num_ids, list(target.holes))
    start_ids = opened.start_ids
    members = router.make([config.draft, *config.extra_draft_specs], target, own_drafter)
    members.unwritten = _unwritten_ids(opened)
    folder = _on_disk(config, runner, members)
    costs = _costs(config, runner, members)
    return Engine(
        runner,
        members,
        pacing.make(config.pacing_spec, config.spec_length, costs),
        tokenizer=opened.tokenizer,
        end_ids=opened.end_ids,
        max_seq_len=opened.max_seq_len,
        max_batch_size=config.max_batch_size,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        catchup_tokens=config.draft_catchup_tokens,
        prefill_stretch=config.prefill_stretch or None,
        max_itl_s=config.max_itl_ms / 1e3 if config.max_itl_ms else None,
        costs=costs,
        start_ids=start_ids,
        folder=folder,
    )


def _cache(opened: Opened, model: LoadedModel) -> BlockCache:
    """Make the target's KV cache with the sizes and options of the configuration."""
    config = opened.config
    return BlockCache.of(
        model,
        config.kv_cache_backend,  # type: ignore[arg-type]
        max_batch_size=config.max_batch_size * model.config.num_slots,
        max_seq_len=opened.max_seq_len,
        num_tokens=opened.kv_cache_tokens,
        dtype=ops.kv_dtype(config.kv_cache_dtype, model),
        prefix_caching=config.prefix_caching,
    )


def _costs(config: EngineConfig, runner: Runner, members: Router) -> Costs:
    """Return the record of pass times of the target and of the drafters' models."""
    traits = {
        name: Traits(drafter.tells_confidence, drafter.searches, drafter.is_free)
        for name, drafter in members.members.items()
    }
    models = {name: drafter.runners for name, drafter in members.members.items() if drafter.runners}
    return Costs.of({"": [runner], **models}, traits, measures=config.calibrate)


def _on_disk(config: EngineConfig, runner: Runner, members: Router) -> Folder | None:
    """Let the KV caches of all models store rows in the folder that kv_disk names.

    Returns this folder, or None if kv_disk is not set.
    """
    limit = disk_limit(config)
    if limit is None:
        return None
    folder = Folder(limit.path, limit.num_bytes)
    name = Path(config.target or "").name
    _keep_on_disk(runner, folder, name)
    for draft_runner in [draft_runner for drafter in members.members.values() for draft_runner in drafter.runners]:
        _keep_on_disk(draft_runner, folder, f"a draft model of {name}")
    return folder


def _keep_on_disk(runner: Runner, folder: Folder, name: str) -> None:
    """Let the KV cache of a model store rows in a subfolder (shelf) of `folder`, which only this model uses.

    The name of the shelf is a hash of everything that decides the bits of the model's cache rows (kv/disk.py).
    """
    cache, model = runner.cache, cast(Any, runner.model)
    if not isinstance(cache, BlockCache) or cache.keeper is not None or not hasattr(model, "stored"):
        return
    about = (
        __version__,
        model.ops.build,
        None if (built := native.extension()) is None else built.source_hash,
        type(model).__name__,
        type(model.ops).__name__,
        model.precision,
        repr(model.config),
        repr(cache.shape),
        str(cache.dtype),
        runner.layers,
        weights_digest(model.stored()),
    )
    cache.keep_on_disk(Keeper(cache.pools, folder.shelf(about, cache.record_bytes, name)))


def _unwritten_ids(opened: Opened) -> frozenset[int]:
    """Return the token ids that only the chat template writes, never the model.

    Returns no ids where the target has no tokenizer or no readable chat template. An unreadable template raises an
    error later, when a conversation needs the template.
    """
    if opened.tokenizer is None:
        return frozenset()
    try:
        template = opened.chat_template
    except UserError:
        return frozenset()
    return unwritten_ids(template, opened.tokenizer, opened.end_ids)
