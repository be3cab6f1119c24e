"""One distribution, computed three ways: by numpy, by the native kernels of every instruction set, and by full sorts.

The first two must agree in every bit, and the third holds both to what they promise, ties at every threshold included.
"""

import hashlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forerun.errors import BadOption, InternalError
from forerun.sampling import arithmetic, random as rng
from forerun.sampling.pipeline import Filters, _argmax, _probs, probs
from forerun.sampling.random import PhiloxCoins
from forerun.types import Probs, SamplingParams
from sampling.samplers import BY_NUMPY, KINDS, Row, row

NONE = -math.inf
Made = tuple[np.ndarray | None, np.ndarray] | None


def same(a: Made, b: Made) -> bool:
    """Equal in form, in type and in every bit."""
    if a is None or b is None:
        return a is b
    (ids, values), (other_ids, other_values) = a, b
    if ids is None or other_ids is None:
        return ids is other_ids and values.dtype == other_values.dtype and values.tobytes() == other_values.tobytes()
    return ids.dtype == other_ids.dtype and ids.tolist() == other_ids.tolist() and same((None, values), (None, b[1]))


def by_definition(logits: Row, temperature: float, top_k: int, log_min_p: float, top_p: float) -> dict[int, float]:
    """Id -> probability, with a stable sort of everything and Python's integers."""
    scaled = (logits - logits.max()) / np.float32(temperature)
    weights = arithmetic.exp(scaled)
    ticks = arithmetic.ticks(weights, len(logits), 1.0).tolist()
    kept = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))[: top_k or None]
    kept = [i for i in kept if scaled[i] >= np.float32(log_min_p)]
    if top_p < 1:
        masses = list(itertools.accumulate(ticks[i] for i in kept))
        goal = math.ceil(top_p * float(masses[-1]))
        kept = kept[: 1 + sum(mass < goal for mass in masses)]
    divisor = np.float32(sum(ticks[i] for i in kept) * 2.0 ** (1 - arithmetic.tick_bits(len(logits))))
    return {i: float(weights[i] / divisor) for i in sorted(kept) if weights[i] > 0}


def as_dict(made: Made) -> dict[int, float]:
    assert made is not None
    ids, values = made
    ids = np.arange(len(values)) if ids is None else ids
    return {int(i): float(p) for i, p in zip(ids, values, strict=True) if p > 0}


# ------------------------------------------------------------------------------------------------------- elementary


def test_exp_is_within_one_unit_in_the_last_place_and_monotone():
    bits = np.arange(0x80000000, int(np.float32(-87).view(np.uint32)) + 1, 1013, dtype=np.int64).astype(np.uint32)
    x = bits.view(np.float32)
    made, exact = arithmetic.exp(x), np.exp(x.astype(np.float64))
    assert np.abs((made - exact) / np.spacing(exact.astype(np.float32))).max() < 1
    assert (np.diff(made) <= 0).all()
    ends = np.array([0.0, -0.0, -87.0, np.nextafter(np.float32(-87), np.float32(-99)), -1e30, -np.inf], np.float32)
    assert arithmetic.exp(ends).tolist() == [1.0, 1.0, float(np.float32(np.exp(-87.0))), 0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 50_257])
def test_masses_are_the_same_in_numpy_and_in_every_instruction_set(native, size):
    for kind in KINDS:
        logits = row(kind, size, size)
        weights = arithmetic.exp(logits - logits.max()) * np.float32(0.37)
        wanted = weights.astype(np.float64).sum()
        assert arithmetic._mass(weights) == native.mass(weights) == pytest.approx(wanted, rel=1e-9)
        whole = native.mass_of_logits(logits)
        assert arithmetic._mass_of_logits(logits) == whole == pytest.approx(wanted / np.float32(0.37), rel=1e-6)
    for none in ([0.0], [math.nan, 1.0], [math.inf, 1.0], []):
        assert arithmetic._mass(np.array(none, np.float32)) == native.mass(np.array(none, np.float32)) == 0
    for none in ([-math.inf], [math.nan, 1.0], [math.inf, 1.0]):
        logits = np.array(none, np.float32)
        assert arithmetic._mass_of_logits(logits) == native.mass_of_logits(logits) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_entropies_and_chances_are_those_of_a_softmax(dtype):
    for kind in KINDS:
        logits = row(kind, 700, 3).astype(dtype)
        scores = logits.astype(np.longdouble)
        p = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        wanted = float(-(p[p > 0] * np.log(p[p > 0])).sum())
        assert arithmetic.entropy_of_logits(logits) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert arithmetic.entropy(p.astype(dtype)) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        for place in (0, int(logits.argmax())):
            assert arithmetic.chance(logits, place) == pytest.approx(float(p[place]), rel=1e-6, abs=1e-38)


def test_log_is_within_one_unit_in_the_last_place():
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.random(50_000), 1 - generator.random(20_000) * 1e-9, [1.0, 2.0**-33, 1 - 2.0**-33]])
    exact = np.log(x.astype(np.longdouble))
    assert np.abs((arithmetic.log(x) - exact) / np.spacing(np.abs(exact.astype(np.float64)))).max() < 1
    assert arithmetic.log(1.0) == 0


def test_ticks_have_no_order_and_cannot_overflow():
    weights = np.random.default_rng(0).random(200_000).astype(np.float32)
    counts = arithmetic.ticks(weights, len(weights), float(weights.max()))
    assert counts.sum() == counts[::-1].cumsum()[-1] == sum(counts.tolist())
    exact = weights.astype(np.float64)
    assert np.abs(counts / counts.sum() - exact / exact.sum()).max() < 2.0**-44
    for size in (1, 2**18 - 1, 2**18, 2**23, 2**40):
        assert size * 2 ** arithmetic.tick_bits(size) <= 2**62
    assert arithmetic.ticks(np.array([3e-45, 1.5], np.float32), 2, 1.5).tolist() == [0, 3 * 2**42]


def test_the_bits_are_these():
    """Pinned: a numpy, a compiler or a processor that computes something else is found out here.

    Logits come from Philox words, so that no library's random numbers or normal distribution stand between.
    """
    words = rng.philox4x32(np.stack(np.broadcast_arrays(np.arange(1500), 7, 0, 0), -1), (1, 2)).reshape(-1)
    logits = (words >> 8).astype(np.float32) * np.float32(2.0**-20) - np.float32(8)
    digest = hashlib.sha256(arithmetic.exp(-np.abs(logits)).tobytes())
    for filters in ((0.8, 0, NONE, 1.0, 0), (0.8, 0, NONE, 0.95, 0), (0.7, 50, NONE, 0.9, 375), (1.0, 0, -3.0, 1.0, 0)):
        digest.update(_probs(logits, *filters)[1].tobytes())
    digest.update(arithmetic.log((words + 0.5) * 2.0**-32).tobytes())
    assert digest.hexdigest() == "e8985c756e12d687a89a11e64137a98aec76b1f17acfdac082c98d93113841ed"


# ----------------------------------------------------------------------------------------------------- numpy and native

SIZES = st.sampled_from([1, 2, 3, 5, 16, 63, 64, 65, 127, 128, 129, 511, 513, 1000, 4096])
FILTERS = st.tuples(
    st.sampled_from([1e-5, 0.3, 0.8, 1.0, 1.7, 100.0, 3e38]),
    st.sampled_from([0, 0, 1, 2, 3, 50, 600]),
    st.sampled_from([NONE, NONE, 0.0, -0.5, -3.0, -99.0]),
    st.sampled_from([1.0, 1.0, 1e-9, 0.17, 0.5, 0.9, 0.999, 1 - 1e-12]),
    st.sampled_from([0, 30, 10**6]),
)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(KINDS), SIZES, st.integers(0, 10**6), FILTERS)
def test_every_bit_is_the_same(native: Any, kind: str, size: int, seed: int, filters: Filters) -> None:
    logits = row(kind, size, seed)
    with np.errstate(over="ignore"):
        made = _probs(logits, *filters)
    assert same(native.probs(logits, *filters), made)
    assert native.argmax(logits) == _argmax(logits) == int(logits.argmax())


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(KINDS), SIZES, st.integers(0, 10**6), FILTERS)
def test_numpy_is_the_definition(kind: str, size: int, seed: int, filters: Filters) -> None:
    logits = row(kind, size, seed)
    with np.errstate(over="ignore"):
        assert as_dict(_probs(logits, *filters)) == by_definition(logits, *filters[:4])


def test_an_id_has_a_probability_down_to_87_below_the_largest(kernels):
    below = np.nextafter(np.float32(-87), np.float32(-88))
    _, values = kernels.probs(np.array([0, -87, below, -88, -np.inf] * 20, np.float32), 1.0, 0, NONE, 1.0, 0)
    assert (values > 0).tolist() == [True, True, False, False, False] * 20


WIDE = [(0.8, 50, NONE, 0.9), (0.8, 0, NONE, 0.95), (0.8, 0, NONE, 1.0), (1.3, 5000, -4.0, 0.5), (1.0, 0, -3.0, 0.999)]


@pytest.mark.parametrize("size", [128_256, 200_000, 262_208])
def test_whole_vocabularies(native, size):
    """As wide as published models are; beyond 2^18 ids a weight has fewer ticks."""
    for seed, kind in enumerate(("flat", "peaked", "whole numbers", "close")):
        logits = row(kind, size, seed)
        for filters in WIDE[seed % 2 :: 2] if size > 128_256 else WIDE:
            assert same(native.probs(logits, *filters, size // 16), _probs(logits, *filters, size // 16))
            assert native.argmax(logits) == _argmax(logits)


def test_rows_that_lie_anywhere(native):
    """No alignment is assumed, and a row is never written to."""
    memory = row("flat", 5000, 3)
    before = memory.copy()
    memory.setflags(write=False)
    for start in range(1, 18):
        part = memory[start : start + 4500]
        for filters in WIDE:
            assert same(native.probs(part, *filters, 0), _probs(part, *filters, 0))
    assert (memory == before).all()


# ------------------------------------------------------------------------------------------------------- thresholds


def kept_ids(kernels: Any, logits: Row, *filters: float, most_listed: int = 0) -> list[int]:
    return list(as_dict(kernels.probs(logits, *filters, most_listed)))


@pytest.mark.parametrize("size", [70, 700, 7000])
@pytest.mark.parametrize("k", [1, 5, 6, 7, 63, 64, 65, 68, 69])
def test_ties_of_top_k_are_filled_by_lowest_id(kernels, size, k):
    """Five ids are above; the others are tied, so each further one kept is the lowest that is left."""
    logits = np.zeros(size, np.float32)
    above = [3, 62, 63, 64, size - 1]
    logits[above] = 1
    others = [i for i in range(size) if i not in above]
    assert kept_ids(kernels, logits, 1.0, k, NONE, 1.0) == (above[:k] if k <= 5 else sorted(above + others[: k - 5]))


@pytest.mark.parametrize("size", [128, 2048, 8192])
@pytest.mark.parametrize("share", [1, 2, 17, 63, 64, 65, 127])
def test_ties_of_top_p_are_filled_by_lowest_id(kernels, size, share):
    """All equal: `share` of 128 parts are the first ids, exactly; a hair more is one id more."""
    logits = np.full(size, 2.5, np.float32)
    count = share * size // 128
    assert kept_ids(kernels, logits, 1.0, 0, NONE, share / 128) == list(range(count))
    assert kept_ids(kernels, logits, 1.0, 0, NONE, math.nextafter(share / 128, 1)) == list(range(count + 1))
    assert kept_ids(kernels, logits, 1.0, 0, NONE, share / 128 + 1e-9, most_listed=size) == list(range(count + 1))


@pytest.mark.parametrize("size", [64, 4096])
def test_ties_of_top_p_below_the_largest(kernels, size):
    """One id has half of the mass and the tied ones share the other half."""
    logits = np.full(size, np.float32(math.log(1 / (size - 1))), np.float32)
    logits[size // 2] = 0
    ticks = arithmetic.ticks(arithmetic.exp(logits), size, 1.0)
    total, each = int(ticks.sum()), int(ticks[0])
    for num_ties in (1, 2, size // 2 - 1, size // 2, size - 2):
        reached = (int(ticks[size // 2]) + num_ties * each) / total
        first = [i for i in range(size) if i != size // 2]
        for top_p, more in ((reached * (1 - 1e-12), 0), (reached * (1 + 1e-12), 1)):
            assert kept_ids(kernels, logits, 1.0, 0, NONE, top_p) == sorted([size // 2, *first[: num_ties + more]])


@pytest.mark.parametrize("depth", [0.003, 0.25, 5.0, 9.0, 17.0])
def test_a_goal_that_is_reached_exactly_takes_nobody_more(kernels, depth):
    """The mass of the better half is the goal, to the tick: the next best value stays out, wherever it lies."""
    logits = np.full(8192, -depth, np.float32)
    logits[1::2] = 0
    counts = arithmetic.ticks(arithmetic.exp(logits), 8192, 1.0)
    total, half = float(counts.sum()), int(counts[1::2].sum())
    near = half / total + np.arange(-8, 9) * 2.0**-53
    top_p = next(float(p) for p in near if math.ceil(float(p) * total) == half)
    assert kept_ids(kernels, logits, 1.0, 0, NONE, top_p) == list(range(1, 8192, 2))
    assert kept_ids(kernels, logits, 1.0, 0, NONE, top_p + 2.0**-52) == [0, *range(1, 8192, 2)]


@pytest.mark.parametrize("size", [2**18 - 1, 2**18])
def test_the_smallest_mass_that_counts(native, size):
    """More than half a tick is one, and up to one and a half; of 2^18 ids and more a tick is twice as large."""
    logits = np.full(size, math.log(0.6) - 42 * math.log(2), np.float32)
    logits[0] = 0
    made = _probs(logits, 1.0, 0, NONE, 1 - 1e-8, 0)
    assert same(native.probs(logits, 1.0, 0, NONE, 1 - 1e-8, 0), made)
    assert 1 < len(as_dict(made)) < size


def test_min_p_keeps_what_is_equal(kernels):
    logits = np.array([0, -3, np.nextafter(np.float32(-3), np.float32(-4)), -2.5, -np.inf] * 40, np.float32)
    expected = [i for i in range(200) if i % 5 in (0, 1, 3)]
    for top_k in (0, 199):
        assert kept_ids(kernels, logits, 1.0, top_k, -3.0, 1.0) == expected
    assert kept_ids(kernels, logits, 1.0, 0, 0.0, 1.0) == list(range(0, 200, 5))


def test_ties_that_only_the_temperature_makes(kernels):
    """Different logits whose scaled values round to one float are ties, and the lowest id wins."""
    logits = np.array([0.0, 3e-39, 7e-39, 1e-39] * 500, np.float32)
    assert len(set(logits.tolist())) == 4
    assert kept_ids(kernels, logits, 3e38, 3, NONE, 1.0) == [0, 1, 2]


def test_a_list_has_at_most_as_many_ids_as_it_may(kernels):
    logits = row("flat", 5000, 1)
    logits[:10] = -200  # far enough to have no weight
    for top_k, log_min_p, top_p in ((50, NONE, 1.0), (0, NONE, 0.5), (0, -2.0, 1.0)):
        count = len(as_dict(kernels.probs(logits, 1.0, top_k, log_min_p, top_p, 0)))
        ids, values = kernels.probs(logits, 1.0, top_k, log_min_p, top_p, count)
        assert len(ids) == len(values) == count
        assert kernels.probs(logits, 1.0, top_k, log_min_p, top_p, count - 1)[0] is None
    ids, values = kernels.probs(logits, 1.0, 4999, NONE, 1.0, 4999)
    assert len(ids) == 4990, "nine ids passed top-k and have no weight"
    assert values.min() > 0


# ------------------------------------------------------------------------------------------------------- dead ends


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_what_is_no_number_is_seen_wherever_it_stands(native, size, bad):
    for place in {0, size // 2, size - 1}:
        logits = row("flat", size, 0)
        logits[place] = bad
        assert native.argmax(logits) is None
        for filters in WIDE:
            assert native.probs(logits, *filters, 0) is None
    nothing = np.full(size, -np.inf, np.float32)
    assert native.argmax(nothing) is native.probs(nothing, 1.0, 0, NONE, 1.0, 0) is None


def test_the_errors_are_the_same(kernels, monkeypatch):
    monkeypatch.setattr(arithmetic, "native_sampler", lambda: None if kernels is BY_NUMPY else kernels)
    for temperature in (0.0, 1.0):
        with pytest.raises(InternalError, match="no numbers"):
            probs(np.array([1.0, math.nan], np.float32), SamplingParams(temperature=temperature))
        with pytest.raises(BadOption, match="no token is left"):
            probs(np.array([1.0], np.float32), SamplingParams(temperature=temperature, logit_bias={0: NONE}))
    for weights in ([0.0, 0.0], [0.5, -0.1], [math.nan, 1.0], [math.inf, 1.0]):
        for draw in (PhiloxCoins(0, 0, 0).draw, PhiloxCoins(0, 0, 0).pick):
            with pytest.raises(InternalError, match="cannot be drawn from"):
                draw(Probs(dense=np.array(weights, np.float32)), 0)


def test_the_pipeline_takes_the_native_sampler(native, monkeypatch):
    """Through `probs`: greedy, lists and vectors; float64 rows stay with numpy."""
    logits = row("peaked", 4096, 5)
    everything = [{"temperature": 0.0}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0.7}, {"min_p": 0.1}]
    by_kernels = []
    for kernels in (None, native):
        monkeypatch.setattr(arithmetic, "native_sampler", lambda kernels=kernels: kernels)
        by_kernels.append([probs(logits, SamplingParams(**params)) for params in everything])
        assert probs(logits.astype(np.float64), SamplingParams()).dense.dtype == np.float64
    for a, b in zip(*by_kernels, strict=True):
        assert (a.point, a.dense is None, a.ids is None) == (b.point, b.dense is None, b.ids is None)
        assert a.point is not None or (a.weights == b.weights).all()
        assert a.ids is None or (a.ids == b.ids).all()
    assert [a.ids is not None for a in by_kernels[1]] == [False, True, False, True]
