"""Hierarchical verification of chains (Zhou et al. 2026, arXiv 2601.05724): capped it is block, else it has a state.

forerun has no rule of this name: the one that is exact is `block` (docs/development/log.md). With r_i, the product of
p / q along a prefix, the target has more mass than the draft on some children of that prefix, and less on others. The
prefix is accepted with the ratio of the two masses, the longest prefix first, and the next token is drawn from the
excess.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence as Seq

import numpy as np
import pytest
from scipy.optimize import linprog

from forerun.testing import dense, drawn_tree, enumerate_outcomes, plain, total_variation
from forerun.testing.rules import Outputs, RuleFunction, Table
from forerun.theory import formulas
from forerun.types import Coins, Draft, Probs
from forerun.verify import Ruling, block
from verify.cases import CAUGHT, CHAINS, EXACT, TABLES, error_of, largest_error, law_of, mean_tokens

Share = Callable[[Seq[float]], float]  # r_0 = 1, r_1, ..., r_i of a prefix -> its share, r_i as it is capped

CAPPED: dict[str, Share] = {
    "the largest so far": lambda ratios: ratios[-1] / max(ratios),
    "the largest before, then 1": lambda ratios: min(1.0, ratios[-1] / max(ratios[:-1], default=1.0)),
}
WRONG: dict[str, tuple[Share, Share]] = {  # (share of a prefix, share of the whole chain)
    "the whole chain is judged by its uncapped ratio": (CAPPED["the largest so far"], lambda ratios: ratios[-1]),
    "each prefix is capped by itself": (lambda ratios: min(1.0, ratios[-1]), lambda ratios: ratios[-1]),
    "the largest before, without 1": (lambda ratios: ratios[-1] / max(ratios[:-1], default=1.0),) * 2,
    "nothing is capped, nothing carried": (lambda ratios: ratios[-1],) * 2,
}
TARGET, NEAR = (lambda tokens: np.array([1 / 3, 2 / 3])), (lambda tokens: np.array([2 / 3, 1 / 3]))


def hierarchical(share: Share, last: Share | None = None) -> RuleFunction:
    """Return the rule with this cap. last: the share of the whole chain, if it is another."""

    def rule(draft: Draft, b: int, rows: Seq[Probs], coins: Coins) -> Ruling:
        nodes, ratios = list(draft.nodes(b)), [1.0]
        for row, node in zip(rows, nodes, strict=False):
            ratios.append(ratios[-1] * row.at(draft.tokens[node]) / draft.probs[node].at(draft.tokens[node]))
        prob = min(1.0, (last or share)(ratios))
        rest = rows[len(nodes)].weights
        for i in reversed(range(len(nodes) + 1)):
            if i < len(nodes):
                difference = share(ratios[: i + 1]) * rows[i].weights - draft.probs[nodes[i]].weights
                excess, deficit = np.maximum(difference, 0), np.maximum(-difference, 0)
                larger = max(excess.sum(), deficit.sum())
                prob = excess.sum() / larger if larger > 0 else 1.0
                rest = excess if excess.sum() > 0 else rows[i].weights
            if i == 0 or coins.accept(prob, i - 1):
                return nodes[:i], coins.draw(dense(rest / rest.sum()), i), []
        raise AssertionError("the empty prefix is always accepted")

    return rule


UNCAPPED = hierarchical(lambda ratios: ratios[-1])


# ------------------------------------------------------------------------------------------------------- capped: block


@pytest.mark.parametrize("cap", CAPPED)
@pytest.mark.parametrize("kind", TABLES)
def test_capped_it_does_with_each_draft_what_block_does(kind, cap):
    target, near = TABLES[kind]
    for shape in CHAINS:
        for _, draft in enumerate_outcomes(drawn_tree(shape, near, "independent")):
            rows = [dense(target(tuple(draft.tokens[:i]))) for i in range(len(shape) + 1)]
            by_block, by_hierarchy = (rulings(rule, draft, rows) for rule in (block.rule, hierarchical(CAPPED[cap])))
            assert total_variation(by_block, by_hierarchy) < EXACT, draft.tokens


def rulings(rule: RuleFunction, draft: Draft, rows: list[Probs]) -> Outputs:
    """Return the probability of each (number of accepted tokens, token behind them)."""
    probs = defaultdict[tuple[int, ...], float](float)
    for weight, (path, token, _) in enumerate_outcomes(lambda coins: rule(draft, 0, rows, coins)):
        probs[len(path), token] += weight
    return probs


@pytest.mark.parametrize("caps", WRONG)
def test_with_other_caps_a_round_is_not_exact(caps):
    assert largest_error(hierarchical(*WRONG[caps]), (-1, 0), "independent") > CAUGHT


def test_what_other_caps_gain_on_two_ids_is_their_error():
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 7/3 emitted in place of 20/9, with a total variation of 1/9."""
    drafter = drawn_tree((-1, 0), NEAR, "independent")
    for caps in ("the whole chain is judged by its uncapped ratio", "each prefix is capped by itself"):
        rule = hierarchical(*WRONG[caps])
        assert mean_tokens(rule, TARGET, drafter) == pytest.approx(7 / 3, abs=EXACT)
        assert error_of(rule, TARGET, drafter) == pytest.approx(1 / 9, abs=EXACT)


# ------------------------------------------------------------------------------------- what a rule without a state can


@pytest.mark.parametrize("kind", TABLES)
def test_no_exact_rule_without_a_state_emits_more_than_block_in_a_round(kind):
    """Whatever it knows of the target: a linear program over all of them finds block's mean."""
    target, near = TABLES[kind]
    by_block = mean_tokens(block.rule, target, drawn_tree((-1, 0), near, "independent"))
    assert most_tokens(target, near, 2) == pytest.approx(by_block, abs=1e-8)


def most_tokens(target: Table, near: Table, num_drafted: int) -> float:
    """Return the largest mean emitted tokens of a round such that, with the target alone behind it, texts are exact.

    A rule is the mass of each (draft, number of accepted tokens, token behind them). The masses of a draft add up to
    its probability, and those that lead to a text to the target's.
    """
    ids = range(len(target(())))
    drafts, texts = (list(itertools.product(ids, repeat=num_drafted + more)) for more in (0, 1))
    masses = [(draft, kept, token) for draft in drafts for kept in range(num_drafted + 1) for token in ids]
    matrix = np.zeros((len(drafts) + len(texts), len(masses)))
    for column, (draft, kept, token) in enumerate(masses):
        matrix[drafts.index(draft), column] = 1
        for text, prob in plain(target, num_drafted + 1, (*draft[:kept], token)).items():
            matrix[len(drafts) + texts.index(text), column] = prob
    drawn, said = plain(near, num_drafted), plain(target, num_drafted + 1)
    probs = [drawn.get(draft, 0.0) for draft in drafts] + [said.get(text, 0.0) for text in texts]
    found = linprog([-(kept + 1) for _, kept, _ in masses], A_eq=matrix, b_eq=probs, method="highs")
    assert found.success, found.message
    return -float(found.fun)


# ----------------------------------------------------------------------------------------- uncapped, it carries a state


def after(
    target: Table, near: Table, num_drafted: int, num_rounds: int
) -> Iterator[tuple[float, tuple[int, ...], Table]]:
    """Yield (probability, text, target of what follows) of each text that rounds of the uncapped rule may emit."""
    if num_rounds == 0:
        yield 1.0, (), target
        return
    drafter = drawn_tree(range(-1, num_drafted - 1), near, "independent")

    def run(coins: Coins) -> tuple[int, ...]:
        draft = drafter(coins)
        rows = [dense(target(tuple(draft.tokens[:i]))) for i in range(num_drafted + 1)]
        path, token, _ = UNCAPPED(draft, 0, rows, coins)
        return (*draft.tokens[: len(path)], token)

    for text, weight in law_of(run).items():
        left = carried(target, near, text, num_drafted)
        for share, more, behind in after(left, shifted(near, text), num_drafted, num_rounds - 1):
            yield weight * share, (*text, *more), behind


def carried(target: Table, near: Table, text: tuple[int, ...], num_drafted: int) -> Table:
    """Return the target behind a round that emitted this text: up to the last drafted position what the draft left.

    There the next token has norm((P p - Q q)+), with P and Q the probabilities of the tokens since the round began.
    """

    @functools.cache
    def table(tokens: tuple[int, ...]) -> np.ndarray:
        context = (*text, *tokens)
        if len(context) >= num_drafted:
            return target(context)
        by_target, by_draft = (
            math.prod(float(law(context[:i])[x]) for i, x in enumerate(context)) for law in (target, near)
        )
        excess = np.maximum(by_target * target(context) - by_draft * near(context), 0)
        return excess / excess.sum() if excess.sum() > 0 else target(context)

    return table


def shifted(table: Table, text: tuple[int, ...]) -> Table:
    return lambda tokens: table((*text, *tokens))


def mean_after(target: Table, near: Table, num_drafted: int, num_rounds: int) -> float:
    return sum(weight * len(text) for weight, text, _ in after(target, near, num_drafted, num_rounds))


@pytest.mark.parametrize("kind", ["unlike", "alike", "flat", "zeros"])
def test_uncapped_it_is_exact_where_its_state_is_carried(kind):
    target, near = TABLES[kind]
    said = defaultdict[tuple[int, ...], float](float)
    for weight, text, behind in after(target, near, num_drafted=2, num_rounds=2):
        for more, share in plain(behind, max(0, 4 - len(text))).items():
            said[(*text, *more)[:4]] += weight * share
    assert total_variation(said, plain(target, 4)) < EXACT


@pytest.mark.parametrize("kind", ["unlike", "alike", "flat", "zeros"])
def test_uncapped_its_first_round_emits_all_that_full_information_allows(kind):
    target, near = TABLES[kind]
    bound = 0.0
    for weight, draft in enumerate_outcomes(drawn_tree((-1, 0), near, "independent")):
        ratios = [target(tuple(draft.tokens[:i]))[x] / draft.probs[i].at(x) for i, x in enumerate(draft.tokens)]
        bound += weight * formulas.chain_tokens(ratios).bound
    assert mean_after(target, near, 2, 1) == pytest.approx(bound, abs=EXACT)


def test_uncapped_it_gains_in_the_first_round_and_loses_more_behind_it():
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: 21/9 emitted, then 19/9 in each round; by block 20/9."""
    means = [mean_after(TARGET, NEAR, 2, num_rounds) for num_rounds in (1, 2, 3)]
    assert means == pytest.approx([21 / 9, 40 / 9, 59 / 9], abs=EXACT)
    assert mean_tokens(block.rule, TARGET, drawn_tree((-1, 0), NEAR, "independent")) == pytest.approx(20 / 9, abs=EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_uncapped_its_third_round_emits_less_than_block_on_random_pairs(seed):
    p, q = np.random.default_rng(seed).dirichlet(np.ones(2), 2)  # the same at every position
    target, near = (lambda tokens: p), (lambda tokens: q)
    by_block = mean_tokens(block.rule, target, drawn_tree((-1, 0), near, "independent"))
    means = [mean_after(target, near, 2, num_rounds) for num_rounds in (1, 2, 3)]
    assert means[0] > by_block + CAUGHT
    assert means[2] - means[1] < by_block - CAUGHT
