"""Quantises weights while they are read from files.

Every matrix of the layers is rounded to the requested number of bits. The embedding and the LM head are rounded to at
least 8 bits, because their rounding affects every logit. With Quantization.again, for draft models, these two also get
the requested number of bits. Biases, norms, and the matrices that choose experts stay unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

from forerun.blocks import Spec, itemsize, weights
from forerun.config import Quantization
from forerun.errors import BadOption
from forerun.host_tensor import HostTensor
from forerun.models.source import QuantisedSource, Source, Stored, Wrapped
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.quantising import BLOCK_WEIGHTS, is_rounded, quantise, scheme_for, scheme_of

LARGE_WEIGHTS = 1 << 26  # a draft model with so many weights,
LARGE_BITS = 4.5  # and so many bits per weight, is rounded by default


class QuantisingSource(Wrapped):
    """A source whose matrices are rounded while they are read. Raises BadOption for a matrix that cannot be rounded."""

    def __init__(self, source: Source, spec: Spec, quantization: Quantization) -> None:
        super().__init__(source)
        self.quantization = quantization
        self.tensors: Mapping[str, Stored] = planned(source.tensors, spec, quantization)

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor, with their values after rounding, as floats. See `Source.blocks`."""
        scheme = self.tensors[name].scheme
        if scheme is None or scheme == self.source.tensors[name].scheme:
            yield from self.source.blocks(name)
            return
        for rows in self._rows(name, scheme):
            yield HostTensor.of(rows.dequantise())

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a matrix after rounding. A quantised matrix that is not rounded again is returned as it is stored."""
        stored = self.tensors[name]
        if stored.scheme is None or stored.scheme == self.source.tensors[name].scheme:
            return cast(QuantisedSource, self.source).quantised(name)
        num_out, num_in = stored.shape
        place = None
        if self.source.tensors[name].scheme is not None and stored.scheme.bits == 4:
            rows = cast(QuantisedSource, self.source).quantised(name).stored
            place = None if rows is None else replace(rows, rounded=stored.scheme.group)
        return QuantisedMatrix(stored.scheme, (num_out, num_in), partial(self._rows, name, stored.scheme), place)

    def _rows(self, name: str, scheme: Scheme) -> Iterator[QuantisedRows]:
        """Yield the rows of a matrix, rounded according to the scheme."""
        step = max(1, BLOCK_WEIGHTS // self.tensors[name].shape[1])
        for block in self.source.blocks(name):
            for first in range(0, len(block), step):
                rows = block[first : first + step]
                if not rows.is_finite():
                    raise BadOption(
                        f"quantization={str(self.quantization)!r} is not possible: {name} in "
                        f"{self.tensors[name].file} holds numbers that are not finite: fetch the file again"
                    )
                yield quantise(rows.float32(), scheme)


def planned(tensors: Mapping[str, Stored], spec: Spec, quantization: Quantization) -> dict[str, Stored]:
    """Return the stored form that each tensor of a source will have after rounding. Raises as `QuantisingSource`."""
    rounded = {weight.name: weight for weight in weights(spec) if is_rounded(weight)}
    after = dict(tensors)
    for name, stored in tensors.items():
        if stored.scheme is not None and not quantization.again:
            raise BadOption(
                f"quantization={str(quantization)!r} is not possible: {stored.file} is quantised already ({name}: "
                f"{stored.scheme}): leave it out, or name the unquantised original; a draft model may be rounded "
                f"again, as {str(replace(quantization, again=True))!r}"
            )
        if name in rounded and not _stays(stored, quantization):
            after[name] = Stored(stored.file, stored.shape, "float32", scheme_for(rounded[name], quantization))
    return after


def _stays(stored: Stored, quantization: Quantization) -> bool:
    """Whether a matrix keeps its stored form although `quantization.again` is true.

    A matrix keeps its form if rounding would not reduce its bits, or if the group size does not divide the length of
    its rows.
    """
    has_few_bits = stored.scheme is not None and stored.scheme.bits <= quantization.bits
    return quantization.again and (has_few_bits or stored.shape[-1] % quantization.group > 0)


def usual_rounding(tensors: Mapping[str, Stored], packs: Callable[[Scheme], bool]) -> str | None:
    """Return the default quantization of a draft model with these tensors; None if rounding would not make it faster.

    packs(scheme): returns whether the operators compute with a scheme's codes directly.

    The time of a pass over large weights is the time to read them from memory, so fewer bytes make the pass faster. The
    weights of a small model stay in the processor's caches, so the time of its pass is mostly calls and barriers.
    """
    matrices = [stored for stored in tensors.values() if len(stored.shape) == 2]
    num_weights = sum(math.prod(stored.shape) for stored in matrices)
    num_bits = sum(_bits(stored) * math.prod(stored.shape) for stored in matrices)
    rounded = Quantization(4, 32, again=True)
    is_large = num_weights >= LARGE_WEIGHTS and num_bits >= LARGE_BITS * num_weights
    return str(rounded) if is_large and packs(scheme_of(rounded.bits, rounded.group)) else None


def _bits(stored: Stored) -> int:
    return 8 * itemsize(stored.dtype) if stored.scheme is None else stored.scheme.bits
