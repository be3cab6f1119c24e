"""lenience and typical: what they promise, their known answers, their price; and that nobody gets them unasked."""

import functools

import numpy as np
import pytest

from engine.load import MODEL, runner_with
from forerun import verify
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.engine.router import Router
from forerun.errors import BadOption
from forerun.pacing import make
from forerun.sampling.random import PhiloxCoins
from forerun.testing import dense, drawn_tree, enumerate_outcomes
from forerun.types import Draft, Probs, SamplingParams
from forerun.verify import lenience, typical
from refusals import refusal
from verify.cases import CHAINS, EXACT, TABLES, error_of


def judged(p: Probs, q: Probs, share: float, correction: str = "residual"):
    """Every way of a round with one drafted token: (probability, (first token, acceptance tests))."""

    def run(coins):
        draft = Draft.chains([[coins.draft(q, 0)]], [[q]])
        path, token, tests = lenience.rule(draft, 0, [p, p], coins, lenience.Options(share, correction))
        return draft.tokens[0] if path else token, tests

    return enumerate_outcomes(run)


def test_k2_lenience():
    """p = (.5, .3, .2), q = (.2, .6, .2), l = .8: s = (.425, .375, .2), TV = .075, at most 1 / l times as likely."""
    p, q = dense(np.array([0.5, 0.3, 0.2])), dense(np.array([0.2, 0.6, 0.2]))
    ways = judged(p, q, 0.8)
    said = [sum(w for w, (token, _) in ways if token == x) for x in range(3)]
    assert said == pytest.approx([0.425, 0.375, 0.2], abs=EXACT)
    assert {round(tests[0].price, 12) for _, (_, tests) in ways} == {0.075}


@pytest.mark.parametrize("correction", ["residual", "target"])
def test_the_price_is_the_total_variation(correction):
    for seed in range(60):
        weights = np.random.default_rng(seed).dirichlet(np.full(4, 0.5), 2)
        weights[:, seed % 4] *= seed % 3 > 0
        p, q = (row / row.sum() for row in weights)
        share = 0.1 + 0.9 * (seed % 7) / 6
        ways = judged(dense(p), dense(q), share, correction)
        said = np.array([sum(w for w, (token, _) in ways if token == x) for x in range(4)])
        assert ways[0][1][1][0].price == pytest.approx(np.abs(said - p).sum() / 2, abs=EXACT)
        if correction == "residual":
            assert (said <= p / share + EXACT).all()


def test_a_correction_from_the_target_is_biased_also_without_lenience():
    """p = (.5, .3, .2), q = (.2, .6, .2): min(p, q) + .3 p = (.35, .39, .26), and not p."""
    ways = judged(dense(np.array([0.5, 0.3, 0.2])), dense(np.array([0.2, 0.6, 0.2])), 1.0, "target")
    said = [sum(w for w, (token, _) in ways if token == x) for x in range(3)]
    assert said == pytest.approx([0.35, 0.39, 0.26], abs=EXACT)
    assert {round(tests[0].price, 12) for _, (_, tests) in ways} == {0.15}
    assert "correction='p'" in refusal(BadOption, lenience.Options, 1.0, "p")


@pytest.mark.parametrize("kind", TABLES)
def test_lenience_of_1_is_exact(kind):
    target, near = TABLES[kind]
    rule = functools.partial(lenience.rule, options=lenience.Options(1.0))
    for shape in CHAINS:
        assert error_of(rule, target, drawn_tree(shape, near, "independent")) < EXACT


def test_lenience_of_greedy_requests_compares_with_the_largest():
    """l max p = .5 * .45: the second token is near enough, the third is not, and the argmax is emitted instead."""
    row = Probs(point=0, soft=dense(np.array([0.45, 0.35, 0.2])))
    for token, share, kept, price in [(1, 0.5, [0], 1.0), (2, 0.5, [], 0.0), (1, 1.0, [], 0.0), (0, 1.0, [0], 0.0)]:
        draft = Draft.chains([[token]], [[Probs(point=token)]])
        path, emits, tests = lenience.rule(draft, 0, [row, row], PhiloxCoins(0, 0, 0), lenience.Options(share))
        assert (path, emits, tests[0].price) == (kept, 0, price), (token, share)
    tied = Probs(point=0, soft=dense(np.array([0.4, 0.4, 0.2])))
    draft = Draft.chains([[1]], [[Probs(point=1)]])
    for share, kept in ((1.0, []), (0.99, [0])):  # ties: lowest id
        assert lenience.rule(draft, 0, [tied, tied], PhiloxCoins(0, 0, 0), lenience.Options(share))[0] == kept


def test_the_share_must_be_above_0():
    for share in (0, -0.1, 1.1, "nan"):
        assert "lenience:l=" in refusal(BadOption, verify.find, f"lenience:l={share}")


def test_typical_keeps_what_is_likely_enough():
    """The threshold is min(.09, .3 exp(-H)): .09 for a peaked row, 0.03 for ten equal ids."""
    options = typical.Options()
    flat, peaked = dense(np.full(10, 0.1)), dense(np.array([0.93, 0.05, 0.02]))
    assert typical.threshold(flat, options) == pytest.approx(0.03)
    assert typical.threshold(peaked, options) == 0.09
    draft = Draft.chains([[3, 1]], [[flat, peaked]])
    rows = [flat, peaked, peaked]
    weight, verdict = enumerate_outcomes(lambda coins: typical.rule(draft, 0, rows, coins, options))[0]
    assert verdict[0] == [0], "the second token is not likely enough"
    assert weight < 1, "the next token is drawn from the whole distribution"


def test_typical_takes_the_longest_path_and_of_several_the_likeliest():
    row = dense(np.array([0.5, 0.3, 0.2]))
    draft = Draft([0, 1, 2, 0, 1], [-1, -1, -1, 2, 2], [0, 5], [Probs(point=0)] * 5)
    path, _, tests = typical.rule(draft, 0, [row] * 6, PhiloxCoins(0, 0, 0), typical.Options())
    assert path == [2, 3]
    assert [(t.node, t.accepted) for t in tests] == [(0, False), (1, False), (2, True), (4, False), (3, True)]


def test_greedy_is_exact_with_typical_acceptance():
    draft = Draft([0, 1, 1, 2], [-1, -1, 1, 1], [0, 4], [Probs(point=x) for x in (0, 1, 1, 2)])
    rows = [Probs(point=1), Probs(point=0), Probs(point=2), Probs(point=0), Probs(point=0)]
    path, token, _ = typical.rule(draft, 0, rows, PhiloxCoins(0, 0, 0), typical.Options())
    assert (path, token) == ([1, 3], 0)


REFUSED = [
    (name, shape, draws)
    for name in verify.rules()
    for shape in ("chain", "tree")
    for draws in ("point", "independent", "distinct")
    if shape not in verify.find(name).module.SHAPES or draws not in verify.find(name).module.DRAWS
]


@pytest.mark.parametrize(("name", "shape", "draws"), REFUSED)
def test_pairs_that_cannot_be_judged_are_refused_when_a_request_comes(name, shape, draws):
    """With a sentence that names rules that can; lossy ones are never recommended."""
    drafter = Drafter()
    drafter.shape, drafter.draws = shape, draws
    engine = Engine(runner_with(MODEL, 400), Router({"guesser": drafter}), make("fixed", 3))
    with pytest.raises(BadOption, match=rf"acceptance='{name}' cannot judge the drafts of 'guesser'") as refused:
        engine.add([1, 2, 3], SamplingParams(max_tokens=3, acceptance=name))
    advice = str(refused.value).partition(": use ")[2]
    assert "acceptance='ratio'" in advice
    assert "lenience" not in advice
    assert "typical" not in advice
    engine.add([1, 2, 3], SamplingParams(max_tokens=3, acceptance=name, draft="none"))


def test_typical_has_no_distribution_guarantee():
    """Negative control: enumeration sees that the output is not the target's."""
    target, near = TABLES["unlike"]
    rule = functools.partial(typical.rule, options=typical.Options())
    assert error_of(rule, target, drawn_tree((-1, 0), near, "independent")) > 0.05
