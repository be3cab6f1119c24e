"""A checkpoint as far as it is known before its weights are read: what the memory plan is computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.blocks import Spec
from forerun.config import AUTO, Quantization
from forerun.models.opened import OpenedCheckpoint, said_tensors
from forerun.models.quantising import planned, usual_rounding
from forerun.models.source import Stored
from forerun.ops.memory import Beside as Beside
from forerun.ops.quantised import Scheme


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
        opened: OpenedCheckpoint,
        quantization: str | None = None,
        packs: Callable[[Scheme], bool] = lambda _: False,
    ) -> Outline:
        """Return the outline of a checkpoint: of the files with weights only headers are read.

        Where they are not here, config.json says how matrices are quantised, as far as it does. packs: what the
        operators compute with as integers. Raises BadOption as `load_checkpoint` would.
        """
        if quantization == AUTO:
            quantization = usual_rounding(opened.tensors, packs)
        return cls(opened.raw, opened.spec, quantization, _schemes(opened.tensors, opened.spec, quantization))

    def widened(self, config: Spec) -> Outline:
        """Return the outline of a model that is made of this one in memory; its weights are dense until then."""
        schemes = _schemes(said_tensors(config, {}), config, self.quantization)
        return Outline(self.raw, config, self.quantization, schemes)

    def made(self, quantization: str | None, layers: Seq[int] | None, config: Spec | None = None) -> Outline:
        """Return the outline of a model that this one rounds, or of some of its layers. layers: None = all.

        config: of layers that stand beside this one's instead.
        """
        if config is None:
            config = self.config if layers is None else self.config.only(layers)
        schemes = {} if quantization is None else _schemes(said_tensors(config, {}), config, quantization)
        return Outline(self.raw, config, quantization, schemes, is_made=True)


def _schemes(tensors: Mapping[str, Stored], spec: Spec, quantization: str | None) -> Mapping[str, Scheme]:
    made = tensors if quantization is None else planned(tensors, spec, Quantization.parse(quantization))
    known = {name: stored.scheme or stored.floats for name, stored in made.items()}
    return {name: scheme for name, scheme in known.items() if scheme is not None}
