"""Tables of token counts: how often each token occurs, and how often after each other token.

A table is counted in one text, or fitted to many texts beforehand. `unigram` and `bigram` draw from tables. A
distribution lists at most MOST_IDS ids, because a draw from all ids of a large vocabulary takes longer than all other
work for a draft, and rare tokens hardly ever agree with the target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from forerun.drafters import Drafter, Known, Needs, Target
from forerun.drafters.shared import artifacts
from forerun.drafters.shared.chains import READ_TOKENS, TextDrafter, draw_chains
from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.models.runner import float_type
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Probs, Sequence

KIND = "ngram"  # the kind of a file that `forerun train ngram` fitted
MOST_IDS = 1024
_DRAWS_AS = {"point": "point", "sampled": "independent"}  # value of the option `draws` -> `Drafter.draws`

Ids = npt.NDArray[np.int64]
Row = tuple[Ids, Ids]  # ids [n] ascending, and their counts [n]
NOTHING: Row = (np.empty(0, np.int64), np.empty(0, np.int64))


class Table(Protocol):
    """Holds token counts: how often each token occurs, and how often each token follows each token (bigrams)."""

    def unigram(self) -> Row:
        """Return the most frequent ids and their counts, at most MOST_IDS."""

    def behind(self, token: int) -> Row:
        """Return the ids that most often followed a token, with their counts, at most MOST_IDS."""

    def best(self, token: int | None) -> int | None:
        """Return the id that most often followed `token`. If `token` is None, return the most frequent id.

        Of equally frequent ids, the lowest is returned. Returns None if nothing was counted.
        """


@dataclass(frozen=True)
class TableOptions:
    """The options: the text in which tokens are counted, and how draft tokens are chosen from these counts."""

    method: ClassVar[str]
    path: str | None = option(None, "file of `forerun train ngram`; none = count the request's own text")
    draws: str = option(
        "point", "point (the most frequent token) or sampled (a draw from the counts; point where a request is greedy)"
    )

    def __post_init__(self) -> None:
        if self.draws not in _DRAWS_AS:
            allowed = " or ".join(_DRAWS_AS)
            raise BadOption(f"{self.method}:draws={shown(self.draws)} is not possible: it must be {allowed}")


def most_frequent(ids: Ids, counts: Ids, most: int = MOST_IDS) -> Row:
    """Return the `most` ids with the highest counts, sorted by id. Of ids with equal counts, the lowest are taken."""
    if len(ids) > most:
        kept = np.lexsort((ids, -counts))[:most]
        ids, counts = ids[kept], counts[kept]
    order = ids.argsort()
    return ids[order], counts[order]


def mixture(row: Row, back_off: Row, k: float) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Return the ids v and their probabilities (C2[v] + k U1[v]) / (sum C2 + k), where U1 = C1 / sum C1.

    row: C2, the counts after the last token. back_off: C1, the counts of single tokens. If k is 0 or `back_off` is
    empty, the probabilities follow `row` alone. If `row` is empty, they follow `back_off` alone.
    """
    ids = np.union1d(row[0], back_off[0])
    weights = np.zeros(len(ids))
    if len(back_off[0]):
        alone = k if len(row[0]) else 1.0
        weights[ids.searchsorted(back_off[0])] += alone * (back_off[1] / back_off[1].sum())
    weights[ids.searchsorted(row[0])] += row[1]
    known = weights > 0
    return ids[known], weights[known] / weights.sum()


class Counter:
    """Growing counts of tokens. best: the most frequent token so far; of equally frequent tokens, the lowest id."""

    __slots__ = ("best", "counts")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.best: int | None = None

    def add(self, token: int) -> None:
        """Count a token."""
        count = self.counts[token] = self.counts.get(token, 0) + 1
        if self.best is None or (count, -token) > (self.counts[self.best], -self.best):
            self.best = token

    def row(self) -> Row:
        """Return the most frequent ids and their counts."""
        counts = self.counts
        ids = np.fromiter(counts, np.int64, len(counts))
        return most_frequent(ids, np.fromiter(counts.values(), np.int64, len(counts)))


class TextTable:
    """The table of one text, which is read in order. before: a text to count first, such as an encoder's input."""

    def __init__(self, before: Seq[int] = ()) -> None:
        self.num_read = 0
        self._alone, self._behind = Counter(), dict[int, Counter]()
        self._unigram: tuple[int, Row] = (-1, NOTHING)  # num_read when it was computed, and the row
        self.read(before, len(before))
        self.num_read = 0

    def read(self, tokens: Seq[int], stop: int) -> None:
        """Count each unread token before index `stop` twice: by itself, and as the successor of the token before it."""
        for i in range(self.num_read, stop):
            self._alone.add(tokens[i])
            if i > 0:
                self._behind.setdefault(tokens[i - 1], Counter()).add(tokens[i])
        self.num_read = stop

    def unigram(self) -> Row:
        """Return the most frequent ids and their counts, at most MOST_IDS."""
        if self._unigram[0] != self.num_read:
            self._unigram = (self.num_read, self._alone.row())
        return self._unigram[1]

    def behind(self, token: int) -> Row:
        """Return the ids that most often followed a token, and their counts, at most MOST_IDS ids."""
        counter = self._behind.get(token)
        return NOTHING if counter is None else counter.row()

    def best(self, token: int | None) -> int | None:
        """Return the id that most often followed `token`. If `token` is None, return the most frequent id."""
        counter = self._alone if token is None else self._behind.get(token)
        return None if counter is None else counter.best


class FittedTable:
    """The table in a file of `forerun train ngram`.

    The file has these arrays. counts [V]: how often each id occurs. starts [V + 1], followers, follower_counts: the ids
    after id u are followers[starts[u] : starts[u + 1]], ascending, and their counts are in follower_counts at the same
    indices. A file of order 1 has only counts.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        self._arrays = {name: array.astype(np.int64) for name, array in arrays.items()}
        counts = self._arrays["counts"]
        known = counts.nonzero()[0]
        self._unigram = most_frequent(known, counts[known])

    def unigram(self) -> Row:
        """Return the most frequent ids and their counts, at most MOST_IDS."""
        return self._unigram

    def behind(self, token: int) -> Row:
        """Return the ids that most often followed a token, and their counts, at most MOST_IDS ids."""
        start, stop = self._arrays["starts"][token : token + 2]
        return most_frequent(self._arrays["followers"][start:stop], self._arrays["follower_counts"][start:stop])

    def best(self, token: int | None) -> int | None:
        """Return the id that most often followed `token`. If `token` is None, return the most frequent id."""
        ids, counts = self._unigram if token is None else self.behind(token)
        return int(ids[counts.argmax()]) if len(ids) else None


def needs(options: TableOptions, target: Known) -> Needs:
    """Check the file, and return empty needs, because the memory plan does not count tables.

    Raises the errors of `artifacts.load`. The arrays are compared with the target's ids only in `load`.
    """
    if options.path is not None:
        artifacts.load(options.path, KIND, target.fingerprint)
    return Needs()


def load(path: str, target: Target, order: int) -> FittedTable:
    """Read a fitted file. Raises UserError if it is incomplete, belongs to another target, or has a lower order."""
    arrays, _ = artifacts.load(path, KIND, artifacts.fingerprint(target.tokenizer, target.num_ids))
    _check_arrays(path, arrays, target.num_ids)
    if order > 1 and "starts" not in arrays:
        raise BadOption(f"{shown(path)} was fitted with --order 1 and holds no pairs: fit it with --order {order}")
    return FittedTable(arrays)


def _check_arrays(path: str, arrays: Mapping[str, npt.NDArray[np.generic]], num_ids: int) -> None:
    """Raise UnsupportedModel if the lengths or the ids in the arrays do not fit a table of `num_ids` ids."""
    wide = {name: array.astype(np.int64) for name, array in arrays.items() if array.dtype.kind in "iu"}
    empty = np.zeros(0, np.int64)
    counts, starts = wide.get("counts", empty), wide.get("starts", np.zeros(num_ids + 1, np.int64))
    followers, follower_counts = wide.get("followers", empty), wide.get("follower_counts", empty)
    fits = (
        (counts.shape, starts.shape, followers.shape) == ((num_ids,), (num_ids + 1,), follower_counts.shape)
        and counts.max() > 0
        and (starts[0], starts[-1]) == (0, len(followers))
        and np.diff(starts).min(initial=0) >= 0
        and 0 <= followers.min(initial=0) <= followers.max(initial=0) < num_ids
    )
    if not fits:
        raise UnsupportedModel(
            f"{shown(path)} holds no table of {num_ids} ids: fit it again with `forerun train ngram`"
        )


Make = Callable[[Table, int, bool], Probs | None]  # (table, last token, whether to sample) -> the next token's probs


class _FittedDrafter(Drafter):
    """A drafter with one table for all texts. It caches the distributions."""

    def __init__(self, draws: str, table: Table, after: Make) -> None:
        self.draws, self.is_free = _DRAWS_AS[draws], draws == "point"
        self._after = functools.lru_cache(4096)(functools.partial(after, table))

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return draw_chains(seqs, budget, coins, self._expected)

    def _expected(self, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        return self._after((drafted or seq.tokens)[-1], not self.is_free and not seq.params.greedy)


class _TextTableDrafter(TextDrafter[TextTable]):
    """A drafter with one table for each text."""

    def __init__(self, draws: str, after: Make) -> None:
        super().__init__(lambda seq: TextTable(seq.source_ids[-READ_TOKENS:]))
        self.draws, self.is_free, self._after = _DRAWS_AS[draws], draws == "point", after

    def behind(self, text: TextTable, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        return self._after(text, (drafted or seq.tokens)[-1], not self.is_free and not seq.params.greedy)


def drafter(options: TableOptions, target: Target, order: int, k: float = 1.0) -> Drafter:
    """Make a drafter with the fitted table in `options.path`. If the path is None, each text gets its own table.

    order: 2 = a guess depends on the last token, 1 = on no token. k: see `mixture`. Raises UserError for a file of
    another target.
    """
    dtype = float_type(target.model)  # the type of the target's probabilities

    def after(table: Table, token: int, samples: bool) -> Probs | None:
        if not samples:
            best = table.best(token if order > 1 else None)
            return None if best is None else Probs(point=best)
        ids, weights = mixture(table.behind(token) if order > 1 else NOTHING, table.unigram(), k)
        return Probs(ids=ids, listed=weights.astype(dtype)) if len(ids) else None

    if options.path is None:
        return _TextTableDrafter(options.draws, after)
    return _FittedDrafter(options.draws, load(options.path, target, order), after)
