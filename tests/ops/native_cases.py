"""Helpers of the tests of the native operators: instruction sets, comparison of bits, ragged passes, decoders.

A test that needs more than one row to fail compares *bits*: a NaN has to be the same NaN, and -0 is not 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun import native
from forerun.blocks import Plain, Spec, weight_shapes
from forerun.host_tensor import HostTensor
from forerun.kv.cache import BlockCache
from forerun.kv.pool import Pool
from forerun.models.runner import Run, pack
from forerun.ops.cpu import CpuOps
from forerun.ops.reference import PLAIN, ReferenceOps, Scoring
from forerun.ops.torch import TorchModel
from forerun.ops.torch_pools import TorchPool
from forerun.ops.torch_tensors import host_of, tensor_of
from forerun.types import CacheView, RaggedBatch, ancestor_words
from tensors import TensorOps, as_tensor, load_model

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
DTYPES = [pytest.param(FLOAT32, id="float32"), pytest.param(BFLOAT16, id="bfloat16")]
INF, NAN = float("inf"), float("nan")
TINY = 2.0**-126  # the smallest normal float32

# With FORERUN_REQUIRE_NATIVE=1 an extension that is not there fails the tests instead of leaving them out.
ISAS = native.processor_isas() or (["none"] if os.environ.get("FORERUN_REQUIRE_NATIVE") == "1" else [])
several_sets = pytest.mark.skipif(len(ISAS) < 2, reason="one set alone runs here")
needs_native = pytest.mark.skipif(not ISAS, reason=f"no native operators here: {native.why_not()}")
# Of what a process of its own takes by default.
runs_native = pytest.mark.skipif(native.isa() == "reference", reason=f"torch computes here: {native.why_not()}")


@cache
def ops_of(isa: str, num_threads: int = 1) -> CpuOps:
    return TensorOps(isa, num_threads)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def same_bits(a: Tensor | HostTensor, b: Tensor | HostTensor) -> bool:
    a, b = as_tensor(a), as_tensor(b)
    as_ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(as_ints), b.view(as_ints))


def close(found: Tensor, expected: Tensor, tolerance: Tensor | float) -> bool:
    """Whether NaN and infinities are where the reference has them, and all else is within the tolerance."""
    found, expected = found.double(), expected.double()
    finite, infinite = expected.isfinite(), expected.isinf()
    same = torch.equal(found.isnan(), expected.isnan()) and torch.equal(found[infinite], expected[infinite])
    allowed = tolerance[finite] if isinstance(tolerance, Tensor) else tolerance
    return same and found.shape == expected.shape and bool(((found - expected)[finite].abs() <= allowed).all())


def by_value(a: Tensor, b: Tensor) -> bool:
    """Whether two passes in float32 agree, in which sums may have other orders."""
    return bool((a - b).abs().max() <= 2e-5 * b.abs().max())


Same = Callable[[Tensor, Tensor], bool]
# Operators, the type of weights, and how rows of two passes agree there.
EXACT = [
    *(pytest.param(ops_of(isa, 2), d, same_bits, id=f"{isa}-{d}") for isa in ISAS for d in (FLOAT32, BFLOAT16)),
    pytest.param(ReferenceOps(row_by_row=True), FLOAT32, same_bits, id="row_by_row"),
]
FAST = pytest.param(ReferenceOps(), FLOAT32, by_value, id="fast")
every_ops = pytest.mark.parametrize(("ops", "dtype", "same"), [*EXACT, FAST])

# ----------------------------------------------------------------------------------------------------- ragged passes


def pool_tensors(cache: BlockCache) -> list[Tensor]:
    """All that is allocated, as tensors with the same memory: the keys of each kept layer, then the values."""
    found = cache.pools.tensors()  # type: ignore[attr-defined]
    return [tensor_of(part) if isinstance(part, HostTensor) else part for part in found]


def read(pool: Any, rows: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of some rows as tensors, in the type of the cache; those in 8 bits are float32."""
    if isinstance(pool, TorchPool):
        return pool.read(torch.as_tensor(rows))
    keys, values = (HostTensor.of(part) for part in pool.read(rows))
    kind = "float32" if pool.keys.dtype == "int8" else pool.keys.dtype
    return tensor_of(keys.to(kind)), tensor_of(values.to(kind))


@dataclass(frozen=True)
class RunShape:
    """One sequence's run: tokens in the cache, and the parents of pending rows and its own (-1 = the context)."""

    cached: int
    parents: tuple[int, ...]
    num_pending: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.parents) - self.num_pending

    @property
    def num_before(self) -> int:
        """The number of rows that are written already."""
        return self.cached + self.num_pending

    def path(self, row: int) -> list[int]:
        """Return the pending rows and rows of the run that row i sees, itself included, in depth order."""
        return path_to(self.num_pending + row, self.parents)


def path_to(row: int, tree: Seq[int] | None) -> list[int]:
    """Return the rows from the root of a tree to this one; without a tree each row hangs from the one before it."""
    path = [row]
    while (parent := path[0] - 1 if tree is None else tree[path[0]]) >= 0:
        path.insert(0, parent)
    return path


def chain(cached: int, num_rows: int) -> RunShape:
    return RunShape(cached, tuple(range(-1, num_rows - 1)))


@dataclass(frozen=True)
class AttentionCase:
    """Queries, new keys and values of some runs, and pools that hold their past in scattered rows.

    Rows of the pools that no run owns are NaN, so that a kernel which reads one is caught.
    """

    runs: list[RunShape]
    view: CacheView
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor

    def attend(self, ops: ReferenceOps, window: int | None = None, scoring: Scoring = PLAIN) -> Tensor:
        """[T, heads, head_dim]; the pools stay as they are."""
        pool: Any = TorchPool(self.keys.clone(), self.values.clone())
        if isinstance(ops, CpuOps):
            pool = Pool(host_of(pool.keys), host_of(pool.values))
        with torch.inference_mode():
            return ops.attention(self.q, self.k, self.v, pool=pool, view=self.view, window=window, scoring=scoring)

    def alone(self, b: int, i: int) -> AttentionCase:
        """Return row i of run b as plain decoding computes it: one new token behind the rows that it sees."""
        run, row = self.runs[b], self.view.batch.run(b)[i]
        rows = self.view.read_rows[b][[*range(run.cached), *(run.cached + r for r in run.path(i)[:-1])]]
        keys, values = self.keys.clone(), self.values.clone()
        keys[self.view.write_rows], values[self.view.write_rows] = self.k.to(keys.dtype), self.v.to(values.dtype)
        space = torch.zeros_like(keys[:1])
        shape, read = chain(len(rows), 1), np.arange(len(rows) + 1)
        view = CacheView(batch_of([shape]), read[-1:], [read])
        new = (x[row : row + 1] for x in (self.q, self.k, self.v))
        return AttentionCase([shape], view, *new, torch.cat((keys[rows], space)), torch.cat((values[rows], space)))

    def wide(self) -> AttentionCase:
        """Return the same numbers as float64, with new keys and values rounded as in the pools."""
        k, v = (x.to(self.keys.dtype).double() for x in (self.k, self.v))
        return AttentionCase(self.runs, self.view, self.q.double(), k, v, self.keys.double(), self.values.double())


def batch_of(runs: Seq[RunShape]) -> RaggedBatch:
    """Positions and parents of some runs; all tokens are 0."""
    starts, pending, ancestors, positions = [0], [], [], []
    for run in runs:
        is_chain = run == chain(run.cached, run.num_rows)
        pending.append(0 if is_chain else run.num_pending)
        ancestors += [0] * run.num_rows if is_chain else ancestor_words(run.parents)[run.num_pending :]
        positions += [run.cached + len(run.path(row)) - 1 for row in range(run.num_rows)]
        starts.append(starts[-1] + run.num_rows)
    slots, cached = list(range(len(runs))), [run.cached for run in runs]
    tokens = torch.zeros(starts[-1], dtype=torch.int64)
    return RaggedBatch(tokens, torch.tensor(positions), starts, slots, cached, pending, ancestors)


def attention_case(
    seed: int, runs: Seq[RunShape], heads: tuple[int, int, int], dtype: torch.dtype, *, scale: float = 1.0
) -> AttentionCase:
    """heads: query heads, key heads, head_dim."""
    num_heads, num_kv, dim = heads
    batch, generator = batch_of(runs), seeded(seed)
    num_rows, num_owned = len(batch.tokens), sum(run.num_before + run.num_rows for run in runs)
    scattered = torch.randperm(num_owned + 9, generator=generator)[:num_owned]
    reads = list(scattered.split([run.num_before + run.num_rows for run in runs]))
    writes = torch.cat([read[run.num_before :] for read, run in zip(reads, runs, strict=True)])
    keys, values = torch.full((2, num_owned + 9, num_kv, dim), NAN).unbind()
    past = torch.cat([read[: run.num_before] for read, run in zip(reads, runs, strict=True)])
    keys[past] = torch.randn(len(past), num_kv, dim, generator=generator) * scale
    values[past] = torch.randn(len(past), num_kv, dim, generator=generator)
    q = torch.randn(num_rows, num_heads, dim, generator=generator)
    k, v = torch.randn(2, num_rows, num_kv, dim, generator=generator).unbind()
    view = CacheView(batch, writes.numpy(), [read.numpy() for read in reads])
    return AttentionCase(list(runs), view, q, k * scale, v, keys.to(dtype), values.to(dtype))


# ---------------------------------------------------------------------------------------------------------- decoders


def make_config(**changes: Any) -> Spec:
    """A small decoder whose sizes fit no vector."""
    sizes: dict[str, Any] = {"model_type": "llama", "vocab_size": 77, "hidden_size": 52, "num_layers": 2,
                             "num_heads": 6, "num_kv_heads": 2, "head_dim": 20, "ffn_size": 67, "norm_eps": 1e-5,
                             "max_positions": 1024, "tied": True}  # fmt: skip
    return Plain(**{**sizes, **changes}).spec


def random_weights(config: Spec, dtype: torch.dtype, seed: int = 5) -> dict[str, Tensor]:
    generator, weights = seeded(seed), {}
    for name, shape in weight_shapes(config).items():
        weights[name] = (torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)).to(dtype)
    return weights


def make_decoder(config: Spec, dtype: torch.dtype, isa: str, num_threads: int = 1) -> TorchModel:
    return load_model(config, random_weights(config, dtype), ops_of(isa, num_threads))


def one_by_one(session: Session, tokens: Seq[int]) -> Tensor:
    """What plain decoding computes: a pass for each token, in slot 0."""
    return torch.cat([session.run({0: [token]}) for token in tokens])


def tokens_of(num: int, seed: int, vocab_size: int = 77) -> list[int]:
    return torch.randint(vocab_size, (num,), generator=seeded(seed)).tolist()


class Session:
    """A decoder with a cache: some sequences that grow pass by pass.

    layout: tokens of a block, 0 = one block for the whole sequence. kept: the type of the cache, None = the model's.
    Blocks are handed out in shuffled order, and rows that were never written are NaN.
    """

    def __init__(
        self,
        model: TorchModel,
        layout: int = 16,
        *,
        max_seq_len: int = 640,
        seed: int = 0,
        kept: str | None = None,
    ) -> None:
        self.model, block = model, layout or max_seq_len
        self.cache = BlockCache(
            model.config.cache_shape,
            block_tokens=block,
            num_blocks=4 * -(-max_seq_len // block),
            dtype=kept or model.cache_dtype,
            pools=model.make_pools,
        )
        for part in pool_tensors(self.cache):
            part.view(torch.int8).fill_(-1)  # whose scales in 8 bits are NaN, too
        np.random.default_rng(seed).shuffle(self.cache._free)

    def run(
        self,
        runs: dict[int, list[int]],
        trees: dict[int, list[int]] | None = None,
        kept: dict[int, list[int]] | None = None,
    ) -> Tensor:
        """Final hidden states and logits of every row of one pass, side by side: [T, H + V].

        trees: parents within the run, for slots whose run is no chain. kept: rows that stay in the cache, else all.
        """
        batch = self.batch(runs, trees or {})
        with torch.inference_mode():
            hidden = self.model.forward(batch, self.cache).hidden
            found = torch.cat((hidden, self.model.logits(hidden)), dim=1)
        self.cache.keep({slot: (kept or {}).get(slot, range(len(run))) for slot, run in runs.items()})
        return found

    def batch(self, runs: dict[int, list[int]], trees: dict[int, list[int]]) -> RaggedBatch:
        """Reserves what the runs need, opens slots that are new."""
        for slot, run in runs.items():
            if slot not in self.cache._slots:
                self.cache.open(slot)
            self.cache.reserve(slot, len(run))
        return pack([Run(slot, run, parents=trees.get(slot)) for slot, run in runs.items()], self.cache)

    def written(self, slot: int) -> Tensor:
        """Keys and values of the slot's kept tokens: [layers, 2, tokens, kv_heads, head_dim].

        Those that no later token sees, behind a window, are 0, for they may have been given back.
        """
        length, found = self.cache.length(slot), []
        windows = self.model.config.cache_shape.windows or (None,) * self.model.config.num_layers
        for layer, pool in enumerate(self.cache.pools):
            kept = torch.stack(read(pool, self.cache.rows(slot, 0, length, self.cache.shape.kind_of(layer))))
            kept[:, : 0 if (window := windows[layer]) is None else max(0, length + 1 - window)] = 0
            found.append(kept)
        return torch.stack(found)
