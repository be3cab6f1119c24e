"""Thousands of random lives in a small pool with shared blocks, checked row by row after every operation."""

import random

import pytest

from forerun.errors import CapacityError
from forerun.kv import states, tables
from kv.prefix_cases import BLOCK, Driven, Windows, pool

NUM_SLOTS = 5
NUM_OPERATIONS = 2500
MAX_TOKENS = 24


class Lives:
    """Sequences of two tokens only, so that they often begin alike; `tokens` are the committed ones by slot."""

    def __init__(self, seed: int, windows: Windows | None = None, *, has_states: bool = False) -> None:
        self.random = random.Random(seed)
        self.num_blocks = self.random.choice((6, 10, 16))
        self.d = Driven(pool(self.num_blocks, windows, max_batch_size=NUM_SLOTS, has_states=has_states))
        for kind in self.d.cache.kinds[1:]:
            kind.touched_blocks = self.random.choice((3, self.num_blocks))
        self.tokens: dict[int, list[int]] = {}
        self.past: list[list[int]] = [[]]
        self.seen: set[str] = set()

    def some(self, low: int, high: int) -> list[int]:
        return self.random.choices((0, 1), k=self.random.randint(low, high))

    def open(self, slot: int) -> None:
        """Make a prompt, which mostly begins like an earlier one."""
        past = self.random.choice(self.past)
        tokens = [*past[: self.random.randint(0, len(past))], *self.some(0, 6)][:MAX_TOKENS] or [0]
        salt = self.random.choice((None, None, None, "a"))
        limit = self.findable(tokens, salt)
        found = self.d.open(slot, tokens, salt)
        assert found <= limit
        self.d.cache.mark(slot, self.random.choices(range(MAX_TOKENS), k=2))
        self.seen.add("hit" if found else "miss")
        self.tokens[slot] = tokens

    def findable(self, tokens: list[int], salt: str | None) -> int:
        """Return the most tokens that may be found: those in blocks that were computed from exactly these tokens."""
        shape, index = self.d.cache.shape, self.d.cache._prefixes
        keys = self.d.cache.pools[[shape.kind_of(layer) for layer in shape.kept].index(0)].keys.values
        last = {int(keys[(b + 1) * BLOCK - 1, 0, 0]) for b in range(self.num_blocks) if index.holds(b)}
        found = [0]
        for length in range(BLOCK, len(tokens), BLOCK):
            if self.d.number(salt, tokens[:length]) in last:
                found.append(length)
            elif self.d.cache.window is None:
                break
        return found[-1]

    def run(self, slot: int) -> None:
        """A chunk of the prompt, or behind it the last token and a random tree, of which one path is kept."""
        kept, tokens = self.d.kept[slot], self.tokens[slot]
        remaining = tokens[len(kept) :]
        if len(remaining) > 1:
            chunk = remaining[: self.random.randint(1, len(remaining) - 1)]
            if self.write(slot, chunk, None, is_silent=self.random.random() < 0.5):
                self.d.keep(slot, list(range(len(chunk))))
            return
        if not remaining:
            return
        drafted = self.some(0, 7)
        run, parents = [*remaining, *drafted], [-1, *(self.random.randint(0, i) for i in range(len(drafted)))]
        while len(run) > 3 and self.random.random() < 0.5:  # the tree grows: its first nodes are written and held
            cut = self.random.randint(1, len(run) - 1)
            if not self.write(slot, run[:cut], parents[len(self.d.pending(slot)) :][:cut]):
                self.d.truncate(slot, len(kept))
                return
            self.d.hold(slot)
            self.seen.add("held")
            run = run[cut:]
        if not self.write(slot, run, parents[len(self.d.pending(slot)) :]):
            self.d.truncate(slot, len(kept))
            return
        path, node = [], self.random.randrange(len(parents))
        while node >= 0:
            path.append(node)
            node = parents[node]
        self.d.keep(slot, path[::-1])
        self.seen.add("moved" if path[::-1] != list(range(len(path))) else "chain")
        self.tokens[slot] = [*self.d.kept[slot], *self.some(1, 1)]

    def write(self, slot: int, run: list[int], parents: list[int] | None, *, is_silent: bool = False) -> bool:
        fits, cut = self.d.cache.can_reserve(slot, len(run)), self.d.cache._cut_block(self.d.cache._slots[slot])
        is_findable = cut is not None and self.d.cache._prefixes.holds(cut)
        users = 0 if cut is None else self.d.cache._num_users[cut]
        evictable, free = self.d.cache._prefixes.evictable(), list(self.d.cache._free)
        state = (self.d.cache.free_tokens(), list(self.d.cache._slots[slot].table))
        missing = self.d.cache.missing_blocks(slot, len(run))
        try:
            self.d.write(slot, run, parents, is_silent=is_silent)
        except CapacityError:
            assert not fits
            if self.d.cache.window is None:
                assert state == (self.d.cache.free_tokens(), self.d.cache._slots[slot].table)
            self.seen.add("full")
            return False
        assert fits or self.d.cache.window is not None  # where the slot's own old blocks were enough
        # Free ones first, then from the front of those that wait; a withdrawn block was in use and is none of them.
        if self.d.cache.window is None:
            assert self.d.cache._prefixes.evictable() == evictable[max(0, missing - len(free)) :]
        self.seen |= {"evicted"} if missing > len(free) else set()
        if users:
            self.seen.add("withdrawn" if users == 1 else "copied" if is_findable else "copied, of a fork")
        return True

    def cut(self, slot: int) -> None:
        """As a draft model's cache is cut to what was accepted; other tokens may follow then."""
        wanted = self.random.randint(0, len(self.d.kept[slot]))
        self.d.truncate(slot, wanted)
        length = len(self.d.kept[slot])
        self.seen |= {"cut", "cut to nothing"} if length < wanted else {"cut"}
        if self.random.random() < 0.5 or length == len(self.tokens[slot]):
            self.tokens[slot] = [*self.tokens[slot][:length], *self.some(1, 6)]

    def fork(self, slot: int) -> None:
        """Another slot goes on with what is kept of this one."""
        new_slot = self.random.randrange(NUM_SLOTS)
        if new_slot in self.tokens:
            return
        is_partial = len(self.d.kept[slot]) % BLOCK > 0
        free = self.d.cache.free_tokens()
        try:
            self.d.fork(slot, new_slot)
        except CapacityError:
            assert is_partial
            assert free == 0
            self.seen.add("no room to fork")
            return
        assert free - self.d.cache.free_tokens() == BLOCK * is_partial
        self.seen.add("forked")
        self.tokens[new_slot] = [*self.d.kept[slot], *self.some(1, 6)]

    def publish(self, slot: int) -> None:
        """Publish all committed tokens, or as many as a caller says."""
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
            do = self.random.choices((self.run, self.publish, self.cut, self.fork, self.end), (6, 6, 2, 2, 1))[0]
            do(slot)
        if self.random.random() < 0.005:
            self.d.cache.clear_prefixes()
        self.d.check()
        self.seen |= {"gave back" for own in self.d.cache.kinds[-1]._slots.values() if own.first}
        used = {block for own in self.d.cache._slots.values() for block in own.live}
        assert self.d.cache.free_tokens() == (self.num_blocks - len(used)) * BLOCK
        without = (slot, (slot + 1) % NUM_SLOTS)
        used = {block for other, own in self.d.cache._slots.items() if other not in without for block in own.live}
        assert self.d.cache.free_tokens(without) == (self.num_blocks - len(used)) * BLOCK


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("windows", [None, (None, 5), (9, None, 2, 1), (7, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives_share_what_is_equal_and_nothing_else(
    windows: Windows | None, seed: int, has_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "SPARE_TOKENS", 2)
    monkeypatch.setattr(states, "STATE_TOKENS", BLOCK)
    lives = Lives(seed, windows, has_states=has_states)
    for _ in range(NUM_OPERATIONS):
        lives.operate()
    rare = {"copied, of a fork", "no room to fork"}  # not with every seed
    rare |= {"copied"} if windows or has_states else set()
    wanted = {"hit", "miss", "moved", "chain", "held", "full", "evicted", "withdrawn", "copied", "forked", "cut"} - rare
    wanted |= {"gave back"} if windows else set()
    wanted |= {"cut to nothing"} if windows or has_states else set()
    assert lives.seen - rare == wanted
    lives.d.release(*range(NUM_SLOTS))
    lives.d.check()
    assert lives.d.cache.free_tokens() == lives.num_blocks * BLOCK, "a block was lost"
    lives.d.cache.clear_prefixes()
    if has_states:
        tables_of_states = lives.d.cache.states
        assert tables_of_states.num_published == 0
        assert len(tables_of_states._free) == tables_of_states.num_states
    for kind in lives.d.cache.kinds:
        assert kind._free == list(range(kind.num_blocks))[::-1]
