"""The facts about a checkpoint that are known before its weights are read, for the memory plan."""

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
    """A checkpoint's config, and the quantization with which its model is to be loaded.

    raw: the checkpoint's config.json. config: the model's spec. schemes: by matrix name, the scheme of each matrix that
    is quantised once the model is loaded. is_made: whether the model is made in memory from another model. Without a
    quantization, such a model shares the other model's weights. With a quantization, it has rounded copies of them.
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
        """Return the outline of a checkpoint. Only the headers of its weights are read.

        If the weights are not on this machine, the schemes are derived from config.json, as far as it describes the
        quantisation. packs(scheme): returns whether the operators compute with a scheme's codes directly. Raises
        BadOption as `load_checkpoint` would.
        """
        if quantization == AUTO:
            quantization = usual_rounding(opened.tensors, packs)
        return cls(opened.raw, opened.spec, quantization, _schemes(opened.tensors, opened.spec, quantization))

    def widened(self, config: Spec) -> Outline:
        """Return the outline of a wider model, which is made in memory from this model. config: the wider model's spec.

        The wider model's weights are first made as dense matrices, and then quantised.
        """
        schemes = _schemes(said_tensors(config, {}), config, self.quantization)
        return Outline(self.raw, config, self.quantization, schemes)

    def made(self, quantization: str | None, layers: Seq[int] | None, config: Spec | None = None) -> Outline:
        """Return the outline of a model that is made in memory from this model, by rounding or by leaving out layers.

        layers: the layers that the new model has; None = all. config: the spec of the new model, needed only if its
        layers are not layers of this model; None = this model's spec with `layers`.
        """
        if config is None:
            config = self.config if layers is None else self.config.only(layers)
        schemes = {} if quantization is None else _schemes(said_tensors(config, {}), config, quantization)
        return Outline(self.raw, config, quantization, schemes, is_made=True)


def _schemes(tensors: Mapping[str, Stored], spec: Spec, quantization: str | None) -> Mapping[str, Scheme]:
    loaded = tensors if quantization is None else planned(tensors, spec, Quantization.parse(quantization))
    known = {name: stored.scheme or stored.floats for name, stored in loaded.items()}
    return {name: scheme for name, scheme in known.items() if scheme is not None}
