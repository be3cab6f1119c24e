"""Code that the models of all backends share: results and checks of a forward pass, and words for dtypes of weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.blocks import Spec
from forerun.errors import InternalError
from forerun.host_tensor import Floats
from forerun.types import Probs, RaggedBatch


@dataclass(frozen=True)
class Lent:
    """The parts that a draft head borrows from its target: the embedding, and the LM head if the draft head has none.

    target: the target model. ids: the target's token id for each id that the draft head can draft.
    """

    target: Any
    ids: Seq[int]


@dataclass(frozen=True)
class Passed:
    """The result of one forward pass. Only the model's own methods may read it before `Model.wait` is called.

    hidden [T, H]: the output of the final norm if the last layer ran, otherwise the residual stream. taps: by k, the
    residual stream before layer k [T, H]. num_experts: for each layer with experts that ran, the number of experts that
    were chosen for at least one row.
    """

    hidden: Any
    taps: Mapping[int, Any] = field(default_factory=dict)
    num_experts: Seq[int] = ()


@dataclass(frozen=True)
class RanAhead:
    """The result of `run_ahead`: the token ids that continue each run (the tokens of one sequence) of a batch.

    confidences: by run, the probability of each id. Empty if `run_ahead` was called without `stops`, or if the model
    does not know the probabilities. probs: by run, the distribution from which each id was drawn. Empty if `run_ahead`
    was called without `draws`.
    """

    ids: list[list[int]]
    confidences: Seq[Seq[float]] = ()
    probs: Seq[Seq[Probs]] = ()


def check_pass(
    spec: Spec, batch: RaggedBatch, layers: Seq[int] | None, hidden: Any, taps: Seq[int]
) -> tuple[Seq[int], bool]:
    """Return the layers of a pass, and whether the final norm follows them. See TorchModel.forward for the arguments.

    Raises InternalError for layers, taps or rows that do not fit the model.
    """
    chosen = range(spec.num_layers) if layers is None else layers
    check_layers(spec, chosen)
    _check_part("taps", sorted(taps), spec.num_layers + 1)
    check_rows([] if hidden is None else [hidden], batch, spec.hidden_size)
    return chosen, layers is None or spec.num_layers - 1 in layers


def check_rows(tensors: Iterable[Any], batch: RaggedBatch, width: int) -> None:
    """Raise InternalError unless each tensor has the shape of a batch's hidden states, [T, width]."""
    for rows in tensors:
        if rows.shape != (batch.run_starts[-1], width):
            raise InternalError(f"{tuple(rows.shape)} is not the shape of hidden rows of {batch.run_starts[-1]} tokens")


def float_rows(x: npt.ArrayLike, width: int, num: int | None = None) -> Floats:
    """Return x [num, width] as contiguous float32, the form that native operators read.

    num: the number of rows that x must have; None = any number. Raises InternalError for any other shape.
    """
    x = np.asarray(x)
    if x.ndim != 2 or x.shape[1] != width:
        raise InternalError(f"rows of shape {tuple(x.shape)} do not fit a width of {width}")
    if num not in (None, x.shape[0]):
        raise InternalError(f"{x.shape[0]} rows are given where there must be {num}")
    return np.ascontiguousarray(x, np.float32)


def batch_of_sources(sources: Mapping[int, Seq[int]]) -> RaggedBatch:
    """Return the batch in which an encoder reads these inputs, each as one sequence from position 0 on.

    sources: by cache slot, the token ids of an encoder input.
    """
    starts = [0, *itertools.accumulate(map(len, sources.values()))]
    tokens = [token for source in sources.values() for token in source]
    positions = [i for source in sources.values() for i in range(len(source))]
    return RaggedBatch(tokens, positions, starts, list(sources), [0] * len(sources))


def check_sources(batch: RaggedBatch) -> None:
    """Raise InternalError unless each run in a batch of an encoder-decoder has a source, the encoder's input."""
    if len(batch.sources) != len(batch.slots):
        raise InternalError(f"{len(batch.slots)} runs of an encoder-decoder have {len(batch.sources)} sources")


def check_layers(spec: Spec, layers: Seq[int]) -> None:
    """Raise InternalError for layers that do not ascend, or that the model does not have."""
    _check_part("layers", layers, spec.num_layers)


def _check_part(name: str, part: Seq[int], whole: int) -> None:
    if part and not (part[0] >= 0 and part[-1] < whole and all(a < b for a, b in itertools.pairwise(part))):
        raise InternalError(f"{name} must ascend from 0 or more to less than {whole}, and {list(part)} do not")


def end_of(batch: RaggedBatch) -> int:
    """Return an exclusive upper bound of the positions in a batch."""
    return max(map(batch.end, range(len(batch.slots))), default=0)


def kinds_in_words(bits: Iterable[int], dtypes: Iterable[str]) -> str:
    """Describe weights of these bit widths and dtypes in words, such as "4-bit and bfloat16 weights"."""
    names = [f"{num}-bit" for num in sorted(set(bits))] + sorted(set(dtypes))
    *others, last = names
    return f"{', '.join(others)}{' and ' if others else ''}{last} weights"
