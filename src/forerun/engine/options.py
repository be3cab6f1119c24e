"""The keyword options of LLM for type checkers, editors and help(): EngineConfig's fields, and the aliases.

Type checkers cannot read a dataclass as keywords, so names and types are repeated here. EngineConfig has the defaults
and the checks. tests/engine/test_options.py compares these names and types with the fields of EngineConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, TypedDict

from forerun.config import EngineConfig
from forerun.drafters import Drafter, Target
from forerun.models.loading import Checkpoint


class LLMOptions(TypedDict, total=False):
    """The keyword arguments of LLM: all arguments except the first, `target`."""

    draft: str | Path | Checkpoint | Callable[[Target], Drafter] | None
    extra_drafts: str | None
    spec_length: int | None
    pacing: str | None
    pacing_log: str | None
    calibrate: bool
    dtype: str
    quantization: str | None
    device: str
    generation_config: str
    ignore_config_keys: str | Seq[str] | None
    chat_template: str | Path | None
    ops: str
    kv_cache_backend: str
    kv_cache_dtype: str
    kv_cache_tokens: int | None
    max_batch_size: int
    max_seq_len: int | None
    kv_disk: str | None
    prefix_caching: bool
    prefill_chunk_tokens: int
    prefill_stretch: float | None
    max_itl_ms: float | None
    max_num_batched_tokens: int
    draft_catchup_tokens: int
    draft_model: str | Path | Checkpoint | Callable[[Target], Drafter] | None
    num_speculative_tokens: int | None
    speculative_config: Mapping[str, Any] | None
    use_speculative_decoding: bool | None
    batching_mode: str | None
    use_cuda_graphs: bool | None


def llm_signature() -> Signature:
    """Return the signature of LLM, with EngineConfig's defaults."""
    fields, hints = EngineConfig.__dataclass_fields__, LLMOptions.__annotations__
    target = Parameter(
        "target", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="str | Path | Checkpoint | None"
    )
    options = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=fields[name].default if name in fields else None,
            annotation=getattr(hint, "__forward_arg__", hint),
        )
        for name, hint in hints.items()
    ]
    return Signature([target, *options])
