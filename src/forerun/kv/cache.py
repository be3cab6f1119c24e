"""The KV cache of the models in models/: block tables on the host, and a pool of rows for each layer.

Layers with the same window are of one *kind* and share block tables. A kind with a window gives old blocks back.

The widest kind alone decides how many tokens fit, because no other kind runs out of blocks before it. Each other kind
has as many blocks as the widest kind, and some more for each sequence. The further blocks are for this case: two
sequences share the blocks of a common beginning in the widest kind, but have separate blocks for the same beginning in
another kind. Most blocks of a kind with a window are never written. On a CPU, memory that is never written takes no
room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from forerun.blocks import CacheShape as CacheShape
from forerun.errors import BadOption, InternalError
from forerun.kv import Held
from forerun.kv.disk import Place
from forerun.kv.keeping import Fetch, Keeper, Missing
from forerun.kv.pool import HostPools, MakePools, StateRoom
from forerun.kv.prefix import Key, keys_of
from forerun.kv.states import ROWS_EACH, StateTables
from forerun.kv.tables import SPARE_TOKENS, BlockTables
from forerun.types import CacheView, RaggedBatch

Backend = Literal["paged", "contiguous"]
PAGED_BLOCK_TOKENS = 16
FOUND_TOKENS = 8192  # tokens before the windows, kept for later sequences that begin with them
WRITTEN_TOKENS = 512  # how many a sequence is assumed to run in one pass, to count the blocks that a window needs
LEAST_SNAPSHOTS = 8  # states of recurrent layers kept for later sequences; max_batch_size of them if that is more


class Cached(Protocol):
    """The properties of a model that `BlockCache.of` reads."""

    @property
    def config(self) -> HasShape: ...
    @property
    def cache_dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def make_pools(self) -> MakePools: ...


class HasShape(Protocol):
    """The only property of a model's configuration that `BlockCache.of` reads."""

    @property
    def cache_shape(self) -> CacheShape: ...


class BlockCache(BlockTables):
    """The keys and values of all sequences of one model, in blocks, for both the paged and the contiguous backend.

    pools: the rows of each layer, see kv/pool.py. kinds: the block tables of each kind of layers, the widest kind
    first. The tables of the widest kind are this cache itself. states: the states of recurrent layers; None = the model
    has none. max_batch_size: how many sequences run at once. This number decides how many blocks of kinds with windows
    are written, and how many states there are.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        block_tokens: int,
        num_blocks: int,
        dtype: str,
        prefix_caching: bool = True,
        max_batch_size: int = 1,
        pools: MakePools = HostPools,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        (widest, *windows) = shape.kinds
        more = [max_batch_size * (window // block_tokens + 2) for window in windows if window is not None]
        blocks = [num_blocks, *(num_blocks + further for further in more)]
        touched = [written_blocks(window, block_tokens, num_blocks, max_batch_size) for window in shape.kinds]
        room = state_room(shape, max_batch_size)
        self.pools = pools(shape, block_tokens, blocks, dtype, room)
        self.states = None
        if room is not None:
            self.states = StateTables(block_tokens, room.num_states, room.num_rows, self.pools.copy_inputs)
        super().__init__(
            block_tokens,
            num_blocks,
            self.pools.copy,
            prefix_caching=prefix_caching,
            window=widest,
            touched_blocks=touched[0],
        )
        self.kinds: list[BlockTables] = [self]
        for kind, window in enumerate(windows, 1):
            copy = partial(self.pools.copy, kind=kind)
            self.kinds.append(
                BlockTables(
                    block_tokens,
                    blocks[kind],
                    copy,
                    prefix_caching=prefix_caching,
                    window=window,
                    touched_blocks=touched[kind],
                )
            )

    @classmethod
    def create(
        cls,
        shape: CacheShape,
        backend: Backend,
        *,
        max_batch_size: int,
        max_seq_len: int,
        num_tokens: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        prefix_caching: bool = True,
        pools: MakePools = HostPools,
    ) -> BlockCache:
        """Allocate a cache for `max_batch_size` sequences of `max_seq_len` tokens, or for `num_tokens` tokens in all.

        pools: the function that makes the pools of the model's backend (Model.make_pools). Raises BadOption where
        `num_tokens` is less than one block, and CapacityError where there is no memory.
        """
        shape = shape_of(shape, backend, max_seq_len, device)
        block = PAGED_BLOCK_TOKENS if backend == "paged" else max_seq_len
        per_sequence = -(-max_seq_len // block)
        num_blocks = max_batch_size * per_sequence if num_tokens is None else num_tokens // block
        if num_blocks < 1:
            raise BadOption(
                f"kv_cache_tokens={num_tokens} is less than one block of {block} tokens: raise it, or lower max_seq_len"
            )
        return cls(
            shape,
            block_tokens=block,
            num_blocks=num_blocks,
            dtype=dtype,
            prefix_caching=prefix_caching,
            max_batch_size=max_batch_size,
            pools=pools,
        )

    @classmethod
    def of(
        cls,
        model: Cached,
        backend: Backend,
        *,
        max_batch_size: int,
        max_seq_len: int,
        num_tokens: int | None = None,
        prefix_caching: bool = True,
        shape: CacheShape | None = None,
        dtype: str | None = None,
    ) -> BlockCache:
        """Allocate a model's cache in the pools of the model's backend. shape, dtype: None = the model's own.

        For the other parameters, see `create`.
        """
        return cls.create(
            shape or model.config.cache_shape,
            backend,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            num_tokens=num_tokens,
            dtype=dtype or model.cache_dtype,
            device=model.device,
            prefix_caching=prefix_caching,
            pools=model.make_pools,
        )

    # ------------------------------------------------------------------------------------------------- of every kind

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        """Begin a sequence with the published rows of `tokens` that all kinds of layers have.

        The parameters and the result are as in KVCache.open.
        """
        keys = keys_of(tokens, salt, self.block_tokens) if self.prefix_caching else []
        keys = self._beginning(keys)
        for kind in self.kinds:
            kind.begin(slot, keys, tokens, salt)
        if self.states is not None:
            self.states.begin(slot, keys, tokens)
        return self._counted(slot, len(tokens))

    def mark(self, slot: int, positions: Collection[int]) -> None:
        """Let later sequences begin at these positions of an open slot, or shortly before them.

        Each position is rounded down to a common multiple of `block_tokens` and STATE_TOKENS. Only models with
        recurrent layers need marks. In other models, a sequence may begin after any full block.
        """
        if self.states is not None and self.prefix_caching:
            self.states.mark(slot, positions)

    def keep_on_disk(self, keeper: Keeper) -> None:
        """From now on, write published blocks to the keeper's folder on disk, and fetch blocks from there."""
        for number, kind in enumerate(self.kinds):
            kind.keeper, kind.kind = keeper, number
        if self.states is not None:
            self.states.keeper, self.states.kind = keeper, len(self.kinds)

    @property
    def record_bytes(self) -> list[int]:
        """The bytes on disk of one block of each kind of layers; then the bytes of one state, if there are states."""
        return [self.pools.record_bytes(kind) for kind in range(len(self.kinds) + (self.states is not None))]

    def fetch(self, slot: int, tokens: Seq[int], salt: str | None = None) -> Fetch | None:
        """Begin to read the rows of `tokens` that are on disk and not in memory.

        Returns None if there are no such rows, or no free blocks for them. The slot holds the blocks for these rows
        until the caller calls `arrived`, when the fetch is over or given up. Then `open` finds the blocks. salt: only
        rows that were published under the same salt are found.
        """
        keeper = self.keeper
        if keeper is None or not self.prefix_caching:
            return None
        keys = keys_of(tokens, salt, self.block_tokens)
        size = self.block_tokens
        keeper.shelf.refresh()
        places = list[dict[bytes, Place]]()
        for number, kind in enumerate(self.kinds):
            lacking = {key: tokens[i * size : (i + 1) * size] for i, key in enumerate(keys) if not kind.holds(key)}
            on_disk = ((key, keeper.shelf.find(number, key, block_tokens)) for key, block_tokens in lacking.items())
            places.append({key: place for key, place in on_disk if place is not None})
        if self.states is not None:  # a state is looked up by the tokens of the last block before it
            behind = {key: tokens[i * size : (i + 1) * size] for i, key in enumerate(keys)}
            on_shelf = ((key, keeper.shelf.find(len(self.kinds), key, last)) for key, last in behind.items())
            places.append({key: place for key, place in on_shelf if place is not None})
        in_memory = self._beginning(keys)
        keys = self._beginning(keys, places)
        while len(keys) > len(in_memory) and (few := self._lacks_blocks(keys)):
            keys = self._beginning(keys[: max(0, len(keys) - few)], places)
        if len(keys) <= len(in_memory):
            return None
        missing = list[Missing]()
        for number, kind in enumerate(self.kinds):
            absent = [keys[i] for i in kind.absent(keys)]
            taken = kind.await_blocks(slot, keys)
            missing += [
                Missing(number, key, block, places[number][key]) for key, block in zip(absent, taken, strict=True)
            ]
        if self.states is not None and (state := self.states.await_state(slot, keys[-1])) is not None:
            missing.append(Missing(len(self.kinds), keys[-1], state, places[-1][keys[-1]]))
        return keeper.fetch(slot, missing)

    def _lacks_blocks(self, keys: Seq[Key]) -> int:
        """Return how many blocks are lacking for these prefix keys, in the kind of layers that lacks most.

        Return 1 if there are enough blocks, but no room for the state. Return 0 if nothing is lacking.
        """
        few = max(kind.lacks_blocks(keys) for kind in self.kinds)
        return few if few or self.states is None else int(not self.states.holds(keys[-1]) and not self.states.has_place)

    def arrived(self, fetch: Fetch) -> int:
        """Publish the rows that a fetch has read, and return their number of tokens.

        The fetch must be over or given up.
        """
        for number, kind in enumerate(self.kinds):
            kind.publish_awaited(fetch.slot, {one.key: one.block for one in fetch.loaded if one.kind == number})
        if self.states is not None:
            loaded = {one.key: one.block for one in fetch.loaded if one.kind == len(self.kinds)}
            self.states.publish_awaited(fetch.slot, loaded)
        return self.block_tokens * sum(one.kind == 0 for one in fetch.loaded)

    def _beginning(self, keys: list[Key], others: Seq[Collection[Key]] | None = None) -> list[Key]:
        """Return the longest prefix of `keys` with whose blocks a sequence can begin in every layer.

        others: further prefix keys that count as present. It has one collection for each kind of layers, and then one
        for states.
        """
        num, more = None, others or [()] * (len(self.kinds) + 1)
        while num != len(keys):
            num = len(keys)
            for kind, present in zip(self.kinds, more, strict=False):
                keys = keys[: kind.num_found(keys, present)]
            if self.states is not None:
                keys = keys[: self.states.num_found(keys, more[len(self.kinds)])]
        return keys

    def fork(self, slot: int, new_slot: int) -> None:
        """Begin a sequence with the kept rows of another sequence, see KVCache."""
        super().fork(slot, new_slot)
        for kind in self.kinds[1:]:
            kind.fork(slot, new_slot)
        if self.states is not None:
            self.states.fork(slot, new_slot)

    def publish(self, slot: int, tokens: Seq[int]) -> None:
        """Let other sequences find the slot's full blocks, see KVCache."""
        super().publish(slot, tokens)
        for kind in self.kinds[1:]:
            kind.publish(slot, tokens)
        if self.states is not None:
            self.states.publish(slot, tokens, self._keys(slot))

    def release(self, slot: int) -> None:
        """End a sequence and give its blocks back, see KVCache."""
        if self.states is not None:
            self.states.release(slot, self._keys(slot))
        super().release(slot)
        for kind in self.kinds[1:]:
            kind.release(slot)

    def clear_prefixes(self) -> None:
        """Free every published block that no slot uses, and withdraw every published state."""
        super().clear_prefixes()
        for kind in self.kinds[1:]:
            kind.clear_prefixes()
        if self.states is not None:
            self.states.clear()

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for a run, see KVCache."""
        super().reserve(slot, num_tokens)
        for kind in self.kinds[1:]:
            kind.reserve(slot, num_tokens)

    def keep(self, kept: Mapping[int, Seq[int]], held: Mapping[int, Held] = MappingProxyType({})) -> list[int]:
        """Keep some of the pending rows and of the rows just written, see KVCache."""
        for kind in self.kinds[1:]:
            kind.keep(kept, held)
        reached = [] if self.states is None else self.states.keep(kept, held)
        full = super().keep(kept, held)
        return full if set(reached) <= set(full) else sorted({*full, *reached})

    def hold(self, slot: int, parents: Seq[int]) -> None:
        """Make the rows of the run just written pending, see KVCache."""
        super().hold(slot, parents)
        for kind in self.kinds[1:]:
            kind.hold(slot, parents)
        if self.states is not None:
            self.states.hold(slot, len(parents))

    def truncate_to(self, slot: int, length: int) -> int:
        """Keep only the first `length` tokens, see KVCache.

        Fewer tokens are kept where a kind with a window has given back blocks that the next row would see, or where the
        state of recurrent layers already contains later tokens.
        """
        if length <= self.length(slot):
            length = self._cut_length(slot, length)
            if self.states is not None:
                self.states.truncate_to(slot, length, self._keys(slot))
        for kind in self.kinds[1:]:
            kind.truncate_to(slot, length)
        return super().truncate_to(slot, length)

    def _cut_length(self, slot: int, length: int) -> int:
        """Return a length, at most `length`, to which all layers of a slot can be cut."""

        def can_cut(length: int) -> bool:
            return all(kind.can_cut(slot, length) for kind in self.kinds)

        if self.states is None:
            return length if can_cut(length) else 0
        return self.states.cut_length(slot, length, self._keys(slot), can_cut)

    def check_integrity(self) -> None:
        """Check the block tables of each kind of layers, and the states of recurrent layers.

        Also check that every kind has room for at least as many tokens as the kind with the widest window. Raises
        InternalError where a check fails.
        """
        super().check_integrity()
        for kind in self.kinds[1:]:
            kind.check_integrity()
            if kind.free_tokens() < self.free_tokens():
                raise InternalError("layers with a window have less room in the KV cache than those without")
        if self.states is not None:
            self.states.check_integrity()

    # --------------------------------------------------------------------------------------------------- one forward

    def rows(self, slot: int, start: int, stop: int, kind: int = 0) -> npt.NDArray[np.int64]:
        """Return the physical rows of the logical positions start .. stop-1 in layers of a kind, int64 [stop - start].

        Positions whose blocks were given back map to rows of other blocks. No token of the batch may attend to these
        rows. kind: the index of the kind in `kinds`; 0 = the layers with the widest window.
        """
        table, block = self.kinds[kind].table(slot), self.block_tokens
        if not table or table == list(range(table[0], table[0] + len(table))):
            base = table[0] * block if table else 0
            return np.arange(base + start, base + stop)
        heads = np.array(table, np.int64)[:, None] * block
        return (heads + np.arange(block)).reshape(-1)[start:stop]

    def view(self, batch: RaggedBatch, kind: int = 0) -> CacheView:
        """Return the cache rows that a pass writes and reads in layers of a kind.

        kind: the index of the kind in `kinds`; 0 = the layers with the widest window. Raises InternalError where batch
        and cache disagree.
        """
        reads, writes = [], []
        self.kinds[kind].tables(batch)
        for b, slot in enumerate(batch.slots):
            read = self.rows(slot, 0, batch.end(b), kind)
            reads.append(read)
            writes.append(read[len(read) - len(batch.run(b)) :])
        if len(writes) == 1:
            return CacheView(batch, writes[0], reads)
        return CacheView(batch, np.concatenate(writes) if writes else np.empty(0, np.int64), reads)


def state_room(shape: CacheShape, max_batch_size: int) -> StateRoom | None:
    """Return the room for the states and inputs of recurrent layers; None where the model has no such layers.

    Each sequence needs two states: the state that it continues from and the state that its pass writes. A pass that
    only measures needs two states as well. Further states are for later sequences to begin with.
    """
    if not shape.states:
        return None
    num_lines = max_batch_size + 1
    return StateRoom(2 * num_lines + max(LEAST_SNAPSHOTS, max_batch_size), num_lines * ROWS_EACH)


def shape_of(shape: CacheShape, backend: str, max_seq_len: int, device: str) -> CacheShape:
    """Return the shape of the cache that `BlockCache.create` makes for a model with this shape.

    Only a paged cache on a CPU gives blocks back. For every other cache, the returned shape has no windows.
    """
    if backend == "paged" and device == "cpu":
        return shape.within(max_seq_len)
    return replace(shape, windows=None)  # a block is a whole sequence, or kernels read one table for all layers


def written_blocks(
    window: int | None, block_tokens: int, num_blocks: int, max_batch_size: int, pass_tokens: int = 0
) -> int:
    """Return how many blocks of one kind of layers are ever written. Without a window, all blocks are written.

    With a window, only two sorts of blocks are written: blocks that running sequences see, and blocks that are kept so
    that later sequences can begin with them. A prompt that runs more than WRITTEN_TOKENS tokens in one pass first takes
    the kept blocks. It takes other blocks only when the kept blocks are used up. The count assumes that no beam search
    has many rows pending. pass_tokens: the number of tokens in the largest pass; 0 = no sequence runs more than
    WRITTEN_TOKENS in a pass.
    """
    if window is None:
        return num_blocks
    each = -(-(window + SPARE_TOKENS + WRITTEN_TOKENS) // block_tokens) + 2
    seen = -(-(window + SPARE_TOKENS) // block_tokens) + 2
    # Two prompts: a sequence gives blocks back only when it runs on, and another prompt may overtake it before.
    prompts = 2 * -(-pass_tokens // block_tokens)
    return min(num_blocks, max(max_batch_size * each + FOUND_TOKENS // block_tokens, max_batch_size * seen + prompts))
