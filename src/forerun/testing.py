"""Proofs for verification rules: they enumerate all outcomes of a rule's coins, and must refuse wrong rules.

This proves a rule of your own, `rule(draft, b, target_probs, coins) -> (path, next token, acceptance tests)`:

    target, near = tables(3, seed=1), tables(3, seed=2)
    said = emitted(rule, target, drawn_tree((-1, -1, 0), near, "independent"), horizon=3)
    assert total_variation(said, plain(target, horizon=3)) < 1e-12

`emitted` runs the rule through all outcomes of its coins and of the drafter's (exact enumeration, docs/exactness.md),
and continues each output with the target up to the horizon. A rule is exact if one round that the target continues has
the distribution of the target alone, because rounds compose. `MUTANTS` are small changes of a right rule, or of what it
is given, that a proof must refuse.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from forerun.errors import InternalError
from forerun.sampling.random import weights_of
from forerun.types import Coins, Draft, Probs
from forerun.verify import Ruling

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
Polygon = list[tuple[float, float, float]]  # its corners in order; of three numbers, lists take less time than arrays
Table = Callable[[tuple[int, ...]], Floats]  # tokens so far -> probabilities of the next one, [V]
Outputs = Mapping[tuple[int, ...], float]  # output -> probability
RuleFunction = Callable[..., Ruling]  # (draft, b, target_probs, coins)


@dataclass
class _Way:
    """One way through all branchings of a run."""

    script: list[int]  # outcomes to take first; behind them the first outcome is taken
    trail: list[tuple[int, int]] = field(default_factory=list)  # (outcome taken, number of outcomes)
    weight: float = 1.0
    noise: dict[int, Polygon] = field(default_factory=dict)  # absolute index -> polygon of the possible match noise


class Branching:
    """Coins that take every outcome in turn, depth first, and count its probability (docs/exactness.md).

    `enumerate_outcomes` makes them; `at(position)` gives the Coins of a round whose first token has that absolute
    index. A production coin is a function of (purpose, depth, lane), so a rule that asks for the same coin twice in a
    round gets the same random number twice. Here that raises an AssertionError, because enumeration would count the two
    as independent. The match noise of one index is one random object, however often it is used (by a drafter and the
    verifier, or in two rounds), so `pick` takes each outcome that the earlier picks leave possible, with its exact
    conditional probability.
    """

    def __init__(self, way: _Way, position: int = 0) -> None:
        self._way, self._position = way, position
        self._asked: set[tuple[str, int, int]] = set()

    def at(self, position: int) -> Branching:
        """Return the coins of a round on the same way that starts at this absolute index."""
        return Branching(self._way, position)

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Take both outcomes in turn, with weights prob and 1 - prob."""
        prob = min(1.0, max(0.0, prob))
        if 0 < prob < 1:  # production uses no random number for 0 and 1
            self._ask("accept", depth, lane)
        return self._branch(np.array([prob, 1.0 - prob])) == 0

    def draw(self, probs: Probs, depth: int) -> int:
        """Take every id of the support in turn, with its probability."""
        return self._draw(probs, "next", depth, 0)

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        """Do as `draw`, with a random number of the drafter's own."""
        return self._draw(probs, "draft", depth, lane)

    def _draw(self, probs: Probs, purpose: str, depth: int, lane: int) -> int:
        if probs.point is not None:
            return probs.point
        self._ask(purpose, depth, lane)
        return self._branch(_spelled_out(probs))

    def _ask(self, purpose: str, depth: int, lane: int) -> None:
        if (purpose, depth, lane) in self._asked:
            raise AssertionError(  # the engine lets it pass, whatever part of it asked
                f"the coin ({purpose}, depth {depth}, lane {lane}) is used twice in a round: it is one random number; "
                "give each draw and each test at a depth a lane of its own"
            )
        self._asked.add((purpose, depth, lane))

    def pick(self, probs: Probs, depth: int) -> int:
        """Take every id of the support in turn, with its probability given the earlier picks at this index."""
        return self.picks(probs, depth, 1)[0]

    def picks(self, probs: Probs, depth: int, num: int) -> list[int]:
        """Take every order of `num` ids of the support in turn, with its probability given the earlier picks."""
        if probs.point is not None:
            return [probs.point]
        weights, noise = _spelled_out(probs).tolist(), self._way.noise
        position = self._position + depth
        support = [x for x, weight in enumerate(weights) if weight]
        orders = list(itertools.permutations(support, min(num, len(support))))
        cells = [_ordered(noise.get(position, _SIMPLEX), weights, order) for order in orders]
        i = self._branch(np.array([_area(cell) for cell in cells]), rounding=1e-14)
        noise[position] = cells[i]
        return list(orders[i])

    def _branch(self, weights: npt.NDArray[Any], rounding: float = 0.0) -> int:
        """Take one index whose share of the weights is above `rounding`; the weights need not be normalised."""
        shares = weights.astype(np.float64) / weights.sum(dtype=np.float64)
        possible = np.flatnonzero(shares > rounding)
        way = self._way
        if len(possible) == 1:
            return int(possible[0])
        taken = way.script[len(way.trail)] if len(way.trail) < len(way.script) else 0
        way.trail.append((taken, len(possible)))
        way.weight *= float(shares[possible[taken]])
        return int(possible[taken])


def _spelled_out(probs: Probs) -> npt.NDArray[Any]:
    """Return the weights of the ids 0 to n - 1, also for listed ids. Raises InternalError for no distribution."""
    weights, ids = weights_of(probs)
    if ids is None:
        return weights
    spelled = np.zeros(ids[-1] + 1, dtype=weights.dtype)
    spelled[ids] = weights
    return spelled


def enumerate_outcomes(run: Callable[[Branching], T]) -> list[tuple[float, T]]:
    """Return (probability, result) of every way that `run` can go. `run` must be a function of its coins alone."""
    outcomes: list[tuple[float, T]] = []
    script: list[int] = []
    while True:
        way = _Way(script)
        result = run(Branching(way))
        outcomes.append((way.weight, result))
        while way.trail and way.trail[-1][0] + 1 == way.trail[-1][1]:
            way.trail.pop()
        if not way.trail:
            return outcomes
        script = [taken for taken, _ in way.trail[:-1]] + [way.trail[-1][0] + 1]


# Gumbel-max is an exponential race: id x wins where E_x / p_x is smallest. Only the direction of (E_0, E_1, E_2)
# matters, and it is uniform on the triangle E_0 + E_1 + E_2 = 1. So the noise that is still possible after some picks
# is a convex polygon in that triangle, a pick cuts it by straight lines, and probabilities are areas. With two ids the
# third has weight 0.

_SIMPLEX: Polygon = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]


def _winning(polygon: Polygon, weights: Seq[float], x: int) -> Polygon:
    """Return the part of the polygon in which id x wins the race for these weights [2 or 3]."""
    if len(weights) > 3:
        raise InternalError(f"picks can be enumerated for at most 3 ids, not {len(weights)}")
    if weights[x] == 0:
        return []
    for z in range(len(weights)):
        if z != x:
            polygon = _clip(polygon, [corner[x] * weights[z] - corner[z] * weights[x] for corner in polygon])
    return polygon


def _ordered(polygon: Polygon, weights: Seq[float], order: Seq[int]) -> Polygon:
    """Return the part of the polygon in which these ids are the first of the race, in this order."""
    left = list(weights)
    for x in order:
        polygon = _winning(polygon, left, x)
        left[x] = 0.0
    return polygon


def _clip(polygon: Polygon, height: Seq[float]) -> Polygon:
    """Cut a convex polygon to where a linear function, given at its corners, is <= 0 (Sutherland, Hodgman 1974)."""
    corners: Polygon = []
    for i, corner in enumerate(polygon):
        j = (i + 1) % len(polygon)
        if height[i] <= 0:
            corners.append(corner)
        if height[i] * height[j] < 0:
            share = height[i] / (height[i] - height[j])
            u, v, w = (a + share * (b - a) for a, b in zip(corner, polygon[j], strict=True))
            corners.append((u, v, w))
    return corners


def _area(polygon: Polygon) -> float:
    """Return the area relative to the whole triangle, by the shoelace formula."""
    ends = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return abs(math.fsum(a[0] * b[1] - a[1] * b[0] for a, b in ends)) if len(polygon) > 2 else 0.0


# ------------------------------------------------------------------------------------------------- rules by themselves


def tables(num_ids: int, seed: int, *, zero_share: float = 0.0, near: Table | None = None, share: float = 0.5) -> Table:
    """Make a random distribution for each context, float64 [num_ids]; about `zero_share` of its entries are 0.

    near: another table, which is mixed in with a weight of `share`.
    """

    @functools.cache
    def table(tokens: tuple[int, ...]) -> Floats:
        rng = np.random.default_rng([seed, *tokens])
        weights = rng.dirichlet(np.full(num_ids, 0.7))
        weights[rng.random(num_ids) < zero_share] = 0.0
        weights = weights if weights.sum() > 0 else np.eye(num_ids)[0]
        weights /= weights.sum()
        return np.asarray(weights if near is None else share * near(tokens) + (1 - share) * weights)

    return table


def dense(weights: Floats) -> Probs:
    """Return weights as the Probs that a rule sees."""
    return Probs(dense=torch.from_numpy(np.array(weights, dtype=np.float64)))


def drawn_tree(parents: Seq[int], table: Table, draws: str) -> Callable[[Coins], Draft]:
    """Return a drafter of trees of one shape: parents[i] of node i, -1 = the root. Tokens are drawn from `table`.

    draws: "independent" siblings (with replacement), "distinct" ones (without; each states the distribution that its
    earlier siblings left), or the most likely ones as "point" masses. A node for which no token is left is not drafted,
    nor are its descendants.
    """

    def draft(coins: Coins) -> Draft:
        made = Draft([], [], [0, 0], [])
        places: dict[int, int] = {-1: -1}  # node of the shape -> node of the draft
        for node, parent in enumerate(parents):
            if parent not in places:
                continue
            at = places[parent]
            context = tuple(made.tokens[n] for n in made.path(at)) if at >= 0 else ()
            left = table(context).copy()
            siblings = [n for n, p in enumerate(made.parents) if p == at]
            if draws != "independent":
                left[[made.tokens[n] for n in siblings]] = 0.0
            if left.sum() == 0:
                continue
            probs = Probs(point=int(left.argmax())) if draws == "point" else dense(left / left.sum())
            places[node] = len(made.tokens)
            made.tokens.append(coins.draft(probs, len(context), lane=node))
            made.parents.append(at)
            made.probs.append(probs)
        return dataclasses.replace(made, node_starts=[0, len(made.tokens)])

    return draft


def emitted(rule: RuleFunction, target: Table, drafter: Callable[[Coins], Draft], horizon: int) -> Outputs:
    """Return the probability of each output of `horizon` tokens: one round of the rule, then the target alone.

    A round that emits more than `horizon` tokens is cut.
    """

    def run(coins: Branching) -> tuple[int, ...]:
        draft = drafter(coins)
        contexts = [(), *(tuple(draft.tokens[i] for i in draft.path(n)) for n in draft.nodes(0))]
        path, token, _ = rule(draft, 0, [dense(target(context)) for context in contexts], coins)
        return (*(draft.tokens[n] for n in path), token)[:horizon]

    said: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, output in enumerate_outcomes(run):
        for ending, share in plain(target, horizon, output).items():
            said[ending] += weight * share
    return said


def plain(target: Table, horizon: int, start: tuple[int, ...] = ()) -> Outputs:
    """Return the probability, by the target alone, of each output of `horizon` tokens, given that it begins so."""
    outputs = {start: 1.0}
    for _ in range(horizon - len(start)):
        outputs = {
            (*output, x): weight * float(p)
            for output, weight in outputs.items()
            for x, p in enumerate(target(output))
            if p > 0
        }
    return outputs


def total_variation(a: Outputs, b: Outputs) -> float:
    """Return the total variation distance: half the sum of absolute differences over the outputs of both."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}) / 2


# -------------------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """A wrong rule made from a right one. needs: "chain" or "tree", and for trees how their siblings are drawn."""

    name: str
    needs: str
    apply: Callable[[RuleFunction], RuleFunction]


class _Spy:
    """Stands between a rule and its coins and rows; subclasses change what passes through, which makes a mutant.

    row: the distribution of the target that the rule read last, which is the one behind the path so far.
    """

    def __init__(self, draft: Draft, b: int, rows: Seq[Probs], coins: Coins) -> None:
        self.draft_of, self.b, self.rows, self.coins = draft, b, rows, coins
        self.row = rows[0]
        self.pick, self.picks, self.draft = coins.pick, coins.picks, coins.draft

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Probs:
        self.row = self.rows[row]
        return self.row

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        return self.coins.accept(prob, depth, lane)

    def draw(self, probs: Probs, depth: int) -> int:
        return self.coins.draw(probs, depth)

    def draft_probs(self, depth: int) -> Probs:
        """Return the draft probabilities of the node at a depth of a chain."""
        return self.draft_of.probs[self.draft_of.nodes(self.b)[depth]]


def _spied(spy: type[_Spy]) -> Callable[[RuleFunction], RuleFunction]:
    def apply(rule: RuleFunction) -> RuleFunction:
        def wrong(draft: Draft, b: int, rows: Seq[Probs], coins: Coins, *rest: Any) -> Ruling:
            between = spy(draft, b, rows, coins)
            return rule(draft, b, between, between, *rest)

        return wrong

    return apply


def _given(change: Callable[[Draft], Draft]) -> Callable[[RuleFunction], RuleFunction]:
    """Make a mutant that judges a changed draft. The target's row of a node is found by the tokens of its path."""

    def apply(rule: RuleFunction) -> RuleFunction:
        def wrong(draft: Draft, b: int, rows: Seq[Probs], coins: Coins, *rest: Any) -> Ruling:
            changed = change(draft.only(b))
            paths = {tuple(draft.tokens[i] for i in draft.path(n)): n - draft.node_starts[b] for n in draft.nodes(b)}
            own = [paths[tuple(changed.tokens[i] for i in changed.path(n))] for n in changed.nodes(0)]
            if not own:
                return [], coins.draw(rows[0], 0), []
            path, token, tests = rule(changed, 0, [rows[0], *(rows[n + 1] for n in own)], coins, *rest)
            return [draft.node_starts[b] + own[n] for n in path], token, tests

        return wrong

    return apply


class _CorrectionFromTarget(_Spy):
    def draw(self, probs: Probs, depth: int) -> int:
        return self.coins.draw(self.row, depth)


class _BonusFromDraft(_Spy):
    def draw(self, probs: Probs, depth: int) -> int:
        is_bonus = depth == len(self.draft_of.nodes(self.b))
        return self.coins.draw(self.draft_probs(depth - 1) if is_bonus else probs, depth)


class _NeverByChance(_Spy):
    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        return prob >= 1


class _FoldedResidual(_Spy):
    def draw(self, probs: Probs, depth: int) -> int:
        if depth < len(self.draft_of.nodes(self.b)):
            probs = dense(np.abs(_spelled_out(self.row) - _spelled_out(self.draft_probs(depth))))
        return self.coins.draw(probs, depth)


class _ShiftedRows(_Spy):
    def __getitem__(self, row: int) -> Probs:
        self.row = self.rows[min(row + 1, len(self.rows) - 1)]
        return self.row


class _OneCoin(_Spy):
    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        return self.coins.accept(prob, depth)


def _drawn_twice(rule: RuleFunction) -> RuleFunction:
    def wrong(draft: Draft, b: int, rows: Seq[Probs], coins: Coins, *rest: Any) -> Ruling:
        path, token, tests = rule(draft, b, rows, coins, *rest)
        row = path[-1] - draft.node_starts[b] + 1 if path else 0
        return path, token if tests[-1].accepted else coins.draw(rows[row], len(path)), tests

    return wrong


def _cut_by_confidence(draft: Draft) -> Draft:
    n = next((i for i, token in enumerate(draft.tokens) if draft.probs[i].at(token) < 0.4), len(draft.tokens))
    return Draft(draft.tokens[:n], draft.parents[:n], [0, n], draft.probs[:n])


def _without_forbidden(rule: RuleFunction) -> RuleFunction:
    """Cut the draft before the first token that the target excludes, and draw a bonus there."""

    def wrong(draft: Draft, b: int, rows: Seq[Probs], coins: Coins, *rest: Any) -> Ruling:
        own = draft.only(b)
        allowed = [rows[i].at(token) > 0 for i, token in enumerate(own.tokens)]
        n = allowed.index(False) if False in allowed else len(allowed)
        if n == 0:
            return [], coins.draw(rows[0], 0), []
        path, token, tests = rule(
            Draft(own.tokens[:n], own.parents[:n], [0, n], own.probs[:n]),
            0,
            [rows[i] for i in range(n + 1)],
            coins,
            *rest,
        )
        return [draft.node_starts[b] + node for node in path], token, tests

    return wrong


def _flatter(draft: Draft) -> Draft:
    roots = [np.sqrt(_spelled_out(q)) for q in draft.probs]
    return dataclasses.replace(draft, probs=[dense(root / root.sum()) for root in roots])


def _merged(draft: Draft) -> Draft:
    places: dict[int, int] = {-1: -1}
    made = Draft([], [], [0, 0], [])
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        at = places[parent]
        equal = next((n for n, p in enumerate(made.parents) if p == at and made.tokens[n] == token), None)
        if equal is None:
            made.tokens.append(token)
            made.parents.append(at)
            made.probs.append(draft.probs[node])
        places[node] = len(made.tokens) - 1 if equal is None else equal
    return dataclasses.replace(made, node_starts=[0, len(made.tokens)])


def _first_probs(draft: Draft) -> Draft:
    firsts = [draft.parents.index(parent) for parent in draft.parents]
    return dataclasses.replace(draft, probs=[draft.probs[first] for first in firsts])


def _sorted_siblings(draft: Draft) -> Draft:
    """Sort siblings by their probability, with their whole subtrees."""
    order: list[int] = []

    def visit(parent: int) -> None:
        children = [n for n, p in enumerate(draft.parents) if p == parent]
        for node in sorted(children, key=lambda n: -draft.probs[n].at(draft.tokens[n])):
            order.append(node)
            visit(node)

    visit(-1)
    places = {-1: -1} | {node: i for i, node in enumerate(order)}
    parents = [places[draft.parents[n]] for n in order]
    return Draft([draft.tokens[n] for n in order], parents, draft.node_starts, [draft.probs[n] for n in order])


MUTANTS = [
    Mutant("m1 correction drawn from p", "chain", _spied(_CorrectionFromTarget)),
    Mutant("m2 bonus drawn from q", "chain", _spied(_BonusFromDraft)),
    Mutant("m3 accepted iff p >= q", "chain", _spied(_NeverByChance)),
    Mutant("m4 residual folded, not clamped", "chain", _spied(_FoldedResidual)),
    Mutant("m6 unlikely draws dropped", "chain", _given(_cut_by_confidence)),
    Mutant("m7 equal siblings merged", "independent", _given(_merged)),
    Mutant("m8 the first sibling's q for all, drawn without replacement", "distinct", _given(_first_probs)),
    Mutant("m9 siblings sorted by their probability", "independent", _given(_sorted_siblings)),
    Mutant("m11 rows of p shifted by one", "chain", _spied(_ShiftedRows)),
    Mutant("m12 q at another temperature", "chain", _given(_flatter)),
    Mutant("m15 draws dropped that the target excludes", "chain", _without_forbidden),
]
SECOND_DRAW = Mutant("m5 a second draw after a mismatch", "match", _drawn_twice)
ONE_COIN = Mutant("siblings share one coin", "independent", _spied(_OneCoin))
