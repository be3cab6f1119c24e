"""A cache that is used as a model uses it, with rows that say which tokens they were computed from.

The number written into a row stands for the salt and all tokens up to that row, so a row that is shared wrongly, or
overwritten while another slot reads it, is found.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from forerun.blocks import StateShape
from forerun.host_tensor import Array
from forerun.kv.cache import BlockCache, CacheShape
from forerun.kv.states import NOWHERE
from forerun.models.runner import Run, pack
from forerun.types import RaggedBatch

SHAPE = CacheShape(num_layers=1, num_kv_heads=1, head_dim=1)
BLOCK = 4  # tokens
PROMPT = list(range(100, 116))  # four blocks

Windows = tuple[int | None, ...]  # of each layer


def pool(
    num_blocks: int = 16, windows: Windows | None = None, max_batch_size: int = 1, *, has_states: bool = False
) -> BlockCache:
    shape = SHAPE if windows is None else CacheShape(len(windows), 1, 1, windows=windows)
    if has_states:  # a layer more, whose state is one number
        states = ((shape.num_layers, StateShape(conv=2, width=1, heads=1, key_dim=1, value_dim=1)),)
        shape = replace(shape, num_layers=shape.num_layers + 1, layers=tuple(range(shape.num_layers)), states=states)
    sizes = {"block_tokens": BLOCK, "num_blocks": num_blocks, "max_batch_size": max_batch_size}
    return BlockCache(shape, **sizes, dtype="float32")


def batch_of(cache: BlockCache, slot: int, num_tokens: int) -> RaggedBatch:
    tokens = [0] * num_tokens
    return RaggedBatch(tokens, tokens, [0, num_tokens], [slot], [cache.length(slot)])


class Driven:
    """A cache and what each of its slots must hold: `kept` tokens by slot, under a salt."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self.kept: dict[int, list[int]] = {}
        self.salts: dict[int, str | None] = {}
        # Per pending row, and per row of the run behind them: the tokens from the beginning up to it.
        self._held: dict[int, list[list[int]]] = {}
        self._runs: dict[int, list[list[int]]] = {}
        self._parents: dict[int, Seq[int]] = {}  # of the run
        self._numbers: dict[tuple[str | None, tuple[int, ...]], int] = {}

    def number(self, salt: str | None, tokens: Seq[int]) -> int:
        return self._numbers.setdefault((salt, tuple(tokens)), len(self._numbers) + 1)

    def open(self, slot: int, tokens: Seq[int] = (), salt: str | None = None) -> int:
        found = self.cache.open(slot, tokens, salt)
        assert found == self.cache.length(slot) <= max(0, len(tokens) - 1)
        self.kept[slot], self.salts[slot] = list(tokens[:found]), salt
        return found

    def fork(self, slot: int, new_slot: int) -> None:
        self.cache.fork(slot, new_slot)
        self.kept[new_slot], self.salts[new_slot] = list(self.kept[slot]), self.salts[slot]

    def pending(self, slot: int) -> Seq[int]:
        return self.cache.pending(slot)

    def write(self, slot: int, tokens: Seq[int], parents: Seq[int] | None = None, *, is_silent: bool = False) -> None:
        """Write one pass without keeping its rows. Raises CapacityError as the cache does.

        parents: indices among the pending rows, then the run. is_silent: whether no row is judged.
        """
        self.cache.reserve(slot, len(tokens))
        batch = pack([Run(slot, tokens, "none" if is_silent else "all", parents)], self.cache)
        chains = list(self._held.get(slot, []))
        num_pending = len(chains)
        parents = range(num_pending - 1, num_pending - 1 + len(tokens)) if parents is None else parents
        for token, parent in zip(tokens, parents, strict=True):
            chains.append([*(self.kept[slot] if parent < 0 else chains[parent]), token])
        numbers = [self.number(self.salts[slot], chain) for chain in chains]
        for rows, layer in self._layers():
            view = self.cache.view(batch, self.cache.shape.kind_of(layer))
            rows[view.write_rows] = np.array(numbers[num_pending:], np.float32)[:, None, None]
            for i, number in enumerate(numbers[num_pending:]):  # a row sees its own chain and nothing else
                seen = view.read_rows[0][batch.visible(0, i)]
                chain = chains[num_pending + i]
                wanted = [self.number(self.salts[slot], chain[: j + 1]) for j in range(len(chain))]
                first = self.first_seen(layer, len(chain) - 1)
                assert rows[seen, 0, 0].astype(int).tolist()[first:] == wanted[first:]
                assert wanted[-1] == number
        self._recur(batch, slot, chains, num_pending)
        self._runs[slot], self._parents[slot] = chains, parents

    def _recur(self, batch: RaggedBatch, slot: int, chains: list[list[int]], num_pending: int) -> None:
        """Compute a recurrent layer: a state is the number of its tokens, and an input that of the tokens up to it."""
        if self.cache.states is None:
            return
        (run,), (layer,) = self.cache.states.plan(batch), self.cache.pools.states.values()
        salt, own = self.salts[slot], chains[num_pending:]
        start = len(own[0]) - 1 - len(run.before) - (len(run.paths[0]) if run.paths else 0)
        state = 0 if run.first == NOWHERE else int(layer.states.values[run.first, 0, 0, 0])
        assert state == (self.number(salt, own[0][:start]) if start else 0)
        stored = layer.inputs.values[:, 0]
        numbers = [self.number(salt, chain) for chain in own]
        for i, chain in enumerate(own):
            behind = [stored[row] for row in run.before]
            if run.paths:
                nodes = [*(stored[row] for row in run.pending), *numbers]
                behind += [nodes[j] for j in run.paths[i]]
            else:
                behind += numbers[:i]
            path = list(map(int, [*behind, numbers[i]]))
            assert path == [self.number(salt, chain[: start + j + 1]) for j in range(len(path))]
            assert start + len(path) == len(chain)
        for number, row in zip(numbers, run.rows, strict=True):
            if row != NOWHERE:
                stored[row] = number
        for num, place in run.saves:
            assert num <= len(run.before) or not run.paths
            layer.states.values[place, 0, 0, 0] = self.number(salt, own[-1][: start + num])

    def _layers(self) -> list[tuple[Array, int]]:
        """The keys, then the values of each layer, and its number."""
        return [
            (rows.values, layer % len(self.cache.shape.kept)) for layer, rows in enumerate(self.cache.pools.tensors())
        ]

    def first_seen(self, layer: int, position: int) -> int:
        """Return the first position that a row sees."""
        windows = self.cache.shape.windows
        window = None if windows is None else windows[layer]
        return 0 if window is None else max(0, position + 1 - window)

    def hold(self, slot: int) -> None:
        """Make the rows just written pending."""
        self.cache.hold(slot, self._parents[slot])
        self._held[slot] = self._runs.pop(slot)

    def keep(self, slot: int, path: list[int]) -> None:
        before = self.cache.length(slot)
        is_filled = (before + len(path)) // BLOCK > before // BLOCK
        assert self.cache.keep({slot: path}) == ([slot] if is_filled else [])
        if path:
            self.kept[slot] = self._runs[slot][path[-1]]
        del self._runs[slot]
        self._held.pop(slot, None)

    def feed(self, slot: int, tokens: Seq[int]) -> None:
        """Run a chain in a slot, which may be a new one, and keep all of it."""
        if slot not in self.kept:
            self.open(slot)
        self.write(slot, tokens)
        self.keep(slot, list(range(len(tokens))))

    def start(self, slot: int, tokens: Seq[int], salt: str | None = None) -> int:
        """Open a slot, run the tokens that were not found, publish; returns how many were found."""
        found = self.open(slot, tokens, salt)
        self.feed(slot, tokens[found:])
        self.cache.publish(slot, tokens)
        return found

    def truncate(self, slot: int, length: int) -> None:
        found = self.cache.truncate_to(slot, length)
        assert found == length or self.cache.states or (found == 0 and self.cache.shape.windows is not None)
        self.kept[slot] = self.kept[slot][:found]
        self._runs.pop(slot, None)
        self._held.pop(slot, None)

    def release(self, *slots: int) -> None:
        for slot in slots:
            self.cache.release(slot)
            for of_slots in (self.kept, self.salts, self._runs, self._held):
                of_slots.pop(slot, None)  # type: ignore[attr-defined]

    def found(self, tokens: Seq[int], salt: str | None = None) -> int:
        """Return how many tokens a new sequence would find, and end it. The found blocks count as used."""
        found = self.open(-1, tokens, salt)
        self.release(-1)
        return found

    def check(self) -> None:
        """Check that every slot holds its tokens, and that the cache keeps its promises."""
        self.cache.check_integrity()
        for slot, kept in self.kept.items():
            assert self.cache.length(slot) == len(kept)
            wanted = [self.number(self.salts[slot], kept[: i + 1]) for i in range(len(kept))]
            for held, layer in self._layers():
                rows = self.cache.rows(slot, 0, len(kept), self.cache.shape.kind_of(layer))
                first = self.first_seen(layer, len(kept))
                assert held[rows, 0, 0].astype(int).tolist()[first:] == wanted[first:]


def driven(num_blocks: int = 16, windows: Windows | None = None) -> Driven:
    return Driven(pool(num_blocks, windows))
