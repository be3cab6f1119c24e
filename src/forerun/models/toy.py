"""A toy model whose exact probabilities are known. It has the same interface as real models.

The toy keeps the id and the position of each token in the KV cache. A row's history is read back from the cache rows
that the row attends to. So the output changes if a block table, a position or an ancestor in a tree is wrong, or if
rows were not truncated. The logits come from a random table with one entry for each context. An entry is made from a
seed when it is first needed. For tests, `logits_after` returns logits from the table, without the cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.blocks import Block
from forerun.config import Quantization
from forerun.errors import InternalError
from forerun.host_tensor import HostTensor
from forerun.kv.cache import BlockCache, CacheShape
from forerun.kv.pool import HostPools
from forerun.ops.operators import HostRows, Operators
from forerun.ops.passes import Passed
from forerun.sampling.arithmetic import Row
from forerun.types import RaggedBatch

SOURCE_ENDS = -1  # between a source and a text, in the key of a table


@dataclass(frozen=True)
class ToyConfig:
    """The sizes of a toy model, under the names that the specs of real models have."""

    vocab_size: int
    max_positions: int
    model_type: str = "toy"
    encoder: ToyConfig | None = None

    has_experts = False

    @property
    def blocks(self) -> tuple[Block, ...]:
        return ()

    @property
    def num_slots(self) -> int:
        return 1 if self.encoder is None else 2

    @property
    def hidden_size(self) -> int:
        return self.vocab_size

    @property
    def num_layers(self) -> int:
        return self.cache_shape.num_layers

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(num_layers=1, num_kv_heads=1, head_dim=2)  # a pair, as rotary positions turn


@dataclass(frozen=True)
class ToyTable:
    """The parameters of the random table.

    order: the number of last tokens on which the logits depend; None = the whole history. scale: the standard deviation
    of the logits; with 0 the distribution is uniform, and with 8 it is peaked. zero_share: the share of ids whose logit
    is -inf in a context; at least one id has a finite logit. tie_step: logits are rounded to multiples of this number;
    0 = no rounding. distance: for a toy that resembles another toy (`near`), as a draft model resembles its target, the
    standard deviation of the noise that is added to the other toy's logits.
    """

    order: int | None = None
    scale: float = 1.0
    zero_share: float = 0.0
    tie_step: float = 0.0
    distance: float = 0.0


class ToyOps(Operators):
    """The operators of a toy, in Python."""

    name, row_invariant = "reference", True

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def rows_dtype(self, weights: str) -> str:
        """Return the toy's dtype."""
        return self._dtype

    @property
    def loader(self) -> Callable[..., Any]:
        """The function that makes a draft head for a toy. It needs torch."""
        from forerun.models.toy_heads import load

        return load

    def multiplier(self, model: Any, matrix: HostTensor, bias: HostTensor | None = None) -> Callable[[Any], Any]:
        """Return a function that multiplies rows by a matrix [O, I] one by one and adds `bias`, in the toy's dtype."""
        columns = matrix.float32().astype(self._dtype).T
        added = 0 if bias is None else bias.float32().astype(self._dtype)
        return lambda rows: np.stack([row @ columns for row in rows]) + added


class ToyModel:
    """A model with one layer, whose logits come from a random table. The hidden states are the logits (H = V).

    A token's embedding is 1 at the token's id and 0 elsewhere, so the index of an input's largest element is the id.
    The final norm does nothing. near: the toy that this toy resembles (`ToyTable.distance`). source: the token ids of
    an encoder's input. If `source` is not empty, the toy is an encoder-decoder, and its logits depend on all of these
    ids. `logits_after` uses `source` directly; a pass reads the ids back from the cache.
    """

    weight_bits: tuple[int, ...] = ()
    bytes_per_pass = 0

    def __init__(
        self,
        vocab_size: int,
        seed: int,
        table: ToyTable | None = None,
        *,
        near: ToyModel | None = None,
        max_positions: int = 4096,
        dtype: str = "float64",
        source: Seq[int] = (),
    ) -> None:
        if dtype not in ("float32", "float64"):
            raise InternalError(f"the toy keeps ids in its cache, which {dtype} cannot hold exactly")
        self.source = tuple(source)
        encoder = ToyConfig(vocab_size, max_positions) if source else None
        self.config = ToyConfig(vocab_size, max_positions, encoder=encoder)
        self.shape = table or ToyTable()
        self.near, self.seed = near, seed
        self.weight_dtype = self.activation_dtype = self.cache_dtype = dtype
        self.make_pools = HostPools
        self._float = np.dtype(dtype)
        self.device = "cpu"
        self.ops, self.rows = ToyOps(dtype), HostRows()
        self._table: dict[tuple[int, ...], Row] = {}
        self._rounded: dict[Quantization, ToyModel] = {}

    # ------------------------------------------------------------------------------------------------ as a model

    def forward(
        self,
        batch: RaggedBatch,
        cache: BlockCache | None,
        layers: Seq[int] | None = None,
        hidden: Row | None = None,
        taps: Seq[int] = (),
    ) -> Passed:
        """Write the new tokens' ids and positions into the cache, and read each row's history back.

        Returns the logits [T, V], which are the hidden states, too.
        """
        if cache is None:
            raise InternalError("the toy reads its history from a cache and was given none")
        if layers is not None and list(layers) != [0]:
            raise InternalError(f"the toy has the layer 0 and runs no others: {list(layers)}")
        view = cache.view(batch)
        pool = cache.pools[0]
        tokens, positions = batch.ids()
        if hidden is None and max(tokens, default=0) >= self.config.vocab_size:
            raise InternalError(f"the toy has {self.config.vocab_size} embeddings and none for id {max(tokens)}")
        written = np.array(tokens) if hidden is None else hidden.argmax(axis=1)
        pool.write(view.write_rows, written[:, None, None], np.array(positions)[:, None, None])
        rows = []
        for b, read in enumerate(view.read_rows):
            source = self._source_of(batch, b, cache)
            tokens, positions = ([int(x) for x in kept[:, 0, 0].tolist()] for kept in pool.read(read))
            for i in range(len(batch.run(b))):
                seen = batch.visible(b, i)
                rows.append(self._at([tokens[j] for j in seen], [positions[j] for j in seen], source))
        all_logits = np.stack(rows) if rows else np.empty((0, self.config.vocab_size), self._float)
        inputs = hidden if hidden is not None or not taps else self.embed(batch.ids()[0])
        return Passed(all_logits, {k: (inputs, all_logits)[k] for k in taps})

    def begin(self, sources: Mapping[int, Seq[int]], cache: BlockCache) -> None:
        """Write the token ids and positions of encoder inputs into the cache. sources: maps slots to token ids."""
        for slot, ids in sources.items():
            written = (np.array(numbers)[:, None, None] for numbers in (list(ids), list(range(len(ids)))))
            cache.pools[0].write(cache.rows(slot, 0, len(ids)), *written)

    def _source_of(self, batch: RaggedBatch, b: int, cache: BlockCache) -> tuple[int, ...]:
        """Return the encoder's input for run `b` of a batch, read back from the cache.

        If a token's position differs from its index, the difference is appended to the returned ids, so that the output
        changes.
        """
        if not self.source:
            return ()
        slot, num_tokens = batch.sources[b]
        ids, positions = cache.pools[0].read(cache.rows(slot, 0, num_tokens))
        shifts = [int(p) - i for i, p in enumerate(positions[:, 0, 0].tolist())]
        return (*(int(x) for x in ids[:, 0, 0].tolist()), *filter(None, shifts))

    def embed(self, ids: Seq[int]) -> Row:
        """Return the embedding of each id, [n, V]."""
        return np.eye(self.config.vocab_size, dtype=self._float)[list(ids)]

    def head(self, ids: Seq[int]) -> Row:
        """Return the rows of the LM head for these ids, [n, V]. The LM head is the identity matrix."""
        return self.embed(ids)

    def norm(self, hidden: Row) -> Row:
        """Return a copy of the hidden states [R, V]."""
        return hidden.copy()

    def logits(self, hidden: Row, num_ids: int | None = None) -> Row:
        """Return the logits of hidden states [R, V], in the toy's dtype. num_ids: only the logits of the first ids."""
        return hidden[:, :num_ids].copy()

    def wait(self) -> None:
        """Do nothing, because every result is ready when the call that computes it returns."""

    def rounded(self, quantization: Quantization) -> ToyModel:
        """Return a toy whose logits are the logits of this toy, rounded to multiples of 2^(4 - bits).

        Every call with the same quantization returns the same toy.
        """
        if quantization not in self._rounded:
            size, positions = self.config.vocab_size, self.config.max_positions
            table = ToyTable(tie_step=2.0 ** (4 - quantization.bits))
            dtype = self.weight_dtype
            self._rounded[quantization] = ToyModel(
                size, self.seed, table, near=self, max_positions=positions, dtype=dtype, source=self.source
            )
        return self._rounded[quantization]

    # ----------------------------------------------------------------------------------------------- as an oracle

    def logits_after(self, history: Seq[int]) -> Row:
        """Return the logits [V] after this history, from the table alone. The cache and positions are not used."""
        return self._logits(self.source, history)

    def _logits(self, source: tuple[int, ...], history: Seq[int]) -> Row:
        order = self.shape.order
        context = tuple(history) if order is None else tuple(history[max(0, len(history) - order) :])
        key = (*source, SOURCE_ENDS, *context) if source else context
        if key not in self._table:
            self._table[key] = self._make(key)
        return self._table[key]

    def _at(self, tokens: list[int], positions: list[int], source: tuple[int, ...] = ()) -> Row:
        """Return the logits after a history that was read back from the cache.

        If a token's position differs from its index, the logits are shifted cyclically, so that the output changes.
        """
        shifts = [p - i for i, p in enumerate(positions)]
        logits = self._logits(source, tokens)
        return np.roll(logits, 1 + sum(map(abs, shifts))) if any(shifts) else logits

    def _make(self, context: tuple[int, ...]) -> Row:
        """Draw the logits of a context.

        If the toy has a source, the context is the ids of the source, SOURCE_ENDS, and the ids of the history.
        """
        shape, size = self.shape, self.config.vocab_size
        generator = np.random.default_rng([self.seed, zlib.crc32(repr(context).encode())])
        logits = generator.standard_normal(size) * shape.scale
        if self.near is not None:
            logits = self.near._logits(*_parts(context)) + generator.standard_normal(size) * shape.distance
        if shape.tie_step > 0:
            logits = np.round(logits / shape.tie_step) * shape.tie_step
        excluded = generator.random(size) < shape.zero_share
        excluded[generator.integers(size)] = False
        logits[excluded] = -np.inf
        if not np.isfinite(logits).any():
            logits[generator.integers(size)] = 0.0
        return logits.astype(self._float)


def _parts(context: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a key of the table into the source and the history."""
    end = context.index(SOURCE_ENDS) if SOURCE_ENDS in context else -1
    return context[: max(0, end)], context[end + 1 :]
