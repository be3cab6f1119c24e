"""block, kseq and traversal by exact enumeration: what they say, how much they keep, and their known answers."""

import itertools
import random

import numpy as np
import pytest

from forerun.sampling.random import PhiloxCoins
from forerun.testing import MUTANTS, dense, drawn_tree, enumerate_outcomes, tables
from forerun.theory import formulas
from forerun.types import Draft, Probs
from forerun.verify import block, kseq, match, ratio, traversal
from verify.cases import CAUGHT, CHAINS, EXACT, TABLES, V, error_of, largest_error, mean_tokens, one_level, random_shape

RULES = {"block": block, "kseq": kseq, "traversal": traversal}
PAIRS = [
    (module, draws)
    for module in (kseq, traversal, ratio, match)
    for draws in ("point", "independent", "distinct")
    if draws in module.DRAWS
]
EXAMPLE = tuple((lambda tokens, w=w: np.array(w)) for w in ((1 / 3, 2 / 3), (2 / 3, 1 / 3)))  # of Sun et al. 2024


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", TABLES)
def test_chains_are_exact(kind, rule):
    target, near = TABLES[kind]
    for shape in CHAINS:
        assert error_of(RULES[rule].rule, target, drawn_tree(shape, near, "independent")) < EXACT


@pytest.mark.parametrize(("module", "draws"), PAIRS)
@pytest.mark.parametrize("kind", TABLES)
def test_random_trees_are_exact(kind, module, draws):
    target, near = TABLES[kind]
    for seed in range(3):
        assert error_of(module.rule, target, drawn_tree(random_shape(4, seed), near, draws)) < EXACT


@pytest.mark.parity
@pytest.mark.parametrize(("module", "draws"), PAIRS)
def test_many_random_trees_are_exact(module, draws):
    for seed in range(60):
        target = tables(V, 100 + seed, zero_share=0.3 * (seed % 2))
        near = tables(V, 200 + seed, near=target, share=0.3 * (seed % 3))
        assert error_of(module.rule, target, drawn_tree(random_shape(3 + seed % 3, seed), near, draws)) < EXACT


def test_several_distributions_below_one_node_are_judged_in_turn_by_kseq():
    """Two draws from one distribution, then two from another, as of two drafters."""
    (target, first), second = TABLES["unlike"], tables(V, 12)

    def draft(coins):
        laws = [dense(table(())) for table in (first, first, second, second)]
        return Draft([coins.draft(q, 0, lane) for lane, q in enumerate(laws)], [-1] * 4, [0, 4], laws)

    assert error_of(kseq.rule, target, draft) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_lists_and_vectors_of_other_lengths_are_exact(rule):
    """p and q may be listed by id, or one vector shorter than the other."""
    p, q = [0.1, 0.4, 0.3, 0.2], [0.5, 0.1, 0.4]
    forms = [dense(np.array(p)), dense(np.array(q)), Probs(ids=np.array([0, 2]), listed=np.array([0.4, 0.6]))]
    num = 1 if rule == "block" else 2
    for target, near in itertools.product(forms, forms):

        def run(coins, target=target, near=near):
            draft = Draft([coins.draft(near, 0, i) for i in range(num)], [-1] * num, [0, num], [near] * num)
            path, token, _ = RULES[rule].rule(draft, 0, [target] * (num + 1), coins)
            return draft.tokens[path[0]] if path else token

        ways = enumerate_outcomes(run)
        for x in range(4):
            assert sum(w for w, token in ways if token == x) == pytest.approx(target.at(x), abs=EXACT)


# ------------------------------------------------------------------------------------------- how many tokens are kept


def test_k3_block_keeps_more():
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 11/9 accepted, 10/9 by ratio, at most 12/9 with full information."""
    target, near = EXAMPLE
    drafter = drawn_tree((-1, 0), near, "independent")
    for module, kept in ((block, 11 / 9), (traversal, 11 / 9), (ratio, 10 / 9)):
        assert mean_tokens(module.rule, target, drafter) == pytest.approx(1 + kept, abs=EXACT)
    p, q = (dense(table(())) for table in EXAMPLE)
    for tokens, share in {(0, 0): 1 / 4, (0, 1): 1.0, (1, 0): 1 / 2, (1, 1): 1.0}.items():
        draft = Draft.chains([list(tokens)], [[q, q]])
        ways = enumerate_outcomes(lambda coins, draft=draft: block.rule(draft, 0, [p] * 3, coins)[0])
        assert sum(w for w, path in ways if len(path) == 2) == pytest.approx(share, abs=EXACT)
        first = 0.0 if tokens[0] == 0 else 1.0  # h_1, given that both were not kept
        assert sum(w for w, path in ways if len(path) == 1) == pytest.approx((1 - share) * first, abs=EXACT)


@pytest.mark.parametrize("kind", TABLES)
def test_block_is_never_shorter_than_ratio_and_the_yardsticks_are_the_means(kind):
    """The averages of the formulas over what was drafted equal the means of the rules (docs/exactness.md)."""
    target, near = TABLES[kind]
    for shape in CHAINS:
        drafter = drawn_tree(shape, near, "independent")
        expected = formulas.ChainTokens(0.0, 0.0, 0.0)
        for weight, draft in enumerate_outcomes(drafter):
            ratios = [target(tuple(draft.tokens[:i]))[x] / draft.probs[i].at(x) for i, x in enumerate(draft.tokens)]
            found = formulas.chain_tokens(ratios)
            expected = formulas.ChainTokens(*(a + weight * b for a, b in zip(expected, found, strict=True)))
        by_ratio, by_block = (mean_tokens(module.rule, target, drafter) for module in (ratio, block))
        assert by_ratio == pytest.approx(expected.ratio, abs=EXACT)
        assert by_block == pytest.approx(expected.block, abs=EXACT)
        assert by_ratio <= by_block + EXACT
        assert by_block <= expected.bound + EXACT


SHAPES = ((-1, -1), (-1, -1, 0), (-1, -1, 0, 1), (-1, 0, 0, -1))


@pytest.mark.parametrize("kind", ["unlike", "alike", "flat", "zeros"])
def test_traversal_keeps_most_then_distinct_siblings_then_independent_ones(kind):
    target, near = TABLES[kind]
    for shape in SHAPES:
        distinct, independent = (drawn_tree(shape, near, draws) for draws in ("distinct", "independent"))
        pairs = (traversal, distinct), (ratio, distinct), (ratio, independent)
        means = [mean_tokens(module.rule, target, drafter) for module, drafter in pairs]
        assert means == sorted(means, reverse=True), (shape, means)
    pair = drawn_tree((-1, -1), near, "independent")  # deeper, kseq may keep less: it spreads over the siblings
    assert mean_tokens(kseq.rule, target, pair) >= mean_tokens(ratio.rule, target, pair) - EXACT


def test_a_chain_is_judged_alike_by_block_and_traversal_coin_by_coin():
    rng = np.random.default_rng(0)
    for seed in range(300):
        num = 1 + seed % 6
        rows = [dense(rng.dirichlet(np.full(5, 0.6))) for _ in range(num + 1)]
        laws = [dense(rng.dirichlet(np.full(5, 0.6))) for _ in range(num)]
        coins = PhiloxCoins(seed, 7, 1)
        draft = Draft.chains([[coins.draft(q, i) for i, q in enumerate(laws)]], [laws])
        assert block.rule(draft, 0, rows, coins) == traversal.rule(draft, 0, rows, coins)


# ------------------------------------------------------------------------------------------------------ known answers


def test_k4_kseq():
    """p = (.7, .3), q = (.3, .7), two draws: rho* = 1.5, acceptance .75, residual (1, 0); the optimum is .81."""
    p, q = (0.7, 0.3), (0.3, 0.7)
    said, accepted = one_level(p, q, 2, kseq.rule)
    assert said == pytest.approx(p, abs=EXACT)
    assert accepted == pytest.approx(0.75, abs=EXACT)
    target, near = dense(np.array(p)), dense(np.array(q))
    assert kseq.ratio_of(target, near, 2) == pytest.approx(1.5, abs=EXACT)
    assert kseq.left_by(target, near, 2, 1.5).dense.tolist() == pytest.approx([1, 0], abs=EXACT)
    assert formulas.optimal_acceptance(p, q, 2) == pytest.approx(0.81, abs=EXACT)
    assert formulas.optimal_acceptance(p, q, 1) == pytest.approx(formulas.acceptance(p, q), abs=EXACT)


def test_kseq_keeps_at_least_the_share_that_is_proven():
    """1 - 1/e of the optimum for independent draws, and never more than the optimum."""
    rng = random.Random(0)
    for seed in range(40):
        p, q = (np.random.default_rng([seed, i]).dirichlet(np.full(4, 0.7)) for i in range(2))
        num = rng.randint(2, 4)
        accepted = 1 - (1 - np.minimum(q, p / kseq.ratio_of(dense(p), dense(q), num)).sum()) ** num
        best = formulas.optimal_acceptance(p, q, num)
        assert (1 - 1 / np.e) * best <= accepted <= best + EXACT


@pytest.mark.parametrize("rule", RULES)
def test_greedy_falls_out_of_points(rule):
    """Also where the draft was drawn at a temperature: whatever was drafted, each emitted token is the argmax."""
    q = dense(np.array([0.5, 0.3, 0.2]))
    rows = [Probs(point=x) for x in (1, 2, 0, 1)]
    for tokens in itertools.product(range(3), repeat=3):
        draft = Draft.chains([list(tokens)], [[q, q, q]])
        (way,) = enumerate_outcomes(lambda coins, draft=draft: RULES[rule].rule(draft, 0, rows, coins))
        weight, (path, token, _) = way
        assert weight == 1.0
        said = [tokens[n] for n in path] + [token]
        assert said == [1, 2, 0, 1][: len(said)]
        assert len(path) == 3 or tokens[len(path)] != said[-1], "a drafted argmax was not kept"


@pytest.mark.parametrize("rule", RULES)
def test_rows_behind_a_token_of_probability_0_are_not_read(rule):
    """There no token may be allowed any more (a bad word, a bias), and the row would be an error."""
    rows = [dense(np.array([0.5, 0.5, 0.0]))] * 2  # to read one behind them is an IndexError
    q = dense(np.array([0.2, 0.2, 0.6]))
    draft = Draft.chains([[0, 2, 1]], [[q, q, q]])
    for seed in range(20):
        path, token, _ = RULES[rule].rule(draft, 0, rows, PhiloxCoins(seed, 0, 0))
        assert path in ([], [0])
        assert token != 2


@pytest.mark.parametrize("module", [*RULES.values(), ratio])
def test_a_token_that_its_own_distribution_excludes_is_rejected(module):
    """Only underflow gives q(x) = 0: the token is rejected, and the correction is drawn from p (docs/exactness.md)."""
    p, q = dense(np.array([0.5, 0.5])), dense(np.array([0.0, 1.0]))
    draft = Draft.chains([[0]], [[q]])
    ways = enumerate_outcomes(lambda coins: module.rule(draft, 0, [p, p], coins))
    assert [(w, token) for w, (path, token, _) in ways if not path] == [(0.5, 0), (0.5, 1)]


# ------------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.needs == "chain"], ids=lambda m: m.name)
def test_mutants_are_caught(mutant, rule):
    assert largest_error(mutant.apply(RULES[rule].rule), (-1, 0), "independent") > CAUGHT


def test_m7_m8_and_m9_are_caught_in_a_traversal():
    for mutant in (m for m in MUTANTS if m.needs != "chain"):
        wrong = mutant.apply(traversal.rule)
        assert largest_error(wrong, (-1, -1, 0), mutant.needs, ("unlike", "alike", "flat")) > CAUGHT, mutant.name


def test_m14_kseq_with_a_ratio_of_1(monkeypatch):
    """The residual would be negative, and is cut off at 0: (.7, .3) becomes (.58, .42)."""
    monkeypatch.setattr(kseq, "ratio_of", lambda p, q, num: 1.0)
    said, _ = one_level((0.7, 0.3), (0.3, 0.7), 2, kseq.rule)
    assert said == pytest.approx([0.58, 0.42], abs=5e-3)
    assert abs(said[0] - 0.7) > CAUGHT
