"""Retrieval from a datastore: continue as a collection of texts does behind the longest end of this one (REST).

`forerun train datastore` makes the file from texts (He et al. 2311.08252): their tokens, and a suffix array, which
lists all places of the tokens in the order of what stands there. So the places where a suffix of the text occurs are
found by binary search, in O(log n). What followed at num_continuations of them, spread evenly over all, is merged into
a tree with counts, of which the likeliest nodes are drafted.

The published rule for sampled outputs draws once for each path and again for the next token, which favours the draft.
Here every node is a point mass, and the rule that judges it is exact.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from forerun.drafters import Drafter, Target, artifacts
from forerun.drafters.continuations import END_OF_TEXT, Guess, Tokens, grow
from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.text.tokenizer import Tokenizer
from forerun.types import Budget, Coins, Draft, Sequence

KIND = "datastore"
SHAPES = {"path": "chain", "tree": "tree"}


@dataclass(frozen=True)
class Options:
    """Which file, and how a guess is made of it."""

    path: str | None = field(default=None, metadata={"help": "file that `forerun train datastore` made"})
    max_match: int = field(default=16, metadata={"help": "longest suffix looked for, in tokens", "min": 1, "max": 255})
    min_match: int = field(default=1, metadata={"help": "shortest suffix looked for, in tokens", "min": 1, "max": 255})
    shape: str = field(default="path", metadata={"help": "path = the most frequent chain, tree = the likeliest nodes"})
    num_continuations: int = field(
        default=64, metadata={"help": "occurrences of the suffix that are looked at", "min": 1, "max": 5000}
    )

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise BadOption(f"datastore:shape={shown(self.shape)} is not possible: it must be path or tree")
        if self.min_match > self.max_match:
            raise BadOption(
                f"datastore:min_match={self.min_match} is not possible: it must be at most max_match={self.max_match}"
            )


class Datastore:
    """Texts that can be searched. tokens [n]: each text with END_OF_TEXT behind it. suffixes [n]: a suffix array."""

    def __init__(self, tokens: Tokens, suffixes: Tokens) -> None:
        self._tokens, self._suffixes = tokens, suffixes

    def places(self, pattern: Seq[int]) -> range:
        """Return which entries of the suffix array begin with a pattern."""
        wanted, length = list(pattern), len(pattern)

        def beginning(entry: int) -> list[int]:
            start = self._suffixes[entry]
            found: list[int] = self._tokens[start : start + length].tolist()
            return found

        entries = range(len(self._suffixes))
        first = bisect.bisect_left(entries, wanted, key=beginning)
        return range(first, bisect.bisect_right(entries, wanted, first, key=beginning))

    def longest(self, context: Seq[int], min_match: int) -> tuple[int, range]:
        """Return the length of the longest suffix of a context that occurs, and its places; (0, none) without one.

        Where a suffix occurs every shorter one does, so the length itself is found by binary search.
        """
        found = (0, range(0))
        low, high = min_match, len(context)
        while low <= high:
            length = (low + high + 1) // 2
            if places := self.places(context[len(context) - length :]):
                found, low = (length, places), length + 1
            else:
                high = length - 1
        return found

    def continuations(self, length: int, places: range, most: int, num_tokens: int) -> list[list[int]]:
        """Return what follows a suffix of `length` tokens at `most` of its places, num_tokens each."""
        chosen = [places[i * len(places) // most] for i in range(most)] if len(places) > most else places
        ends = self._suffixes[list(chosen)] + length
        return [self._tokens[end : end + num_tokens].tolist() for end in ends]


class DatastoreDrafter(Drafter):
    """Looks the end of each text up in one datastore, which no request changes."""

    draws = "point"
    is_free = True

    def __init__(self, options: Options, store: Datastore) -> None:
        self.options, self.shape, self._store = options, SHAPES[options.shape], store

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        guesses = [self._guess(seq, budget.num_tokens[b]) for b, seq in enumerate(seqs)]
        return Draft.joined([guess.draft(b, budget) for b, guess in enumerate(guesses)])

    def _guess(self, seq: Sequence, most: int) -> Guess:
        o = self.options
        length, places = self._store.longest(seq.tokens[-o.max_match :], o.min_match) if most else (0, range(0))
        rows = self._store.continuations(length, places, o.num_continuations, most)
        return grow(rows, most, self.shape == "tree", end_ids=seq.end_ids)


def check(options: Options, tokenizer: Tokenizer, ignore_config_keys: frozenset[str]) -> None:
    """Refuse a missing file, or one of another tokenizer, before any weight is read."""
    _load(options, artifacts.fingerprint(tokenizer, tokenizer.num_ids), tokenizer.num_ids)


def build(options: Options, target: Target) -> Drafter:
    """Read the file. Raises what `artifacts.load` raises, and BadOption where no file is named."""
    fingerprint = artifacts.fingerprint(target.tokenizer, target.num_ids)
    return DatastoreDrafter(options, _load(options, fingerprint, target.num_ids))


def _load(options: Options, fingerprint: str, num_ids: int) -> Datastore:
    if options.path is None:
        raise BadOption(
            "datastore needs a file: make one with `forerun train datastore --target TARGET --out FILE`, then write "
            "datastore:path=FILE"
        )
    arrays, _ = artifacts.load(options.path, KIND, fingerprint)
    tokens, suffixes = (arrays.get(name, np.empty(0)) for name in ("tokens", "suffixes"))
    is_whole = len(tokens) == len(suffixes) > 0 and tokens[-1] == END_OF_TEXT and int(tokens.max()) < num_ids
    if not is_whole:
        raise UnsupportedModel(f"{shown(options.path)} holds no datastore: make it again with `forerun train datastore`")
    return Datastore(tokens.astype(np.intc, copy=False), suffixes.astype(np.intc, copy=False))
