"""What every model can do, wherever it computes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from forerun.blocks import CacheShape, Spec
from forerun.config import Quantization
from forerun.host_tensor import Floats
from forerun.kv import KVCache
from forerun.kv.pool import MakePools
from forerun.ops.operators import Operators
from forerun.ops.passes import Passed, RanAhead
from forerun.types import Draw, Probs, RaggedBatch, Stop


class ModelConfig(Protocol):
    """The facts that the engine must know of an architecture."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def cache_shape(self) -> CacheShape: ...
    @property
    def num_slots(self) -> int:
        """The cache slots of each sequence: two where its source needs one, else one."""

    @property
    def encoder(self) -> Any:
        """The part that reads the sources of an encoder-decoder; None for other models."""

    @property
    def has_experts(self) -> bool:
        """Tell whether rows choose experts in some layer."""


class RowsOf(Protocol):
    """Operations on the rows of a model, wherever the rows are."""

    def join(self, parts: Any) -> Any:
        """Join rows, one part behind the other."""

    def take(self, rows: Any, places: Seq[int]) -> Any:
        """Return a copy of the rows at some places."""

    def from_host(self, rows: npt.NDArray[Any]) -> Any:
        """Return rows of the host as rows of the model."""

    def top(self, logits: Any, num: int) -> npt.NDArray[np.int64]:
        """Return the ids of the largest logits of each row, best first [R, num], on the host."""

    def to_host(self, rows: Any) -> npt.NDArray[Any]:
        """Return the rows as a numpy array, which is written once the model was waited for."""


class Model(Protocol):
    """Weights plus one forward pass. It knows nothing of drafts, requests or text, and reads caches of one class.

    Further protocols name what only some models can do: FindsBest, KeepsCache, DrawsRows, RunsAhead.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def device(self) -> str: ...
    @property
    def weight_dtype(self) -> str: ...
    @property
    def activation_dtype(self) -> str: ...
    @property
    def cache_dtype(self) -> str: ...
    @property
    def make_pools(self) -> MakePools: ...
    @property
    def rows(self) -> RowsOf: ...
    @property
    def ops(self) -> Operators: ...
    @property
    def weight_bits(self) -> tuple[int, ...]:
        """The bits of weights that are multiplied as integers, ascending; () = all are of `weight_dtype`."""

    @property
    def bytes_per_pass(self) -> int:
        """The bytes of weights that one pass of a few rows reads, counted from what is in memory: every matrix once.

        A mixture of experts counts the experts that one row chooses. 0: the weights are not known, as in a module of
        torch.
        """

    def forward(
        self, batch: RaggedBatch, cache: Any, layers: Seq[int] | None = None, hidden: Any = None, taps: Seq[int] = ()
    ) -> Passed:
        """Run every new token through these layers (None = all) and write their keys, values and states into the cache.

        hidden [T, H]: the input of the first layer; None = the tokens' embeddings. taps: each k whose residual stream
        before layer k is wanted.
        """

    def rounded(self, quantization: Quantization) -> Model:
        """Return a second model of these weights with every matrix rounded."""

    def embed(self, ids: Seq[int]) -> Any:
        """Return the embeddings of these ids [n, H]."""

    def head(self, ids: Seq[int]) -> npt.NDArray[np.float32]:
        """Return rows of the LM head on the host [n, H]."""

    def norm(self, hidden: Any) -> Any:
        """Apply the final norm to rows of the residual stream [R, H]."""

    def logits(self, hidden: Any, num_ids: int | None = None) -> Any:
        """Compute float32 logits: hidden [R, H] -> [R, V], or [R, num_ids] of the first ids."""

    def wait(self) -> None:
        """Wait until everything launched is computed; a clock read before that measures the launch alone."""


class LoadedModel(Model, Protocol):
    """A model whose weights are in memory, on any backend."""

    @property
    def config(self) -> Spec: ...
    @property
    def precision(self) -> str:
        """The precision of the weights in words: 4-bit and 8-bit weights, or bfloat16 weights."""

    def weight(self, name: str) -> Floats:
        """Return a weight by its name in a checkpoint, float32, as it was before packing."""


@runtime_checkable
class FindsBest(Protocol):
    """A model that finds the largest logits without writing the others."""

    def best(self, hidden: Any, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Return id and value of the largest of the first `num_ids` logits of each of these rows of hidden [T, H].

        Ties go to the lowest id, and NaN counts as the largest.
        """


@runtime_checkable
class KeepsCache(Protocol):
    """A model that reads a cache of its own, not a BlockCache."""

    def own_cache(self) -> KVCache:
        """Make the cache that this model reads."""


@runtime_checkable
class DrawsRows(Protocol):
    """A model that draws from rows of logits on its device, with the bits of the sampling pipeline."""

    def draw(
        self, hidden: Any, rows: list[int], num_ids: int, draws: Seq[Draw], asked: Seq[Seq[int]]
    ) -> tuple[list[Probs], list[int]]:
        """Draw an id from the first `num_ids` logits of each of these rows of hidden [T, H], as its draw says.

        asked: for each row, further ids whose probabilities are wanted. Returns the distributions and the likeliest
        ids, -1 where logits are no numbers.
        """


@runtime_checkable
class RunsAhead(Protocol):
    """A model that continues runs in one call. tells_confidence: it takes stops; draws_ahead: it takes draws."""

    tells_confidence: bool
    draws_ahead: bool

    def run_ahead(
        self,
        batch: RaggedBatch,
        lengths: list[int],
        cache: Any,
        num_ids: int,
        layers: Seq[int] | None = None,
        hidden: Any = None,
        *,
        stops: Seq[Stop] = (),
        layer_rows: Seq[Any] = (),
        draws: Seq[Draw] = (),
    ) -> RanAhead | None:
        """Continue each run of a batch; return None where a logit is no number (ops/cpu/model.py says more)."""
