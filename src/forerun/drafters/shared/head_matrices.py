"""The matrices of trained heads, in the form that the target's operators take."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from forerun import blocks
from forerun.blocks import Spec
from forerun.config import Quantization
from forerun.host_tensor import HostTensor
from forerun.models.source import Stored
from forerun.ops.memory import Beside
from forerun.ops.model import Model
from forerun.ops.quantised import QuantisedMatrix, Scheme, dequantised
from forerun.ops.quantising import is_rounded, quantise, scheme_for

Weight = HostTensor | QuantisedMatrix  # a head's weight as stored in its file


def loadable(
    spec: Spec, weights: Mapping[str, Weight], target: Model, rounded: Quantization | None
) -> Mapping[str, Weight]:
    """Return the weights of a head's spec in the form that the target's operators load.

    rounded: the format to which matrices are rounded; None = no rounding. Raises BadOption if groups of that format do
    not divide the rows of a matrix.
    """
    loaded = dict[str, Weight]()
    for weight in blocks.weights(spec):
        scheme = None
        if rounded is not None and weight.role != "table" and is_rounded(weight):
            scheme = scheme_for(weight, rounded)
        part = in_scheme(weights[weight.name], scheme, target)
        if isinstance(part, QuantisedMatrix) and not target.ops.packs_scheme(part.scheme):
            part = dense_of(part).to(target.weight_dtype)
        loaded[weight.name] = part
    return loaded


def in_scheme(part: Weight, scheme: Scheme | None, target: Model) -> Weight:
    """Return a weight in the quantised format `scheme`; None = not quantised, in the target's dtype."""
    if isinstance(part, QuantisedMatrix):
        if part.scheme == scheme:
            return part
        part = dense_of(part)
    dense = part.to(target.weight_dtype)
    return dense if scheme is None else quantised(dense, scheme)


def beside_of(spec: Spec, tensors: Mapping[str, Stored]) -> Beside:
    """Return how much memory the weights of a spec take if they stay in the formats of their files."""
    stored = [tensors[weight.name] for weight in blocks.weights(spec)]
    matrices = [((one.shape[0], one.shape[1]), one.scheme) for one in stored if len(one.shape) == 2]
    return Beside(tuple(matrices), 0, sum(one.shape[0] for one in stored if len(one.shape) == 1))


def dense_of(weight: Weight) -> HostTensor:
    """Return a head's weight as a dense tensor. A quantised matrix is dequantised to float32."""
    return dequantised(weight, "float32") if isinstance(weight, QuantisedMatrix) else weight


def quantization_of(option: str, shapes: Collection[tuple[int, ...]], *, pays: bool) -> Quantization | None:
    """Return the format to which a head is rounded, by the option `quantization`; None = no rounding.

    With auto the format is 8 bits if `pays` is True and the row length of every matrix is a multiple of the group size.
    shapes: the shapes of the head's weights. pays: whether the target has weights of 4 or 8 bits, or the head drafts
    equally well in 8 bits.
    """
    if option != "auto":
        return None if option == "none" else Quantization.parse(option)
    usual = Quantization(8)
    fits = all(shape[1] % usual.group == 0 for shape in shapes if len(shape) == 2)
    return usual if pays and fits else None


def is_packed(target: Model) -> bool:
    """Return whether a target's weights in memory have 4 or 8 bits."""
    return bool(target.weight_bits)


def quantised(weight: HostTensor, scheme: Scheme) -> QuantisedMatrix:
    """Return a matrix in the quantised format `scheme`. It is rounded each time that it is read."""
    return QuantisedMatrix(
        scheme, (weight.shape[0], weight.shape[1]), lambda: iter([quantise(weight.float32(), scheme)])
    )
