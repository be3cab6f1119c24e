"""Every default of the engine, in one frozen, validated place.

Precedence: request > command-line flag > FORERUN_* variable > config file > default.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import BadOption, NotFound
from forerun.methods import make_options, unknown


def _option(default: Any, text: str, **range_: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **range_})


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with. Raises BadOption, with the name and the value, for what cannot be honoured."""

    target: str | None = _option(None, "checkpoint folder of the target model; none = the shipped one")
    draft: str = _option("auto", "auto, none, a method with options such as lookup:max_n=3, or a draft model's folder")
    spec_length: int = _option(5, "tokens drafted per step (K)", min=1, max=64)
    pacing: str = _option("fixed", "policy that decides how far to draft")
    dtype: str = _option("auto", "auto, float32 or bfloat16")
    quantization: str | None = _option(None, "not available yet; must be left out")
    device: str = _option("auto", "auto, cpu or cuda")
    ops: str = _option("auto", "auto, reference, or reference_row_by_row (slow; bits independent of batching)")
    kv_cache_backend: str = _option("paged", "paged (blocks of 16 tokens) or contiguous (one block per sequence)")
    kv_cache_tokens: int | None = _option(None, "tokens in the KV cache; none = max_batch_size * max_seq_len", min=16)
    max_batch_size: int = _option(8, "sequences that run together at most", min=1, max=1024)
    max_seq_len: int | None = _option(None, "prompt + output tokens; none = the model's, at most 4096", min=2)
    prefill_chunk_tokens: int = _option(512, "prompt tokens run per step at most", min=1)
    draft_catchup_tokens: int = _option(
        512, "committed tokens per step that the draft model may run to catch up", min=1
    )

    def __post_init__(self) -> None:
        if self.quantization is not None:
            raise BadOption(f"quantization={self.quantization!r} is not available yet: leave it out")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise BadOption(unknown(f"{name} called", str(getattr(self, name)), allowed))

    @classmethod
    def make(cls, **options: Any) -> EngineConfig:
        """From keyword options, aliases of other engines included. Unknown and contradictory options are refused."""
        values = _resolve_aliases({k: v for k, v in options.items() if not (v is None and k == "draft")})
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise BadOption(unknown("option", name, known))
        config: EngineConfig = make_options(cls, {k: _as_text(v) for k, v in values.items()})
        return config

    @classmethod
    def from_sources(cls, flags: Mapping[str, Any], config_file: str | None = None) -> EngineConfig:
        """Merge flags (None = not given) over FORERUN_* variables over a TOML file over the defaults."""
        merged: dict[str, Any] = _read_toml(config_file) if config_file else {}
        for f in dataclasses.fields(cls):
            variable = os.environ.get(f"FORERUN_{f.name.upper()}")
            if variable is not None:
                merged[f.name] = variable
        merged |= {k: v for k, v in flags.items() if v is not None}
        return cls.make(**merged)


_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "ops": ("auto", "reference", "reference_row_by_row"),
    "kv_cache_backend": ("paged", "contiguous"),
}


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _resolve_aliases(options: dict[str, Any]) -> dict[str, Any]:
    """draft_model, num_speculative_tokens, speculative_config and use_speculative_decoding, as other engines say it."""
    given = dict(options)
    for key, value in (given.pop("speculative_config", None) or {}).items():
        name = {"model": "draft", "method": "draft"}.get(key, key)
        _set(given, name, value, f"speculative_config[{key!r}]")
    for alias, name in (("draft_model", "draft"), ("num_speculative_tokens", "spec_length")):
        if alias in given:
            _set(given, name, given.pop(alias), alias)
    use = given.pop("use_speculative_decoding", None)
    if use is False:
        _set(given, "draft", "none", "use_speculative_decoding=False")
    if use is True and given.get("draft") == "none":
        raise BadOption("use_speculative_decoding=True contradicts draft='none': drop one of them")
    return given


def _set(options: dict[str, Any], name: str, value: Any, alias: str) -> None:
    if name in options and options[name] != value:
        raise BadOption(f"{alias} says {name}={value!r} but {name}={options[name]!r} was given too: drop one of them")
    options[name] = value


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"the config file {path!r} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise BadOption(f"the config file {path!r} is not valid TOML: {error}") from None
