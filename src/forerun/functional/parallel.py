"""Speculative sampling outside of language models: two slow functions run side by side, and the results stay exact.

Let f(x) be a distribution p from which the input y of g is drawn. For example, f is a policy that chooses the action of
a simulator g. One after the other, f and g take t_f + t_g. Here y' is drawn from q, a cheap guess of p, and g runs on
y' while f runs. Then y' is kept with probability min(1, p(y') / q(y')). Otherwise y is drawn from norm(max(0, p - q)),
and g runs again. So y has exactly the distribution p (Leviathan et al. 2023, arXiv 2211.17192, section 6, last
paragraph), and a step takes max(t_f, t_g) where the guess is kept. The test is the engine's own rule `ratio`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from forerun.errors import BadOption
from forerun.sampling.random import PhiloxCoins, weights_of
from forerun.types import Coins, Draft, Probs
from forerun.verify import ratio

X = TypeVar("X")
Distribution = Any  # weights of the inputs 0 to V - 1 of g: a list, an array or a tensor [V], or a Probs
NUM_THREADS = 3  # for f, for g, and for a g that is still running on a guess that was not kept
UNNORMALISED = 1e-6  # how far from 1 a sum may be


@dataclass(frozen=True)
class Choice(Generic[X]):
    """One step: the drawn input, the guessed input, and the result of g."""

    drawn: int
    guessed: int
    result: X

    @property
    def is_kept(self) -> bool:
        """Whether the guess was kept, so that g ran on the right input while f was running."""
        return self.drawn == self.guessed


@dataclass(frozen=True)
class Speculated(Generic[X]):
    """The results of all steps. result: the result of the last step, or the start if there was no step."""

    result: X
    choices: list[Choice[X]]

    @property
    def acceptance_rate(self) -> float:
        """The share of guesses that were kept; 0.0 where nothing was guessed."""
        return sum(choice.is_kept for choice in self.choices) / len(self.choices) if self.choices else 0.0


def speculate(
    f: Callable[[X], Distribution],
    g: Callable[[X, int], X],
    guess: Callable[[X], Distribution],
    n: int = 1,
    *,
    start: X,
    coins: Callable[[int], Coins] | None = None,
    seed: int | None = None,
    executor: Executor | None = None,
) -> Speculated[X]:
    """Repeat y ~ f(x), x <- g(x, y) n times from `start`, and run g on a guess of y while f runs.

    All draws and results together have exactly the distribution of that loop, whatever `guess` returns.

    Args:
        f: x -> weights of the inputs of g, 0 to V - 1, that add up to 1. f runs in another thread.
        g: (x, y) -> the next x. g runs in another thread, and also on guesses that are not kept. So g must change
            nothing outside of itself, and its errors on such guesses are dropped.
        guess: x -> weights as f returns them, but cheap. It runs in this thread.
        n: the number of steps, at least 0. If the functions ignore x, the steps are independent draws.
        start: the first x.
        coins: step -> the random decisions of that step (docs/exactness.md); None = Philox.
        seed: the 64-bit seed of Philox; None = a random seed.
        executor: where f and g run; None = threads, which this call waits for at the end. Functions that compute in
            Python itself need processes (ProcessPoolExecutor) to run side by side.

    Raises BadOption for weights that are no distribution, or whose lengths differ. Raises what f, g or guess raise.
    """
    if n < 0:
        raise BadOption(f"n={n} is not possible: it must be at least 0")
    if coins is None:
        key = secrets.randbits(64) if seed is None else seed
        coins = lambda step: PhiloxCoins(key, step, 0)  # noqa: E731
    pool = executor or ThreadPoolExecutor(NUM_THREADS, "forerun-speculate")
    x = start
    choices = list[Choice[X]]()
    try:
        for step in range(n):
            choices.append(_step(f, g, guess, x, coins(step), pool))
            x = choices[-1].result
    finally:
        if executor is None:
            pool.shutdown(cancel_futures=True)
    return Speculated(x, choices)


def _step(
    f: Callable[[X], Distribution],
    g: Callable[[X, int], X],
    guess: Callable[[X], Distribution],
    x: X,
    coins: Coins,
    pool: Executor,
) -> Choice[X]:
    slow: Future[Distribution] = pool.submit(f, x)
    q = distribution(guess(x), "guess")
    guessed = coins.draft(q, 0)
    ahead: Future[X] = pool.submit(g, x, guessed)
    p = distribution(slow.result(), "f")
    if p.point is None and q.point is None and len(p.weights) != len(q.weights):
        raise BadOption(f"f gave {len(p.weights)} weights and guess {len(q.weights)}: both are of the inputs of g")
    draft = Draft.chains([[guessed]], [[q]])
    # After a kept guess nothing is drawn: the second distribution is a point mass, which needs no coin.
    drawn = ratio.verify(draft, [[p, Probs.of_point(guessed)]], [coins]).emitted(draft, 0)[0]
    if drawn == guessed:
        return Choice(drawn, guessed, ahead.result())
    ahead.cancel()
    return Choice(drawn, guessed, pool.submit(g, x, drawn).result())


def distribution(weights: Distribution, name: str) -> Probs:
    """Return weights as a Probs in float64; a Probs stays as it is. Raises BadOption where they are no distribution."""
    if isinstance(weights, Probs):
        return weights
    vector = np.array(weights, dtype=np.float64)
    is_one = vector.ndim == 1 and abs(vector.sum() - 1) < UNNORMALISED and (vector >= 0).all()
    if not is_one:
        raise BadOption(f"{name} must give a vector of weights that are not negative and add up to 1")
    probs = Probs(dense=vector)
    weights_of(probs)
    return probs
