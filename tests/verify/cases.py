"""Tables, shapes and small runs that the tests of several rules share."""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forerun.testing import Branching, dense, drawn_tree, emitted, enumerate_outcomes, plain, tables, total_variation
from forerun.verify import ratio

EXACT, CAUGHT = 1e-12, 1e-6
V, HORIZON = 3, 3
CHAINS = ((-1,), (-1, 0), (-1, 0, 1))
TABLES = {
    "unlike": (tables(V, 1), tables(V, 2)),
    "alike": (tables(V, 3), tables(V, 4, near=tables(V, 3))),
    "equal": (tables(V, 5), tables(V, 5)),
    "flat": (lambda tokens: np.array([0.2, 0.4, 0.4]), lambda tokens: np.array([0.6, 0.3, 0.1])),
    "zeros": (tables(V, 6, zero_share=0.4), tables(V, 7, zero_share=0.4)),
    "disjoint": (lambda tokens: np.array([0.0, 0.3, 0.7]), lambda tokens: np.array([1.0, 0.0, 0.0])),
    "one-hot draft": (tables(V, 8), lambda tokens: np.eye(V)[len(tokens) % V]),
    "one-hot target": (lambda tokens: np.eye(V)[len(tokens) % V], tables(V, 9)),
}


def random_shape(num_nodes: int, seed: int) -> tuple[int, ...]:
    """Parents of a random tree: each node hangs from the root or from a node before it."""
    rng = random.Random(seed)
    return tuple(rng.randrange(-1, node) for node in range(num_nodes))


def law_of(run: Callable[[Branching], Any]) -> dict[Any, float]:
    """Return the probability of each outcome of a run, over all the ways to it."""
    law = defaultdict[Any, float](float)
    for weight, outcome in enumerate_outcomes(run):
        law[outcome] += weight
    return law


def one_level(p: tuple[float, ...], q: tuple[float, ...], num: int, rule=ratio.rule) -> tuple[list[float], float]:
    """Probabilities of the first token, and of acceptance, with so many independent siblings."""
    drafter = drawn_tree((-1,) * num, lambda tokens: np.array(q), "independent")

    def run(coins: Branching) -> tuple[int, bool]:
        draft = drafter(coins)
        path, token, _ = rule(draft, 0, [dense(np.array(p))] * (num + 1), coins)
        return (draft.tokens[path[0]], True) if path else (token, False)

    said, accepted = [0.0] * len(p), 0.0
    for weight, (token, is_accepted) in enumerate_outcomes(run):
        said[token] += weight
        accepted += weight * is_accepted
    return said, accepted


def mean_tokens(rule, target, drafter) -> float:
    """Mean emitted tokens of a round, by enumeration."""

    def run(coins: Branching) -> int:
        draft = drafter(coins)
        contexts = [(), *(tuple(draft.tokens[i] for i in draft.path(n)) for n in draft.nodes(0))]
        return 1 + len(rule(draft, 0, [dense(target(context)) for context in contexts], coins)[0])

    return sum(weight * num for weight, num in enumerate_outcomes(run))


def error_of(rule, target, drafter) -> float:
    """How far the texts of a rule, whose probabilities add up to 1, are from those of the target."""
    said = emitted(rule, target, drafter, HORIZON)
    assert sum(said.values()) == pytest.approx(1, abs=EXACT)
    return total_variation(said, plain(target, HORIZON))


def largest_error(rule, shape, draws, kinds=("unlike", "alike", "zeros")) -> float:
    """How far a wrong rule is from the target where it is farthest, among these tables."""
    pairs = (TABLES[kind] for kind in kinds)
    return max(error_of(rule, target, drawn_tree(shape, near, draws)) for target, near in pairs)
