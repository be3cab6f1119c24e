"""The rules on distributions that are written by hand: known answers, edge cases, and the seed-exactness of match."""

import functools
import itertools

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

from forerun import verify
from forerun.errors import BadOption
from forerun.models.toy import ToyModel, ToyTable
from forerun.sampling import random as rng
from forerun.sampling.random import PhiloxCoins
from forerun.testing import Branching, enumerate_outcomes
from forerun.theory import formulas
from forerun.types import Draft, Probs
from forerun.verify import match, ratio


def test_rules_that_requests_ask_for_fill_no_memory() -> None:
    """An option has any number of values, and each is a text of somebody's request."""
    for i in range(200):
        assert verify.find(f"typical:epsilon={0.1 + i / 1000}").name == "typical"
    assert verify.find.cache_info().currsize <= 64


def dist(*weights: float, dtype: type = np.float64) -> Probs:
    return Probs(dense=np.array(weights, dtype))


def point(token: int) -> Probs:
    return Probs(point=token)


def as_list(probs: Probs, size: int) -> list[float]:
    return [probs.at(x) for x in range(size)]


def one_round(p: Probs, q: Probs, module, bonus: Probs | None = None):
    """Return every way of a round with one drafted token: (probability, (drafted, verdict, emitted tokens))."""

    def run(coins: Branching):
        token = coins.draft(q, 0)
        draft = Draft.chains([[token]], [[q]])
        verdict = module.verify(draft, [[p, bonus or point(0)]], [coins])
        return token, verdict, verdict.emitted(draft, 0)

    return enumerate_outcomes(run)


def first_token(ways, size: int) -> list[float]:
    return [sum(w for w, (_, _, emitted) in ways if emitted[0] == x) for x in range(size)]


PAIRS = {
    "K1": ((0.5, 0.3, 0.2), (0.2, 0.6, 0.2)),
    "equal": ((0.5, 0.3, 0.2), (0.5, 0.3, 0.2)),
    "disjoint": ((0.0, 0.3, 0.7), (1.0, 0.0, 0.0)),
    "q narrower": ((0.5, 0.3, 0.2), (0.0, 0.9, 0.1)),
    "p narrower": ((0.0, 0.8, 0.2), (0.4, 0.5, 0.1)),
    "one-hot target": ((0.0, 1.0, 0.0), (0.3, 0.6, 0.1)),
    "one-hot draft": ((0.5, 0.3, 0.2), (0.0, 1.0, 0.0)),
    "far below rounding": ((1 - 1e-18, 1e-18, 0.0), (1e-18, 1 - 1e-18, 0.0)),
}


@pytest.mark.parametrize("module", [ratio, match])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_distribution_of_one_position(pair, module):
    p, q = PAIRS[pair]
    assert first_token(one_round(dist(*p), dist(*q), module), 3) == pytest.approx(p, abs=1e-15)


@pytest.mark.parametrize("module", [ratio, match])
def test_points_on_either_side(module):
    """A point is the same as its one-hot vector; both sides may be points."""
    for p, q in itertools.product([dist(0.5, 0.3, 0.2), point(1)], [dist(0.2, 0.6, 0.2), point(1), point(2)]):
        ways = one_round(p, q, module)
        assert first_token(ways, 3) == pytest.approx(as_list(p, 3), abs=1e-15)
        accepted = sum(w for w, (_, verdict, _) in ways if verdict.paths[0])
        if q.point is not None:
            assert accepted == pytest.approx(p.at(q.point), abs=1e-15), "a point is accepted with p of it"


def test_k1_by_its_parts():
    p, q = dist(0.5, 0.3, 0.2), dist(0.2, 0.6, 0.2)
    assert [ratio.acceptance(p.at(x), q.at(x)) for x in range(3)] == [1.0, 0.5, 1.0]
    residual = ratio.residual(p, q).dense
    assert (residual / residual.sum()).tolist() == pytest.approx([1, 0, 0], abs=1e-15)
    assert sum(w for w, (_, verdict, _) in one_round(p, q, ratio) if verdict.paths[0]) == pytest.approx(0.7, abs=1e-15)


def test_distributions_given_the_role():
    """Accepted tokens have the distribution min(p, q) / beta, corrections (p - q)+ / (1 - beta): neither is p."""
    p, q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)
    ways = one_round(dist(*p), dist(*q), ratio, bonus=dist(0.1, 0.1, 0.8))
    for x in range(3):
        kept = sum(w for w, (_, v, e) in ways if v.paths[0] and e[0] == x)
        fixed = sum(w for w, (_, v, e) in ways if not v.paths[0] and e[0] == x)
        assert kept == pytest.approx(min(p[x], q[x]), abs=1e-15)
        assert fixed == pytest.approx(max(0, p[x] - q[x]), abs=1e-15)
    bonus = [sum(w for w, (_, v, e) in ways if v.paths[0] and e[1] == x) for x in range(3)]
    assert bonus == pytest.approx([0.7 * b for b in (0.1, 0.1, 0.8)], abs=1e-15)


def test_equal_distributions_always_accept_and_zero_never_does():
    p = dist(0.5, 0.3, 0.2)
    assert all(verdict.paths[0] for _, (_, verdict, _) in one_round(p, p, ratio))
    assert ratio.acceptance(0.0, 0.3) == 0.0
    assert ratio.acceptance(0.3, 0.3) == ratio.acceptance(1e-300, 1e-320) == 1.0


def test_residual_edges():
    """The residual is a distribution for mass 0, points and different lengths, and leaves its arguments unchanged."""
    p, q = dist(0.5, 0.3, 0.2), dist(0.2, 0.6, 0.2)
    ratio.residual(p, q), ratio.residual(p, point(0))
    assert p.dense.tolist() == [0.5, 0.3, 0.2]
    assert ratio.residual(p, p) is p
    assert ratio.residual(point(2), q) == point(2)
    assert ratio.residual(p, point(0)).dense.tolist() == pytest.approx([0.0, 0.6, 0.4])
    assert ratio.residual(dist(0.0, 1.0), point(1)).dense.tolist() == [0.0, 1.0], "nothing is left: p itself"
    assert ratio.residual(p, point(7)).dense.tolist() == p.dense.tolist()
    assert ratio.residual(p, dist(0.5, 0.1, 0.1, 0.3)).dense.tolist() == pytest.approx([0.0, 2 / 3, 1 / 3])
    assert ratio.residual(p, dist(0.6, 0.4)).dense.tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert ratio.residual(dist(0.5, 0.5, dtype=np.float32), dist(0.25, 0.75)).dense.dtype == np.float64


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3)])
def test_vocabularies_of_different_length_stay_exact(sizes):
    generator = np.random.default_rng(0)
    p, q = (dist(*generator.dirichlet(np.ones(n))) for n in sizes)
    assert first_token(one_round(p, q, ratio), 5) == pytest.approx(as_list(p, 5), abs=1e-15)


def test_k6_the_draw_that_disagreed_is_emitted():
    """Drawing again after a mismatch would give (.75, .15, .1)."""
    assert first_token(one_round(dist(0.5, 0.3, 0.2), point(0), match), 3) == pytest.approx([0.5, 0.3, 0.2], abs=1e-15)


def test_k7_cutting_before_the_draw_is_exact_and_after_it_is_not():
    """p = q = (.5, .3, .2). Dropping draws with q(x) < .4 gives (.75, .15, .1); verifying them gives p."""
    p = dist(0.5, 0.3, 0.2)

    def drop(coins: Branching) -> int:
        token = coins.draft(p, 0)
        return token if p.at(token) >= 0.4 else coins.draw(p, 0)

    assert [sum(w for w, t in enumerate_outcomes(drop) if t == x) for x in range(3)] == pytest.approx([0.75, 0.15, 0.1])
    assert first_token(one_round(p, p, ratio), 3) == pytest.approx([0.5, 0.3, 0.2], abs=1e-15)


def test_greedy_falls_out_of_points():
    """Tokens are accepted while they are the argmax; correction and bonus are argmaxes; no coin is used."""
    draft = Draft.chains([[4, 5, 6]], [[point(4), point(5), point(6)]])
    for module in (ratio, match):
        for targets, path, token in [((4, 5, 6, 7), [0, 1, 2], 7), ((4, 9, 6, 7), [0], 9), ((1, 5, 6, 7), [], 1)]:
            rows = [point(x) for x in targets]
            ways = enumerate_outcomes(lambda coins, m=module, rows=rows: m.verify(draft, [rows], [coins]))
            assert [(weight, v.paths, v.next_tokens) for weight, v in ways] == [(1.0, [path], [token])]


def test_tests_say_what_was_tested():
    draft = Draft.chains([[0, 1, 2]], [[dist(0.6, 0.4, 0.0), point(1), point(2)]])
    target = [dist(0.3, 0.3, 0.4), dist(0.0, 0.0, 1.0), point(0), point(0)]
    for module in (ratio, match):
        for _, verdict in enumerate_outcomes(lambda c, m=module: m.verify(draft, [target], [c])):
            tests = verdict.tests[0]
            assert [t.node for t in tests] == list(range(len(tests)))
            assert [t.accepted for t in tests] == [i < len(verdict.paths[0]) for i in range(len(tests))]
            assert (tests[0].target_prob, tests[0].draft_prob) == (0.3, 0.6)
            assert len(tests) <= 2, "the second token has target probability 0"


def test_rows_behind_a_rejection_are_not_read():
    """A rule reads no row behind a rejection, because callers compute rows on demand."""
    draft = Draft.chains([[4, 5, 6]], [[point(4), point(5), point(6)]])
    rows = [point(4), point(9)]  # to read one behind them is an IndexError
    for module in (ratio, match):
        assert module.verify(draft, [rows], [PhiloxCoins(0, 0, 0)]).next_tokens == [9]


# ------------------------------------------------------------------------------------------------------------ ruling


def test_each_sequence_is_ruled_by_its_own_rule():
    p, q = dist(0.5, 0.3, 0.2), dist(0.2, 0.6, 0.2)
    draft = Draft.chains([[1], [], [1]], [[q], [], [q]])
    target_probs = [[p, p], [p], [p, p]]
    specs = ["match", "ratio", "ratio"]
    for seed in range(40):
        coins = [PhiloxCoins(seed, 3 + b, 0) for b in range(3)]
        verdict = verify.collected([verify.ruling(draft, b, target_probs[b], coins[b], specs[b]) for b in range(3)])
        for b, rule in ((0, match.rule), (2, ratio.rule)):
            ruling = rule(draft, b, target_probs[b], coins[b])
            assert (verdict.paths[b], verdict.next_tokens[b], verdict.tests[b]) == ruling
        # An empty draft is decided by the match noise in every mode, so that plain decoding is one text.
        assert (verdict.paths[1], verdict.next_tokens[1]) == ([], coins[1].pick(p, 0))
        assert verdict.tests[1] == []


def test_unknown_rules_are_refused_with_those_that_exist():
    assert {"match", "ratio"} <= set(verify.rules())
    with pytest.raises(BadOption, match=r"no acceptance rule 'likely'.*match.*ratio"):
        verify.ruling(Draft.chains([[0]], [[point(0)]]), 0, [point(0)] * 2, PhiloxCoins(0, 0, 0), "likely")


# ------------------------------------------------------------------------------------------------------- match = plain

SIZE, LENGTH, GAMMA = 4, 3, 2
TARGET = ToyModel(SIZE, 21, ToyTable(scale=1.5))
NEAR = ToyModel(SIZE, 22, ToyTable(distance=1.0), near=TARGET)


@functools.cache
def probs_of(model: ToyModel, tokens: tuple[int, ...]) -> Probs:
    return Probs(dense=softmax(model.logits_after(tokens)))


def plain_text(seed: int) -> tuple[int, ...]:
    """Draw a text by the definition of Gumbel-max, token by token."""
    tokens: tuple[int, ...] = ()
    while len(tokens) < LENGTH:
        weights = probs_of(TARGET, tokens).dense
        noise = rng.gumbel(seed, len(tokens), np.arange(SIZE))
        tokens += (int((np.log(weights) + noise).argmax()),)
    return tokens


def matched_text(seed: int, shared: bool) -> tuple[tuple[int, ...], int, int]:
    """Return the text of rounds of match verification, with the numbers of accepted and of tested tokens."""
    tokens: tuple[int, ...] = ()
    accepted = tested = rounds = 0
    while len(tokens) < LENGTH:
        coins, chain_tokens = PhiloxCoins(seed, len(tokens), rounds), ()
        target_probs = [probs_of(TARGET, tokens)]
        for depth in range(GAMMA):
            draft_probs = probs_of(NEAR, tokens + chain_tokens)
            chain_tokens += ((coins.pick if shared else coins.draft)(draft_probs, depth),)
            target_probs.append(probs_of(TARGET, tokens + chain_tokens))
        draft = Draft.chains([list(chain_tokens)], [[point(t) for t in chain_tokens]])
        verdict = match.verify(draft, [target_probs], [coins])
        tokens += tuple(verdict.emitted(draft, 0))
        accepted, tested, rounds = accepted + len(verdict.paths[0]), tested + len(verdict.tests[0]), rounds + 1
    return tokens[:LENGTH], accepted, tested


@pytest.mark.parametrize("num_seeds", [2_000, pytest.param(10_000, marks=pytest.mark.parity)])
def test_match_is_plain_for_thousands_of_seeds(num_seeds):
    plain = [plain_text(seed) for seed in range(num_seeds)]
    done = [matched_text(seed, shared=seed % 2 == 0) for seed in range(num_seeds)]
    assert [text for text, _, _ in done] == plain
    rates = [sum(d[1] for d in done[i::2]) / sum(d[2] for d in done[i::2]) for i in (0, 1)]
    assert 0.3 < rates[1] < rates[0] < 1, "shared noise is accepted more often"

    weights = softmax(TARGET.logits_after(()))
    assert stats.chisquare(np.bincount([text[0] for text in plain], minlength=SIZE), weights * num_seeds).pvalue > 1e-4
    q = softmax(NEAR.logits_after(()))
    coins = (PhiloxCoins(seed, 0, 0) for seed in range(num_seeds))
    agree = sum(c.pick(Probs(dense=q), 0) == text[0] for c, text in zip(coins, plain, strict=True))
    assert stats.binomtest(agree, num_seeds, formulas.match_acceptance(weights, q)).pvalue > 1e-4
