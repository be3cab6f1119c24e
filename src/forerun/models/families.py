"""The families of models: each is one file of this folder, named as the checkpoint's model_type, found by scanning."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from forerun.blocks import Spec
from forerun.errors import UnsupportedModel, shown
from forerun.models.naming import Gguf, Names


class Family(Protocol):
    """What a file of this folder must define to be a family.

    It may have `NAMES`, of published tensors where they are not the usual ones, or `names(spec)` where they depend on
    the model, and `GGUF`, if there are such files.
    """

    def read(self, raw: Mapping[str, Any]) -> Spec: ...
    def write(self, spec: Spec) -> Mapping[str, Any]: ...


@cache
def model_types() -> tuple[str, ...]:
    """Every known `model_type`: the files of this folder that define `read`, found without importing them."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple(f.stem for f in files if "\ndef read(" in f.read_text(encoding="utf-8"))


def family(model_type: object) -> Family:
    """The file named like the checkpoint's `model_type`. Raises UnsupportedModel with the list of known ones."""
    if model_type is None:
        raise UnsupportedModel(
            f"config.json has no model_type: fetch it again, or add the one that it is, of {list(model_types())}"
        )
    if model_type not in model_types():
        raise UnsupportedModel(
            f"model_type={shown(model_type)} is not supported: it must be one of {list(model_types())}"
        )
    return cast(Family, importlib.import_module(f"forerun.models.{model_type}"))


def names_of(spec: Spec) -> Names | None:
    """What published tensors of a model are called; None = as here."""
    if spec.model_type not in model_types():
        return None
    own = family(spec.model_type)
    return cast("Names | None", own.names(spec) if hasattr(own, "names") else getattr(own, "NAMES", None))


@cache
def gguf_families() -> Mapping[str, tuple[str, Gguf]]:
    """By general.architecture, the model_type of the family whose GGUF files have it, and how they are read."""
    found = {}
    for name in model_types():
        gguf = getattr(family(name), "GGUF", None)
        if gguf is not None:
            found[gguf.architecture] = name, gguf
    return found
