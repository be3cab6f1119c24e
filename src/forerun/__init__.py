"""Speculative decoding that never changes what the model says.

    from forerun import LLM, SamplingParams

    llm = LLM("path/to/checkpoint", draft="path/to/small/checkpoint")
    print(llm.generate("def fib(n):", SamplingParams(max_tokens=64, temperature=0))[0].text)

The names are loaded when they are first used, so that `import forerun` and the command line's help do not wait for
numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forerun.version import __version__ as __version__

if TYPE_CHECKING:
    from forerun.config import EngineConfig
    from forerun.engine.llm import LLM
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.errors import (
        BadOption,
        CapacityError,
        ForerunError,
        InternalError,
        NotFound,
        PromptTooLong,
        UnsupportedModel,
        UserError,
        VocabularyMismatch,
    )
    from forerun.types import SamplingParams, StepReport

__all__ = [
    "LLM",
    "BadOption",
    "CapacityError",
    "Chunk",
    "EngineConfig",
    "ForerunError",
    "InternalError",
    "NotFound",
    "PromptTooLong",
    "RequestOutput",
    "SamplingParams",
    "StepReport",
    "UnsupportedModel",
    "UserError",
    "VocabularyMismatch",
]

_HOMES = {
    "LLM": "forerun.engine.llm",
    "EngineConfig": "forerun.config",
    "Chunk": "forerun.engine.request",
    "RequestOutput": "forerun.engine.request",
    "SamplingParams": "forerun.types",
    "StepReport": "forerun.types",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "forerun.errors")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
