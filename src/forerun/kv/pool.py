"""The rows of keys and values that a KV cache holds: one pool for each layer.

Only kv/tables.py knows which row holds which token. Only this package and the backends know how a row is stored. Each
backend makes the pools of its models; the pools in this file are for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from forerun import native
from forerun.blocks import CacheShape, StateShape, inputs_of, itemsize
from forerun.errors import CapacityError
from forerun.host_tensor import Array, Floats, HostTensor, address
from forerun.kv.rounded import plain_keys, plain_values, rounded_keys, rounded_values

Rows = npt.NDArray[np.int64] | slice


def type_number(dtype: str) -> int:
    """Return the number of a cache's dtype in native operators: 1 = bfloat16, 2 = int8, 0 = float32.

    Every other dtype, with which native operators do not compute, has the number 0, too.
    """
    return {"bfloat16": 1, "int8": 2}.get(dtype, 0)


class StateRoom(NamedTuple):
    """The number of states, and the number of rows of inputs, for which each recurrent layer has memory."""

    num_states: int
    num_rows: int


class Pools(Protocol):
    """The pools of all layers, in the memory of their backend.

    native: the pools in the form that native operators take; None = there is no such form. states: the states of each
    recurrent layer, by layer.
    """

    native: Any
    states: Mapping[int, StatePool]

    def copy(self, sources: list[int], targets: list[int], kind: int = 0) -> None:
        """Copy rows `sources` to rows `targets` in all layers of a kind, one row after the other."""

    def copy_inputs(self, sources: list[int], targets: list[int]) -> None:
        """Copy input rows `sources` to input rows `targets` in all recurrent layers."""

    def clear(self, rows: npt.NDArray[np.int64]) -> None:
        """Set these rows to zeros in all layers."""

    def record_bytes(self, kind: int) -> int:
        """Return the bytes of one block in all layers of a kind.

        If `kind` is the number after the last kind, return the bytes of one state in all recurrent layers.
        """

    def save(self, kind: int, block: int, out: memoryview) -> None:
        """Copy the rows of a block into `out`: for each layer of the kind its keys, then its values.

        `out` has as many bytes as `record_bytes` returns. If `kind` is the number after the last kind, `block` is a
        state. Then the state of each recurrent layer is copied, and the inputs of its last tokens.
        """

    def load(self, kind: int, block: int, rows: memoryview) -> None:
        """Fill a block with the bytes that `save` has copied."""

    def __getitem__(self, layer: int) -> Any:
        """Return the pool of a layer, which has write(rows, keys, values) and read(rows)."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the pools of the layers that keep keys and values, in the order of the layers."""


# (shape, tokens of a block, blocks of each kind, type, room of recurrent layers) -> pools
MakePools = Callable[[CacheShape, int, Seq[int], str, StateRoom | None], Pools]


@dataclass(frozen=True)
class Pool:
    """The keys and values of one layer, each [rows, num_kv_heads, head_dim] in the dtype of the cache.

    In 8 bits, the last dimension is larger than head_dim, because each head is stored with its scales (kv/rounded.py).
    head_dim and refined are used only in 8 bits. refined: whether the keys are stored in the form of
    CacheShape.refined_keys.
    """

    keys: HostTensor
    values: HostTensor
    head_dim: int = 0
    refined: bool = False

    def write(self, rows: Rows, keys: Array, values: Array) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] to these rows [n]."""
        if self.keys.dtype == "int8":
            self.keys.values[rows] = rounded_keys(keys, refined=self.refined)
            self.values.values[rows] = rounded_values(values)
            return
        for part, numbers in ((self.keys, keys), (self.values, values)):
            part.values[rows] = HostTensor.of(numbers).to(part.dtype).values

    def read(self, rows: Rows) -> tuple[Array, Array]:
        """Return keys and values of these rows, each [n, num_kv_heads, head_dim]; float32 for bfloat16 and 8 bits.

        Keys in 8 bits have the order of dimensions in which they are stored, see kv/rounded.py. Rows given as a
        slice are copied only where they are converted.
        """
        if self.keys.dtype == "int8":
            keys = plain_keys(self.keys.values[rows], self.head_dim, refined=self.refined)
            return keys, plain_values(self.values.values[rows], self.head_dim)
        return _plain(self.keys[rows]), _plain(self.values[rows])

    @property
    def row_bytes(self) -> tuple[int, int]:
        """The bytes of a row of keys, and the bytes of a row of values."""
        return self.keys[:1].nbytes, self.values[:1].nbytes


def _plain(numbers: HostTensor) -> Floats | Array:
    return numbers.float32() if numbers.dtype == "bfloat16" else numbers.values


@dataclass(frozen=True)
class StatePool:
    """The states of one recurrent layer, and the inputs of tokens after each state. kv/states.py assigns their indices.

    states [states, heads, key_dim, value_dim]: float32. history [states, conv - 1, width]: the inputs of the last
    tokens in each state. inputs [rows, width], gates [rows, num_gates]: a row for each token after a state. gates are
    float32. history and inputs have the dtype of the cache, or bfloat16 where the cache is in 8 bits.
    """

    states: Any
    history: Any
    inputs: Any
    gates: Any


def state_sizes(shape: StateShape, room: StateRoom) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors of a StatePool, in the order of its fields."""
    return (
        (room.num_states, shape.heads, shape.key_dim, shape.value_dim),
        (room.num_states, shape.conv - 1, shape.width),
        (room.num_rows, shape.width),
        (room.num_rows, shape.num_gates),
    )


class LayerPools:
    """The base of all backends' pools: a map from layers to pools.

    pools: the pools of the layers that keep keys and values (CacheShape.kept), in order. For any other layer, the
    map has the first of these pools, which must not be used. states: the states of recurrent layers, by layer.
    """

    def __init__(
        self,
        shape: CacheShape,
        block_tokens: int,
        pools: Seq[Any],
        states: Mapping[int, StatePool] = MappingProxyType({}),
    ) -> None:
        self.shape, self.block_tokens, self.states = shape, block_tokens, states
        self._kept = dict(zip(shape.kept, pools, strict=True))
        first = self._kept[shape.kept[0]] if shape.kept else None
        every = [self._kept.get(layer, first) for layer in range(shape.num_layers)]
        self.by_layer = [pool for pool in every if pool is not None]
        self.of_kind = [
            [pool for layer, pool in self._kept.items() if shape.kind_of(layer) == kind]
            for kind in range(len(shape.kinds))
        ]

    def __getitem__(self, layer: int) -> Any:
        """Return the pool of a layer."""
        return self.by_layer[layer]

    def __iter__(self) -> Iterator[Any]:
        """Yield the pools of the layers that keep keys and values, in the order of the layers."""
        return iter(self._kept.values())

    def tensors(self) -> list[Any]:
        """Return the key tensors of all layers that keep keys and values, then their value tensors."""
        return [pool.keys for pool in self] + [pool.values for pool in self]

    def record_parts(self, kind: int, block: int) -> Iterator[Any]:
        """Yield the tensors that `save` copies, in order."""
        if kind == len(self.of_kind):
            for states in self.states.values():
                yield from (states.states[block : block + 1], states.history[block : block + 1])
            return
        rows = slice(block * self.block_tokens, (block + 1) * self.block_tokens)
        for pool in self.of_kind[kind]:
            yield from (pool.keys[rows], pool.values[rows])

    def record_bytes(self, kind: int) -> int:
        """Return the bytes of one block in all layers of a kind; for the kind after the last one, of one state."""
        if kind == len(self.of_kind):
            return sum(part[:1].nbytes for pool in self.states.values() for part in (pool.states, pool.history))
        return sum(self.block_tokens * sum(pool.row_bytes) for pool in self.of_kind[kind])


class HostPools(LayerPools):
    """Pools in numpy arrays, which native operators read, too."""

    def __init__(
        self, shape: CacheShape, block_tokens: int, num_blocks: Seq[int], dtype: str, room: StateRoom | None = None
    ) -> None:
        pools = _allocated(shape, block_tokens, num_blocks, dtype)
        super().__init__(shape, block_tokens, pools, _allocated_states(shape, room, dtype))
        self._dtype = dtype
        kinds = [shape.kind_of(layer) for layer in range(shape.num_layers)]
        self.native = self.for_native(self.by_layer, kinds)
        if self.native is not None and room is not None:
            self.native.keep_states(*room, [(layer, *_places(pool)) for layer, pool in self.states.items()])
        self._moved = [self.for_native(pools) if pools else None for pools in self.of_kind]

    def copy(self, sources: list[int], targets: list[int], kind: int = 0) -> None:
        """Copy rows `sources` to rows `targets` in all layers of a kind."""
        if (moved := self._moved[kind]) is not None:
            moved.copy(sources, targets)
            return
        for pool in self.of_kind[kind]:
            for part in (pool.keys.values, pool.values.values):
                part[targets] = part[sources]

    def copy_inputs(self, sources: list[int], targets: list[int]) -> None:
        """Copy input rows `sources` to input rows `targets` in all recurrent layers."""
        for pool in self.states.values():
            for part in (pool.inputs.values, pool.gates.values):
                part[targets] = part[sources]

    def clear(self, rows: npt.NDArray[np.int64]) -> None:
        """Set these rows to zeros in all layers."""
        for tensor in self.tensors():
            tensor.values[rows] = 0

    def save(self, kind: int, block: int, out: memoryview) -> None:
        """Copy the rows of a block, or a state, into `out`, see `Pools`."""
        self._move(kind, block, out, to_pools=False)

    def load(self, kind: int, block: int, rows: memoryview) -> None:
        """Fill a block, or a state, with the bytes that `save` has copied."""
        self._move(kind, block, rows, to_pools=True)

    def _move(self, kind: int, block: int, rows: memoryview, *, to_pools: bool) -> None:
        record, start = np.frombuffer(rows, np.uint8), 0
        moved = self._moved[kind] if kind < len(self._moved) else None
        if moved is not None:
            (moved.load if to_pools else moved.save)(block, address(record), len(rows))
            return
        for tensor in self.record_parts(kind, block):
            part = tensor.values
            stored = record[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
            np.copyto(part if to_pools else stored, stored if to_pools else part)
            start += part.nbytes

    def for_native(self, pools: Seq[Pool], kinds: Seq[int] = ()) -> Any:
        """Return `pools` in the form that native operators take; None if there are no native operators.

        kinds: the kind of each pool's layer. The pools must stay in memory for as long as the result is used.
        """
        extension = native.extension()
        if extension is None:
            return None
        keys = [address(pool.keys.values) for pool in pools]
        values = [address(pool.values.values) for pool in pools]
        row_bytes, num_rows = [pool.row_bytes for pool in pools], [pool.keys.shape[0] for pool in pools]
        if not pools:  # no layer keeps rows of keys and values
            keys = [0] * len(kinds)
            values = [0] * len(kinds)
            row_bytes = [(0, 0)]
            num_rows = [0]
        kinds = list(kinds) or [0] * len(keys)
        refined = self.shape.refined_keys
        return extension.Pools(
            keys, values, self.block_tokens, row_bytes, num_rows, type_number(self._dtype), refined, kinds
        )


def _places(pool: StatePool) -> tuple[list[int], list[int]]:
    """Return the addresses of a pool's tensors, and the bytes of a single item (a state or a row) of each tensor."""
    parts = [part.values for part in (pool.states, pool.history, pool.inputs, pool.gates)]
    return list(map(address, parts)), [part.itemsize * math.prod(part.shape[1:]) for part in parts]


def pool_sizes(
    shape: CacheShape, block_tokens: int, num_blocks: Seq[int], dtype: str
) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int], int]]:
    """Yield, for each layer that keeps keys and values, the shapes of its keys and values, and the size of a head.

    num_blocks: the number of blocks of each kind of layers. dtype: the dtype of the cache.
    """
    for layer in shape.kept:
        rows, (heads, dim) = block_tokens * num_blocks[shape.kind_of(layer)], shape.size_of(layer)
        keys, values = shape.widths_of(layer, dtype)
        yield (rows, heads, keys), (rows, heads, values), dim


def no_room_for_pools(sizes: Seq[Seq[int]], dtype: str, device: str) -> CapacityError:
    """Return the error for a cache that is too large for the memory. sizes: the shapes of the cache's tensors."""
    num_gb = sum(map(math.prod, sizes)) * itemsize(dtype) / 1e9
    return CapacityError(
        f"there is no memory for a KV cache of {num_gb:.1f} GB on {device}: lower max_batch_size, max_seq_len "
        "or kv_cache_tokens; forerun plan says what fits"
    )


def _allocated(shape: CacheShape, block_tokens: int, num_blocks: Seq[int], dtype: str) -> list[Pool]:
    """Allocate the pool of each layer that keeps keys and values. Raises CapacityError without enough memory.

    The pools are not zeroed, because no row is read before it is written, and untouched pages take no memory.
    num_blocks: the number of blocks of each kind of layers.
    """
    sizes = list(pool_sizes(shape, block_tokens, num_blocks, dtype))
    try:
        return [
            Pool(HostTensor.empty(keys, dtype), HostTensor.empty(values, dtype), dim, shape.refined_keys)
            for keys, values, dim in sizes
        ]
    except MemoryError as error:
        raise no_room_for_pools([one for keys, values, _ in sizes for one in (keys, values)], dtype, "cpu") from error


def _allocated_states(shape: CacheShape, room: StateRoom | None, dtype: str) -> dict[int, StatePool]:
    """Allocate the pool of each recurrent layer, and return the pools by the index of the layer.

    A StatePool holds states, and inputs of the tokens after a state. room: the number of states and of input rows of
    each layer; None = return no pools. Raises CapacityError without enough memory.
    """
    if room is None:
        return {}
    kinds = ("float32", inputs_of(dtype), inputs_of(dtype), "float32")
    sizes = {layer: state_sizes(state, room) for layer, state in shape.states}
    try:
        return {
            layer: StatePool(*(HostTensor.empty(size, kind) for size, kind in zip(parts, kinds, strict=True)))
            for layer, parts in sizes.items()
        }
    except MemoryError as error:
        raise no_room_for_pools([size for parts in sizes.values() for size in parts], dtype, "cpu") from error
