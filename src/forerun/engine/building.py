"""An engine from loaded parts: the caches, runners, drafters and policy that a configuration asks for."""

from __future__ import annotations

from forerun import drafters, pacing
from forerun.config import EngineConfig
from forerun.engine import crew
from forerun.engine.engine import Engine
from forerun.engine.memory import resolve_max_seq_len
from forerun.engine.opening import SHIPPED_DRAFT, is_shipped
from forerun.kv.cache import KVCache
from forerun.models.loading import Checkpoint
from forerun.models.runner import Runner
from forerun.text.tokenizer import Tokenizer


def build(checkpoint: Checkpoint, tokenizer: Tokenizer, config: EngineConfig, draft: Checkpoint | None) -> Engine:
    """The engine of a loaded target; `draft` is a draft model that the caller has loaded. Raises UserError."""
    model = checkpoint.model
    max_seq_len = resolve_max_seq_len(config.max_seq_len, model.config.max_positions)
    target = _target(checkpoint, tokenizer, config, draft, max_seq_len)
    cache = KVCache.create(
        model.config.cache_shape,
        target.kv_cache_backend,
        max_batch_size=config.max_batch_size,
        max_seq_len=max_seq_len,
        num_tokens=config.kv_cache_tokens,
        dtype=model.dtype,
        device=model.device,
        prefix_caching=config.prefix_caching,
    )
    return Engine(
        Runner(model, cache, target.num_ids, list(target.holes)),
        crew.make([config.draft, *config.extra_draft_specs], target),
        pacing.make(config.pacing_spec, config.spec_length),
        tokenizer=tokenizer,
        end_ids=checkpoint.end_ids,
        max_seq_len=max_seq_len,
        max_batch_size=config.max_batch_size,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        catchup_tokens=config.draft_catchup_tokens,
    )


def _target(
    checkpoint: Checkpoint, tokenizer: Tokenizer, config: EngineConfig, draft: Checkpoint | None, max_seq_len: int
) -> drafters.Target:
    """What the drafters may know."""
    model = checkpoint.model
    return drafters.Target(
        model=model,
        tokenizer=tokenizer,
        end_ids=checkpoint.end_ids,
        num_ids=min(tokenizer.num_ids, model.config.vocab_size),
        holes=tuple(sorted(tokenizer.holes)),
        max_batch_size=config.max_batch_size,
        max_seq_len=max_seq_len,
        kv_cache_backend=config.kv_cache_backend,  # type: ignore[arg-type]
        kv_cache_tokens=config.kv_cache_tokens,
        prefix_caching=config.prefix_caching,
        shipped_draft=str(SHIPPED_DRAFT) if is_shipped(checkpoint.folder) else None,
        loaded_draft=draft,
    )
