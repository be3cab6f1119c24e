"""The model families. Each family is a file of this folder, named like a `model_type`, and found by scanning."""

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
    """The functions that each file of this folder defines: `read` and `write`.

    Some files define more. `NAMES`: the family's published tensor names, where they differ from our names (naming.py).
    `names(spec)`: these names, if they depend on the model. `GGUF`: how the family's GGUF files are read. `CODE`: the
    model class in the code of published checkpoints, if this class computes what forerun computes. `RUN_BY`: the
    drafting method that runs the family's checkpoints, if they cannot run as models by themselves. In a file for
    multimodal checkpoints, `read` returns the spec of the text model, with the model_type of the text model's family.
    """

    def read(self, raw: Mapping[str, Any]) -> Spec: ...
    def write(self, spec: Spec) -> Mapping[str, Any]: ...


@cache
def model_types() -> tuple[str, ...]:
    """Return every known `model_type`: the names of the files in this folder. No file is imported."""
    return tuple(sorted(f.stem for f in Path(__file__).parent.glob("*.py") if not f.name.startswith("_")))


def family(model_type: object) -> Family:
    """Import the file that is named like `model_type`, and return the module.

    Raises UnsupportedModel for an unknown `model_type`. The message lists the known types.
    """
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
    """Return the map of published tensor names for a model; None if the published names are our names (naming.py)."""
    if spec.model_type not in model_types():
        return None
    module = family(spec.model_type)
    return cast("Names | None", module.names(spec) if hasattr(module, "names") else getattr(module, "NAMES", None))


def published_names(raw: Mapping[str, Any], spec: Spec) -> Names | None:
    """Return the map of published tensor names for a checkpoint; None if they are our names (naming.py).

    raw: the checkpoint's config.json. spec: the spec that was read from `raw`.
    """
    kind = raw.get("model_type")
    if kind == spec.model_type or kind not in model_types():
        return names_of(spec)
    return cast("Names | None", getattr(family(kind), "NAMES", None))


def computes(raw: Mapping[str, Any]) -> str | None:
    """Return the name of the model class in the code of published checkpoints that computes the same as forerun.

    Returns None where the family has no such class. raw: the checkpoint's config.json.
    """
    kind = raw.get("model_type")
    return cast("str | None", getattr(family(kind), "CODE", None)) if kind in model_types() else None


def run_by(raw: Mapping[str, Any]) -> str | None:
    """Return the drafting method that runs a checkpoint; None where the checkpoint runs as a model by itself.

    raw: the checkpoint's config.json.
    """
    kind = raw.get("model_type")
    return cast("str | None", getattr(family(kind), "RUN_BY", None)) if kind in model_types() else None


@cache
def gguf_families() -> Mapping[str, tuple[str, Gguf]]:
    """Map each known value of general.architecture to its family: the model_type, and the family's `Gguf`."""
    families = {}
    for name in model_types():
        gguf = getattr(family(name), "GGUF", None)
        if gguf is not None:
            families[gguf.architecture] = name, gguf
    return families
