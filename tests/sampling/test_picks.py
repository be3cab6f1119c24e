"""The first ids of the race of a match draw, in production and by enumeration."""

import numpy as np
import pytest

from forerun.sampling.random import PhiloxCoins, gumbel
from forerun.types import Probs
from verify.cases import law_of


@pytest.mark.parametrize("is_listed", [False, True])
def test_picks_are_the_largest_of_log_probs_plus_noise(is_listed: bool) -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        weights = rng.dirichlet(np.full(40, 0.3)) * (rng.random(40) < 0.5)
        weights /= weights.sum()
        ids = np.flatnonzero(weights)
        probs = Probs(ids=ids, listed=weights[ids]) if is_listed else Probs(dense=weights)
        order = ids[np.argsort(-(np.log(weights[ids]) + gumbel(seed, 7, ids)))]
        coins = PhiloxCoins(seed, 5, 0)
        assert coins.picks(probs, 2, 4) == order[:4].tolist()
        assert coins.picks(probs, 2, 99) == order.tolist()
        assert coins.picks(probs, 2, 1) == [coins.pick(probs, 2)]


def test_an_enumerated_order_has_its_probability() -> None:
    p = np.array([0.5, 0.3, 0.2])
    law = law_of(lambda way: tuple(way.picks(Probs(dense=p), 0, 2)))
    assert len(law) == 6
    for (x, y), share in law.items():
        assert share == pytest.approx(p[x] * p[y] / (1 - p[x]), abs=1e-12)  # without replacement


def test_picks_and_a_later_pick_share_their_noise() -> None:
    p, q = (Probs(dense=np.array(w)) for w in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]))
    direct = law_of(lambda way: (way.pick(q, 0), way.pick(p, 0)))
    assert law_of(lambda way: (way.picks(q, 0, 2)[0], way.pick(p, 0))) == pytest.approx(direct, abs=1e-12)
