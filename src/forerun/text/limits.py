"""Limits the work of chat templates. A template that would never end, or would fill the memory, is refused.

`sandbox` does the counting. This file defines how many characters each operation counts as. Templates of published
models take some ten steps per message, and make a few times as many characters as the conversation has.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sized
from string import Formatter

MAX_TEMPLATE_BYTES = 2**18  # of all templates of a model together; the longest published ones have about 30 KB
MAX_STEPS = 1_000_000  # rounds of loops, calls, filters and operators of one rendering
MAX_MADE_CHARACTERS = 500_000_000  # of all texts that are made during the rendering, printed or not
MAX_PRINTED_CHARACTERS = 10_000_000  # of the text that the template prints
MAX_CPU_S = 10.0  # processor time of the thread that renders
STEPS_PER_LOOK = 64  # the clock is read every so many steps
ITEM_CHARACTERS = 8  # characters that a number, or a place in a list, counts as


class TooMuch(Exception):
    """The error for a limit that is exceeded. Its message continues a sentence that begins with the template's name."""


class Budget:
    """The steps, characters and time that one rendering has used up. Every method raises TooMuch beyond a limit."""

    def __init__(self) -> None:
        self._num_steps, self._num_characters, self._end_s = 0, 0, time.thread_time() + MAX_CPU_S

    def step(self, num_characters: int = 0) -> None:
        """Count one step of a template, such as a call or a loop's iteration.

        num_characters: the characters that the step counts as. If they are known beforehand, the caller calls this
        method before the step runs, so that too large a step is never run.
        """
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise TooMuch(f"takes more than {MAX_STEPS:,} steps")
        if self._num_steps % STEPS_PER_LOOK == 0 and time.thread_time() > self._end_s:
            raise TooMuch(f"takes more than {MAX_CPU_S:g} s")
        self.add(num_characters)

    def add(self, num_characters: int) -> None:
        """Count further characters, without counting a step."""
        self._num_characters += num_characters
        if self._num_characters > MAX_MADE_CHARACTERS:
            raise TooMuch(f"makes texts and lists of more than {MAX_MADE_CHARACTERS:,} characters")

    def weigh(self, value: object) -> int:
        """Return about how many characters a value's text has. Each list or mapping in the value counts as a step.

        A short list can have a long text: it may hold a second list twice, which holds a third list twice, and so on.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, Collection):
            return ITEM_CHARACTERS
        if isinstance(value, dict):
            value = [*value, *value.values()]
        self.step()
        return sum(map(self.weigh, value)) + ITEM_CHARACTERS * len(value)

    def product(self, left: object, right: object) -> int:
        """Return the number of characters that `left * right` counts as: a product, or a repeated text or list."""
        if isinstance(left, int) and isinstance(right, int):
            return _digits(left.bit_length() + right.bit_length())
        value, times = (right, left) if isinstance(left, int) else (left, right)
        return self.weigh(value) * max(times, 0) if isinstance(times, int) else 0


def check_printed(text: str) -> None:
    """Raise TooMuch for a printed text with more than MAX_PRINTED_CHARACTERS characters."""
    if len(text) > MAX_PRINTED_CHARACTERS:
        raise TooMuch(f"prints more than {MAX_PRINTED_CHARACTERS:,} characters")


def power(left: object, right: object) -> int:
    """Return the number of characters that `left ** right` counts as."""
    if isinstance(left, int) and isinstance(right, int):
        return _digits(left.bit_length() * max(right, 0))
    return 0


def _digits(num_bits: int) -> int:
    """Return the number of characters that a whole number of num_bits bits counts as.

    This number is proportional to the square of num_bits, because multiplying long numbers takes long.
    """
    return num_bits * num_bits // 64


def percent(text: object, values: object) -> int:
    """Return the sum of the numbers in the `%` format `text`, such as 9 for "%9d".

    A format with "*" takes numbers from `values`, so the numbers in `values` are added.
    """
    if not isinstance(text, str):
        return 0
    return _numbers(f"{text}{values!r}" if "*" in text else text)


def widths(text: str) -> int:
    """Return the sum of the numbers in the format specs of a `str.format` text, such as 9 for "{:9}".

    Raises TooMuch for a spec that takes a width from the values.
    """
    specs = [spec or "" for _, _, spec, _ in Formatter().parse(text)]
    if any("{" in spec for spec in specs):
        raise TooMuch("formats a text with a width that is a value")
    return sum(map(_numbers, specs))


def join(separator: str, items: object) -> int:
    """Return the number of characters of the separators in `separator.join(items)`."""
    return len(separator) * len(items) if isinstance(items, Sized) else 0


def replace(text: str, old: object, new: object) -> int:
    """Return the number of characters that `text.replace(old, new)` inserts."""
    return text.count(old) * len(new) if isinstance(old, str) and isinstance(new, str) else 0


def numbers(values: Iterable[object]) -> int:
    """Return the sum of the absolute values of the integers in `values`, because each integer may be a width."""
    return sum(abs(value) for value in values if isinstance(value, int))


def _numbers(text: str) -> int:
    return sum(int(digits[:20]) for digits in re.findall(r"\d+", text))


def made(value: object) -> int:
    """Return the number of characters that a new text or list counts as; 0 for any other value."""
    if isinstance(value, str):
        return len(value)
    return ITEM_CHARACTERS * len(value) if isinstance(value, list | tuple | dict) else 0
