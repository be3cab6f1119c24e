"""The cache against a plain Python model of its contents, and the lengths of docs/development/journey.md."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forerun.errors import CapacityError, InternalError
from forerun.host_tensor import address
from forerun.kv import SCRATCH_SLOT, Held, fetch_slot, source_slot
from forerun.kv.cache import PAGED_BLOCK_TOKENS, BlockCache, CacheShape
from forerun.models.runner import Run, pack
from forerun.types import RaggedBatch
from kv.prefix_cases import BLOCK, driven
from refusals import refusal

SHAPE = CacheShape(num_layers=2, num_kv_heads=1, head_dim=2)
SLOTS = range(4)


def write(cache: BlockCache, slot: int, marks: list[int]) -> None:
    """One pass: reserve, view, and write each mark into every layer where the view says."""
    cache.reserve(slot, len(marks))
    view = cache.view(pack([Run(slot, marks)], cache))
    for pool in cache.pools.tensors():
        pool.values[view.write_rows] = np.array(marks, np.float32)[:, None, None]
    assert np.array_equal(view.read_rows[0][cache.length(slot) + len(cache.pending(slot)) :], view.write_rows)


def contents(cache: BlockCache, slot: int) -> list[int]:
    """Return the marks that a slot holds, which must be the same in all layers."""
    rows = cache.rows(slot, 0, cache.length(slot))
    found = [pool.values[rows, 0, lane].astype(int).tolist() for pool in cache.pools.tensors() for lane in (0, 1)]
    assert all(layer == found[0] for layer in found)
    return list(found[0])


@dataclass
class _Slot:
    kept: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
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
    def keep_paths(self, data: st.DataObject) -> None:
        """Keep rows of several slots in one call; of some of them, rows behind the kept ones stay pending."""
        slots = data.draw(st.sets(st.sampled_from([n for n, s in self.slots.items() if s.run]), min_size=1))
        kept, held = {}, {}
        for slot in sorted(slots):
            state = self.slots[slot]
            written = [*state.pending, *state.run]
            rows = sorted(data.draw(st.sets(st.integers(0, len(written) - 1))))
            num_kept = data.draw(st.integers(0, len(rows)))
            kept[slot] = rows[:num_kept]
            state.kept += [written[i] for i in kept[slot]]
            state.pending, state.run = [written[i] for i in rows[num_kept:]], []
            if state.pending or data.draw(st.booleans()):
                parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(state.pending))]
                held[slot] = Held(rows[num_kept:], parents)
        self.cache.keep(kept, held)
        assert all(self.cache.pending(slot) == rows.parents for slot, rows in held.items())

    @precondition(lambda self: any(s.run for s in self.slots.values()))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([n for n, s in self.slots.items() if s.run]))
        state = self.slots[slot]
        self.cache.hold(slot, [data.draw(st.integers(-1, len(state.pending) + i - 1)) for i in range(len(state.run))])
        state.pending, state.run = state.pending + state.run, []

    @precondition(lambda self: self.slots and len(self.slots) < len(SLOTS))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        new_slot = data.draw(st.sampled_from([n for n in SLOTS if n not in self.slots]))
        is_partial = len(self.slots[slot].kept) % self.cache.block_tokens > 0
        if is_partial and not self.cache.free_tokens():
            with pytest.raises(CapacityError):
                self.cache.fork(slot, new_slot)
        else:
            self.cache.fork(slot, new_slot)
            self.slots[new_slot] = _Slot(list(self.slots[slot].kept))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        state = self.slots[slot]
        length = data.draw(st.integers(0, len(state.kept)))
        self.cache.truncate_to(slot, length)
        state.kept, state.pending, state.run = state.kept[:length], [], []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for slot, state in self.slots.items():
            assert contents(self.cache, slot) == state.kept
            rows = self.cache.rows(slot, len(state.kept), len(state.kept) + len(state.pending))
            assert self.cache.pools[1].values.values[rows, 0, 1].astype(int).tolist() == state.pending


TestCacheFuzz = CacheFuzz.TestCase
TestCacheFuzz.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def make(backend: Any = "paged", *, num_slots: int = 1, **more: Any) -> BlockCache:
    """Make a cache of which so many slots are open."""
    cache = BlockCache.create(SHAPE, backend, max_batch_size=2, max_seq_len=64, **more)
    for slot in range(num_slots):
        cache.open(slot)
    return cache


def feed(cache: BlockCache, slot: int, marks: list[int]) -> None:
    """Write a pass and keep all of it."""
    write(cache, slot, marks)
    cache.keep({slot: range(len(marks))})


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize(("num_accepted", "target", "draft"), [(2, 12, 12), (4, 14, 13), (0, 10, 10)])
def test_lengths_of_one_round(backend: Any, num_accepted: int, target: int, draft: int) -> None:
    """L = 10 committed, gamma = 4; the draft feeds 4 tokens, the target 5."""
    cache = make(backend, num_slots=2)
    for slot in (0, 1):
        feed(cache, slot, list(range(9)))
    feed(cache, 1, [9, 10, 11, 12])  # g, x1, x2, x3: the last drafted token is not fed
    assert cache.length(1) == 13
    write(cache, 0, [9, 10, 11, 12, 13])
    cache.keep({0: range(num_accepted + 1)})
    cache.truncate_to(1, min(13, 10 + num_accepted))
    assert (cache.length(0), cache.length(1)) == (target, draft)
    assert contents(cache, 0) == list(range(target))
    assert "cannot be extended" in refusal(InternalError, cache.truncate_to, 1, 14)
    cache.check_integrity()


def test_a_path_moves_across_block_boundaries() -> None:
    cache = make(num_slots=2)
    for start in range(0, 12, 4):  # blocks of the two slots interleave
        for slot in (0, 1):
            feed(cache, slot, list(range(start, start + 4)))
    write(cache, 0, list(range(100, 130)))
    cache.keep({0: [0, 3, 4, 9, 20, 21, 29]})
    assert contents(cache, 0) == [*range(12), 100, 103, 104, 109, 120, 121, 129]
    assert contents(cache, 1) == list(range(12))
    cache.check_integrity()


def test_what_is_held_comes_behind_what_is_kept() -> None:
    cache = make()
    write(cache, 0, [1, 2, 3])
    assert "they must ascend" in refusal(InternalError, cache.keep, {0: [1]}, {0: Held([0], [-1])})
    cache.keep({0: [0]}, {0: Held([2], [-1])})
    assert (contents(cache, 0), cache.pending(0)) == ([1], [-1])


def test_blocks_behind_the_length_are_freed() -> None:
    cache = make()
    free = cache.free_tokens()
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
    write(cache, 0, list(range(20)))
    assert "kv_cache_tokens" in refusal(CapacityError, cache.reserve, 0, 33)
    cache.keep({0: range(20)})
    assert contents(cache, 0) == list(range(20))


def test_disagreement_with_the_batch_is_an_internal_error() -> None:
    cache = make()
    assert "open already" in refusal(InternalError, cache.open, 0)
    with pytest.raises(InternalError, match="holds 0 tokens, the batch says 5"):
        cache.view(RaggedBatch([1], [0], [0, 1], [0], [5]))
    assert "reserve them first" in refusal(InternalError, cache.view, RaggedBatch([1], [0], [0, 1], [0], [0]))


def test_a_pending_row_hangs_from_one_that_comes_before_it() -> None:
    cache = make()
    write(cache, 0, [1, 2])
    for parents in ([0, -1], [-1, 1], [-2, -1]):
        assert "a parent comes first" in refusal(InternalError, cache.hold, 0, parents)
    cache.hold(0, [-1, 0])


def test_integrity_notices_a_block_owned_twice() -> None:
    cache = make()
    write(cache, 0, [1])
    cache._free.append(cache._slots[0].table[0])
    assert "owns one twice" in refusal(InternalError, cache.check_integrity)


@pytest.mark.parametrize("length", range(41))
@pytest.mark.parametrize("cut", [None, 0, 1])
def test_a_fork_shares_full_blocks_and_either_goes_on(length: int, cut: int | None) -> None:
    """cut: the slot that is cut inside of what both share, before both write."""
    cache = make(num_tokens=160)
    feed(cache, 0, list(range(length)))
    write(cache, 0, [70, 71])
    cache.hold(0, [-1, -1])  # which the fork does not see
    free = cache.free_tokens()
    cache.fork(0, 1)
    assert free - cache.free_tokens() == (PAGED_BLOCK_TOKENS if length % PAGED_BLOCK_TOKENS else 0)
    assert contents(cache, 1) == list(range(length))
    assert (list(cache.pending(0)), list(cache.pending(1))) == ([-1, -1], [])
    cache.check_integrity()
    cache.keep({0: [1]})
    expected = [[*range(length), 71], list(range(length))]
    if cut is not None:
        cache.truncate_to(cut, length // 3)
        expected[cut] = list(range(length // 3))
    for slot in (0, 1):
        write(cache, slot, [80 + slot] * 19)
        cache.check_integrity()
        cache.keep({slot: range(19)})
        expected[slot] += [80 + slot] * 19
    for slot in (0, 1):
        assert contents(cache, slot) == expected[slot]
    cache.release(0)
    assert contents(cache, 1) == expected[1]
    cache.release(1)
    cache.check_integrity()
    assert cache.free_tokens() == 160


def test_a_fork_needs_room_for_the_last_block_and_a_new_slot() -> None:
    cache = make(num_tokens=32)
    feed(cache, 0, list(range(20)))
    assert "kv_cache_tokens" in refusal(CapacityError, cache.fork, 0, 1)
    assert "open already" in refusal(InternalError, cache.fork, 0, 0)
    assert cache.length(1) == 0
    cache.truncate_to(0, 16)
    cache.fork(0, 1)
    assert (cache.free_tokens(), contents(cache, 1)) == (16, list(range(16)))
    cache.check_integrity()


def test_forks_publish_the_block_that_they_share() -> None:
    """Two slots publish the same blocks; the slot that first computed block 0 has ended."""
    d = driven(12)
    prompt = list(range(12))
    d.feed(0, prompt)
    d.feed(2, prompt[:4])
    d.cache.publish(2, prompt[:4])
    d.fork(0, 1)
    d.cache.publish(0, prompt)  # all but block 0, which is slot 2's
    d.release(2)
    d.cache.clear_prefixes()
    d.cache.publish(1, prompt)  # block 0 as well, for slot 2's is gone
    d.check()
    assert d.found([*prompt, 99]) == 12
    for slot in (0, 1):
        d.feed(slot, [7, 8, 9])
        d.truncate(slot, 6)
        d.feed(slot, [slot])
        d.check()
        d.release(slot)
    d.check()
    assert d.cache.free_tokens() == 12 * BLOCK


def test_a_cache_of_some_layers_copies_each_pool_once():
    """Keeping a path moves rows onto rows that are moved themselves: a second time it would move the wrong ones."""
    some = dataclasses.replace(SHAPE, num_layers=4, layers=(1, 3))
    cache = BlockCache(some, block_tokens=BLOCK, num_blocks=4, dtype="float32")
    assert cache.shape.bytes_per_token("float32") == SHAPE.bytes_per_token("float32")
    cache.open(0)
    write(cache, 0, [10, 11, 12, 13, 14])
    cache.keep({0: [0, 2, 4]})
    assert contents(cache, 0) == [10, 12, 14]
    assert len({address(pool.values) for pool in cache.pools.tensors()}) == 4


def test_no_two_owners_have_one_slot() -> None:
    """Of sequences, of passes that measure, of what is fetched for sequences, and of the sources of both."""
    slots = [*range(100), SCRATCH_SLOT, *map(fetch_slot, range(100)), *map(source_slot, (SCRATCH_SLOT, *range(100)))]
    assert len(set(slots)) == len(slots)
