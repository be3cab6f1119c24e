"""Shared blocks are never written to, wherever a slot is cut, and a broken promise is noticed."""

from typing import Any

import pytest

from forerun.errors import CapacityError, InternalError
from forerun.kv.cache import BlockCache
from kv.prefix_cases import BLOCK, PROMPT, batch_of, driven, pool
from refusals import refusal

# ------------------------------------------------------------------------------------------- cuts and private writes


@pytest.mark.parametrize("length", range(len(PROMPT) + 1))
@pytest.mark.parametrize("is_shared", [True, False])
def test_cut_anywhere_and_write_on(length: int, is_shared: bool) -> None:
    """Slot 0 published four blocks; slot 1 uses them too, or no slot does."""
    d = driven(12)
    d.start(0, PROMPT)
    if is_shared:
        assert d.open(1, [*PROMPT, 9]) == 16
    d.truncate(0, length)
    d.check()
    kept, inside = -(-length // BLOCK), length % BLOCK > 0
    assert d.cache.free_tokens() == (12 - (4 if is_shared else kept)) * BLOCK
    assert d.found([*PROMPT, 9]) == 16  # a cut takes nothing away from others
    room = d.cache.room(0)
    assert room.length + room.slack == (kept - (is_shared and inside)) * BLOCK
    assert room.next_blocks == (d.cache.missing_blocks(0, 1) if room.slack <= 0 else 0)
    d.cache.publish(0, PROMPT)  # nothing new
    d.feed(0, [7, 8, 9, 10, 11])
    new = [*PROMPT[:length], 7, 8, 9, 10, 11]
    d.check()
    # A block that was cut inside is withdrawn where no other slot used it, and so are the blocks behind it.
    assert d.found([*PROMPT, 9]) == (16 if is_shared or not inside else length // BLOCK * BLOCK)
    d.cache.publish(0, new)
    assert d.found([*new, 1]) == len(new) // BLOCK * BLOCK
    d.check()
    d.release(*d.kept)
    assert d.cache.free_tokens() == 12 * BLOCK


def test_the_copy_of_a_shared_block_needs_room() -> None:
    d = driven(5)
    d.start(0, PROMPT)
    d.open(1, [*PROMPT, 9])
    d.truncate(0, 14)
    d.feed(1, [9])
    assert d.cache.free_tokens() == 0
    assert (d.cache.missing_blocks(0, 0), d.cache.missing_blocks(0, 1), d.cache.missing_blocks(0, 3)) == (0, 1, 2)
    assert d.cache.can_reserve(0, 0)
    assert not d.cache.can_reserve(0, 1)
    with pytest.raises(CapacityError):
        d.cache.reserve(0, 1)
    d.check()
    d.release(1)
    d.feed(0, [7, 8])  # now slot 0 is the only user: nothing is copied
    assert d.cache.free_tokens() == BLOCK
    d.check()


def test_of_two_who_were_cut_the_last_needs_no_copy() -> None:
    d = driven(3)
    d.start(0, PROMPT[:8])
    d.open(1, PROMPT[:9])
    for slot in (0, 1):
        d.truncate(slot, 6)
    d.feed(0, [1, 1])
    d.feed(1, [2, 2])
    assert d.cache.free_tokens() == 0
    d.check()


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_run_into_a_published_block_is_refused(is_shared: bool) -> None:
    d = driven()
    d.start(0, PROMPT)
    if is_shared:
        d.open(1, [*PROMPT, 9])
    d.truncate(0, 13)
    for look in (d.cache.view, d.cache.tables):
        with pytest.raises(InternalError, match="would write into block 3, which others may read"):
            look(batch_of(d.cache, 0, 2))
    assert "would write into block 3" in refusal(InternalError, d.cache.keep, {0: [1]})
    d.check()
    d.cache.reserve(0, 2)
    assert len(d.cache.view(batch_of(d.cache, 0, 2)).write_rows) == 2


def test_a_tree_behind_a_shared_prefix_moves_only_its_own_rows() -> None:
    d = driven()
    d.start(0, PROMPT)
    d.open(1, PROMPT[:13])
    d.write(1, [5, 6, 7, 8, 9, 10], parents=[-1, 0, 0, 2, 2, 4])
    d.keep(1, [0, 2, 4, 5])
    assert d.kept[1] == [*PROMPT[:12], 5, 7, 9, 10]
    d.cache.publish(1, d.kept[1])
    assert d.found([*d.kept[1], 1]) == d.found([*PROMPT, 1]) == 16
    d.check()


# ------------------------------------------------------------------------------------------------- what is refused


def test_slots_that_are_not_open_publish_nothing() -> None:
    cache = pool()
    cache.release(3)
    assert "slot 3 is not open" in refusal(InternalError, cache.publish, 3, PROMPT)


def _miscount(cache: BlockCache) -> None:
    cache._num_users[cache._slots[0].table[0]] += 1


def _free_though_published(cache: BlockCache) -> None:
    block = cache._prefixes.evictable()[0]
    cache._prefixes.wake(block)
    cache._free.append(block)


def _shared_behind_the_end(cache: BlockCache) -> None:
    cache._slots[0].length = 4
    cache._slots[0].keys.pop()


def _another_key(cache: BlockCache) -> None:
    index = cache._prefixes
    first, second = list(index._block_of)[:2]
    index._block_of[first], index._block_of[second] = index._block_of[second], index._block_of[first]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_miscount, "counts other users"),
        (_free_though_published, "free and published"),
        (_shared_behind_the_end, "others may read"),
        (_another_key, "a key that is not its own"),
        (lambda cache: cache._prefixes._block_of.popitem(), "lost a published block"),
        (lambda cache: cache._free.pop(), "lost a block"),
        (lambda cache: setattr(cache._slots[0], "length", 7), "published more blocks than it filled"),
        (lambda cache: cache._slots[0].table.reverse(), "published as other tokens"),
    ],
)
def test_integrity_notices(break_it: Any, message: str) -> None:
    d = driven()
    d.start(2, [*PROMPT, 1, 1, 1, 1])
    d.start(0, PROMPT[:8])
    d.open(1, PROMPT[:9])
    d.release(2)
    d.truncate(0, 4)
    d.release(0)
    d.open(0, PROMPT[:9])
    d.check()
    break_it(d.cache)
    assert message in refusal(InternalError, d.cache.check_integrity)
