"""The rows of keys and values that a KV cache holds: one pool for each layer.

Which row holds which token is said by kv/tables.py alone. Nothing outside of this room and the backends sees how a row
is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun import native
from forerun.blocks import CacheShape
from forerun.errors import CapacityError
from forerun.kv.rounded import plain_keys, plain_values, rounded_keys, rounded_values

KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}  # of kv_cache_dtype, by name


def type_number(dtype: torch.dtype) -> int:
    """Return how native operators call the type of a cache; what they compute nothing with counts as float32."""
    return {torch.bfloat16: 1, torch.int8: 2}.get(dtype, 0)


@dataclass(frozen=True)
class Pool:
    """The keys and values of one layer, each [rows, num_kv_heads, head_dim] in the type of the cache.

    In 8 bits a head is as wide as kv/rounded.py stores it. head_dim, refined: as there, of a pool in 8 bits.
    """

    keys: Tensor
    values: Tensor
    head_dim: int = 0
    refined: bool = False

    def write(self, rows: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [n, num_kv_heads, head_dim] of any type into these rows [n]."""
        if self.keys.dtype == torch.int8:
            self.keys[rows] = rounded_keys(keys, refined=self.refined)
            self.values[rows] = rounded_values(values)
            return
        self.keys[rows] = keys.to(self.keys.dtype)
        self.values[rows] = values.to(self.values.dtype)

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of these rows, each [n, num_kv_heads, head_dim]; a slice is not copied.

        Those in 8 bits are float32, in the order of kv/rounded.py.
        """
        if self.keys.dtype == torch.int8:
            keys = plain_keys(self.keys[rows], self.head_dim, refined=self.refined)
            return keys, plain_values(self.values[rows], self.head_dim)
        return self.keys[rows], self.values[rows]

    @property
    def row_bytes(self) -> tuple[int, int]:
        """The bytes of a row of keys and of one of values."""
        return self.keys[:1].nbytes, self.values[:1].nbytes


class Pools:
    """One pool for each layer, by its index. A layer that is not kept has another one's pool, and must not be run.

    num_blocks: of each kind of layers (CacheShape.kinds).
    native: the pools in the form that native operators take, None where there are none.
    """

    def __init__(
        self, shape: CacheShape, block_tokens: int, num_blocks: Seq[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device, self._dtype = device, dtype
        self._shape = shape
        self._block_tokens = block_tokens
        self._kept = dict(zip(shape.kept, _allocated(shape, block_tokens, num_blocks, dtype, device), strict=True))
        first = self._kept[shape.kept[0]] if shape.kept else None
        pools = [self._kept.get(layer, first) for layer in range(shape.num_layers)]
        self._by_layer = [pool for pool in pools if pool is not None]
        kinds = [shape.kind_of(layer) for layer in range(shape.num_layers)]
        self.native = self._for_native(self._by_layer, block_tokens, kinds)
        self._of_kind = [self._those(kind) for kind in range(len(shape.kinds))]
        self._copied = [self._for_native(pools, block_tokens) for pools in self._of_kind]

    def __getitem__(self, layer: int) -> Pool:
        """Return the pool of a layer."""
        return self._by_layer[layer]

    def __iter__(self) -> Iterator[Pool]:
        """Yield the pool of each layer that is kept, in order."""
        return iter(self._kept.values())

    def tensors(self) -> list[Tensor]:
        """Return all that is allocated: the keys of each kept layer, then the values."""
        return [pool.keys for pool in self] + [pool.values for pool in self]

    def copy(self, sources: list[int], targets: list[int], kind: int = 0) -> None:
        """Copy rows in all layers of a kind, one after the other."""
        if (copied := self._copied[kind]) is not None:
            copied.copy(sources, targets)
            return
        source, target = (torch.tensor(rows, device=self._device) for rows in (sources, targets))
        for pool in self._of_kind[kind]:
            pool.keys[target], pool.values[target] = pool.keys[source], pool.values[source]

    def record_bytes(self, kind: int) -> int:
        """Return the bytes of one block in all layers of a kind."""
        return sum(self._block_tokens * sum(pool.row_bytes) for pool in self._of_kind[kind])

    def save(self, kind: int, block: int, out: memoryview) -> None:
        """Copy the rows of a block in all layers of a kind into `out`: record_bytes, keys then values of each layer."""
        self._move(kind, block, out, to_pools=False)

    def load(self, kind: int, block: int, rows: memoryview) -> None:
        """Write what `save` copied into a block."""
        self._move(kind, block, rows, to_pools=True)

    def _move(self, kind: int, block: int, rows: memoryview, *, to_pools: bool) -> None:
        bytes_ = torch.frombuffer(rows, dtype=torch.uint8)
        if (copied := self._copied[kind]) is not None:
            (copied.load if to_pools else copied.save)(block, bytes_.data_ptr(), len(rows))
            return
        own = slice(block * self._block_tokens, (block + 1) * self._block_tokens)
        parts = [part[own] for pool in self._of_kind[kind] for part in (pool.keys, pool.values)]
        start = 0
        for part in parts:
            one = bytes_[start : start + part.nbytes].view(part.dtype).view(part.shape)
            (part if to_pools else one).copy_(one if to_pools else part)
            start += part.nbytes

    def _those(self, kind: int) -> list[Pool]:
        return [pool for layer, pool in self._kept.items() if self._shape.kind_of(layer) == kind]

    def _for_native(self, pools: Seq[Pool], block_tokens: int, kinds: Seq[int] = ()) -> Any:
        extension = native.extension()
        if extension is None or self._device.type != "cpu":
            return None
        keys = [pool.keys.data_ptr() for pool in pools]
        values = [pool.values.data_ptr() for pool in pools]
        row_bytes, num_rows = [pool.row_bytes for pool in pools], [pool.keys.shape[0] for pool in pools]
        kinds, refined = list(kinds) or [0] * len(keys), self._shape.refined_keys
        return extension.Pools(
            keys, values, block_tokens, row_bytes, num_rows, type_number(self._dtype), refined, kinds
        )


def _allocated(
    shape: CacheShape, block_tokens: int, num_blocks: Seq[int], dtype: torch.dtype, device: torch.device
) -> list[Pool]:
    """Allocate the pool of each layer that is kept. Raises CapacityError where there is no memory for them.

    They are not zeroed: no row is read before it is written, and on a CPU untouched pages take no memory.
    """
    sizes = list[tuple[int, int, int]]()
    for layer in shape.kept:
        rows, (heads, _) = block_tokens * num_blocks[shape.kind_of(layer)], shape.size_of(layer)
        sizes += [(rows, heads, width) for width in shape.widths_of(layer, dtype)]
    try:
        made = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
    except RuntimeError as error:  # OutOfMemoryError on an accelerator, a plain RuntimeError on a CPU
        num_gb = sum(map(math.prod, sizes)) * dtype.itemsize / 1e9
        raise CapacityError(
            f"there is no memory for a KV cache of {num_gb:.1f} GB on {device}: lower max_batch_size, max_seq_len "
            "or kv_cache_tokens; forerun plan says what fits"
        ) from error
    dims = [shape.size_of(layer)[1] for layer in shape.kept]
    return [Pool(made[2 * i], made[2 * i + 1], dim, shape.refined_keys) for i, dim in enumerate(dims)]
