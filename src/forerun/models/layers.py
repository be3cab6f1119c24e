"""The pre-norm decoder that Llama, Mistral and Qwen share: one class, and what differs is data (`DecoderConfig`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.config import Quantization
from forerun.errors import BadOption, InternalError, UnsupportedModel, shown
from forerun.kv.cache import BlockCache, CacheShape
from forerun.models.quantising import RoundedWeights
from forerun.ops.reference import ReferenceOps
from forerun.types import CacheView, RaggedBatch


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021); `kind` default, linear or llama3."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0  # linear, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_positions: int = 8192  # llama3


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides the function computed by a decoder; sizes in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k (Qwen3)
    windows: tuple[int | None, ...] = ()  # per layer; None = full attention; () = full everywhere

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.num_layers, self.num_kv_heads, self.head_dim)

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens, None = full attention."""
        return self.windows[layer] if self.windows else None


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, under the names of published checkpoints."""
    h, d, f = config.hidden_size, config.head_dim, config.ffn_size
    q, kv = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h)}
    for i in range(config.num_layers):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes |= {f"model.layers.{i}.input_layernorm.weight": (h,)}
        shapes |= {f"model.layers.{i}.post_attention_layernorm.weight": (h,)}
        shapes |= {f"{at}q_proj.weight": (q, h), f"{at}k_proj.weight": (kv, h), f"{at}v_proj.weight": (kv, h)}
        shapes |= {f"{at}o_proj.weight": (h, q), f"{mlp}down_proj.weight": (h, f)}
        shapes |= {f"{mlp}gate_proj.weight": (f, h), f"{mlp}up_proj.weight": (f, h)}
        if config.qkv_bias:
            shapes |= {f"{at}q_proj.bias": (q,), f"{at}k_proj.bias": (kv,), f"{at}v_proj.bias": (kv,)}
        if config.o_bias:
            shapes |= {f"{at}o_proj.bias": (h,)}
        if config.mlp_bias:
            shapes |= {f"{mlp}gate_proj.bias": (f,), f"{mlp}up_proj.bias": (f,), f"{mlp}down_proj.bias": (h,)}
        if config.qk_norm:
            shapes |= {f"{at}q_norm.weight": (d,), f"{at}k_norm.weight": (d,)}
    shapes["model.norm.weight"] = (h,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    return shapes


def kinds_in_words(bits: Iterable[int], dtypes: Iterable[torch.dtype]) -> str:
    """Weights of these bits and types: 4-bit and 8-bit weights, or bfloat16 weights."""
    names = [f"{num}-bit" for num in sorted(set(bits))] + sorted({str(t).removeprefix("torch.") for t in dtypes})
    *others, last = names
    return f"{', '.join(others)}{' and ' if others else ''}{last} weights"


class Rope:
    """cos and sin by position, computed in blocks of fixed shape so that a table's size never changes its bits."""

    BLOCK = 256

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self.inv_freq = inverse_frequencies(config, head_dim).to(device)
        self._table = torch.empty(0, 2, 1, head_dim, device=device, dtype=dtype)
        self._num_positions = 0

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """positions [T], all below `end` -> cos, sin, each [T, 1, head_dim]; sin as ops.rope wants it."""
        cos, sin = self.table(end)[positions].unbind(1)
        return cos, sin

    def of(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows of a batch, as `at`."""
        return self.at(_on_device(batch, self.inv_freq.device)[1], _end(batch))

    def table(self, end: int) -> Tensor:
        """cos and sin of every position below `end`, and some more: [positions, 2, 1, head_dim]."""
        while end > self._num_positions:  # a tensor's len() takes as long as a layer's norm
            first = self._num_positions
            block = torch.arange(first, first + self.BLOCK, device=self.inv_freq.device)
            angles = block[:, None].float() * self.inv_freq[None]
            cos, sin = angles.cos(), angles.sin()
            table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
            self._table = torch.cat((self._table, table[:, :, None].to(self._table.dtype)))
            self._num_positions = self._table.shape[0]
        return self._table


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32; llama3 blends scaled and unscaled frequencies by wavelength (Llama 3.1 release)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind != "llama3":
        raise UnsupportedModel(f"rope type {shown(rope.kind)} is not supported: it must be default, linear or llama3")
    wavelength = 2 * math.pi / inv_freq
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    spread = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / spread
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low, inv_freq / rope.factor, inv_freq)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


@dataclass(frozen=True)
class Projections:
    """Several matrices of one input. parts: their weights and biases; joined: all in one, where memory allows it.

    sizes: how many outputs each has.
    """

    parts: list[tuple[Tensor, Tensor | None]]
    sizes: list[int]
    joined: tuple[Tensor, Tensor | None] | None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], names: list[str]) -> Projections:
        """Join the matrices of these names where they lie back to back."""
        parts = [(weights[name + ".weight"], weights.get(name + ".bias")) for name in names]
        whole = _back_to_back([weight for weight, _ in parts]) if len(parts) > 1 else None
        biases = [bias for _, bias in parts if bias is not None]
        joined = None if whole is None else (whole, torch.cat(biases) if biases else None)
        return cls(parts, [len(weight) for weight, _ in parts], joined)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(weight.nbytes for weight, _ in ([self.joined] if self.joined else self.parts))

    def apply(self, ops: ReferenceOps, x: Tensor) -> Seq[Tensor]:
        """x [T, H] -> one [T, size] for each part; one product where the parts are joined."""
        if self.joined is None:
            return [ops.linear(x, weight, bias) for weight, bias in self.parts]
        return torch.split_with_sizes(ops.linear(x, *self.joined), self.sizes, dim=-1)


@dataclass(frozen=True)
class Layer:
    """One layer's weights, looked up once. input_norm: None where its attention reads what another norm has made."""

    input_norm: Tensor | None
    qkv: Projections
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projections
    mlp_norm: Tensor
    gate_up: Projections
    down: Projections
    window: int | None

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        i: int,
        join: Callable[[Mapping[str, Tensor], list[str]], Projections] | None = None,
    ) -> Layer:
        """join: what makes one product of the matrices of these names; None = Projections.of."""
        at = f"model.layers.{i}."
        qkv, gate_up = JOINED
        join = join or Projections.of
        return cls(
            input_norm=weights.get(at + "input_layernorm.weight"),
            qkv=join(weights, [at + name for name in qkv]),
            q_norm=weights[at + "self_attn.q_norm.weight"] if config.qk_norm else None,
            k_norm=weights[at + "self_attn.k_norm.weight"] if config.qk_norm else None,
            o=join(weights, [at + "self_attn.o_proj"]),
            mlp_norm=weights[at + "post_attention_layernorm.weight"],
            gate_up=join(weights, [at + name for name in gate_up]),
            down=join(weights, [at + "mlp.down_proj"]),
            window=config.window(i),
        )

    def run(
        self,
        config: DecoderConfig,
        ops: ReferenceOps,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        pools: tuple[Tensor | None, Tensor | None],
        view: CacheView | None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Run rows of the residual stream x [T, H], one operator after the other.

        read [T, inputs of qkv]: what the attention reads; None = x, behind the layer's norm where it has one.
        rotation: cos and sin of each row. pools: keys and values of this layer, of which `view` says the rows.
        """
        x = x + self._attention(config, ops, x, rotation, pools, view, read)
        gate, up = self.gate_up.apply(ops, ops.rms_norm(x, self.mlp_norm, config.norm_eps))
        return x + self.down.apply(ops, ops.silu_mul(gate, up))[0]

    def _attention(
        self,
        c: DecoderConfig,
        ops: ReferenceOps,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        pools: tuple[Tensor | None, Tensor | None],
        view: CacheView | None,
        read: Tensor | None,
    ) -> Tensor:
        num = len(x)
        q, k, v = self.qkv.apply(ops, self._read(ops, x, c.norm_eps) if read is None else read)
        q, k = q.view(num, c.num_heads, c.head_dim), k.view(num, c.num_kv_heads, c.head_dim)
        v = v.view(num, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = ops.rms_norm(q, self.q_norm, c.norm_eps), ops.rms_norm(k, self.k_norm, c.norm_eps)
        q, k = ops.rope(q, *rotation), ops.rope(k, *rotation)
        out = ops.attention(q, k, v, keys=pools[0], values=pools[1], view=view, window=self.window)
        return self.o.apply(ops, out.flatten(1))[0]

    def _read(self, ops: ReferenceOps, x: Tensor, eps: float) -> Tensor:
        return x if self.input_norm is None else ops.rms_norm(x, self.input_norm, eps)


JOINED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


def empty_weights(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """Every weight of `parameter_shapes`, unwritten: it takes no memory before something is written to it.

    q, k, v and gate, up of each layer lie back to back in one storage: a decoder computes each group in one product.
    """
    shapes = parameter_shapes(config)
    made: dict[str, Tensor] = {}
    for i in range(config.num_layers):
        for group in JOINED:
            names = [f"model.layers.{i}.{name}.weight" for name in group]
            rows = [shapes[name][0] for name in names]
            whole = torch.empty(sum(rows), config.hidden_size, dtype=dtype, device=device)
            made.update(zip(names, torch.split_with_sizes(whole, rows), strict=True))
    return {n: made[n] if n in made else torch.empty(s, dtype=dtype, device=device) for n, s in shapes.items()}


def _back_to_back(weights: list[Tensor]) -> Tensor | None:
    """One matrix over all rows, where the weights follow each other in one storage and none is being trained."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not weight.is_contiguous() or weight.storage_offset() != end or weight.requires_grad:
            return None
        end += weight.numel()
    num_rows = sum(len(weight) for weight in weights)
    return first.as_strided((num_rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())


def _end(batch: RaggedBatch) -> int:
    """One more than the highest position of a batch can be."""
    return max(map(batch.end, range(len(batch.slots))), default=0)


def _check_part(name: str, part: Seq[int], whole: int) -> None:
    """Raise InternalError unless these numbers ascend and are all below `whole`."""
    if part and not (part[0] >= 0 and part[-1] < whole and all(a < b for a, b in itertools.pairwise(part))):
        raise InternalError(f"{name} must ascend from 0 or more to less than {whole}, and {list(part)} do not")


def _write(taps: Mapping[int, Tensor], wanted: range, x: Tensor) -> None:
    """The residual stream x [T, H] into those taps that are wanted."""
    for k, rows in taps.items():
        if k in wanted:
            rows.copy_(x)


def _on_device(batch: RaggedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and positions, int64 [T]."""
    if isinstance(batch.tokens, Tensor) and isinstance(batch.positions, Tensor):
        return batch.tokens, batch.positions
    ids = torch.tensor(batch.ids(), dtype=torch.int64, device=device)
    return ids[0], ids[1]


class Decoder:
    """Weights plus one forward over a ragged batch. It knows nothing of drafts, requests or text.

    weights: every name of `parameter_shapes`, with that shape; tensors of one dtype on one device. They are looked up
    once: later changes must be in place. consume: operators that pack may take the tensors apart while they do, so
    that nothing is in memory twice; the mapping must then not be used again.

    weight_dtype: of the weights. activation_dtype: of the rows that go in and come out. cache_dtype: what a KV cache
    for this model must be made with. The reference operators have one type for all three.
    """

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], ops: ReferenceOps, *, consume: bool = False
    ) -> None:
        self.config = config
        self.ops = ops
        self.compiled = ops.compile(config, weights, consume=consume)
        if self.compiled is not None:
            self.device, self.weight_dtype = torch.device("cpu"), self.compiled.weight_dtype
            self.activation_dtype, self.cache_dtype = self.compiled.activation_dtype, self.compiled.cache_dtype
            self.weights: Mapping[str, Tensor] = {}
            self._rope = Rope(config.rope, config.head_dim, self.device, torch.float32)
            return
        self.weights = weights
        self._embedding = weights["model.embed_tokens.weight"]
        self.device = self._embedding.device
        self.weight_dtype = self.activation_dtype = self.cache_dtype = self._embedding.dtype
        self._head = self._embedding if config.tie_embeddings else weights["lm_head.weight"]
        self._layers = [Layer.of(config, weights, i) for i in range(config.num_layers)]
        self._rope = Rope(config.rope, config.head_dim, self.device, self.activation_dtype)

    @property
    def weight_bits(self) -> tuple[int, ...]:
        """The bits of weights that are computed with as integers, ascending; () = all are of `weight_dtype`."""
        return () if self.compiled is None else tuple(self.compiled.weight_bits)

    @property
    def precision(self) -> str:
        """What weights are computed with, in words: 4-bit and 8-bit weights, or bfloat16 weights."""
        has_dense = self.compiled is None or self.compiled.has_dense
        return kinds_in_words(self.weight_bits, [self.weight_dtype] * has_dense)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of weights that one pass of a few rows reads, counted from what is in memory: every matrix once.

        An embedding matrix that is not tied to the LM head is only looked up, a few rows of it.
        """
        if self.compiled is not None:
            return int(self.compiled.bytes_per_pass)
        looked_up = "" if self.config.tie_embeddings else "model.embed_tokens.weight"
        return sum(tensor.nbytes for name, tensor in self.weights.items() if name != looked_up)

    def forward(
        self,
        batch: RaggedBatch,
        cache: BlockCache | None,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Run every new token through these layers, whose keys and values go into the cache. Returns rows [T, H].

        layers: ascending, gaps allowed; None = all. hidden [T, H]: what the first of them gets; None = the tokens'
        embeddings. The rows come after the final norm if the last layer is among them, else they are the residual
        stream. taps: by k, a float32 [T, H] to which the residual stream before layer k is written; k = 0: before all
        layers, k = num_layers: behind all, before the final norm. Raises InternalError for what is no such layer, tap
        or row.
        """
        num_layers, taps = self.config.num_layers, taps or {}
        chosen = range(num_layers) if layers is None else layers
        is_normed = layers is None or num_layers - 1 in layers
        _check_part("layers", chosen, num_layers)
        _check_part("taps", sorted(taps), num_layers + 1)
        for rows in taps.values() if hidden is None else (hidden, *taps.values()):
            if rows.shape != (batch.run_starts[-1], self.config.hidden_size):
                raise InternalError(
                    f"{tuple(rows.shape)} is not the shape of hidden rows of {batch.run_starts[-1]} tokens"
                )
        if self.compiled is not None:
            if cache is None:
                raise InternalError("native decoders keep keys and values in a cache and were given none")
            table = self._rope.table(_end(batch))
            return self.compiled.forward(batch, cache, table, chosen, hidden, taps, is_normed)  # type: ignore[no-any-return]
        view = None if cache is None else self.ops.plan(cache.view(batch))
        tokens, positions = _on_device(batch, self.device)
        x = F.embedding(tokens, self._embedding) if hidden is None else hidden.to(self.activation_dtype)
        cos, sin = self._rope.at(positions, _end(batch))
        first = 0
        for i in chosen:
            _write(taps, range(first, i + 1), x)
            first = i + 1
            pools = (None, None) if cache is None else (cache.keys[i], cache.values[i])
            x = self._layers[i].run(self.config, self.ops, x, (cos, sin), pools, view)
        _write(taps, range(first, num_layers + 1), x)
        return self.norm(x) if is_normed else x

    def rounded(self, quantization: Quantization) -> Decoder:
        """Return a second model of these weights, each matrix rounded to so many bits; the first stays as it is.

        Operators that pack quantised weights get them; others what they stand for. Raises BadOption where the weights
        are quantised already, or groups do not divide a row.
        """
        if self.weight_bits:
            raise BadOption(
                f"quantization={str(quantization)!r} is not possible: the model has {self.precision} in memory; load "
                "it with dtype='float32' or from an unquantised checkpoint"
            )
        compiled, shapes = self.compiled, parameter_shapes(self.config)
        weights = RoundedWeights(
            shapes,
            (lambda name, rows: self.weights[name][rows.start : rows.stop])
            if compiled is None
            else compiled.matrix_rows,
            self.weights.__getitem__ if compiled is None else compiled.vector,
            quantization,
            self.weight_dtype if compiled is None else None,
        )
        given = dict(weights) if compiled is None else weights
        return Decoder(self.config, cast(Mapping[str, Tensor], given), self.ops)

    def embed(self, ids: Seq[int]) -> Tensor:
        """The embeddings of these ids [n, H], as a pass begins with them."""
        if self.compiled is not None:
            return self.compiled.embed(ids)  # type: ignore[no-any-return]
        return F.embedding(torch.tensor(ids, dtype=torch.int64, device=self.device), self._embedding)

    def weight(self, name: str) -> Tensor:
        """A weight by its name in a checkpoint, float32, as it was before packing."""
        if self.compiled is None:
            return self.weights[name].float()
        shape = parameter_shapes(self.config)[name]
        if len(shape) == 1:
            return self.compiled.vector(name).float()  # type: ignore[no-any-return]
        return self.compiled.matrix_rows(name, range(shape[0])).float()  # type: ignore[no-any-return]

    def head(self, ids: Seq[int]) -> Tensor:
        """Rows of the LM head, float32 [n, H], as they were before packing."""
        if self.compiled is not None:
            return self.compiled.matrices["head"].unpack(ids).float()  # type: ignore[no-any-return]
        return self._head[list(ids)].float()

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of rows of the residual stream [R, H]: what `logits` reads of an inner layer."""
        if self.compiled is not None:
            return self.compiled.norm(hidden)  # type: ignore[no-any-return]
        rows = hidden.to(self.activation_dtype)
        return self.ops.rms_norm(rows, self.weights["model.norm.weight"], self.config.norm_eps)

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """hidden [R, H] -> float32 logits [R, V], or [R, num_ids] of the first ids, reading their rows of the head."""
        if self.compiled is not None:
            return self.compiled.logits(hidden, num_ids)  # type: ignore[no-any-return]
        return self.ops.linear(hidden, self._head[:num_ids]).float()

    def best(self, hidden: Tensor, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Id and value of the largest of the first `num_ids` logits of these rows; only for compiled decoders."""
        return self.compiled.best(hidden, rows, num_ids)  # type: ignore[no-any-return]

    def run_ahead(
        self,
        batch: RaggedBatch,
        lengths: list[int],
        cache: BlockCache,
        num_ids: int,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        ahead: Any = None,
    ) -> list[list[int]] | None:
        """The likeliest tokens behind each run; see CpuDecoder.run_ahead, only for compiled decoders."""
        chosen = range(self.config.num_layers) if layers is None else layers
        _check_part("layers", chosen, self.config.num_layers)
        table = self._rope.table(_end(batch) + max(lengths, default=0))
        return self.compiled.run_ahead(  # type: ignore[no-any-return]
            batch, lengths, cache, table, chosen, num_ids, hidden, ahead
        )
