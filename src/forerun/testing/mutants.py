"""Wrong rules. Each is a small change of a right rule, or of the rule's input. m1 ... m19 are fixed names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.testing.coins import spelled_out
from forerun.testing.rules import RuleFunction, dense
from forerun.types import Coins, Draft, Probs
from forerun.verify import Ruling


@dataclass(frozen=True)
class Mutant:
    """A wrong rule that is made from a right rule.

    needs: the drafts in which the mutant shows: "chain", trees with "independent" or "distinct" siblings, or drafts for
    the rule "match".
    """

    name: str
    needs: str
    apply: Callable[[RuleFunction], RuleFunction]


class _Spy:
    """A stand-in for a rule's coins, and for the rule's rows, which are the target's distributions.

    A subclass changes some coins or rows, which makes a mutant. row: the distribution that the rule read last, which is
    the distribution after the path so far.
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
    """Make a mutant that judges a changed draft.

    The rule still gets the right target distribution for each node, because nodes are found by the tokens on their
    path.
    """

    def apply(rule: RuleFunction) -> RuleFunction:
        def wrong(draft: Draft, b: int, rows: Seq[Probs], coins: Coins, *rest: Any) -> Ruling:
            changed = change(draft.only(b))
            paths = {tuple(draft.tokens[i] for i in draft.path(n)): n - draft.node_starts[b] for n in draft.nodes(b)}
            nodes = [paths[tuple(changed.tokens[i] for i in changed.path(n))] for n in changed.nodes(0)]
            if not nodes:
                return [], coins.draw(rows[0], 0), []
            path, token, tests = rule(changed, 0, [rows[0], *(rows[n + 1] for n in nodes)], coins, *rest)
            return [draft.node_starts[b] + nodes[n] for n in path], token, tests

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
            p, q = spelled_out(self.row), spelled_out(self.draft_probs(depth))
            width = max(len(p), len(q))
            probs = dense(np.abs(np.pad(p, (0, width - len(p))) - np.pad(q, (0, width - len(q)))))
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
    """Make a mutant that cuts the draft before the first token that the target excludes, and draws a token there."""

    def wrong(draft: Draft, b: int, rows: Seq[Probs], coins: Coins, *rest: Any) -> Ruling:
        single = draft.only(b)
        allowed = [rows[i].at(token) > 0 for i, token in enumerate(single.tokens)]
        n = allowed.index(False) if False in allowed else len(allowed)
        if n == 0:
            return [], coins.draw(rows[0], 0), []
        path, token, tests = rule(
            Draft(single.tokens[:n], single.parents[:n], [0, n], single.probs[:n]),
            0,
            [rows[i] for i in range(n + 1)],
            coins,
            *rest,
        )
        return [draft.node_starts[b] + node for node in path], token, tests

    return wrong


def _flatter(draft: Draft) -> Draft:
    return dataclasses.replace(draft, probs=[q if q.point is not None else _root(q) for q in draft.probs])


def _root(q: Probs) -> Probs:
    root = np.sqrt(spelled_out(q))
    return dense(root / root.sum())


def _merged(draft: Draft) -> Draft:
    places: dict[int, int] = {-1: -1}
    merged = Draft([], [], [0, 0], [])
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        at = places[parent]
        equal = next((n for n, p in enumerate(merged.parents) if p == at and merged.tokens[n] == token), None)
        if equal is None:
            merged.tokens.append(token)
            merged.parents.append(at)
            merged.probs.append(draft.probs[node])
        places[node] = len(merged.tokens) - 1 if equal is None else equal
    return dataclasses.replace(merged, node_starts=[0, len(merged.tokens)])


def _first_probs(draft: Draft) -> Draft:
    firsts = [draft.parents.index(parent) for parent in draft.parents]
    return dataclasses.replace(draft, probs=[draft.probs[first] for first in firsts])


def _sorted_siblings(draft: Draft) -> Draft:
    """Sort siblings by their probability, the largest first. Each sibling takes its whole subtree along."""
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
