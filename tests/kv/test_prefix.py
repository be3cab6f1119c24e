"""Prefix caching: what is published, what is found, and what is evicted."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from forerun.errors import CapacityError
from forerun.kv import tables
from forerun.kv.cache import BlockCache
from kv.prefix_cases import BLOCK, PROMPT, SHAPE, Driven, driven, pool
from refusals import refusal


def others(num_tokens: int = BLOCK) -> Iterator[list[int]]:
    """Tokens that no other test sequence begins with."""
    return ([1000 + i] * num_tokens for i in count())


# --------------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("num_tokens", range(len(PROMPT) + 1))
def test_a_hit_is_whole_blocks_and_leaves_the_last_token(num_tokens: int) -> None:
    d = driven()
    assert d.start(0, PROMPT) == 0
    assert d.open(1, PROMPT[:num_tokens]) == max(0, num_tokens - 1) // BLOCK * BLOCK
    d.check()


def test_a_chain_is_found_up_to_the_first_other_token() -> None:
    d = driven()
    d.start(0, PROMPT)
    for i in range(len(PROMPT)):
        assert d.found([*PROMPT[:i], 7, *PROMPT[i + 1 :], 7]) == i // BLOCK * BLOCK
    assert d.found(PROMPT[4:]) == 0  # equal blocks behind another beginning
    d.check()


def test_equal_blocks_behind_different_ones_are_kept_apart() -> None:
    d = driven()
    same = [1, 1, 1, 1]
    d.start(0, [*same, *same, *same])
    d.start(1, [2, 2, 2, 2, *same, *same])
    assert d.open(2, [*same, *same, *same, *same, 9]) == 12
    assert d.open(3, [2, 2, 2, 2, *same, *same, *same, 9]) == 12
    d.check()


def test_salts_do_not_see_each_other() -> None:
    d = driven()
    for slot, salt in enumerate((None, "", "0", "\ud800")):  # the last is half a surrogate pair
        assert d.start(slot, PROMPT[:9], salt) == 0
    for slot, salt in enumerate((None, "", "0", "\ud800", "\udfff", "1", "None")):
        assert d.open(10 + slot, PROMPT[:9], salt) == (8 if slot < 4 else 0)
    d.check()


def test_only_committed_and_kept_rows_are_published() -> None:
    d = driven()
    d.open(0, PROMPT)
    d.feed(0, PROMPT[:7])
    d.write(0, PROMPT[7:12])  # a run that is not judged yet
    d.cache.publish(0, PROMPT)
    assert d.found(PROMPT) == 4
    d.keep(0, [0, 1, 2, 3, 4])
    d.cache.publish(0, PROMPT[:11])  # position 11 is kept but not committed, as a draft model's rows are
    assert d.found(PROMPT) == 8
    d.cache.publish(0, PROMPT)
    assert d.found(PROMPT) == 12
    d.check()


class _Untouched(list[int]):
    def __getitem__(self, _: Any) -> Any:
        raise AssertionError("a call with nothing new looked at the tokens")


def test_publishing_is_incremental() -> None:
    d = driven()
    d.start(0, PROMPT[:13])
    d.cache.publish(0, _Untouched(PROMPT[:13]))
    d.feed(0, PROMPT[13:16])
    assert "looked" in refusal(AssertionError, d.cache.publish, 0, _Untouched(PROMPT))
    d.cache.publish(0, PROMPT)
    assert d.found([*PROMPT, 9]) == 16


def test_what_was_asked_and_found_is_counted() -> None:
    d = driven()
    d.start(0, PROMPT)
    d.open(1, PROMPT)
    d.open(2)
    assert (d.cache.prefix_queries_tokens, d.cache.prefix_hit_tokens) == (32, 12)


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_who_shares(backend: Any, prefix_caching: bool) -> None:
    cache = BlockCache.create(SHAPE, backend, max_batch_size=2, max_seq_len=64, prefix_caching=prefix_caching)
    d, tokens = Driven(cache), list(range(64))
    d.start(0, tokens)  # to the last position, so that the one block of a contiguous slot is full
    shares = backend == "paged" and prefix_caching
    assert d.open(1, tokens) == cache.prefix_hit_tokens == (48 if shares else 0)
    assert cache.prefix_queries_tokens == (128 if prefix_caching else 0)
    assert cache._prefixes.holds(cache._slots[0].table[0]) == prefix_caching
    d.check()


# --------------------------------------------------------------------------------------------------------- eviction


def test_the_longest_unused_goes_first_and_a_hit_is_a_use() -> None:
    d, new = driven(4), others()
    chains = [[*next(new), 9] for _ in range(3)]
    for chain in chains:
        d.start(0, chain[:BLOCK])
        d.release(0)
    assert d.found(chains[0]) == BLOCK  # now the second is the longest unused
    d.feed(0, [7] * 5)  # the free block, then one that is evicted
    assert [d.found(chain) for chain in (chains[1], chains[0], chains[2])] == [0, BLOCK, BLOCK]
    d.feed(0, [7] * 4)  # and now it is the first, for the third was asked for after it
    assert [d.found(chain) for chain in (chains[0], chains[2])] == [0, BLOCK]
    d.check()


def test_tails_go_before_what_they_follow() -> None:
    d = driven(6)
    d.start(0, PROMPT)
    d.release(0)
    found = []
    for _ in range(6):
        d.feed(1, [7] * BLOCK)
        found.append(d.found([*PROMPT, 9]))
        d.check()
    assert found == [16, 16, 12, 8, 4, 0]  # the two free blocks first


def test_unused_blocks_count_as_free() -> None:
    d = driven(4)
    d.start(0, PROMPT[:12])
    assert d.cache.free_tokens() == BLOCK
    assert d.open(1, PROMPT[:9]) == 8
    d.release(0)
    assert d.cache.free_tokens() == 2 * BLOCK  # two blocks are slot 1's, one is free, one evictable
    assert d.cache.can_reserve(1, 8)
    assert not d.cache.can_reserve(1, 9)
    assert "8 free tokens and 12 are needed" in refusal(CapacityError, d.cache.reserve, 1, 9)
    d.feed(1, [7] * 8)
    d.release(1)
    assert d.cache.free_tokens() == 4 * BLOCK
    d.check()


def test_a_block_in_use_is_never_evicted() -> None:
    d = driven(4)
    d.start(0, PROMPT[:8])
    d.open(1, PROMPT[:9])
    d.release(0)
    d.feed(2, [7] * 8)
    with pytest.raises(CapacityError):
        d.feed(2, [7])
    d.check()
    assert d.found(PROMPT[:9]) == 8


def test_clear_prefixes_forgets_blocks_without_users() -> None:
    d = driven(8)
    d.start(0, PROMPT)
    d.release(0)
    d.start(1, [*PROMPT[:4], 7, 7, 7, 7])
    d.cache.clear_prefixes()
    assert d.found([*PROMPT, 9]) == 4  # in use
    d.check()
    d.release(1)
    d.cache.clear_prefixes()
    assert d.found([*PROMPT, 9]) == 0
    assert d.cache._free == pool(8)._free
    d.check()


# ----------------------------------------------------------------------------------------- two who computed the same


def twice(num_blocks: int) -> Driven:
    """Slots 0 and 1 ran the same prompt side by side; slot 0 was the first to publish."""
    d = driven(num_blocks)
    for slot in (0, 1):
        d.open(slot, PROMPT[:8])
    for slot in (0, 1):
        d.feed(slot, PROMPT[:8])
        d.cache.publish(slot, PROMPT[:8])
    assert d.cache.free_tokens() == (num_blocks - 4) * BLOCK
    d.check()
    return d


def test_an_equal_block_stays_private_and_what_follows_it_is_found() -> None:
    d = twice(8)
    d.feed(1, PROMPT[8:12])
    d.cache.publish(1, PROMPT[:12])
    assert d.open(2, PROMPT) == 12
    tables = {slot: own.table for slot, own in d.cache._slots.items()}
    assert tables[2] == [*tables[0], tables[1][2]]
    d.check()


def test_the_equal_block_is_evicted_while_its_copy_lives() -> None:
    d = twice(7)
    d.feed(1, PROMPT[8:12])
    d.cache.publish(1, PROMPT[:12])
    d.release(0)
    d.feed(3, [7] * 4 * BLOCK)  # two free blocks and both of slot 0
    assert d.found(PROMPT) == 0
    d.release(3)
    d.feed(1, PROMPT[12:16])
    d.cache.publish(1, PROMPT)  # behind a block that is gone: not found until an equal one is there
    assert d.found(PROMPT) == 0
    assert d.start(4, PROMPT[:8]) == 0
    assert d.found(PROMPT) == 12
    d.check()
    d.release(1, 4)
    assert d.cache.free_tokens() == 7 * BLOCK
    d.feed(5, [8] * 7 * BLOCK)  # nothing that cannot be found holds on to memory
    d.check()


def test_the_end_of_a_copy_is_a_use_of_what_it_equals() -> None:
    d, new = twice(8), others()
    d.feed(1, PROMPT[8:12])
    d.cache.publish(1, PROMPT[:12])
    d.release(0)
    d.start(2, next(new))
    d.release(2, 1)
    d.feed(3, [7] * (8 - 3) * BLOCK)  # the free ones, and slot 2's, which is now the longest unused
    assert d.found(PROMPT[:13]) == 12
    d.feed(3, [7] * BLOCK)
    assert d.found(PROMPT[:13]) == 8
    d.check()


def test_the_end_of_a_copy_is_no_use_of_what_took_the_place_of_its_equal() -> None:
    d, new = twice(7), others(8)
    d.release(0)
    early, late = next(new), [*next(new), *next(new)][:12]
    d.start(3, late)  # the free blocks
    d.start(4, early)  # evicts both of slot 0
    d.release(4, 3, 1)
    d.feed(5, [7] * 3 * BLOCK)  # slot 1's, and the longest unused one
    assert (d.found([*early, 9]), d.found([*late, 9])) == (4, 12)
    d.check()


def test_a_long_text_does_not_take_the_ends_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SPARE_TOKENS", 0)
    d, long = driven(8, windows=(3,)), list(range(200, 260))
    d.start(0, PROMPT[:9])
    d.release(0)
    for end in range(BLOCK, len(long) + 1, BLOCK):  # what it has passed makes room for it
        d.feed(1, long[end - BLOCK : end])
        d.cache.publish(1, long[:end])
        d.check()
    assert d.found([*long, 1]) == 60
    assert d.found(PROMPT[:9]) == 8


def test_a_sequence_begins_where_every_window_has_its_blocks() -> None:
    """Windows of 5 and 3, of which one lacks block 2 and the other block 3: each allows what the other does not."""
    d = driven(8, windows=(None, 5, 3))
    d.start(0, [*PROMPT, 1])
    blocks = [list(kind.table(0)) for kind in d.cache.kinds]
    d.release(0)
    for kind, lost in ((1, 2), (2, 3)):
        own = d.cache.kinds[kind]
        own._prefixes.wake(blocks[kind][lost])
        own._prefixes.remove(blocks[kind][lost])
        own._free.append(blocks[kind][lost])
    assert d.found([*PROMPT, 2]) == 8
    d.check()
