"""Thousands of random lives in a small pool with shared blocks, checked row by row after every operation."""

from __future__ import annotations

import random

import pytest

from forerun.errors import CapacityError
from kv.prefix_cases import BLOCK, Driven, pool

NUM_SLOTS = 5
NUM_OPERATIONS = 2500
MAX_TOKENS = 24


class Lives:
    """Sequences of two tokens only, so that they often begin alike; `tokens` are the committed ones by slot."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_blocks = self.random.choice((6, 10, 16))
        self.d = Driven(pool(self.num_blocks))
        self.tokens: dict[int, list[int]] = {}
        self.past: list[list[int]] = [[]]
        self.seen: set[str] = set()

    def some(self, low: int, high: int) -> list[int]:
        return self.random.choices((0, 1), k=self.random.randint(low, high))

    def open(self, slot: int) -> None:
        """A prompt that begins like one of before, mostly."""
        past = self.random.choice(self.past)
        tokens = [*past[: self.random.randint(0, len(past))], *self.some(0, 6)][:MAX_TOKENS] or [0]
        salt = self.random.choice((None, None, None, "a"))
        limit = self.findable(tokens, salt)
        found = self.d.open(slot, tokens, salt)
        assert found <= limit
        self.seen.add("hit" if found else "miss")
        self.tokens[slot] = tokens

    def findable(self, tokens: list[int], salt: str | None) -> int:
        """The most that may be found: blocks of the pool whose rows were computed from just these tokens."""
        keys, index = self.d.cache.keys[0], self.d.cache._prefixes
        last = {int(keys[(b + 1) * BLOCK - 1, 0, 0]) for b in range(self.num_blocks) if index.holds(b)}
        length = 0
        while length + BLOCK < len(tokens) and self.d.number(salt, tokens[: length + BLOCK]) in last:
            length += BLOCK
        return length

    def run(self, slot: int) -> None:
        """A chunk of the prompt, or behind it the last token and a random tree, of which one path is kept."""
        kept, tokens = self.d.kept[slot], self.tokens[slot]
        remaining = tokens[len(kept) :]
        if len(remaining) > 1:
            chunk = remaining[: self.random.randint(1, len(remaining) - 1)]
            if self.write(slot, chunk, None):
                self.d.keep(slot, list(range(len(chunk))))
            return
        drafted = self.some(0, 7)
        parents = [-1, *(self.random.randint(0, i) for i in range(len(drafted)))]
        if not remaining or not self.write(slot, [*remaining, *drafted], parents):
            return
        path, node = [], self.random.randrange(len(parents))
        while node >= 0:
            path.append(node)
            node = parents[node]
        self.d.keep(slot, path[::-1])
        self.seen.add("moved" if path[::-1] != list(range(len(path))) else "chain")
        self.tokens[slot] = [*self.d.kept[slot], *self.some(1, 1)]

    def write(self, slot: int, run: list[int], parents: list[int] | None) -> bool:
        fits, cut = self.d.cache.can_reserve(slot, len(run)), self.d.cache._cut_block(self.d.cache._slots[slot])
        users = 0 if cut is None else self.d.cache._num_users[cut]
        evictable, free = self.d.cache._prefixes.evictable(), list(self.d.cache._free)
        state = (self.d.cache.free_tokens(), list(self.d.cache._slots[slot].table))
        missing = self.d.cache.missing_blocks(slot, len(run))
        try:
            self.d.write(slot, run, parents)
        except CapacityError:
            assert not fits
            assert state == (self.d.cache.free_tokens(), self.d.cache._slots[slot].table)
            self.seen.add("full")
            return False
        assert fits
        # Free ones first, then from the front of those that wait; a withdrawn block was in use and is none of them.
        assert self.d.cache._prefixes.evictable() == evictable[max(0, missing - len(free)) :]
        self.seen |= {"evicted"} if missing > len(free) else set()
        self.seen |= {"withdrawn" if users == 1 else "copied"} if users else set()
        return True

    def cut(self, slot: int) -> None:
        """As a draft model's cache is cut to what was accepted; other tokens may follow then."""
        length = self.random.randint(0, len(self.d.kept[slot]))
        self.d.truncate(slot, length)
        if self.random.random() < 0.5 or length == len(self.tokens[slot]):
            self.tokens[slot] = [*self.tokens[slot][:length], *self.some(1, 6)]

    def publish(self, slot: int) -> None:
        """All that is committed, or as far as a caller says."""
        tokens = self.tokens[slot]
        self.d.cache.publish(slot, tokens[: self.random.choice((len(tokens), self.random.randint(0, len(tokens))))])

    def end(self, slot: int) -> None:
        self.past = [*self.past[-5:], self.tokens.pop(slot)]
        self.d.release(slot)

    def operate(self) -> None:
        slot = self.random.randrange(NUM_SLOTS)
        if slot not in self.tokens:
            self.open(slot)
        elif len(self.tokens[slot]) > MAX_TOKENS:
            self.end(slot)
        else:
            do = self.random.choices((self.run, self.publish, self.cut, self.end), (6, 6, 2, 1))[0]
            do(slot)
        if self.random.random() < 0.005:
            self.d.cache.clear_prefixes()
        self.d.check()
        used = {block for own in self.d.cache._slots.values() for block in own.table}
        assert self.d.cache.free_tokens() == (self.num_blocks - len(used)) * BLOCK


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_share_what_is_equal_and_nothing_else(seed: int) -> None:
    lives = Lives(seed)
    for _ in range(NUM_OPERATIONS):
        lives.operate()
    assert lives.seen == {"hit", "miss", "moved", "chain", "full", "evicted", "withdrawn", "copied"}
    for slot in range(NUM_SLOTS):
        lives.d.release(slot)
    lives.d.check()
    assert lives.d.cache.free_tokens() == lives.num_blocks * BLOCK, "a block was lost"
    lives.d.cache.clear_prefixes()
    assert lives.d.cache._free == pool(lives.num_blocks)._free
