"""Choices among equally right ways to say something: drawn at random, or all of them in turn."""

import random
from collections.abc import Callable, Iterator, Sequence as Seq
from typing import Protocol, TypeVar

T = TypeVar("T")


class Pick(Protocol):
    """What chooses: each call returns one of its options."""

    def __call__(self, options: Seq[T]) -> T: ...


Say = Callable[[Pick], str]


class Drawn:
    """Chooses at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, options: Seq[T]) -> T:
        return options[self._rng.randrange(len(options))]


class Path:
    """Follows a list of choices, and takes the first option behind its end."""

    def __init__(self, choices: Seq[int]) -> None:
        self.choices, self.sizes = list(choices), list[int]()

    def __call__(self, options: Seq[T]) -> T:
        at = len(self.sizes)
        if at == len(self.choices):
            self.choices.append(0)
        self.sizes.append(len(options))
        return options[self.choices[at]]


def every(say: Say) -> Iterator[str]:
    """Yield what is said by every sequence of choices."""
    choices: list[int] = []
    while True:
        path = Path(choices)
        yield say(path)
        choices = path.choices
        while choices and choices[-1] + 1 == path.sizes[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1
