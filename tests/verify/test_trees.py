"""Trees by exact enumeration, with the mutants that only trees can have, and coins that must not be used twice."""

import numpy as np
import pytest

from forerun import verify
from forerun.errors import BadOption, InternalError
from forerun.sampling.random import PhiloxCoins
from forerun.testing import MUTANTS, ONE_COIN, dense, drawn_tree, emitted, enumerate_outcomes
from forerun.types import Draft, Extra, Probs
from forerun.verify import match, ratio
from refusals import refusal
from verify.cases import CAUGHT, EXACT, HORIZON, TABLES, largest_error, one_level

CHAIN = (-1, 0)


def test_siblings_that_are_equal_go_on_together():
    """Two equal children, each with a child: what was drawn below either is tried once their token is accepted."""
    token, other = Probs(point=1), dense(np.array([0.5, 0.5, 0.0]))
    draft = Draft([1, 1, 0, 1], [-1, -1, 0, 1], [0, 4], [other, other, other, other])
    rows = [token, Probs(point=1), Probs(point=2), Probs(point=0), Probs(point=0)]
    verdict = ratio.verify(draft, [rows], [PhiloxCoins(0, 0, 0)])
    assert verdict.paths == [[0, 3]]
    assert [t.node for t in verdict.tests[0]] == [0, 2, 3]
    assert verdict.num_tested(0) == 2


# ------------------------------------------------------------------------------------------------------ known answers


def test_k4_recursive_rejection():
    said, accepted = one_level((0.7, 0.3), (0.3, 0.7), 2)
    assert said == pytest.approx([0.7, 0.3], abs=EXACT)
    assert accepted == pytest.approx(0.72, abs=EXACT)


def test_k5_duplicates():
    """Tried and subtracted they are exact; merged they give (.2, .48, .32)."""
    said, accepted = one_level((0.2, 0.5, 0.3), (0.8, 0.1, 0.1), 2)
    assert said == pytest.approx([0.2, 0.5, 0.3], abs=EXACT)
    assert accepted == pytest.approx(0.52, abs=EXACT)
    merged = next(m for m in MUTANTS if m.name.startswith("m7"))
    said, _ = one_level((0.2, 0.5, 0.3), (0.8, 0.1, 0.1), 2, merged.apply(ratio.rule))
    assert said == pytest.approx([0.2, 0.48, 0.32], abs=EXACT)


# ------------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutants_are_caught(mutant):
    shape, draws = (CHAIN, "independent") if mutant.needs == "chain" else ((-1, -1, 0), mutant.needs)
    kinds = ("unlike", "alike", "flat", "zeros")
    assert largest_error(ratio.rule, shape, draws, kinds) < EXACT
    assert largest_error(mutant.apply(ratio.rule), shape, draws, kinds) > CAUGHT


def test_a_coin_that_is_used_twice_is_no_proof():
    """Production coins are a function of depth and lane: siblings with one coin would be certified as independent."""
    target, near = TABLES["flat"]
    with pytest.raises(AssertionError, match=r"accept, depth 0, lane 0.*twice"):
        emitted(ONE_COIN.apply(ratio.rule), target, drawn_tree((-1, -1), near, "independent"), HORIZON)
    with pytest.raises(AssertionError, match=r"draft, depth 0, lane 0.*twice"):
        enumerate_outcomes(lambda coins: [coins.draft(dense(near(())), 0) for _ in range(2)])
    assert len(enumerate_outcomes(lambda coins: [coins.draft(dense(near(())), 0, lane) for lane in range(2)])) == 9


def test_siblings_of_one_lane_would_be_equal_in_production():
    """p = (.2, .4, .4), q = (.6, .3, .1): with one lane for both, recursive rejection emits (.2, .3, .5)."""
    q, num = dense(np.array([0.6, 0.3, 0.1])), 4000
    for lanes, share in (((0, 0), 1.0), ((0, 1), 0.46)):
        drawn = [[PhiloxCoins(seed, 5, 0).draft(q, 0, lane) for lane in lanes] for seed in range(num)]
        assert sum(a == b for a, b in drawn) / num == pytest.approx(share, abs=0.03)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_pair_that_cannot_be_judged_is_refused(monkeypatch):
    monkeypatch.setattr(match, "SHAPES", ("chain",))
    rule = verify.find("match")
    rule.check("model", "chain", "independent")
    with pytest.raises(
        BadOption, match=r"acceptance='match' cannot judge the drafts of 'medusa' \(tree, point\): use .*'ratio'"
    ):
        rule.check("medusa", "tree", "point")


def test_options_of_a_rule_that_has_none():
    assert "takes no options" in refusal(BadOption, verify.find, "ratio:eps=0.1")


@pytest.mark.parametrize(
    ("parents", "extra"),
    [
        ([1, -1, -1], []),
        ([-1, 1, -1], []),
        ([-1, 3, -1], []),
        ([-2, -1, -1], []),
        ([-1, 0, -1], [2]),
        ([-1, 0, -1], [-2]),
    ],
)
def test_parents_come_before_their_children(parents, extra):
    """Also in the second sequence, whose nodes are counted behind those of the first."""
    for shift, starts in ((0, [0, 2, 3]), (1, [0, 1, 3, 4])):
        shifted = [-1] * shift + [p + shift if p >= 0 else p for p in parents]
        rows = {shift: Extra([1], extra)} if extra else {}
        draft = Draft([1] * len(shifted), shifted, starts, [Probs(point=1)] * len(shifted), rows)
        assert "a parent comes before its child" in refusal(InternalError, draft.check, shift)
    good = Draft([1] * 4, [-1, -1, 1, -1], [0, 1, 3, 4], [Probs(point=1)] * 4, {1: Extra([1, 1], [-1, 2])})
    for b in range(3):
        good.check(b)
    with pytest.raises(InternalError, match="a parent comes before its child"):
        Draft([1, 1], [-1, 0], [0, 1, 2], [Probs(point=1)] * 2).check(1)  # a node of another sequence
