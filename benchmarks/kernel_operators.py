"""The operators that `benchmarks.kernels` measures, on random weights."""

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from forerun.blocks import Plain, Spec, products, resized, weight_shapes, weights as weights_of
from forerun.config import Quantization
from forerun.host_tensor import Floats, HostTensor
from forerun.kv.cache import BlockCache
from forerun.models.gguf.blocks import TensorType
from forerun.models.quantising import planned
from forerun.models.source import Stored
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel
from forerun.ops.cpu.packed import PackedMatrix
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.quantising import quantise
from forerun.types import RaggedBatch

Call = Callable[[], object]
STOCK = 1 << 22  # random numbers
PRODUCTS = {"qkv": "qkv", "o": "o", "gate_up": "mlp.gate_up", "down": "mlp.down"}  # of a layer, as in blocks.py


@dataclass(frozen=True)
class Operator:
    """One operator to measure.

    prepare(M): returns a function that runs the operator on M rows, in `num_parts` layers. num_bytes: the bytes that
    one run must read.
    """

    name: str
    prepare: Callable[[int], Call]
    num_bytes: int = 0  # 0: the operator is not limited by memory
    num_parts: int = 1
    prefill: bool = False  # whether it is measured on the many rows of a prompt, too


def random_weights(
    config: Spec, dtype: str, seed: int = 1, quantization: Quantization | None = None, kind: TensorType | None = None
) -> dict[str, Any]:
    """Make every weight of a decoder of normal numbers; some millions of them are repeated, because that is fast.

    Matrices are quantised where that is wanted. kind: of GGUF files, in place of matrices of 4 bits. Raises BadOption
    for a group that does not divide their rows.
    """
    numbers = np.random.default_rng(seed).standard_normal(STOCK, np.float32) * np.float32(0.02)
    stock = HostTensor.of(numbers).to(dtype)
    rounded = {} if quantization is None else _random_matrices(config, stock, quantization, kind)
    return {
        weight.name: _repeated(stock, weight.shape) for weight in weights_of(config) if weight.name not in rounded
    } | rounded


def _repeated(stock: HostTensor, shape: tuple[int, ...]) -> HostTensor:
    """Return the numbers of the stock, over and over, as a weight."""
    made = HostTensor.empty(shape, stock.dtype)
    flat = made.values.reshape(-1)
    for start in range(0, len(flat), len(stock)):
        flat[start : start + len(stock)] = stock.values[: len(flat) - start]
    return made


def _random_matrices(
    config: Spec, stock: HostTensor, quantization: Quantization, kind: TensorType | None
) -> dict[str, QuantisedMatrix]:
    """Return the matrices of a decoder as if they had been rounded at load; those of one width repeat the same rows."""
    shapes = weight_shapes(config)
    dense = {name: Stored(Path("random weights"), shape, stock.dtype) for name, shape in shapes.items()}
    schemes = {name: stored.scheme for name, stored in planned(dense, config, quantization).items() if stored.scheme}
    if kind is not None and kind.scheme is not None:
        schemes = {name: kind.scheme if scheme.bits == 4 else scheme for name, scheme in schemes.items()}

    @cache
    def rounded(scheme: Scheme, num_in: int) -> QuantisedRows:
        if kind is not None and scheme == kind.scheme:
            return _random_rows(kind, num_in)
        return quantise(stock[: len(stock) // num_in * num_in].reshape(-1, num_in).float32(), scheme)

    def blocks(scheme: Scheme, num_out: int, num_in: int) -> Iterator[QuantisedRows]:
        rows = rounded(scheme, num_in)
        parts: dict[str, Any] = {f.name: getattr(rows, f.name) for f in fields(rows) if f.name != "scheme"}
        for first in range(0, num_out, len(rows)):
            num = min(len(rows), num_out - first)
            some: dict[str, Any] = {name: None if part is None else part[:num] for name, part in parts.items()}
            yield QuantisedRows(scheme, **some)

    return {
        name: QuantisedMatrix(scheme, (shapes[name][0], shapes[name][1]), partial(blocks, scheme, *shapes[name]))
        for name, scheme in schemes.items()
    }


def _random_rows(kind: TensorType, num_in: int) -> QuantisedRows:
    """Return rows of random bytes, whose numbers are replaced by one that is finite."""
    shape = (STOCK // num_in, num_in // kind.block, kind.num_bytes)
    assert kind.unpack is not None
    rows = kind.unpack(np.random.default_rng(1).integers(256, size=shape, dtype=np.uint8))
    numbers = ["super_scales", "super_minimums"] if rows.scheme.super_group else ["scales", "minimums"]
    found = {name: part for name in numbers if (part := getattr(rows, name)) is not None}
    finite: dict[str, Any] = {
        name: HostTensor.of(np.full(part.shape, 2.0**-9, np.float32)).to(part.dtype) for name, part in found.items()
    }
    return replace(rows, **finite)


def operators(model: CpuModel, ops: CpuOps, most_rows: int, context: int, contexts: Seq[int]) -> list[Operator]:
    """Return all operators in the order of a layer, then the LM head, and whole passes behind `context` tokens.

    most_rows: the most rows of a pass. contexts: tokens before the rows of attention; prompts use the first one alone.
    """
    config, head = model.config, model.matrices["head"]
    found = _products(model, ops)
    found.append(Operator("norm + rope", lambda m: _norm_and_rope(ops, Plain.of(config), m), prefill=True))
    for c in contexts:
        found.append(_attention(model, ops, c, most_rows, None, prefill=c == contexts[0]))
        found.append(_attention(model, ops, c, most_rows, "int8", prefill=False))
    hidden, num_ids, best = config.hidden_size, config.vocab_size, model.best
    found += [
        Operator("LM head", lambda m: _call(model.logits, torch.randn(m, hidden)), head.nbytes),
        Operator(
            "LM head, argmax", lambda m: _call(best, torch.randn(m, hidden), list(range(m)), num_ids), head.nbytes
        ),
    ]
    cache = cache_behind(model, context, most_rows)

    def whole(num_rows: int) -> Call:
        batch = batch_of(config, context, num_rows)
        return lambda: model.logits(model.forward(batch, cache).hidden)

    def layers(num_rows: int) -> Call:
        return _call(model.forward, batch_of(config, context, num_rows), cache)

    found.append(Operator("all layers", layers, model.bytes_per_pass - head.nbytes, prefill=True))
    found.append(Operator("whole pass", whole, model.bytes_per_pass))
    return found


def _call(function: Callable[..., object], *arguments: Any) -> Call:
    return lambda: function(*arguments)


def _products(model: CpuModel, ops: CpuOps) -> list[Operator]:
    """Return the products of each layer: qkv, output, gate and up with their activation, down."""
    layers, matrices = range(model.config.num_layers), model.matrices
    sets: dict[str, list[PackedMatrix]] = {
        name: [matrices[f"model.layers.{i}.{product}"] for i in layers] for name, product in PRODUCTS.items()
    }
    # gate and up end in the inputs of a next product: one with a single output costs next to nothing.
    filled = np.full((1, Plain.of(model.config).ffn_size), 0.01, np.float32)
    one = ops.pack(HostTensor.of(filled).to(model.weight_dtype))

    def added(name: str) -> Callable[[int], Call]:
        def prepare(num_rows: int) -> Call:
            x, out = _random(num_rows, sets[name][0].num_in), _random(num_rows, sets[name][0].num_out)
            return lambda: [ops.add_linear(out, x, matrix) for matrix in sets[name]]

        return prepare

    def stored(num_rows: int) -> Call:
        x = _random(num_rows, model.config.hidden_size)
        return lambda: [ops.linear(x, matrix) for matrix in sets["qkv"]]

    def gated(num_rows: int) -> Call:
        x, out = _random(num_rows, model.config.hidden_size), _random(num_rows, 1)
        return lambda: [ops.add_gated(out, x, matrix, one) for matrix in sets["gate_up"]]

    prepare = {"qkv": stored, "o": added("o"), "gate_up": gated, "down": added("down")}
    shown = {"gate_up": "gate, up + silu"}
    return [
        Operator(shown.get(name, name), prepare[name], sum(m.nbytes for m in sets[name]), len(layers), prefill=True)
        for name in sets
    ]


def _random(*shape: int) -> Floats:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _norm_and_rope(ops: CpuOps, config: Plain, num_rows: int) -> Call:
    """Prepare one layer's two norms, and the rotation of its queries and keys: four calls from Python."""
    x, weight = _random(num_rows, config.hidden_size), np.ones(config.hidden_size, np.float32)
    q, k = (_random(num_rows, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads))
    cos = _random(num_rows, 1, config.head_dim)

    def call() -> None:
        for _ in range(2):
            ops.rms_norm(x, weight, config.norm_eps)
        ops.rope(q, cos, cos)
        ops.rope(k, cos, cos)

    return call


def _attention(
    model: CpuModel, ops: CpuOps, context: int, most_rows: int, dtype: str | None, *, prefill: bool
) -> Operator:
    """Return attention as passes of a decoder with the same heads and layers, but small matrices.

    So its time includes rotation, writing to the cache, and waiting of threads, as in a whole pass. The bytes of the
    small matrices are counted; they are just large enough that threads share a pass of one row, as for a large model.
    dtype: of the cache, None = the model's.
    """
    small = resized(model.config, hidden_size=128, ffn_size=32, vocab_size=32)
    heads = CpuModel(ops, small, random_weights(small, model.weight_dtype))
    cache = cache_behind(heads, context, most_rows, dtype)
    num_bytes = heads.bytes_per_pass + context * small.cache_shape.bytes_per_token(cache.dtype)

    def prepare(num_rows: int) -> Call:
        return _call(heads.forward, batch_of(small, context, num_rows), cache)

    name = f"attention, {context}" + (", 8 bits" if dtype == "int8" else "")
    return Operator(name, prepare, num_bytes, small.num_layers, prefill)


def cache_behind(model: CpuModel, context: int, num_rows: int, dtype: str | None = None) -> BlockCache:
    """Make a paged cache whose slot 0 holds `context` tokens of random numbers, with room for a pass behind them.

    dtype: None = the model's.
    """
    length = context + num_rows
    cache = BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=length, dtype=dtype or model.cache_dtype)
    for pool in cache.pools:  # the same numbers in every row
        numbers = np.random.default_rng(0).standard_normal((2, 1, pool.keys.shape[1], pool.head_dim), np.float32)
        pool.write(slice(0, 1), *(numbers * np.float32(0.5)))
        for part in (pool.keys.values, pool.values.values):
            part[1:] = part[:1]
    cache.open(0)
    cache.reserve(0, length)
    cache.keep({0: range(context)})
    cache.reserve(0, num_rows)
    return cache


def batch_of(config: Spec, context: int, num_rows: int) -> RaggedBatch:
    """Make the batch of one sequence's run of new tokens."""
    tokens = torch.arange(num_rows) * 7919 % config.vocab_size
    return RaggedBatch(tokens, torch.arange(context, context + num_rows), [0, num_rows], [0], [context])


def torch_products(config: Spec, dtype: torch.dtype, num_tokens: int) -> Call:
    """Prepare every layer's products and activation in torch, and nothing else. All layers use one layer's weights.

    That is fair, because these are larger than all caches together, and memory does not limit a pass of many rows.
    """
    first = "model.layers.0."
    groups = products(weights_of(config))
    shapes = {
        name: (sum(weight.shape[0] for weight in group), group[0].shape[1])
        for name, product in PRODUCTS.items()
        if (group := groups[first + product])
    }
    q = shapes["o"][1]
    weights = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    x, attended = (torch.randn(num_tokens, width).to(dtype) for width in (config.hidden_size, q))

    def call() -> None:
        for _ in range(config.num_layers):
            F.linear(x, weights["qkv"])
            F.linear(attended, weights["o"])
            gate, up = F.linear(x, weights["gate_up"]).chunk(2, dim=-1)
            F.linear(F.silu(gate) * up, weights["down"])

    return call
