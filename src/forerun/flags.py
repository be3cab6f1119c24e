"""Command-line flags that several commands share, made from the dataclasses that hold the defaults.

Every flag is None where it is not given: then FORERUN_* variables, the config file and the default have their say.
Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.config import EngineConfig
from forerun.methods import names
from forerun.types import SamplingParams


def _engine(name: str, methods: str | None = None) -> Any:
    """The flag of one field of EngineConfig: its help text, the methods of a room (found by scanning), its default."""
    field = EngineConfig.__dataclass_fields__[name]
    known = "" if methods is None else f"; methods: {', '.join(names(methods))}"
    default = "" if field.default is None else f" [default: {field.default}]"
    return typer.Option(
        f"--{name.replace('_', '-')}", help=field.metadata["help"] + known + default, show_default=False
    )


def _sampling(name: str, text: str) -> Any:
    default = SamplingParams.__dataclass_fields__[name].default
    shown = "" if default in (None, ()) else f" [default: {default}]"
    return typer.Option(f"--{name.replace('_', '-')}", help=text + shown, show_default=False)


Target = Annotated[str | None, _engine("target")]
Draft = Annotated[str | None, _engine("draft", methods="forerun.drafters")]
SpecLength = Annotated[int | None, _engine("spec_length")]
Pacing = Annotated[str | None, _engine("pacing", methods="forerun.pacing")]
Device = Annotated[str | None, _engine("device")]
Dtype = Annotated[str | None, _engine("dtype")]
Ops = Annotated[str | None, _engine("ops")]
CacheBackend = Annotated[str | None, _engine("kv_cache_backend")]
MaxSeqLen = Annotated[int | None, _engine("max_seq_len")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with engine options.", show_default=False)]

Temperature = Annotated[float | None, _sampling("temperature", "0 = greedy")]
TopK = Annotated[int | None, _sampling("top_k", "keep the k most likely ids; 0 = all")]
TopP = Annotated[float | None, _sampling("top_p", "keep the likeliest ids that together reach this mass, in (0, 1]")]
MinP = Annotated[float | None, _sampling("min_p", "drop ids below this share of the largest probability, in [0, 1]")]
MaxTokens = Annotated[int | None, _sampling("max_tokens", "tokens to generate at most")]
Seed = Annotated[int | None, _sampling("seed", "the same seed, the same text; without one a seed is drawn and shown")]
Stop = Annotated[list[str] | None, _sampling("stop", "text that ends the output and is cut from it; may be repeated")]
Acceptance = Annotated[
    str | None, _sampling("acceptance", "verification rule [default: match with a seed and temperature, else ratio]")
]
IgnoreEos = Annotated[bool | None, typer.Option("--ignore-eos", help="go on past the end of sequence")]

_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)
_ENGINE = frozenset(EngineConfig.__dataclass_fields__)


def sampling_params(flags: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among a command's arguments; those that were not given keep their default."""
    return SamplingParams(**{k: v for k, v in flags.items() if k in _SAMPLING and v is not None})


def engine_config(flags: Mapping[str, Any], config_file: Path | None = None) -> EngineConfig:
    """The engine's options among a command's arguments, over FORERUN_* variables, over the file, over the defaults."""
    given = {k: v for k, v in flags.items() if k in _ENGINE}
    return EngineConfig.from_sources(given, str(config_file) if config_file else None)


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """Every option but the target, as keyword arguments of LLM, for a target that is loaded already."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "target"}
