"""The memory plan of a configuration that names its models: refused before weights are read, if it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forerun import drafters, ops
from forerun.config import EngineConfig
from forerun.engine.machine import available_bytes
from forerun.engine.memory import memory_plan
from forerun.engine.opening import SHIPPED_DRAFT, is_shipped, target_files
from forerun.errors import BadOption, CapacityError
from forerun.models.loading import DTYPES, read_config, read_raw_config


def refuse_what_does_not_fit(config: EngineConfig) -> None:
    """Raise CapacityError, with numbers and with what would fit, where this machine has no memory for an engine.

    A draft model that the caller has loaded is not named by the configuration and not counted.
    """
    device = device_of(config)
    raw = read_raw_config(target_files(config))
    name = draft_name(config)
    plan = memory_plan(
        read_config(raw),
        None if name is None else read_config(read_raw_config(name)),
        config,
        extra_drafts={spec: read_config(read_raw_config(path)) for spec, path in extra_draft_names(config).items()},
        dtype=dtype_of(config, device, raw),
        device=device,
        available_bytes=available_bytes(device),
    )
    if not plan.fits:
        raise CapacityError(f"there is no memory for this engine: {plan.verdict()}")


def draft_name(config: EngineConfig) -> str | None:
    """The draft model that LLM would load; None for a drafter without a model. Raises BadOption where none is named."""
    return _model_of(config.draft, config)


def extra_draft_names(config: EngineConfig) -> dict[str, str]:
    """The models that LLM would load for `extra_drafts`, by what each is called there. Raises as `draft_name`."""
    found = ((spec, _model_of(spec, config)) for spec in config.extra_draft_specs)
    return {spec: name for spec, name in found if name is not None}


def _model_of(spec: str, config: EngineConfig) -> str | None:
    method, options = drafters.resolve(spec, is_shipped(config.target))
    if method != "model":
        return None
    name: str | None = options.path or (str(SHIPPED_DRAFT) if is_shipped(config.target) else None)
    if name is None:
        raise BadOption("the drafter 'model' needs a draft model: give its folder, as in draft='path/to/draft'")
    return name


def device_of(config: EngineConfig) -> str:
    """As LLM chooses; "cuda" may be planned for where there is none."""
    return config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(config: EngineConfig, device: str, raw: Mapping[str, Any]) -> torch.dtype:
    """As the operators choose that LLM would take, with what config.json says in place of the stored weights."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    stored = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), None)
    return ops.make(config.ops, device).auto_dtype(device, stored if isinstance(stored, torch.dtype) else torch.float32)
