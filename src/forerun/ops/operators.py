"""The interface of every backend's operators, whether they take numpy arrays or tensors."""

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
    """Operations on a model's hidden states [T, H] that are numpy arrays on the host. See ops.model.RowsOf."""

    def join(self, parts: Seq[Array]) -> Array:
        """Concatenate several arrays of rows, in order."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def take(self, rows: Array, places: Seq[int]) -> Array:
        """Return a copy of the rows at these indices."""
        return rows[list(places)]

    def from_host(self, rows: Array) -> Array:
        """Return the rows unchanged, because this model's rows are numpy arrays on the host, too."""
        return rows

    def top(self, logits: Array, num: int) -> npt.NDArray[np.int64]:
        """Return the token ids of each row's `num` largest logits, [R, num]: the best first, on ties the lowest id."""
        return top(logits, num)[0]

    def to_host(self, rows: Array) -> Array:
        """Return the rows unchanged, because they are a numpy array already."""
        return rows


class Operators:
    """The operators of a backend, which compute its models.

    row_invariant: whether the bits of an output row depend on that row alone, and not on the rest of the batch; tests
    check this. extra_row: the usual cost of one more row, as a share of the cost of a one-row pass. The actual cost is
    measured on each machine.
    """

    name = ""
    row_invariant = False
    extra_row = 0.1

    @property
    def build(self) -> str:
        """The name of the build, for reports. Bitwise equality and measured speeds hold only within one build."""
        return self.name

    @property
    def num_threads(self) -> int:
        """The number of threads that compute on a CPU."""
        return 1

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which only the operators' threads compute on the CPU."""
        return nullcontext()

    def inference(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is recorded for gradients."""
        return nullcontext()

    def auto_dtype(self, device: str, stored: str) -> str:
        """Return the dtype that the option dtype="auto" selects on a device, for weights stored in dtype `stored`."""
        return stored

    def rows_dtype(self, weights: str) -> str:
        """Return the dtype of a model's input and output rows, given the dtype of its weights."""
        return weights

    @property
    def loader(self) -> Callable[..., Any] | None:
        """The function that loads models for these operators; None = the function `load` of their backend's file."""
        return None

    def multiplier(self, model: Any, matrix: HostTensor, bias: HostTensor | None = None) -> Callable[[Any], Any]:
        """Return a function that multiplies rows [T, I] by `matrix` [O, I] in the model's dtype and adds `bias` [O]."""
        raise InternalError(f"the operators {self.name} have no products by themselves")

    def packs_scheme(self, scheme: Scheme) -> bool:
        """Tell whether a model takes a QuantisedMatrix of this scheme in place of a tensor."""
        return False
