"""A whole pre-norm decoder on the native operators: packed weights, and one native call for each pass."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, MutableMapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.ops.packed import PackedMatrix, run_numbers
from forerun.ops.quantised import UNIT, QuantisedMatrix, Scheme
from forerun.ops.quantising import quantise, scheme_of
from forerun.types import RaggedBatch

if TYPE_CHECKING:
    from forerun.ops.cpu import CpuOps

# Of each layer: the matrices that are packed as one, because they have one input.
PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def short_head_scheme() -> Scheme:
    """Return how the first rows of a quantised LM head are packed once more."""
    return scheme_of(8, UNIT)


class DecoderSizes(Protocol):
    """The sizes of an architecture that a native decoder needs; models/layers.py implements it."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    tie_embeddings: bool

    def window(self, layer: int) -> int | None: ...


class Cache(Protocol):
    """The part of a KV cache that a native pass reads; kv/cache.py implements it."""

    native: Any

    def tables(self, batch: RaggedBatch) -> list[list[int]]: ...


class CpuDecoder:
    """The packed weights of a pre-norm decoder, and the native object that runs them.

    Rows go in and come out as float32; keys and values are kept in the type of the weights (`weight_dtype`).
    """

    def __init__(
        self, ops: CpuOps, config: DecoderSizes, weights: Mapping[str, Tensor], *, consume: bool = False
    ) -> None:
        self.config, self.ops = config, ops
        self._norms: dict[str, Tensor] = {}  # referenced here because the native object has only their addresses
        self._places: dict[str, tuple[PackedMatrix, int, int]] = {}  # name -> where it is packed: first row, rows
        source = _Source(weights, consume)
        # The largest first: what packing it takes beside the packed matrix is gone before all the others are there.
        head_name = "model.embed_tokens" if config.tie_embeddings else "lm_head"
        self.matrices = {"head": self._pack(source, (head_name,))}
        table = None if config.tie_embeddings else source.weights["model.embed_tokens.weight"]
        self._embedding = self.matrices["head"] if table is None else None
        self._table: Tensor | None = None
        if isinstance(table, QuantisedMatrix):
            self._embedding = ops.pack(table)
            self._places["model.embed_tokens"] = (self._embedding, 0, table.shape[0])
        elif table is not None:
            self._table = table.detach().contiguous()
        self.weight_dtype = self.cache_dtype = self.matrices["head"].dtype
        self.activation_dtype = torch.float32
        self._short_heads: dict[int, PackedMatrix] = {}  # by their rows
        norms: list[int] = []
        for i in range(config.num_layers):
            norms += self._pack_layer(f"model.layers.{i}.", source)
            norms += [self._norm(source, f"model.layers.{i}.self_attn.{name}_norm.weight") for name in "qk"]
        head = self.matrices["head"].handle
        sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.ffn_size)
        self._native = ops.extension.make_decoder(
            ops.backend,
            [*sizes, config.vocab_size],
            config.norm_eps,
            self.weight_dtype == torch.bfloat16,
            norms,
            [self.matrices[f"{i}.{name}"].handle for i in range(config.num_layers) for name in PRODUCTS],
            [config.window(i) or 0 for i in range(config.num_layers)],
            None if self._embedding is None else self._embedding.handle,
            address(self._table),
            self._norm(source, "model.norm.weight"),
            head,
        )

    @property
    def weight_bits(self) -> tuple[int, ...]:
        """The bits of the quantised matrices, ascending; () = none is."""
        return tuple(sorted({bits for matrix in self._all_matrices() for bits in matrix.bits}))

    @property
    def has_dense(self) -> bool:
        """Tell whether a matrix is not quantised."""
        return self._table is not None or not all(matrix.bits for matrix in self._all_matrices())

    @property
    def bytes_per_pass(self) -> int:
        """The bytes of weights that a pass of a few rows reads: every packed matrix and norm once."""
        return sum(m.nbytes for m in self.matrices.values()) + sum(norm.nbytes for norm in self._norms.values())

    def forward(
        self,
        batch: RaggedBatch,
        cache: Cache,
        rotations: Tensor,
        layers: Seq[int],
        hidden: Tensor | None,
        taps: Mapping[int, Tensor],
        is_normed: bool,
    ) -> Tensor:
        """Run one pass, as Decoder.forward; returns float32 [T, H], after the final norm if `is_normed`.

        rotations: float32 [positions, 2, 1, head_dim], cos and sin by position.
        """
        tokens, positions = batch.ids()
        hidden = None if hidden is None else hidden.float().contiguous()
        out = torch.empty(len(tokens), self.config.hidden_size)
        if tokens:
            self._native.forward(
                tokens,
                positions,
                rotations.data_ptr(),
                len(batch.slots),
                run_numbers(batch, cache.tables(batch)),
                cache.native,
                list(layers),
                address(hidden),
                [(k, taps[k].data_ptr()) for k in sorted(taps)],
                is_normed,
                out.data_ptr(),
            )
        return out

    def run_ahead(
        self,
        batch: RaggedBatch,
        lengths: list[int],
        cache: Cache,
        rotations: Tensor,
        layers: Seq[int],
        num_ids: int,
        hidden: Tensor | None = None,
        ahead: Any = None,
    ) -> list[list[int]] | None:
        """Continue each run greedily in one native call; returns ids[b], lengths[b] of them.

        batch: runs of committed tokens, with cache rows for those and for lengths[b] - 1 more, which are fed one by
        one. layers: those that run; the final norm follows the last of them. ids[b][i] is the argmax of the first
        `num_ids` logits after the run's tokens and ids[b][:i]. Returns None where a logit is NaN. Of a head: hidden
        [T, H] is what its layer gets for the tokens, ahead how a found id is fed (`ahead`).
        """
        if not batch.slots:
            return []
        counts = [end - start for start, end in itertools.pairwise(batch.run_starts)]
        ends = [0, *itertools.accumulate(count + length - 1 for count, length in zip(counts, lengths, strict=True))]
        fed = dataclasses.replace(batch, run_starts=ends)
        numbers, rotated = run_numbers(fed, cache.tables(fed)), rotations.data_ptr()
        hidden = None if hidden is None else hidden.float().contiguous()
        return self._native.run_ahead(  # type: ignore[no-any-return]
            *batch.ids(), counts, lengths, rotated, numbers, cache.native, list(layers), num_ids, address(hidden), ahead
        )

    def ahead(self, ids: Seq[int], norms: tuple[Tensor | None, Tensor | None], eps: float, matrix: Any) -> Any:
        """Return how a head of this decoder feeds what it has found: the product of an embedding and a row.

        ids: this decoder's id of each id of the head. norms: of the embedding and of the row that the head's layer has
        left before, float32 [H]; the caller keeps them. matrix: packed, [H, 2 H].
        """
        return self.ops.extension.Ahead(self._native, list(ids), [address(n) for n in norms], eps, matrix.handle)

    def embed(self, ids: Seq[int]) -> Tensor:
        """Return the embeddings of these ids, float32 [n, H], with the bits that a pass has."""
        if self._embedding is not None:
            return self._embedding.unpack(ids).float()
        assert self._table is not None
        return F.embedding(torch.tensor(ids, dtype=torch.int64), self._table).float()

    def norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to rows of the residual stream [R, H], float32, with the bits that a pass has."""
        return self.ops.rms_norm(hidden, self._norms["model.norm.weight"], self.config.norm_eps)

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """Compute the logits: hidden [R, H] -> float32 [R, V], or [R, num_ids] of the first ids.

        For those the rows of the head are packed once more, when they are first asked for; a quantised head's with 8
        bits. `best` needs no second copy.
        """
        if num_ids is not None and num_ids < self.config.vocab_size:
            return self.ops.linear(hidden, self._short_head(num_ids))
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.config.vocab_size)
        if len(hidden):
            self._native.logits(hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    def best(self, hidden: Tensor, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Return ids and values of the largest of the first `num_ids` logits of some rows of hidden [T, H].

        Ties go to the lowest id, and NaN counts as the largest. The values are bit for bit those of `logits`; the other
        logits are not written.
        """
        if not rows:
            return [], []
        hidden = hidden.contiguous()
        return self._native.argmax(hidden.data_ptr(), rows, num_ids)  # type: ignore[no-any-return]

    def _short_head(self, num_ids: int) -> PackedMatrix:
        if num_ids not in self._short_heads:
            rows = self.matrices["head"].unpack(range(num_ids))
            made: Tensor | QuantisedMatrix = rows
            if self.matrices["head"].bits:
                scheme = short_head_scheme()
                made = QuantisedMatrix(scheme, (num_ids, rows.shape[1]), lambda: iter([quantise(rows, scheme)]))
            self._short_heads[num_ids] = self.ops.pack(made)
        return self._short_heads[num_ids]

    def vector(self, name: str) -> Tensor:
        """Return a norm or a bias by its name in a checkpoint, float32; a missing bias beside others is 0."""
        if name in self._norms:
            return self._norms[name]
        packed, first, num = self._places[name.removesuffix(".bias")]
        assert packed.bias is not None
        return packed.bias[first : first + num]

    def matrix_rows(self, name: str, rows: range) -> Tensor:
        """Return rows of a matrix by its name in a checkpoint, [rows, I], as they were before packing."""
        if self._table is not None and name == "model.embed_tokens.weight":
            return self._table[rows.start : rows.stop]
        packed, first, _ = self._places[name.removesuffix(".weight")]
        return packed.unpack(range(first + rows.start, first + rows.stop))

    def _all_matrices(self) -> list[PackedMatrix]:
        return [*self.matrices.values(), *([] if self._embedding is None else [self._embedding])]

    def _pack_layer(self, at: str, source: _Source) -> list[int]:
        index = at.split(".")[2]
        for name, members in PRODUCTS.items():
            packed = self._pack(source, [at + member for member in members], paired=name == "gate_up")
            self.matrices[f"{index}.{name}"] = packed
        return [self._norm(source, f"{at}{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")]

    def _pack(self, source: _Source, names: Seq[str], *, paired: bool = False) -> PackedMatrix:
        parts, bias = source.parts(*names)
        sizes = [part.shape[0] for part in parts]
        packed = self.ops.pack(parts, bias, paired=paired, consume=source.consume)
        for name, size, end in zip(names, sizes, itertools.accumulate(sizes), strict=True):
            self._places[name] = (packed, end - size, size)
        return packed

    def _norm(self, source: _Source, name: str) -> int:
        """Return the address of a norm's weights in float32, 0 where the architecture has none of that name."""
        weight = source.weights.get(name)
        if weight is None:
            return 0
        self._norms[name] = weight.detach().float().contiguous().clone()
        return int(self._norms[name].data_ptr())


def address(tensor: Tensor | None) -> int:
    """Return where a contiguous tensor's memory begins; 0 of none."""
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class _Source:
    """The weights that a decoder is packed from, each looked up once and let go when it is packed.

    consume: those of a dictionary are taken out of it.
    """

    weights: Mapping[str, Tensor]
    consume: bool

    def parts(self, *names: str) -> tuple[list[Tensor], Tensor | None]:
        """Return the matrices of these names, and their biases joined (None where none has one)."""
        parts = [self.weights[name + ".weight"] for name in names]
        biases = [self.weights.get(name + ".bias") for name in names]
        if self.consume and isinstance(self.weights, MutableMapping):
            for name in names:
                del self.weights[name + ".weight"]
        if all(bias is None for bias in biases):
            return parts, None
        filled = [torch.zeros(p.shape[0]) if b is None else b.float() for p, b in zip(parts, biases, strict=True)]
        return parts, torch.cat(filled)
