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
    the model, and `GGUF`, if there are such files; `CODE` is the class that published checkpoints bring along, where
    what it computes is what is computed here. `RUN_BY` is the method that runs its checkpoints, where they are no
    models by themselves. A family of checkpoints that hold more than a text model reads as the
    spec of the family of its text part.
    """

    def read(self, raw: Mapping[str, Any]) -> Spec: ...
    def write(self, spec: Spec) -> Mapping[str, Any]: ...


@cache
def model_types() -> tuple[str, ...]:
    """Return every known `model_type`: the files of this folder, found without importing them."""
    return tuple(sorted(f.stem for f in Path(__file__).parent.glob("*.py") if not f.name.startswith("_")))


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
    return cast(Family, importlib.import_module(f"{__name__}.{model_type}"))


def names_of(spec: Spec) -> Names | None:
    """What published tensors of a model are called; None = as here."""
    if spec.model_type not in model_types():
        return None
    own = family(spec.model_type)
    return cast("Names | None", own.names(spec) if hasattr(own, "names") else getattr(own, "NAMES", None))


def published_names(raw: Mapping[str, Any], spec: Spec) -> Names | None:
    """What the tensors of a checkpoint with this config.json are called, which reads as this spec; None = as here."""
    kind = raw.get("model_type")
    if kind == spec.model_type or kind not in model_types():
        return names_of(spec)
    return cast("Names | None", getattr(family(kind), "NAMES", None))


def computes(raw: Mapping[str, Any]) -> str | None:
    """The class that checkpoints of this model_type bring along, where it computes what is computed here."""
    kind = raw.get("model_type")
    return cast("str | None", getattr(family(kind), "CODE", None)) if kind in model_types() else None


def run_by(raw: Mapping[str, Any]) -> str | None:
    """The method that runs checkpoints of this model_type; None where they are models."""
    kind = raw.get("model_type")
    return cast("str | None", getattr(family(kind), "RUN_BY", None)) if kind in model_types() else None


@cache
def gguf_families() -> Mapping[str, tuple[str, Gguf]]:
    """By general.architecture, the model_type of the family whose GGUF files have it, and how they are read."""
    found = {}
    for name in model_types():
        gguf = getattr(family(name), "GGUF", None)
        if gguf is not None:
            found[gguf.architecture] = name, gguf
    return found
