"""Opening the models that a configuration names. What can be refused is refused before weights are fetched or read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun import drafters, ops, pacing
from forerun.config import EngineConfig
from forerun.engine.memory import pool_tokens, resolve_max_seq_len
from forerun.errors import BadOption, NotFound
from forerun.models.generation import sampling_defaults, sampling_fields
from forerun.models.loading import Checkpoint, load_checkpoint, read_config, read_raw_config, small_files
from forerun.ops.reference import ReferenceOps
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parent.parent / "data"
SHIPPED_TARGET, SHIPPED_DRAFT = DATA / "target", DATA / "draft"


def is_shipped(target: str | Path | None) -> bool:
    """Whether a target is the model that ships with the package."""
    return target is None or Path(target) == SHIPPED_TARGET


def load_target(config: EngineConfig, *, with_tokenizer: bool = True) -> Checkpoint:
    """The target that a configuration names, on its device and in its type; the shipped one where it names none."""
    name, device = _target(config), _device(config.device)
    return load_checkpoint(name, dtype=config.dtype, device=device, ops=make_ops(config), with_tokenizer=with_tokenizer)


def load_unpacked(config: EngineConfig) -> Checkpoint:
    """The same in the same type, but with weights that can be read: for whoever makes another model of them."""
    own = make_ops(config)
    if own.name != "native":
        return load_target(config)
    dtype = own.auto_dtype("cpu", torch.float32) if config.dtype == "auto" else config.dtype
    return load_checkpoint(_target(config), dtype=dtype, with_tokenizer=True)


def make_ops(config: EngineConfig) -> ReferenceOps:
    """The operators that a configuration names. Raises BadOption where they cannot be had."""
    return ops.make(config.ops, _device(config.device).type)


def refuse_early(config: EngineConfig, has_loaded_draft: bool = False) -> Tokenizer:
    """Raise UserError for whatever the small files of both models show; returns the target's tokenizer."""
    ops.resolve(config.ops, _device(config.device).type)
    pacing.make(config.pacing_spec, config.spec_length)
    has_own = is_shipped(config.target) or has_loaded_draft
    methods = [drafters.resolve(spec, has_own) for spec in (config.draft, *config.extra_draft_specs)]
    folder = target_files(config)
    max_positions = read_config(read_raw_config(folder)).max_positions
    max_seq_len = resolve_max_seq_len(config.max_seq_len, max_positions)
    pool_tokens(
        config.kv_cache_backend,
        max_batch_size=config.max_batch_size,
        max_seq_len=max_seq_len,
        num_tokens=config.kv_cache_tokens,
    )
    tokenizer = Tokenizer.load(folder)
    if config.generation_config == "model":
        sampling_defaults(folder)
    if config.chat_template is not None:
        ChatTemplate.load(folder, config.chat_template)
    for method, options in methods:
        drafters.check(method, options, tokenizer)
    return tokenizer


def suggested_fields(config: EngineConfig) -> dict[str, Any]:
    """The sampling parameters that the target's generation_config.json sets, if the configuration asks for them."""
    return sampling_fields(target_files(config)) if config.generation_config == "model" else {}


def target_files(config: EngineConfig) -> Path:
    """The target's folder, without its weights; see `small_files`."""
    return small_files(_target(config))


def refuse_without_template(config: EngineConfig) -> None:
    """Raise NotFound where the target has no chat template and none is named, before any weight is fetched."""
    ChatTemplate.load(target_files(config), config.chat_template)


def _target(config: EngineConfig) -> str | Path:
    if config.target is None and not SHIPPED_TARGET.exists():
        raise NotFound("the shipped model is missing from this installation: name a checkpoint folder as target")
    return config.target or SHIPPED_TARGET


def check_loaded(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """A loaded model brings type, device and operators along: options that say otherwise are refused, not ignored."""
    model = checkpoint.model
    facts = {
        "dtype": (config.dtype, str(model.dtype).removeprefix("torch.")),
        "device": (config.device, model.device.type),
        "ops": (config.ops, model.ops.name),
    }
    for name, (wanted, fact) in facts.items():
        if wanted not in ("auto", fact):
            raise BadOption(f"{name}={wanted!r} contradicts the loaded model ({fact}): load the model that way instead")


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise BadOption("device='cuda' is not possible: torch sees no CUDA device; use device='cpu'")
    return torch.device("cuda" if name in ("auto", "cuda") and available else "cpu")
