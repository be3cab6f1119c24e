"""Fits the tables of the drafters `unigram` and `bigram` to texts: counts of tokens and of pairs of adjacent tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.drafters.shared import artifacts, tables
from forerun.errors import BadOption, NotFound
from forerun.train.texts import encoded_texts, refuse_out

MOST_COUNT = 2**32 - 1  # of a file's counts
MERGE_PAIRS = 4_000_000  # pairs that wait until they are counted together

Ints = npt.NDArray[np.int64]


@dataclass
class Fit:
    """Holds the counts of tokens in the texts added so far.

    num_ids: the vocabulary size V. order: 1 = count only tokens; 2 = also count pairs of adjacent tokens of a text.
    """

    num_ids: int
    order: int
    num_tokens: int = 0
    counts: Ints = field(init=False)  # [V]
    _pairs: Ints = field(init=False)  # [n] sorted: before * V + after
    _pair_counts: Ints = field(init=False)  # [n]
    _waiting: list[Ints] = field(init=False, default_factory=list)
    _num_waiting: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.num_ids, np.int64)
        self._pairs = self._pair_counts = np.zeros(0, np.int64)

    def add(self, ids: Seq[int]) -> None:
        """Add the tokens of one text to the counts. Ids from num_ids on are left out."""
        text = np.asarray(ids, np.int64)
        text = text[text < self.num_ids]  # the model never writes an id that it has no row for
        self.num_tokens += len(text)
        self.counts += np.bincount(text, minlength=self.num_ids)
        if self.order > 1 and len(text) > 1:
            self._waiting.append(text[:-1] * self.num_ids + text[1:])
            self._num_waiting += len(text) - 1
            if self._num_waiting >= MERGE_PAIRS:
                self._merge()

    def arrays(self, max_followers: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays for the file of tables (see tables.FittedTable).

        For each token, the `max_followers` most frequent next tokens are kept. Among next tokens with equal counts, the
        lowest ids are kept.
        """
        arrays: dict[str, npt.NDArray[np.generic]] = {"counts": self.counts.clip(max=MOST_COUNT).astype(np.uint32)}
        if self.order == 1:
            return arrays
        self._merge()
        before, after = np.divmod(self._pairs, self.num_ids)
        order = np.lexsort((after, -self._pair_counts, before))
        before, after, counts = before[order], after[order], self._pair_counts[order]
        ranks = np.arange(len(before)) - np.searchsorted(before, before)  # of followers of a token, by count
        kept = ranks < max_followers
        before, after, counts = before[kept], after[kept], counts[kept]
        order = np.lexsort((after, before))
        return arrays | {
            "starts": np.searchsorted(before[order], np.arange(self.num_ids + 1)),
            "followers": after[order].astype(np.int32),
            "follower_counts": counts[order].clip(max=MOST_COUNT).astype(np.uint32),
        }

    def _merge(self) -> None:
        new, new_counts = np.unique(np.concatenate([self._pairs[:0], *self._waiting]), return_counts=True)
        pairs = np.union1d(self._pairs, new)
        counts = np.zeros(len(pairs), np.int64)
        counts[pairs.searchsorted(self._pairs)] += self._pair_counts
        counts[pairs.searchsorted(new)] += new_counts
        self._pairs, self._pair_counts = pairs, counts
        self._waiting, self._num_waiting = [], 0


def train(
    target: str | None,
    texts: Seq[Path],
    out: Path,
    *,
    order: int = 2,
    max_followers: int = 64,
    max_text_bytes: int = 10**8,
    progress: Callable[[Fit], None] = lambda fit: None,
) -> Fit:
    """Fit tables to texts with the tokenizer of a target, write the tables to `out`, and return the counts.

    target: as for LLM; None = the default target. texts, max_text_bytes: as in `read_texts`. order: see Fit.
    max_followers: see Fit.arrays. progress: called after each text. Raises UserError for wrong options, if possible
    before a text is read.
    """
    for name, value, most in (("order", order, 2), ("max_followers", max_followers, tables.MOST_IDS)):
        if not 1 <= value <= most:
            raise BadOption(f"{name}={value} is not possible: it must be in 1 .. {most}")
    refuse_out(out)
    ids, num_ids, fingerprint = encoded_texts(target, texts, max_text_bytes)
    fit = fitted(ids, num_ids, order, progress)
    save(fit, out, fingerprint, max_followers)
    return fit


def fitted(
    texts: Iterable[Seq[int]], num_ids: int, order: int, progress: Callable[[Fit], None] = lambda fit: None
) -> Fit:
    """Count the tokens of texts, which are given as token ids. Raises NotFound where the texts have no token.

    num_ids, order: see Fit. progress: called after each text.
    """
    fit = Fit(num_ids, order)
    for ids in texts:
        fit.add(ids)
        progress(fit)
    if not fit.num_tokens:
        raise NotFound("the text has no tokens: name files or folders with text")
    return fit


def save(fit: Fit, out: Path, fingerprint: str, max_followers: int = 64) -> None:
    """Write the counts to the file `out`, which `tables.load` reads. fingerprint: the tokenizer's fingerprint."""
    facts = {"order": str(fit.order), "num_tokens": str(fit.num_tokens)}
    artifacts.save(out, tables.KIND, fit.arrays(max_followers), fingerprint, facts)
