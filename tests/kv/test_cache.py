"""The cache against a plain Python model of its contents, and the lengths of docs/journey.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forerun.errors import CapacityError, InternalError
from forerun.kv.cache import PAGED_BLOCK_TOKENS, BlockCache, CacheShape
from forerun.types import RaggedBatch

SHAPE = CacheShape(num_layers=2, num_kv_heads=1, head_dim=2)
SLOTS = range(4)


def write(cache: BlockCache, slot: int, marks: list[int]) -> None:
    """One pass: reserve, view, and write each mark into every layer where the view says."""
    cache.reserve(slot, len(marks))
    batch = RaggedBatch(torch.tensor(marks), torch.tensor(marks), [0, len(marks)], [slot], [cache.length(slot)])
    view = cache.view(batch)
    for pool in (*cache.keys, *cache.values):
        pool[view.write_rows] = torch.tensor(marks, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    assert torch.equal(view.read_rows[0][cache.length(slot) :], view.write_rows)


def contents(cache: BlockCache, slot: int) -> list[int]:
    """What every layer holds of a slot; all layers agree."""
    rows = cache.rows(slot, 0, cache.length(slot))
    found = [pool[rows, 0, lane].int().tolist() for pool in (*cache.keys, *cache.values) for lane in (0, 1)]
    assert all(layer == found[0] for layer in found)
    return list(found[0])


@dataclass
class _Slot:
    kept: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)  # written, not yet kept


class CacheFuzz(RuleBasedStateMachine):
    """Random lives of four slots; the plain model is a list of marks per slot."""

    @initialize(backend=st.sampled_from(["paged", "contiguous"]), num_tokens=st.integers(40, 200))
    def make(self, backend: Any, num_tokens: int) -> None:
        self.cache = BlockCache.create(SHAPE, backend, max_batch_size=3, max_seq_len=40, num_tokens=num_tokens)
        self.slots: dict[int, _Slot] = {}
        self.next_mark = 1

    @rule(slot=st.sampled_from(SLOTS))
    def open_or_release(self, slot: int) -> None:
        if slot in self.slots:
            self.cache.release(slot)
            del self.slots[slot]
        else:
            self.cache.open(slot)
            self.slots[slot] = _Slot()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), num=st.integers(1, 37))
    def write_run(self, data: st.DataObject, num: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        before = self.cache.free_tokens()
        fits = self.cache.can_reserve(slot, num)
        marks = list(range(self.next_mark, self.next_mark + num))
        try:
            write(self.cache, slot, marks)
        except CapacityError:
            assert not fits
            assert self.cache.free_tokens() == before
            return
        assert fits
        self.next_mark += num
        self.slots[slot].run = marks

    @precondition(lambda self: any(s.run for s in self.slots.values()))
    @rule(data=st.data())
    def keep_path(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([n for n, s in self.slots.items() if s.run]))
        state = self.slots[slot]
        path = sorted(data.draw(st.sets(st.integers(0, len(state.run) - 1))))
        self.cache.keep({slot: path})
        state.kept += [state.run[i] for i in path]
        state.run = []

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        state = self.slots[slot]
        length = data.draw(st.integers(0, len(state.kept)))
        self.cache.truncate_to(slot, length)
        state.kept, state.run = state.kept[:length], []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for slot, state in self.slots.items():
            assert contents(self.cache, slot) == state.kept


TestCacheFuzz = CacheFuzz.TestCase
TestCacheFuzz.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def make(backend: Any = "paged", **more: Any) -> BlockCache:
    return BlockCache.create(SHAPE, backend, max_batch_size=2, max_seq_len=64, **more)


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize(("num_accepted", "target", "draft"), [(2, 12, 12), (4, 14, 13), (0, 10, 10)])
def test_lengths_of_one_round(backend: Any, num_accepted: int, target: int, draft: int) -> None:
    """L = 10 committed, gamma = 4; the draft feeds 4 tokens, the target 5."""
    cache = make(backend)
    for slot, context in ((0, 9), (1, 9)):
        cache.open(slot)
        write(cache, slot, list(range(context)))
        cache.keep({slot: range(context)})
    write(cache, 1, [9, 10, 11, 12])  # g, x1, x2, x3: the last drafted token is not fed
    cache.keep({1: [0, 1, 2, 3]})
    assert cache.length(1) == 13
    write(cache, 0, [9, 10, 11, 12, 13])
    cache.keep({0: range(num_accepted + 1)})
    cache.truncate_to(1, min(13, 10 + num_accepted))
    assert (cache.length(0), cache.length(1)) == (target, draft)
    assert contents(cache, 0) == list(range(target))
    with pytest.raises(InternalError, match="cannot be extended"):
        cache.truncate_to(1, 14)
    cache.check_integrity()


def test_a_path_moves_across_block_boundaries() -> None:
    cache = make()
    for slot in (0, 1):
        cache.open(slot)
    for start in range(0, 12, 4):  # blocks of the two slots interleave
        for slot in (0, 1):
            write(cache, slot, list(range(start, start + 4)))
            cache.keep({slot: [0, 1, 2, 3]})
    write(cache, 0, list(range(100, 130)))
    cache.keep({0: [0, 3, 4, 9, 20, 21, 29]})
    assert contents(cache, 0) == [*range(12), 100, 103, 104, 109, 120, 121, 129]
    assert contents(cache, 1) == list(range(12))
    cache.check_integrity()


def test_blocks_behind_the_length_are_freed() -> None:
    cache = make()
    free = cache.free_tokens()
    cache.open(0)
    write(cache, 0, list(range(33)))
    assert cache.free_tokens() == free - 3 * PAGED_BLOCK_TOKENS
    cache.keep({0: range(16)})
    assert cache.free_tokens() == free - PAGED_BLOCK_TOKENS
    cache.keep({0: []})
    cache.truncate_to(0, 0)
    assert cache.free_tokens() == free
    cache.release(0)
    cache.release(0)
    assert cache.length(0) == 0


def test_a_full_pool_says_so_and_changes_nothing() -> None:
    cache = make(num_tokens=32)
    cache.open(0)
    write(cache, 0, list(range(20)))
    with pytest.raises(CapacityError, match="kv_cache_tokens"):
        cache.reserve(0, 33)
    cache.keep({0: range(20)})
    assert contents(cache, 0) == list(range(20))


def test_disagreement_with_the_batch_is_an_internal_error() -> None:
    cache = make()
    cache.open(0)
    with pytest.raises(InternalError, match="open already"):
        cache.open(0)
    batch = RaggedBatch(torch.tensor([1]), torch.tensor([0]), [0, 1], [0], [5])
    with pytest.raises(InternalError, match="holds 0 tokens, the batch says 5"):
        cache.view(batch)
    with pytest.raises(InternalError, match="reserve them first"):
        cache.view(RaggedBatch(torch.tensor([1]), torch.tensor([0]), [0, 1], [0], [0]))


def test_integrity_notices_a_block_owned_twice() -> None:
    cache = make()
    cache.open(0)
    write(cache, 0, [1])
    cache._free.append(cache._slots[0].table[0])
    with pytest.raises(InternalError, match="owns one twice"):
        cache.check_integrity()
