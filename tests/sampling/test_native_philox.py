"""The native generator, draws and race against numpy's, against published answers, and against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forerun.sampling import arithmetic, random as rng
from forerun.sampling.random import PhiloxCoins, _place, _race
from forerun.types import Probs
from sampling.samplers import BY_NUMPY, KINDS, Row, row, sampler
from sampling.test_random import KNOWN

WORD = st.integers(0, 2**32 - 1)


def weights_of(kind: str, size: int, seed: int) -> Row:
    """Weights of a softmax; not normalised, zeros included."""
    return arithmetic.exp(np.minimum(row(kind, size, seed) - row(kind, size, seed).max(), 0))


def by_definition(weights: Row, ids: np.ndarray, seed: int, position: int) -> int:
    """argmin of -log u / weight over all ids, none left out."""
    lanes = np.asarray(ids, dtype=np.int64)
    blocks, index = np.unique(lanes >> 2, return_inverse=True)
    uniforms = rng._match_uniforms(seed, position, blocks)[index, lanes & 3]
    with np.errstate(divide="ignore"):
        times = -arithmetic.log(uniforms) / weights.astype(np.float64)
    return int(lanes[times == times.min()].min())


# --------------------------------------------------------------------------------------------------------- generator


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(native, counter, key, words):
    assert " ".join(f"{w:08x}" for w in native.philox(*counter, *key)) == words


@settings(max_examples=200, deadline=None)
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_both_generators_agree(counter, key):
    assert sampler("baseline").philox(*counter, *key) == rng.philox_words(counter, key)


def test_log_has_the_bits_of_numpys(native):
    generator = np.random.default_rng(0)
    borders = math.sqrt(0.5) * (1 + np.arange(-50, 50) * 2.0**-45)
    x = np.concatenate([generator.random(3000), 1 - generator.random(1000) * 1e-9, borders, [2.0**-33, 1e-300, 7e200]])
    assert [native.log(value) for value in x.tolist()] == arithmetic.log(x).tolist()


def test_every_lane_of_the_race_has_its_own_noise(native):
    """Two ids with equal weights: who wins is who has the larger word; over all lanes of three blocks of 64."""
    words = rng.philox4x32([[9, rng.PURPOSE_MATCH, 0, j] for j in range(48)], rng.key_of(2**40 + 3)).reshape(-1)
    for i in range(192):
        for j in (i + 1, i + 63, i + 64, 191):
            if i < j < 192:
                weights = np.zeros(200, np.float32)
                weights[[i, j]] = 0.5
                assert native.race(weights, None, 2**40 + 3, 9) == (i if words[i] >= words[j] else j)


# -------------------------------------------------------------------------------------------------------- the race

SIZES = st.sampled_from([1, 2, 3, 5, 63, 64, 65, 129, 1000, 4096])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), SIZES, st.integers(0, 2**64 - 1), st.integers(0, 2**33), st.floats(-40, 40))
def test_races_agree(native, kind, size, seed, position, scale):
    """At every scale of the weights, with and without a list of ids."""
    weights = weights_of(kind, size, seed % 1000) * np.float32(2.0**scale)
    winner = by_definition(weights, np.arange(size), seed, position)
    assert native.race(weights, None, seed, position) == _race(weights, None, seed, position) == winner
    ids = np.flatnonzero(np.random.default_rng(seed).random(3 * size) < 0.3)[:size]
    if len(ids) and weights[: len(ids)].any():
        some = weights[: len(ids)]
        winner = native.race(some, ids, seed, position)
        assert winner == _race(some, ids, seed, position) == by_definition(some, ids, seed, position)


def test_whole_vocabularies(kernels):
    for seed, kind in enumerate(("flat", "peaked", "all equal", "halves and gaps")):
        weights = weights_of(kind, 128_256, seed)
        weights /= weights.sum()
        assert kernels.race(weights, None, seed, 77) == by_definition(weights, np.arange(len(weights)), seed, 77)
        ids = np.flatnonzero(weights)[:: 50 + seed]
        assert kernels.race(weights[ids], ids, seed, 77) == by_definition(weights[ids], ids, seed, 77)


def test_ids_beyond_2_to_the_18_have_noise_of_their_own(kernels):
    """Published vocabularies have up to 262,208 ids."""
    weights, last = np.zeros(262_208, np.float32), np.arange(2**18, 262_208)
    weights[last] = 2.0**-6
    for seed in range(20):
        winner = by_definition(weights[last], last, seed, 77)
        assert kernels.race(weights, None, seed, 77) == kernels.race(weights[last], last, seed, 77) == winner


def words_of(size: int, seed: int, position: int) -> np.ndarray:
    return rng.philox4x32([[position, rng.PURPOSE_MATCH, 0, j] for j in range(size // 4)], rng.key_of(seed)).reshape(-1)


@pytest.mark.parametrize("rest", [0.0, 1e-9, 1e-4])
def test_ties_of_the_race_go_to_the_lowest_id(kernels, rest):
    """Among 2^17 ids some have the same word, so that equal weights finish at the same time, to the last bit."""
    size, num_tied = 2**17, 0
    for seed in range(3):
        words = words_of(size, seed, 4)
        order = np.argsort(words, kind="stable")
        for at in np.flatnonzero(np.diff(words[order].astype(np.int64)) == 0):
            i, j = sorted(order[at : at + 2].tolist())
            if words[i] < 2**31:
                continue  # late: another id may win
            weights = np.full(size, rest * 1e-5, np.float32)
            weights[[i, j]] = 0.5
            assert kernels.race(weights, None, seed, 4) == i
            assert kernels.race(weights[[i, j]], np.array([i, j]), seed, 4) == i
            num_tied += 1
    assert num_tied >= 2


@pytest.mark.parametrize(("size", "seed", "position", "far"), [(4096, 1, 2, 1000), (1024, 289_736, 5, 236)])
def test_the_best_word_wins_with_the_smallest_weight_that_can(kernels, size, seed, position, far):
    """Pruning must not lose an id whose weight is tiny and whose time is tinier: just before and just after.

    The second one has the largest of all words: 1 - u is 2^-33, less than which there is not.
    """
    words = words_of(size, seed, position)
    best = int(words.argmax())
    assert size == 4096 or words[best] == 2**32 - 1
    heavy = (best + far) % size
    weights = np.zeros(size, np.float32)
    weights[heavy] = 1
    best_time, heavy_time = arithmetic.log((words[[best, heavy]] + 0.5) * 2.0**-32).tolist()
    for factor, winner in ((1 - 1e-6, heavy), (1 + 1e-6, best)):
        weights[best] = best_time / heavy_time * factor
        assert kernels.race(weights, None, seed, position) == winner


# ----------------------------------------------------------------------------------------------------------- the draw


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), SIZES, st.integers(0, 1000), st.integers(0, 2**53 - 1), st.floats(-100, 20))
def test_draws_agree(native, kind, size, seed, uniform, scale):
    weights = weights_of(kind, size, seed) * np.float32(2.0**scale)
    if weights.any():
        for u in (0, uniform, 2**53 - 1):
            found = native.place(weights, u)
            assert found == _place(weights, u)
            assert weights[found] > 0


@pytest.mark.parametrize("offset", [0, 1, 510, 511, 512, 513, 1023, 1024])
def test_the_borders_between_places_are_exact(kernels, offset):
    """Four equal weights own a quarter of the uniforms each, to the last of 2^53; zeros around them own nothing."""
    weights = np.zeros(2000, np.float32)
    places = [offset, offset + 1, offset + 5, offset + 700]
    weights[places] = 0.3
    for quarter, expected in enumerate(places):
        assert kernels.place(weights, quarter * 2**51) == expected
        assert kernels.place(weights, (quarter + 1) * 2**51 - 1) == expected


def test_draws_are_the_inverse_of_the_sum_of_ticks(kernels):
    for seed, kind in enumerate(("flat", "peaked", "halves and gaps")):
        weights = weights_of(kind, 20_000, seed)
        mass = arithmetic.ticks(weights, len(weights), float(weights.max())).cumsum().tolist()
        for uniform in np.random.default_rng(seed).integers(2**53, size=30).tolist():
            expected = next(i for i, m in enumerate(mass) if m > uniform * mass[-1] >> 53)
            assert kernels.place(weights, uniform) == expected


@pytest.mark.parametrize("bad", [-1e-30, math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 64, 99])
def test_what_is_no_distribution_is_refused(kernels, bad, at):
    weights = weights_of("flat", 100, 0)
    weights[at] = bad
    assert kernels.place(weights, 5) is None
    assert kernels.race(weights, None, 5, 5) is None
    assert kernels.race(weights, np.arange(0, 200, 2), 5, 5) is None
    assert kernels.place(np.zeros(70, np.float32), 5) is kernels.race(np.zeros(70, np.float32), None, 5, 5) is None
    zeros = np.zeros(100, np.float32)
    zeros[at] = -0.0
    zeros[7] = 1e-30
    assert kernels.place(zeros, 2**53 - 1) == kernels.race(zeros, None, 5, 5) == 7, "minus zero is a weight"


def test_the_text_of_a_seed_is_this(kernels, monkeypatch):
    """Pinned: what a seed says may not change with a library, a processor, or from version to version by accident."""
    monkeypatch.setattr(arithmetic, "native_sampler", lambda: None if kernels is BY_NUMPY else kernels)
    words = rng.philox4x32([[j, 1, 2, 3] for j in range(1250)], (4, 5)).reshape(-1)
    probs = Probs(dense=arithmetic.exp(-(words >> 8).astype(np.float32) * np.float32(2.0**-21)))
    coins = PhiloxCoins(seed=2**63 + 11, position=100, round=7)
    made = [[draw(probs, depth) for depth in range(6)] for draw in (coins.draw, coins.draft, coins.pick)]
    assert made == [
        [4278, 3745, 1227, 1999, 3841, 773],
        [147, 659, 138, 884, 3658, 1298],
        [270, 2396, 3291, 3550, 682, 1716],
    ]
    assert "".join(str(int(coins.accept(0.5, depth))) for depth in range(8)) == "01010111"
