"""The interface of every backend's operators, whatever numbers they compute with."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.errors import InternalError
from forerun.host_tensor import HostTensor
from forerun.ops.quantised import Scheme
from forerun.sampling.largest import top

Array = npt.NDArray[np.floating[Any]]


class HostRows:
    """Hidden rows [T, H] of a model that computes on the host: numpy's arrays. See ops.model.RowsOf."""

    def join(self, parts: Seq[Array]) -> Array:
        """Join rows, one part behind the other."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def take(self, rows: Array, places: Seq[int]) -> Array:
        """Return a copy of the rows at some places."""
        return rows[list(places)]

    def from_host(self, rows: Array) -> Array:
        """Return rows of the host as rows of the model."""
        return rows

    def top(self, logits: Array, num: int) -> npt.NDArray[np.int64]:
        """Return the ids of the largest logits of each row, best first, the lowest on ties [R, num], on the host."""
        return top(logits, num)[0]

    def to_host(self, rows: Array) -> Array:
        """Return the rows as a numpy array, which is written once the model was waited for."""
        return rows


class Operators:
    """The operators of a backend, which compute its models.

    row_invariant: whether the bits of one row depend on that row alone; tests hold a backend to it. extra_row: the
    usual cost of one more row, in passes of one row; the cost on a machine is measured.
    """

    name = ""
    row_invariant = False
    extra_row = 0.1

    @property
    def build(self) -> str:
        """The name of the build, for reports: bits are promised, and speeds were measured, for it alone."""
        return self.name

    @property
    def num_threads(self) -> int:
        """The number of threads that compute on a CPU."""
        return 1

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which only the operators' threads compute on the CPU."""
        return nullcontext()

    def inference(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is remembered for gradients."""
        return nullcontext()

    def auto_dtype(self, device: str, stored: str) -> str:
        """Return the type that dtype="auto" means for weights of a stored type."""
        return stored

    def rows_dtype(self, weights: str) -> str:
        """Return the type of rows that go in and come out, beside weights of this type."""
        return weights

    @property
    def loader(self) -> Callable[..., Any] | None:
        """The function that loads models for these operators; None = `load` of their backend's file."""
        return None

    def multiplier(self, model: Any, matrix: HostTensor, bias: HostTensor | None = None) -> Callable[[Any], Any]:
        """Return a function that multiplies a model's rows [T, I] by a matrix [O, I], in the model's type -> [T, O]."""
        raise InternalError(f"the operators {self.name} have no products by themselves")

    def packs_scheme(self, scheme: Scheme) -> bool:
        """Tell whether a model takes a QuantisedMatrix of this scheme in place of a tensor."""
        return False
