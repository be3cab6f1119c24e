"""acceptance.py: decaying averages by rank, for any shape of draft, which also score guesses that were not drafted."""

import random

import numpy as np
import pytest

from forerun.pacing.acceptance import FIRST_GUESS, MAX_RANKS, Acceptance


def chain(known: Acceptance, alpha: float, num_rounds: int, length: int = 6, request: int = 0, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(num_rounds):
        accepted = next((i for i in range(length) if rng.random() >= alpha), length)
        known.observe(request, length, range(accepted))


def shares(known: Acceptance, request: int = 0) -> np.ndarray:
    return known.request_shares(request, known.drafter_shares())


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_a_chain(alpha):
    """P(rank i) is alpha^(i+1), also beyond the ranks that were ever drafted."""
    known = Acceptance()
    chain(known, alpha, 400)
    assert shares(known)[:10] == pytest.approx([alpha ** (i + 1) for i in range(10)], abs=0.2)


def test_a_tree():
    """Three children of the root and two of the first: ranks 0 to 4; at most one child of a node is accepted."""
    rng, known, first = random.Random(1), Acceptance(), (0.5, 0.3, 0.1)
    for _ in range(2000):
        root = rng.choices((0, 1, 2, None), (*first, 0.1))[0]
        ranks = [] if root is None else [root]
        ranks += [rng.choices((3, 4), (0.6, 0.4))[0]] if root == 0 else []
        known.observe(0, 5, ranks)
    assert shares(known)[:5] == pytest.approx([0.5, 0.3, 0.1, 0.1, 0.1], abs=0.12), "never rising: best first"


def test_nothing_is_known_at_first():
    assert Acceptance().drafter_shares()[0] == pytest.approx(FIRST_GUESS, abs=0.01)


def test_it_forgets():
    known = Acceptance()
    chain(known, 0.95, 300)
    chain(known, 0.0, 60)
    assert shares(known)[0] < 0.25
    chain(known, 0.95, 60)
    assert shares(known)[0] > 0.75


def test_a_request_is_shrunk_to_its_drafter_and_then_its_own():
    known = Acceptance()
    for request in range(1, 9):
        chain(known, 0.9, 40, request=request, seed=request)
    assert shares(known, 0)[0] == pytest.approx(known.drafter_shares()[0]), "a new request is as the others are"
    chain(known, 0.0, 2)
    one_bad_round = shares(known, 0)[0]
    assert 0.55 < one_bad_round < 0.85
    chain(known, 0.0, 40)
    assert shares(known, 0)[0] < 0.2
    assert shares(known, 1)[0] > 0.7, "the others are not much worse for it"
    known.forget(0)
    assert shares(known, 0)[0] == pytest.approx(known.drafter_shares()[0])


def test_a_draft_that_found_nothing_counts_as_not_found_and_not_as_wrong():
    known = Acceptance()
    chain(known, 0.9, 100)
    before = shares(known)
    for _ in range(200):
        known.observe(0, 0, [])
    assert shares(known) == before
    assert known.found_share < 0.05


def test_never_rising_and_never_out_of_range():
    rng, known = random.Random(5), Acceptance()
    for _ in range(300):
        num = rng.randrange(0, 40)
        known.observe(rng.randrange(4), num, sorted(rng.sample(range(num), rng.randrange(0, num + 1))))
        for request in range(5):
            found = shares(known, request)
            assert len(found) == MAX_RANKS
            assert found[-1] >= 0
            assert found[0] <= 1
            assert (np.diff(found) <= 0).all()
