"""The file of the drafter `datastore`: texts, and a suffix array that makes them searchable."""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq

import numpy as np

from forerun.drafters.shared import artifacts
from forerun.drafters.shared.continuations import END_OF_TEXT, Tokens
from forerun.errors import UnsupportedModel, shown

KIND = "datastore"  # the kind of the fitted file


class Datastore:
    """Searchable texts. tokens [n]: each text, followed by END_OF_TEXT. suffixes [n]: the suffix array of `tokens`."""

    def __init__(self, tokens: Tokens, suffixes: Tokens) -> None:
        self._tokens, self._suffixes = tokens, suffixes

    def places(self, pattern: Seq[int]) -> range:
        """Return the range of suffix array indices whose suffixes begin with `pattern`."""
        wanted, length = list(pattern), len(pattern)

        def beginning(entry: int) -> list[int]:
            start = self._suffixes[entry]
            tokens: list[int] = self._tokens[start : start + length].tolist()
            return tokens

        entries = range(len(self._suffixes))
        first = bisect.bisect_left(entries, wanted, key=beginning)
        return range(first, bisect.bisect_right(entries, wanted, first, key=beginning))

    def longest(self, context: Seq[int], min_match: int) -> tuple[int, range]:
        """Return the length of the longest suffix of a context that occurs in the texts, and its range (see `places`).

        Returns (0, range(0)) if no suffix of at least `min_match` tokens occurs. If a suffix occurs, every shorter
        suffix occurs, too, so a binary search finds the length.
        """
        match = (0, range(0))
        low, high = min_match, len(context)
        while low <= high:
            length = (low + high + 1) // 2
            if places := self.places(context[len(context) - length :]):
                match, low = (length, places), length + 1
            else:
                high = length - 1
        return match

    def continuations(self, length: int, places: range, most: int, num_tokens: int) -> list[list[int]]:
        """Return the next `num_tokens` tokens after each of up to `most` occurrences of a suffix of `length` tokens.

        places: the indices of the occurrences in the suffix array.
        """
        chosen = [places[i * len(places) // most] for i in range(most)] if len(places) > most else places
        ends = self._suffixes[list(chosen)] + length
        return [self._tokens[end : end + num_tokens].tolist() for end in ends]


def load(path: str, fingerprint: str, num_ids: int) -> Datastore:
    """Read a datastore's file. Raises the errors of `artifacts.load`, and UnsupportedModel if it holds no datastore.

    num_ids: the number of the target's ids; a file with larger ids is refused.
    """
    arrays, _ = artifacts.load(path, KIND, fingerprint)
    tokens, suffixes = (arrays.get(name, np.empty(0)) for name in ("tokens", "suffixes"))
    is_whole = len(tokens) == len(suffixes) > 0 and tokens[-1] == END_OF_TEXT and int(tokens.max()) < num_ids
    if not is_whole:
        raise UnsupportedModel(f"{shown(path)} holds no datastore: make it again with `forerun train datastore`")
    return Datastore(tokens.astype(np.intc, copy=False), suffixes.astype(np.intc, copy=False))
