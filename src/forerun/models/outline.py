"""A checkpoint as far as it is known before its weights are read: what the memory plan is computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.blocks import MATRIX_BITS, Spec, Weight, weights
from forerun.config import AUTO, Quantization
from forerun.errors import UserError
from forerun.models.hub import locate
from forerun.models.loading import read_config, under_our_names, without
from forerun.models.packings import said_scheme
from forerun.models.quantising import planned, usual_rounding
from forerun.models.source import Source, Stored, open_source
from forerun.ops.memory import Beside as Beside
from forerun.ops.quantised import Scheme
from forerun.text.json_files import read_json


@dataclass(frozen=True)
class Outline:
    """A checkpoint, and the option under which it is to be loaded.

    raw: its config.json. schemes: of the matrices that are quantised then, by name. is_made: it is made of another
    model in memory, of which it has the weights or, with a quantization, rounds them.
    """

    raw: Mapping[str, Any]
    config: Spec
    quantization: str | None
    schemes: Mapping[str, Scheme]
    is_made: bool = False

    @classmethod
    def of(
        cls,
        name: str | Path,
        quantization: str | None = None,
        ignore: Collection[str] = (),
        packs: Callable[[Scheme], bool] = lambda _: False,
    ) -> Outline:
        """Read the outline of a folder, a GGUF file, a name, a hub id, or of a config.json by itself.

        Of the files with weights only headers are read. Where they are not here, config.json says how matrices are
        quantised, as far as it does. ignore: keys of config.json. packs: what the operators compute with as integers.
        Raises UserError as `load_checkpoint` would.
        """
        path, source = Path(name), None
        if path.suffix == ".json" and path.is_file():
            raw = without(read_json(path), ignore)
            config = read_config(raw)
        else:
            path = locate(name, config_only=True)
            source = open_source(path)
            raw = without(source.config, ignore)
            config = read_config(raw, path)
            source = _named(source, config)
        tensors = _tensors(source) or _said_tensors(config, raw)
        if quantization == AUTO:
            quantization = usual_rounding(tensors, packs)
        return cls(raw, config, quantization, _schemes(tensors, config, quantization))

    def widened(self, config: Spec) -> Outline:
        """Return the outline of a model that is made of this one in memory; its weights are dense until then."""
        schemes = _schemes(_said_tensors(config, {}), config, self.quantization)
        return Outline(self.raw, config, self.quantization, schemes)

    def made(self, quantization: str | None, num_layers: int | None, config: Spec | None = None) -> Outline:
        """Return the outline of a model that this one rounds, or of its first layers. num_layers: None = all.

        config: of layers that stand beside this one's instead.
        """
        if config is None:
            config = replace(self.config, blocks=self.config.blocks[:num_layers])
        schemes = {} if quantization is None else _schemes(_said_tensors(config, {}), config, quantization)
        return Outline(self.raw, config, quantization, schemes, is_made=True)


def _named(source: Source, spec: Spec) -> Source | None:
    """Return a source under our names; None where its headers cannot be read, which loading will explain."""
    try:
        return under_our_names(source, spec)
    except (UserError, OSError):
        return None


def _schemes(tensors: Mapping[str, Stored], spec: Spec, quantization: str | None) -> Mapping[str, Scheme]:
    made = tensors if quantization is None else planned(tensors, spec, Quantization.parse(quantization))
    known = {name: stored.scheme or stored.floats for name, stored in made.items()}
    return {name: scheme for name, scheme in known.items() if scheme is not None}


def _tensors(source: Source | None) -> Mapping[str, Stored]:
    """Return what headers say; nothing where they cannot be read, which loading will explain."""
    try:
        return {} if source is None else source.tensors
    except (UserError, OSError):
        return {}


def _said_tensors(config: Spec, raw: Mapping[str, Any]) -> Mapping[str, Stored]:
    """Return what config.json says of tensors; embedding and LM head are dense in most quantised checkpoints."""
    file = Path("config.json")
    return {w.name: Stored(file, w.shape, torch.float32, _said_scheme(w, raw)) for w in weights(config)}


def _said_scheme(weight: Weight, raw: Mapping[str, Any]) -> Scheme | None:
    if weight.least_bits != MATRIX_BITS:
        return None
    return said_scheme(raw, weight.shape[1], is_expert=weight.role == "experts")
