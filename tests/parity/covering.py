"""A seeded covering design: which prompt runs under which configuration, so that every pair of levels meets often.

Six factors. What belongs to an engine (drafter, spec_length, neighbours, chunk, cache backend) is drawn for a group of
prompts that run in one batch, num_neighbours + 1 of them; the rule is drawn for each prompt. Two factors with a and b
values can meet in every pair 20 times over 1000 prompts only where a * b <= 50. So spec_length 1 .. 16 and chunks
1 .. 512 have five levels each, and a group draws one value of its level: the least used one, which keeps the single
values even, too. Neighbours are 1 .. 8, every value a level.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LEVELS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "drafter": (("none",), ("lookup",), ("lookup:max_n=2",), ("model",), ("model:draft_temperature=0.5",)),
    "spec_length": ((1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)),
    "num_neighbours": tuple((n,) for n in range(1, 9)),
    "chunk_tokens": ((1,), (2, 3, 5, 7), (8, 13, 16, 31), (33, 48, 64, 100), (128, 200, 256, 512)),
    "backend": (("paged",), ("contiguous",)),
    "rule": (("greedy",), ("match",), ("match, top-p",), ("match, top-k",)),
}
# Groups of each number of neighbours: 220 engines, 1000 prompts; no fewer than 20 prompts for one in five of each.
THOUSAND = {1: 55, 2: 40, 3: 30, 4: 25, 5: 20, 6: 15, 7: 15, 8: 20}
SIXTY = {1: 3, 2: 2, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1}
HUNDRED = {1: 6, 2: 4, 3: 4, 4: 3, 5: 2, 6: 1, 7: 1, 8: 2}
LEAST = 20
Pair = tuple[tuple[str, int], tuple[str, int]]  # (factor, level) twice, in the order of LEVELS


@dataclass(frozen=True)
class Setting:
    """What one engine is started with."""

    drafter: str
    spec_length: int
    num_neighbours: int
    chunk_tokens: int
    backend: str


@dataclass(frozen=True)
class Group:
    """An engine and the rule of each prompt that runs in it, num_neighbours + 1 of them."""

    setting: Setting
    rules: tuple[str, ...]


def level_of(factor: str, value: object) -> int:
    """Index of the level that a value belongs to."""
    return next(i for i, values in enumerate(LEVELS[factor]) if value in values)


def design(num_groups: Mapping[int, int], seed: int) -> list[Group]:
    """Groups for each number of neighbours, in random order; each takes the levels that pairs lack most."""
    rng = random.Random(seed)
    order = [n for n, groups in num_groups.items() for _ in range(groups)]
    rng.shuffle(order)
    drawn = _Drawn(rng)
    return [drawn.group(n) for n in order]


class _Drawn:
    """How often pairs of levels and single values have been drawn so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pairs: Counter[Pair] = Counter()
        self.values: Counter[tuple[tuple[str, str, int], Any]] = Counter()

    def group(self, num_neighbours: int) -> Group:
        size = num_neighbours + 1
        factors = [name for name in LEVELS if name != "rule"]
        choices = [
            (level_of(name, num_neighbours),) if name == "num_neighbours" else range(len(LEVELS[name]))
            for name in factors
        ]
        candidates = [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*choices)]
        self.rng.shuffle(candidates)
        best = max(candidates, key=lambda levels: self._gain(pairs_of(levels), size))
        self.pairs.update(dict.fromkeys(pairs_of(best), size))
        values = {name: self._value(name, levels, best) for name, levels in best.items()}
        return Group(Setting(**values), tuple(self._rule(best) for _ in range(size)))

    def _rule(self, levels: Mapping[str, int]) -> str:
        """The rule that meets these levels least often so far."""
        choices = list(range(len(LEVELS["rule"])))
        self.rng.shuffle(choices)
        new = {choice: [p for p in pairs_of({**levels, "rule": choice}) if p[1][0] == "rule"] for choice in choices}
        best = max(choices, key=lambda choice: self._gain(new[choice], 1))
        self.pairs.update(new[best])
        return str(LEVELS["rule"][best][0])

    def _value(self, name: str, level: int, levels: Mapping[str, int]) -> Any:
        """The value of a level that met the other levels least often."""
        keys = [(name, other, i) for other, i in levels.items() if other != name]
        best = max(LEVELS[name][level], key=lambda value: sum(4.0 ** -self.values[key, value] for key in keys))
        self.values.update((key, best) for key in keys)
        return best

    def _gain(self, pairs: list[Pair], size: int) -> float:
        """Meetings that are still wanted; among equals, those that were rarest."""
        counts = [self.pairs[pair] for pair in pairs]
        return sum(min(size, max(0, LEAST - count)) - 1e-3 * count for count in counts)


def pairs_of(levels: Mapping[str, int]) -> list[Pair]:
    """Every pair of (factor, level) among these."""
    return list(itertools.combinations(sorted(levels.items(), key=lambda item: list(LEVELS).index(item[0])), 2))


def all_pairs() -> Iterator[Pair]:
    """Every pair of levels of two factors."""
    for a, b in itertools.combinations(LEVELS, 2):
        for i, j in itertools.product(range(len(LEVELS[a])), range(len(LEVELS[b]))):
            yield (a, i), (b, j)


def count_pairs(groups: list[Group]) -> Counter[Pair]:
    """How many prompts each pair of levels meets in: counted from the values, not from how they were drawn."""
    counts: Counter[Pair] = Counter()
    for group in groups:
        levels = {name: level_of(name, getattr(group.setting, name)) for name in LEVELS if name != "rule"}
        for rule in group.rules:
            counts.update(pairs_of({**levels, "rule": level_of("rule", rule)}))
    return counts
