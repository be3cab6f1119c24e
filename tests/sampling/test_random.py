"""The generator against published answers, and the coins against the distributions that they promise."""

import functools
import itertools
import math
import operator
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

from forerun.errors import InternalError
from forerun.sampling import random as rng
from forerun.sampling.random import PhiloxCoins
from forerun.testing import enumerate_outcomes
from forerun.theory.formulas import match_acceptance
from forerun.types import Probs
from refusals import refusal
from verify.cases import law_of

# Philox4x32-10, from the known-answer file of Random123 (Salmon et al. 2011).
KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
P, Q = (0.5, 0.3, 0.15, 0.05), (0.3, 0.4, 0.1, 0.2)  # the pair of K8


def dense(*weights: float, dtype: type = np.float64) -> Probs:
    return Probs(dense=np.array(weights, dtype))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert " ".join(f"{w:08x}" for w in rng.philox4x32(counter, key).tolist()) == words
    assert " ".join(f"{w:08x}" for w in rng.philox_words(counter, key)) == words


def test_both_generators_agree_on_any_shape():
    generator = np.random.default_rng(0)
    counters = generator.integers(2**32, size=(3, 2000, 4), dtype=np.uint64)  # more than one chunk
    keys = generator.integers(2**32, size=(3, 2000, 2), dtype=np.uint64)
    words = rng.philox4x32(counters, keys)
    assert words.dtype == np.uint32
    assert words.shape == counters.shape
    for at in [(0, 0), (1, 999), (2, 1999)]:
        assert tuple(words[at].tolist()) == rng.philox_words(counters[at].tolist(), keys[at].tolist())
    assert (rng.philox4x32(counters, keys[0, 0])[2, 7] == rng.philox4x32(counters[2, 7], keys[0, 0])).all()
    assert (rng.philox4x32(counters, keys, rounds=7) != words).any()


def test_uniform53_ends():
    assert rng.uniform53(0, 0) == 0.0
    assert rng.uniform53(0xFFFFFFFF, 0xFFFFFFFF) == 1 - 2.0**-53


def test_gumbel_is_a_function_of_the_lane():
    """Any subset in any order gives the same noise, few ids or many (the generator has a path for each)."""
    ids = np.random.default_rng(1).permutation(5000)
    noise = rng.gumbel(7, 3, ids)
    assert (rng.gumbel(7, 3, np.arange(5000))[ids] == noise).all()
    assert (rng.gumbel(7, 3, ids[:5]) == noise[:5]).all()
    assert rng.gumbel(7, 3, []).shape == (0,)
    assert (rng.gumbel(7, 4, ids) != noise).all()
    assert (rng.gumbel(8, 3, ids) != noise).all()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3


def test_lane_block_layout():
    """Block j supplies the lanes 4j .. 4j + 3, purpose 3, round word 0 (Salmon et al. 2011)."""
    words = rng.philox_words([9, rng.PURPOSE_MATCH, 0, 2], rng.key_of((5 << 32) + 6))
    assert rng.key_of((5 << 32) + 6) == (6, 5)
    expected = [-math.log(-math.log((w + 0.5) * 2**-32)) for w in words]
    assert rng.gumbel((5 << 32) + 6, 9, [8, 9, 10, 11]).tolist() == pytest.approx(expected, rel=1e-14)


def test_coins_depend_on_everything_in_the_counter_and_on_nothing_else():
    probs = Probs(dense=np.full(1000, 1e-3, np.float32))

    def numbers(seed=1, position=5, round=2, depth=3):
        coins = PhiloxCoins(seed, position, round)
        tossed = int(coins.coin(depth) * 1000)
        return coins.draw(probs, depth), coins.draft(probs, depth), tossed, coins.pick(probs, depth)

    base = numbers()
    assert len(set(base)) == 4, "purposes are separate"
    assert numbers() == base
    assert numbers(position=6, depth=2) == base, "only position + depth counts"
    assert all(a != b for a, b in zip(numbers(seed=2), base, strict=True))
    assert all(a != b for a, b in zip(numbers(depth=4), base, strict=True))
    assert [a == b for a, b in zip(numbers(round=3), base, strict=True)] == [False, False, False, True]


def test_purposes_are_different_words():
    """Two draws of one purpose at one depth would be one number; 4 and 5 are taken, too (docs/exactness.md)."""
    words = {name: word for name, word in vars(rng).items() if name.startswith("PURPOSE_")}
    assert words.keys() >= {"PURPOSE_DRAFT", "PURPOSE_ACCEPT", "PURPOSE_NEXT", "PURPOSE_MATCH", "PURPOSE_SEED"}
    assert len({*words.values(), 4, 5}) == len(words) + 2


def test_a_drafter_s_coin_says_nothing_of_the_coins_that_judge():
    """Where draft and acceptance shared a coin, the tokens that the drafter likes most would be kept too often."""
    fine = Probs(dense=np.full(1000, 1e-3))
    coins = [PhiloxCoins(seed, 4, 2) for seed in range(20)]
    drafted, drawn = ([getattr(c, kind)(fine, 1) for c in coins] for kind in ("draft", "draw"))
    tossed = [int(1000 * c.coin(1)) for c in coins]
    for one, other in itertools.combinations((drafted, drawn, tossed), 2):
        assert sum(abs(a - b) <= 1 for a, b in zip(one, other, strict=True)) < 5


def test_coins_of_a_draft_that_begins_later():
    """What they decide is what the coins of the round decide at that index, by every purpose."""
    coins, probs = PhiloxCoins(9, 50, 3), Probs(dense=np.full(64, 1 / 64, np.float32))
    later = rng.LaterCoins(coins, 4)
    depths = range(12)
    for name in ("pick", "draw", "draft"):
        found = [getattr(later, name)(probs, depth) for depth in depths]
        assert found == [getattr(coins, name)(probs, depth + 4) for depth in depths]
        assert found != [getattr(coins, name)(probs, depth) for depth in depths]
    assert [later.picks(probs, d, 3) for d in depths] == [coins.picks(probs, d + 4, 3) for d in depths]
    assert [later.draft(probs, d, 2) for d in depths] == [coins.draft(probs, d + 4, 2) for d in depths]
    accepts = [[own.accept(0.5, d + more, 1) for d in range(64)] for own, more in ((later, 0), (coins, 4), (coins, 0))]
    assert accepts[0] == accepts[1] != accepts[2]


def test_accept_never_for_zero_always_for_one():
    coins = [PhiloxCoins(seed, 0, 0) for seed in range(500)]
    assert not any(c.accept(0.0, 0) for c in coins)
    assert all(c.accept(1.0, 0) for c in coins)
    assert stats.binomtest(sum(c.accept(0.3, 0) for c in coins), 500, 0.3).pvalue > 1e-4
    assert [c.accept(0.5, 0, lane=1) for c in coins] != [c.accept(0.5, 0) for c in coins]


@pytest.mark.parametrize("kind", ["draw", "draft", "pick"])
@pytest.mark.parametrize("weights", [P, (0.0, 0.7, 0.0, 0.3, 0.0), tuple([0.0] * 600 + [0.25, 0.75] + [0.0] * 9)])
def test_draws_have_their_distribution(kind, weights):
    """Chi-square over 4,000 seeds; weights of 0 must never be drawn. Rows longer than one block of the sum included."""
    counts = Counter(getattr(PhiloxCoins(seed, 11, 1), kind)(dense(*weights), 2) for seed in range(4_000))
    support = [i for i, w in enumerate(weights) if w > 0]
    assert set(counts) == set(support)
    assert stats.chisquare([counts[i] for i in support], [4_000 * weights[i] for i in support]).pvalue > 1e-4


def test_draw_needs_no_normalisation():
    for seed in range(50):
        a, b = (PhiloxCoins(seed, 0, 0).draw(dense(*(scale * w for w in P)), 0) for scale in (1.0, 2.0**-20))
        assert a == b


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_draw_at_the_ends_of_the_uniform(uniform, dtype):
    """Ids of probability 0 at either end, thirds that do not add up, weights far below rounding."""
    for weights in ([0, 1 / 3, 1 / 3, 1 / 3, 0], [0] * 700 + [1e-30, 1.0, 1e-30] + [0] * 700, [0, 0, 1, 0]):
        assert weights[rng._draw(dense(*weights, dtype=dtype), uniform)] > 0
    assert rng._draw(dense(*([0] * 3 + [0.1] * 10 + [0] * 3)), 1 - 2.0**-53) == 12
    assert rng._draw(dense(*([0] * 3 + [0.1] * 10 + [0] * 3)), 0.0) == 3


def test_points_are_returned_without_randomness():
    coins = PhiloxCoins(0, 0, 0)
    assert [coins.draw(Probs(point=9), 0), coins.draft(Probs(point=9), 0), coins.pick(Probs(point=9), 0)] == [9] * 3


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.5, -0.1], [math.nan, 1.0], [math.inf, 1.0]])
def test_what_is_no_distribution_is_refused(weights):
    for kind in ("draw", "pick"):
        assert "cannot be drawn from" in refusal(InternalError, getattr(PhiloxCoins(0, 0, 0), kind), dense(*weights), 0)
    assert "needs a point or a dense" in refusal(InternalError, PhiloxCoins(0, 0, 0).draw, Probs(), 0)


@pytest.mark.parametrize("scale", [0.1, 3.0, 12.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pruning_never_changes_a_pick(scale, dtype):
    """pick skips ids that cannot win; the full argmax over all noise is the definition."""
    generator = np.random.default_rng(3)
    for seed in range(60):
        probs = softmax(generator.standard_normal(2001, dtype) * dtype(scale))
        probs[generator.random(2001) < 0.3] = 0
        ids = np.flatnonzero(probs)
        scores = np.log(probs[ids].astype(np.float64)) + rng.gumbel(seed, 4, ids)
        assert PhiloxCoins(seed, 1, 0).pick(Probs(dense=probs), 3) == ids[scores.argmax()]


def test_k8_shared_noise_agrees_as_often_as_the_formula_says():
    assert match_acceptance(P, Q) == pytest.approx(0.7195, abs=5e-5)
    agree = sum(c.pick(dense(*P), 0) == c.pick(dense(*Q), 0) for c in (PhiloxCoins(s, 0, 0) for s in range(8_000)))
    assert stats.binomtest(agree, 8_000, match_acceptance(P, Q)).pvalue > 1e-4


# ------------------------------------------------------------------------------------------------------- enumeration


def test_enumeration_visits_everything_once():
    ways = enumerate_outcomes(lambda c: (c.draw(dense(0.5, 0.0, 0.5), 0), c.accept(0.25, 1), c.accept(1.0, 2)))
    expected = {(0, True, True): 0.125, (0, False, True): 0.375, (2, True, True): 0.125, (2, False, True): 0.375}
    assert {result: weight for weight, result in ways} == expected
    assert enumerate_outcomes(lambda c: 1) == [(1.0, 1)]


def test_enumerated_picks_are_exact():
    """Shared noise by polygon areas: the marginals are the distributions, and agreement is the closed form."""
    p, q = (0.5, 0.3, 0.2), (0.3, 0.2, 0.5)
    ways = enumerate_outcomes(lambda c: (c.pick(dense(*p), 4), c.at(3).pick(dense(*q), 1), c.pick(dense(*p), 4)))
    assert all(first == again for _, (first, _, again) in ways)
    for side, weights in enumerate((p, q)):
        marginal = [sum(w for w, result in ways if result[side] == x) for x in range(3)]
        assert marginal == pytest.approx(weights, abs=1e-14)
    assert sum(w for w, result in ways if result[0] == result[1]) == pytest.approx(match_acceptance(p, q), abs=1e-14)


def test_enumerated_picks_at_other_indices_are_independent():
    ways = enumerate_outcomes(lambda c: (c.pick(dense(0.6, 0.4), 0), c.pick(dense(0.5, 0.5), 1)))
    assert {r: w for w, r in ways} == pytest.approx({(0, 0): 0.3, (0, 1): 0.3, (1, 0): 0.2, (1, 1): 0.2}, abs=1e-14)


def test_enumerated_picks_agree_with_the_generator():
    """Three distributions looked at through one noise: joint frequencies of the real coins against the polygons."""
    distributions = [dense(0.5, 0.3, 0.2), dense(0.2, 0.3, 0.5), dense(0.1, 0.8, 0.1)]
    exact = law_of(lambda c: tuple(c.pick(p, 0) for p in distributions))
    drawn = Counter(tuple(PhiloxCoins(s, 0, 0).pick(p, 0) for p in distributions) for s in range(3000))
    assert set(drawn) <= set(exact)
    cells = [r for r in exact if exact[r] * 3000 >= 5]
    observed = [drawn[r] for r in cells]
    expected = np.array([exact[r] for r in cells])
    assert stats.chisquare(observed, expected * sum(observed) / expected.sum()).pvalue > 1e-4


def test_more_than_three_ids_cannot_be_picked_exactly():
    assert "at most 3 ids" in refusal(InternalError, enumerate_outcomes, lambda c: c.pick(dense(*P), 0))


def test_derived_seeds_are_64_bits_and_unlike_each_other():
    seeds = [rng.derived_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert [rng.derived_seed(seed, 0) for seed in (0, 1, 2**64 - 1)] == [0, 1, 2**64 - 1]
    assert min((a ^ b).bit_count() for a, b in itertools.pairwise(seeds)) > 8
    derived = [rng.derived_seed(seed, index) for seed in (0, 1) for index in range(1, 100)]
    assert functools.reduce(operator.or_, derived) == 2**64 - 1, "each of the 64 bits is set in some"
    assert functools.reduce(operator.and_, derived) == 0, "and in some it is not"
