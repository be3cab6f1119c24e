"""The protocols of models: what every model can do, on any device, and what only some can do."""

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
    """The facts about an architecture that the engine must know."""

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
        """The number of cache slots of each sequence: one for its text, and one more if the model has an encoder."""

    @property
    def encoder(self) -> Any:
        """The encoder of an encoder-decoder model; None for other models."""

    @property
    def has_experts(self) -> bool:
        """Whether some layer has a mixture of experts."""


class RowsOf(Protocol):
    """Operations on a model's hidden states [rows, H], on the device where they lie."""

    def join(self, parts: Any) -> Any:
        """Concatenate several arrays of rows, in order."""

    def take(self, rows: Any, places: Seq[int]) -> Any:
        """Return a copy of the rows at these indices."""

    def from_host(self, rows: npt.NDArray[Any]) -> Any:
        """Return a numpy array of rows as rows on the model's device."""

    def top(self, logits: Any, num: int) -> npt.NDArray[np.int64]:
        """Return the token ids of each row's `num` largest logits, the best first: a numpy array [R, num]."""

    def to_host(self, rows: Any) -> npt.NDArray[Any]:
        """Return the rows as a numpy array, whose values are valid only after `Model.wait`."""


class Model(Protocol):
    """Weights and one forward pass. A model knows nothing of drafts, requests or text.

    Each model reads caches of one class. Further protocols describe what only some models can do: FindsBest,
    KeepsCache, DrawsRows, RunsAhead.
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
        """The bit widths of the quantised matrices, ascending; () = all weights are `weight_dtype`."""

    @property
    def bytes_per_pass(self) -> int:
        """The bytes of weights that one pass of a few rows reads: every matrix once, as it is in memory.

        In a mixture of experts, only the experts of a single row are counted. 0 = the weights are not known, because
        the caller gave a torch module.
        """

    def forward(
        self, batch: RaggedBatch, cache: Any, layers: Seq[int] | None = None, hidden: Any = None, taps: Seq[int] = ()
    ) -> Passed:
        """Run all new tokens through these layers (None = all) and write their keys, values and states into the cache.

        hidden [T, H]: the input of the first layer; None = the tokens' embeddings. taps: indices of layers; the
        residual stream before each of these layers is returned, too.
        """

    def rounded(self, quantization: Quantization) -> Model:
        """Return a second model with the same weights, in which every matrix is rounded to fewer bits."""

    def embed(self, ids: Seq[int]) -> Any:
        """Return the embeddings [n, H] of these token ids."""

    def head(self, ids: Seq[int]) -> npt.NDArray[np.float32]:
        """Return the LM head's rows [n, H] for these token ids, on the host."""

    def norm(self, hidden: Any) -> Any:
        """Apply the final norm to rows of the residual stream [R, H]."""

    def logits(self, hidden: Any, num_ids: int | None = None) -> Any:
        """Compute float32 logits: hidden [R, H] -> [R, V], or [R, num_ids] for the first `num_ids` token ids."""

    def wait(self) -> None:
        """Wait until all launched work is computed. A time that is taken without this wait covers only the launches."""


class LoadedModel(Model, Protocol):
    """A model whose weights are in memory, on any backend."""

    @property
    def config(self) -> Spec: ...
    @property
    def precision(self) -> str:
        """The precision of the weights in words, such as "4-bit and 8-bit weights" or "bfloat16 weights"."""

    def weight(self, name: str) -> Floats:
        """Return a weight by its name in a checkpoint, float32, as it was before packing."""


@runtime_checkable
class FindsBest(Protocol):
    """A model that finds a row's largest logit without writing all of the row's logits to memory."""

    def best(self, hidden: Any, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Return the token id and the value of the largest logit in each row of hidden [T, H] that `rows` lists.

        Only the first `num_ids` ids are considered. Ties go to the lowest id, and NaN counts as the largest.
        """


@runtime_checkable
class KeepsCache(Protocol):
    """A model that reads its own class of cache instead of a BlockCache."""

    def own_cache(self) -> KVCache:
        """Make the cache that this model reads."""


@runtime_checkable
class DrawsRows(Protocol):
    """A model that draws token ids from logits on its device, with the same bits as sampling on the host."""

    def draw(
        self, hidden: Any, rows: list[int], num_ids: int, draws: Seq[Draw], asked: Seq[Seq[int]]
    ) -> tuple[list[Probs], list[int]]:
        """Draw a token id for each row of hidden [T, H] that `rows` lists; draws[i] has the settings for rows[i].

        Only the first `num_ids` ids can be drawn. asked: by row, further ids whose probabilities are wanted. Returns
        each row's distribution and likeliest id. The likeliest id is -1 where the row's largest logit is NaN or
        infinite.
        """


@runtime_checkable
class RunsAhead(Protocol):
    """A model that continues each sequence of a batch by several tokens in one call.

    tells_confidence: whether `run_ahead` takes the argument `stops`. draws_ahead: whether `run_ahead` takes the
    argument `draws`.
    """

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
        """Continue each sequence; see CpuModel.run_ahead. Returns None if a row's largest logit is not finite."""
