"""Pools of a KV cache as torch tensors, on any device; see kv/pool.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.blocks import CacheShape, inputs_of
from forerun.kv.pool import LayerPools, MakePools, StatePool, StateRoom, no_room_for_pools, pool_sizes, state_sizes
from forerun.ops.torch_tensors import torch_dtype

Rows = Tensor | slice


@dataclass(frozen=True)
class TorchPool:
    """The keys and values of one layer, each [rows, num_kv_heads, head_dim] in the dtype of the cache."""

    keys: Tensor
    values: Tensor

    def write(self, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] of any dtype into these rows [n]."""
        self.keys[rows] = keys.to(self.keys.dtype)
        self.values[rows] = values.to(self.values.dtype)

    def read(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return keys and values of these rows, each [n, num_kv_heads, head_dim]; a slice is not copied."""
        return self.keys[rows], self.values[rows]

    @property
    def row_bytes(self) -> tuple[int, int]:
        """The bytes of one row of keys and one row of values."""
        return self.keys[:1].nbytes, self.values[:1].nbytes


class TorchPools(LayerPools):
    """The pools of all layers, as tensors on one device."""

    native = None

    def __init__(
        self,
        shape: CacheShape,
        block_tokens: int,
        num_blocks: Seq[int],
        dtype: str,
        room: StateRoom | None = None,
        *,
        device: str = "cpu",
    ) -> None:
        pools = _allocated(shape, block_tokens, num_blocks, dtype, device)
        super().__init__(shape, block_tokens, pools, _allocated_states(shape, room, dtype, device))
        self._device = device

    def copy(self, sources: list[int], targets: list[int], kind: int = 0) -> None:
        """See `kv.pool.Pools.copy`."""
        source, target = (torch.tensor(rows, dtype=torch.int64, device=self._device) for rows in (sources, targets))
        for pool in self.of_kind[kind]:
            pool.keys[target], pool.values[target] = pool.keys[source], pool.values[source]

    def copy_inputs(self, sources: list[int], targets: list[int]) -> None:
        """See `kv.pool.Pools.copy_inputs`."""
        for pool in self.states.values():
            for part in (pool.inputs, pool.gates):
                part[targets] = part[sources]

    def clear(self, rows: npt.NDArray[np.int64]) -> None:
        """See `kv.pool.Pools.clear`."""
        places = torch.from_numpy(rows).to(self._device)
        for tensor in self.tensors():
            tensor[places] = 0

    def save(self, kind: int, block: int, out: memoryview) -> None:
        """See `kv.pool.Pools.save`."""
        self._move(kind, block, out, lambda pool, stored: stored.copy_(pool))

    def load(self, kind: int, block: int, rows: memoryview) -> None:
        """See `kv.pool.Pools.load`."""
        self._move(kind, block, rows, lambda pool, stored: pool.copy_(stored))

    def _move(self, kind: int, block: int, rows: memoryview, move: Callable[[Tensor, Tensor], Tensor]) -> None:
        record, start = torch.frombuffer(rows, dtype=torch.uint8), 0
        for part in self.record_parts(kind, block):
            move(part, record[start : start + part.nbytes].view(part.dtype).view(part.shape))
            start += part.nbytes


def pools_on(device: str) -> MakePools:
    """Return a function that makes a model's pools on this device."""
    return partial(TorchPools, device=device)


def _allocated(shape: CacheShape, block_tokens: int, num_blocks: Seq[int], dtype: str, device: str) -> list[TorchPool]:
    """Allocate the pool of each layer that keeps keys and values. Raises CapacityError without enough memory."""
    sizes = list(pool_sizes(shape, block_tokens, num_blocks, dtype))
    torch_type = torch_dtype(dtype)
    try:
        return [
            TorchPool(
                torch.empty(keys, dtype=torch_type, device=device), torch.empty(values, dtype=torch_type, device=device)
            )
            for keys, values, _ in sizes
        ]
    except RuntimeError as error:  # OutOfMemoryError on an accelerator, a plain RuntimeError on a CPU
        raise no_room_for_pools([one for keys, values, _ in sizes for one in (keys, values)], dtype, device) from error


def _allocated_states(shape: CacheShape, room: StateRoom | None, dtype: str, device: str) -> dict[int, StatePool]:
    """Allocate the pool of each recurrent layer, and return the pools by the index of the layer.

    A StatePool holds states, and inputs of the tokens after a state. room: the number of states and of input rows of
    each layer; None = return no pools. Raises CapacityError without enough memory.
    """
    if room is None:
        return {}
    input_type = torch_dtype(inputs_of(dtype))
    kinds = (torch.float32, input_type, input_type, torch.float32)
    sizes = {layer: state_sizes(state, room) for layer, state in shape.states}
    try:
        return {
            layer: StatePool(
                *(torch.empty(size, dtype=kind, device=device) for size, kind in zip(parts, kinds, strict=True))
            )
            for layer, parts in sizes.items()
        }
    except RuntimeError as error:
        raise no_room_for_pools([size for parts in sizes.values() for size in parts], dtype, device) from error
