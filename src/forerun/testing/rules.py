"""The parts of a proof that needs no engine: random tables, drafted trees, and the outputs of a rule."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq

import numpy as np
import numpy.typing as npt

from forerun.testing.coins import Branching, enumerate_outcomes
from forerun.types import Coins, Draft, Probs
from forerun.verify import Ruling

Floats = npt.NDArray[np.float64]
Table = Callable[[tuple[int, ...]], Floats]  # tokens so far -> probabilities of the next one, [V]
Outputs = Mapping[tuple[int, ...], float]  # output -> probability
RuleFunction = Callable[..., Ruling]  # (draft, b, target_probs, coins)


def tables(num_ids: int, seed: int, *, zero_share: float = 0.0, near: Table | None = None, share: float = 0.5) -> Table:
    """Make a table: a random distribution for each context, float64 [num_ids].

    zero_share: about this share of the entries is 0. near: another table, which is mixed in with the weight `share`.
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
    """Return weights as Probs, the form in which a rule reads distributions."""
    return Probs(dense=np.array(weights, dtype=np.float64))


def drawn_tree(parents: Seq[int], table: Table, draws: str) -> Callable[[Coins], Draft]:
    """Return a drafter that drafts trees of one shape, with tokens drawn from `table`.

    parents: the parent of each node, -1 = the root. draws: "independent" = siblings are drawn with replacement.
    "distinct" = siblings are drawn without replacement, and the draft distribution of each sibling excludes the earlier
    siblings. "point" = siblings are the most likely tokens, as point masses. If no token remains for a node, the node
    and its descendants are not drafted.
    """

    def draft(coins: Coins) -> Draft:
        tree = Draft([], [], [0, 0], [])
        places: dict[int, int] = {-1: -1}  # node of the shape -> node of the draft
        for node, parent in enumerate(parents):
            if parent not in places:
                continue
            at = places[parent]
            context = tuple(tree.tokens[n] for n in tree.path(at)) if at >= 0 else ()
            left = table(context).copy()
            siblings = [n for n, p in enumerate(tree.parents) if p == at]
            if draws != "independent":
                left[[tree.tokens[n] for n in siblings]] = 0.0
            if left.sum() == 0:
                continue
            probs = Probs(point=int(left.argmax())) if draws == "point" else dense(left / left.sum())
            places[node] = len(tree.tokens)
            tree.tokens.append(coins.draft(probs, len(context), lane=node))
            tree.parents.append(at)
            tree.probs.append(probs)
        return dataclasses.replace(tree, node_starts=[0, len(tree.tokens)])

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
    """Return the target's probability of each output of `horizon` tokens, given that the output begins with `start`."""
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
    """Return the total variation distance: half the sum of absolute differences over all outputs of a and b."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}) / 2
