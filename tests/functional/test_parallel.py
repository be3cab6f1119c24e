"""speculate(f, g, guess, n): what runs beside what, and what is refused. That it is exact is in test_exact.py."""

import threading
from typing import Any

import pytest

from forerun.errors import BadOption
from forerun.functional import speculate


def test_g_runs_on_the_guess_before_f_has_answered() -> None:
    """f waits until g was called, and would wait for ever if it were asked first."""
    called = threading.Event()

    def f(x: int) -> list[float]:
        assert called.wait(30)
        return [0.0, 1.0]

    def g(x: int, y: int) -> int:
        called.set()
        return x + y

    found = speculate(f, g, lambda x: [0.0, 1.0], 1, start=5)
    assert (found.result, found.acceptance_rate) == (6, 1.0)


def test_what_a_dropped_guess_raises_is_dropped() -> None:
    def g(x: int, y: int) -> int:
        if y == 0:
            raise ZeroDivisionError
        return x + y

    found = speculate(lambda x: [0.0, 1.0], g, lambda x: [1.0, 0.0], 3, start=0)
    assert (found.result, found.acceptance_rate) == (3, 0.0)
    assert [(choice.drawn, choice.guessed, choice.is_kept) for choice in found.choices] == [(1, 0, False)] * 3
    with pytest.raises(ZeroDivisionError):
        speculate(lambda x: [1.0, 0.0], g, lambda x: [1.0, 0.0], 1, start=0)


def test_a_seed_repeats_the_draws() -> None:
    runs = [
        speculate(lambda x: [0.5, 0.5], lambda x, y: y, lambda x: [0.4, 0.6], 20, start=0, seed=3) for _ in range(2)
    ]
    said, again = ([choice.drawn for choice in run.choices] for run in runs)
    assert said == again
    assert set(said) == {0, 1}


def test_no_steps() -> None:
    found = speculate(_never, _never, _never, 0, start="x")
    assert (found.result, found.choices, found.acceptance_rate) == ("x", [], 0.0)


@pytest.mark.parametrize(
    ("f", "guess", "sentence"),
    [
        ([0.5, 0.6], [0.5, 0.5], "f must give"),
        ([0.5, 0.5], [1.5, -0.5], "guess must give"),
        ([0.5, 0.5], [[1.0]], "guess must give"),
        ([float("nan"), 0.5], [0.5, 0.5], "f must give"),
        ([0.2, 0.3, 0.5], [0.5, 0.5], "f gave 3 weights and guess 2"),
    ],
)
def test_what_is_no_distribution_is_refused(f: Any, guess: Any, sentence: str) -> None:
    with pytest.raises(BadOption, match=sentence):
        speculate(lambda x: f, lambda x, y: x, lambda x: guess, 1, start=0)


def test_a_number_of_steps_below_0_is_refused() -> None:
    with pytest.raises(BadOption, match="n=-1"):
        speculate(_never, _never, _never, -1, start=0)


def _never(*_: Any) -> Any:
    raise AssertionError("not to be called")
