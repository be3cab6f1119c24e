"""The native CPU operators: forerun._native behind the interface of ops/reference.py, and whole decoders in one call.

Rows in, float32 rows out; a matrix has to be packed before it can be used (`CpuOps.pack`). Between two operators
everything is float32; with bfloat16 weights the rows that go into a product are rounded to bfloat16, and so are keys
and values on their way into the cache. The bits of a row are a function of that row, its keys and values and the
instruction set alone: not of how many rows there are, of threads, or of where the cache keeps a token
(docs/kernels.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from forerun import native
from forerun.errors import CapacityError, InternalError
from forerun.ops.reference import ReferenceOps
from forerun.types import CacheView, RaggedBatch

DTYPES = (torch.float32, torch.bfloat16)


class DecoderSizes(Protocol):
    """What a native decoder must know of an architecture; models/layers.py has it."""

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
    """What a native pass reads of a KV cache; kv/cache.py has it."""

    keys: list[Tensor]
    values: list[Tensor]
    block_tokens: int

    def tables(self, batch: RaggedBatch) -> list[list[int]]: ...


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A packed weight [num_out, num_in] of one or several parts.

    paired: gate and up of a gated feed-forward block, whose outputs are side by side in memory.
    """

    handle: Any
    num_out: int
    num_in: int
    dtype: torch.dtype
    paired: bool

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding of odd shapes included."""
        return int(self.handle.num_bytes)

    def unpack(self) -> Tensor:
        """The rows as they were, [num_out, num_in]."""
        out = torch.empty(self.num_out, self.num_in, dtype=self.dtype)
        for i, row in enumerate(out):
            self.handle.unpack_row(i, row.data_ptr())
        return out


class CpuOps(ReferenceOps):
    """The kernels of one instruction set, run by a team of threads of their own.

    isa: avx512, avx2 or baseline; None = the best that this processor has, or what FORERUN_ISA says. Raises
    InternalError where the extension was not built.
    """

    def __init__(self, isa: str | None = None, num_threads: int | None = None) -> None:
        super().__init__()
        extension = native.extension()
        self.isa = isa or native.isa()
        if extension is None or self.isa == "reference":
            raise InternalError("the native operators were asked for and are not there")
        self.row_invariant, self.name = True, "native"
        self._num_threads = num_threads or native.num_threads()
        self._extension = extension
        self._backend = extension.Backend(self.isa, self._num_threads)

    @property
    def build(self) -> str:
        """The kernels that compute; their bits depend on nothing else."""
        return f"native kernels, {self.isa}"

    @property
    def num_threads(self) -> int:
        """Threads of the team, the caller included."""
        return self._num_threads

    def auto_dtype(self, device: str, stored: torch.dtype) -> torch.dtype:
        """bfloat16: half the bytes to read, and a row's bits are as independent of its neighbours as in float32."""
        return torch.bfloat16

    # ------------------------------------------------------------------------------------------------- matrices

    def pack(
        self,
        parts: Tensor | Seq[Tensor],
        bias: Tensor | None = None,
        *,
        paired: bool = False,
        consume: bool = False,
    ) -> PackedMatrix:
        """Weights [O, I] of one product, their outputs one after the other; `paired`: gate and up, see PackedMatrix.

        consume: the memory of the parts is given back to the system while they are packed, and they must not be
        read again. Raises CapacityError where there is no memory, InternalError for types other than float32 and
        bfloat16.
        """
        parts = [parts] if isinstance(parts, Tensor) else list(parts)
        dtype, num_in = parts[0].dtype, parts[0].shape[1]
        if dtype not in DTYPES or any(p.dtype != dtype or p.shape[1] != num_in for p in parts):
            raise InternalError(f"weights of {[p.dtype for p in parts]} cannot be packed together")
        rows = [p.detach().contiguous() for p in parts]
        bias = None if bias is None else bias.detach().float().contiguous()
        try:
            handle = self._backend.pack(
                dtype == torch.bfloat16,
                [(p.data_ptr(), len(p)) for p in rows],
                num_in,
                paired,
                0 if bias is None else bias.data_ptr(),
                consume,
            )
        except MemoryError as error:
            raise _no_room(sum(p.nbytes for p in rows), dtype) from error
        return PackedMatrix(handle, sum(len(p) for p in rows), num_in, dtype, paired)

    # ------------------------------------------------------------------------------------------ single operators

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x [T, I] float32, weight packed [O, I] (its bias packed with it) -> float32 [T, O]."""
        if not isinstance(weight, PackedMatrix) or bias is not None or weight.paired:
            raise InternalError("native products take one packed matrix, which brings its bias along")
        x = _rows(x, weight.num_in)
        out = torch.empty(len(x), weight.num_out)
        self._backend.linear(weight.handle, x.data_ptr(), len(x), out.data_ptr())
        return out

    def add_linear(self, residual: Tensor, x: Tensor, weight: PackedMatrix) -> Tensor:
        """residual [T, O] + the product, in one sweep; a new tensor."""
        x, out = _rows(x, weight.num_in), _rows(residual, weight.num_out).clone()
        self._backend.add_linear(weight.handle, x.data_ptr(), len(x), out.data_ptr())
        return out

    def add_gated(self, residual: Tensor, x: Tensor, gate_up: PackedMatrix, down: PackedMatrix) -> Tensor:
        """residual [T, O] + down(silu(gate x) * up x): a feed-forward block; a new tensor."""
        x, out = _rows(x, gate_up.num_in), _rows(residual, down.num_out).clone()
        self._backend.gated_linear(gate_up.handle, down.handle, x.data_ptr(), len(x), out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension, in float32 (Zhang and Sennrich 2019, eq. 4)."""
        shape, width = x.shape, x.shape[-1]
        x, weight = _rows(x.reshape(-1, width), width), weight.detach().float().contiguous()
        out = torch.empty_like(x)
        self._backend.rms_norm(x.data_ptr(), weight.data_ptr(), len(x), width, eps, out.data_ptr())
        return out.view(shape)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, [T, F]."""
        gate, up = _rows(gate, gate.shape[-1]), _rows(up, gate.shape[-1])
        out = torch.empty_like(gate)
        self._backend.silu_mul(gate.data_ptr(), up.data_ptr(), len(gate), gate.shape[-1], out.data_ptr())
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, D] by position; cos, sin [T, 1, D] as for the reference."""
        num, heads, dim = x.shape
        x, cos, sin = x.float().contiguous(), cos.float().contiguous(), sin.float().contiguous()
        out = torch.empty_like(x)
        self._backend.rope(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), num, heads, dim, out.data_ptr())
        return out

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        keys: Tensor | None,
        values: Tensor | None,
        view: CacheView | None,
        window: int | None,
    ) -> Tensor:
        """As the reference: write k, v [T, kv_heads, D] into the pools, attend with q -> [T, heads, D]."""
        assert keys is not None
        assert values is not None
        assert view is not None
        keys[view.write_rows], values[view.write_rows] = k.to(keys.dtype), v.to(values.dtype)
        q = (q.float() * _scale(q.shape[-1])).contiguous()
        out = torch.empty_like(q)
        numbers = _run_numbers(view.batch, [rows.tolist() for rows in view.read_rows])
        self._backend.attention(
            keys.dtype == torch.bfloat16,
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            q.shape[1],
            keys.shape[1],
            q.shape[2],
            window or 0,
            1,  # a table entry for each row: where blocks begin is the cache's affair
            len(view.batch.slots),
            numbers,
            _parents(view.batch),
            out.data_ptr(),
        )
        return out

    # -------------------------------------------------------------------------------------------- whole decoders

    def compile(self, config: DecoderSizes, weights: Mapping[str, Tensor], *, consume: bool = False) -> CpuDecoder:
        """A decoder of these weights as one native call for each pass; see ReferenceOps.compile."""
        return CpuDecoder(self, config, weights, consume=consume)


class CpuDecoder:
    """Packed weights of a pre-norm decoder and the native object that runs them."""

    def __init__(
        self, ops: CpuOps, config: DecoderSizes, weights: Mapping[str, Tensor], *, consume: bool = False
    ) -> None:
        self.config, self.ops = config, ops
        self._pools: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._norms: list[Tensor] = []  # kept alive: the native side has their addresses
        source = _Source(weights, consume)
        embedding = weights["model.embed_tokens.weight"]
        self.dtype = embedding.dtype
        norms: list[int] = []
        self.matrices: dict[str, PackedMatrix] = {}
        for i in range(config.num_layers):
            norms += self._pack_layer(f"model.layers.{i}.", source)
            norms += [self._norm(source, f"model.layers.{i}.self_attn.{name}_norm.weight") for name in "qk"]
        head_name = "model.embed_tokens" if config.tie_embeddings else "lm_head"
        self.matrices["head"] = ops.pack(*source.parts(head_name), consume=consume)
        self._table = None if config.tie_embeddings else embedding.detach().contiguous()
        head = self.matrices["head"].handle
        sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.ffn_size)
        per_layer = ("qkv", "o", "gate_up", "down")
        self._native = ops._extension.make_decoder(
            ops._backend,
            [*sizes, config.vocab_size],
            config.norm_eps,
            self.dtype == torch.bfloat16,
            norms,
            [self.matrices[f"{i}.{name}"].handle for i in range(config.num_layers) for name in per_layer],
            [config.window(i) or 0 for i in range(config.num_layers)],
            head if config.tie_embeddings else None,
            0 if self._table is None else self._table.data_ptr(),
            self._norm(source, "model.norm.weight"),
            head,
        )

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of weights that a pass of a few rows reads: every packed matrix and norm once."""
        return sum(m.nbytes for m in self.matrices.values()) + sum(norm.nbytes for norm in self._norms)

    def forward(self, batch: RaggedBatch, cache: Cache, rotations: Tensor) -> Tensor:
        """Run every new token, write the cache; final-norm hidden states, float32 [T, H].

        rotations: float32 [positions, 2, 1, head_dim], cos and sin by position.
        """
        num_rows = len(batch.tokens)
        hidden = torch.empty(num_rows, self.config.hidden_size)
        if num_rows == 0:
            return hidden
        self._native.forward(
            num_rows,
            batch.tokens.data_ptr(),
            batch.positions.data_ptr(),
            rotations.data_ptr(),
            len(batch.slots),
            _run_numbers(batch, cache.tables(batch)),
            _parents(batch),
            self._pools_of(cache),
            hidden.data_ptr(),
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> float32 logits [R, V]."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.config.vocab_size)
        if len(hidden):
            self._native.logits(hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    def best(self, hidden: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
        """hidden [R, H] -> the largest of the first `num_ids` logits: ids int64 [R], values float32 [R].

        Lowest id on ties, NaN before all, bit for bit what `logits` would have; only the winners are written.
        """
        hidden = hidden.contiguous()
        ids, values = torch.empty(len(hidden), dtype=torch.int64), torch.empty(len(hidden))
        if len(hidden):
            self._native.argmax(hidden.data_ptr(), len(hidden), num_ids, ids.data_ptr(), values.data_ptr())
        return ids, values

    def argmax(self, hidden: Tensor, num_ids: int) -> Tensor:
        """The ids of `best`."""
        return self.best(hidden, num_ids)[0]

    def _pools_of(self, cache: Cache) -> Any:
        if cache not in self._pools:
            keys, values = ([pool.data_ptr() for pool in pools] for pools in (cache.keys, cache.values))
            self._pools[cache] = self.ops._extension.Pools(keys, values, cache.block_tokens)
        return self._pools[cache]

    def _pack_layer(self, at: str, source: _Source) -> list[int]:
        index = at.split(".")[2]
        groups = {
            "qkv": [f"{at}self_attn.{name}_proj" for name in "qkv"],
            "o": [f"{at}self_attn.o_proj"],
            "gate_up": [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"],
            "down": [f"{at}mlp.down_proj"],
        }
        for name, members in groups.items():
            parts, bias = source.parts(*members)
            packed = self.ops.pack(parts, bias, paired=name == "gate_up", consume=source.consume)
            self.matrices[f"{index}.{name}"] = packed
        return [self._norm(source, f"{at}{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")]

    def _norm(self, source: _Source, name: str) -> int:
        """Address of a norm's weights as float32, 0 where the architecture has none of that name."""
        weight = source.weights.get(name)
        if weight is None:
            return 0
        self._norms.append(weight.detach().float().contiguous().clone())
        return int(self._norms[-1].data_ptr())


@dataclass(frozen=True)
class _Source:
    """The weights that a decoder is packed from. consume: they are taken out of the mapping one by one."""

    weights: Mapping[str, Tensor]
    consume: bool

    def parts(self, *names: str) -> tuple[list[Tensor], Tensor | None]:
        """The matrices of these names, and their biases joined (None where none has one)."""
        parts = [self.weights[name + ".weight"] for name in names]
        biases = [self.weights.get(name + ".bias") for name in names]
        if self.consume and isinstance(self.weights, MutableMapping):
            for name in names:
                del self.weights[name + ".weight"]
        if all(bias is None for bias in biases):
            return parts, None
        filled = [torch.zeros(len(p)) if b is None else b.float() for p, b in zip(parts, biases, strict=True)]
        return parts, torch.cat(filled)


def _no_room(num_bytes: int, dtype: torch.dtype) -> CapacityError:
    other = ", or dtype='bfloat16'" if dtype == torch.float32 else ""
    return CapacityError(
        f"there is no memory to pack a matrix of {num_bytes / 1e9:.2f} GB for the native operators: choose a smaller "
        f"model{other}; forerun plan says what fits"
    )


def _scale(head_dim: int) -> float:
    """1 / sqrt(head_dim) as the kernels round it: in float32."""
    return float(np.float32(1) / np.float32(math.sqrt(np.float32(head_dim))))


def _rows(x: Tensor, width: int) -> Tensor:
    if x.dim() != 2 or x.shape[1] != width:
        raise InternalError(f"rows of shape {tuple(x.shape)} do not fit a width of {width}")
    return x.float().contiguous()


def _run_numbers(batch: RaggedBatch, tables: list[list[int]]) -> Any:
    """What csrc/bind_ops.cpp wants: (first row, rows, cached, where the table begins) for each run, then the tables."""
    numbers: list[int] = []
    start = 4 * len(tables)
    for b, table in enumerate(tables):
        rows = batch.run(b)
        numbers += (rows.start, len(rows), batch.cached[b], start)
        start += len(table)
    for table in tables:
        numbers += table
    return np.array(numbers, dtype=np.int32)


def _parents(batch: RaggedBatch) -> Any:
    return None if batch.parents is None else np.array(batch.parents, dtype=np.int32)
