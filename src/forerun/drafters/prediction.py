"""Copy a text that the output is expected to resemble: SamplingParams.prediction, as for an edit of a file.

A pointer stands in the prediction behind the part that the output has followed; the tokens behind it are drafted. Where
the output leaves the prediction, the pointer is lost, until the last resync_n committed tokens occur in the prediction:
then it stands behind them, at the occurrence next to where it was lost. Without a prediction the prompt is copied, and
the pointer is lost at first. An encoder-decoder's prompt is its source, which is copied from its beginning: this is
shallow aggressive decoding (Sun et al. 2021, arXiv 2106.04970).

The guesses are point masses and cost nothing. A prediction never changes the output, however wrong it is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun.drafters import Drafter, Target
from forerun.drafters.shared.chains import TextDrafter
from forerun.registry import option
from forerun.types import Probs, Sequence


@dataclass(frozen=True)
class Options:
    """How the copy finds its place again."""

    resync_n: int = option(2, "last tokens that must occur in the prediction, once the output left it", min=1, max=64)


class Copy:
    """How far an output has followed its prediction: a function of the committed tokens alone.

    at: index of the token of `prediction` that comes next; None = the output has left it.
    """

    def __init__(self, prediction: Seq[int], num_read: int, resync_n: int, is_at_start: bool) -> None:
        self.prediction, self.num_read = prediction, num_read
        self.at: int | None = 0 if is_at_start else None
        self._found_at, self._lost_at = 0, 0
        self._resync_n, self._ids = resync_n, np.array(prediction, dtype=np.int64)

    def read(self, tokens: Seq[int], stop: int) -> None:
        """Follow the tokens up to `stop`."""
        for i in range(self.num_read, stop):
            if self.at is not None and self.next_token(0) == tokens[i]:
                self.at += 1
                continue
            if self.at is not None and self.at > self._found_at:  # else the place was wrong, and is no hint
                self._lost_at = self.at
            last = tokens[max(0, i + 1 - self._resync_n) : i + 1]
            self.at = behind(self._ids, last, self._lost_at) if len(last) == self._resync_n else None
            self._found_at = -1 if self.at is None else self.at
        self.num_read = stop

    def next_token(self, depth: int) -> int | None:
        """Return the token of the prediction `depth` places behind the next one; None where there is none."""
        place = None if self.at is None else self.at + depth
        return None if place is None or place >= len(self.prediction) else self.prediction[place]


def behind(ids: np.ndarray, last: Seq[int], place: int) -> int | None:
    """Return an index behind an occurrence of `last` in ids [n], with a token there; None where there is none.

    It is the first index from `place` on, else the last before it.
    """
    num = len(ids) - len(last)
    if num <= 0:
        return None
    matches = np.ones(num, dtype=bool)  # [i] = `last` stands at i
    for j, token in enumerate(last):
        matches &= ids[j : j + num] == token
    found = matches.nonzero()[0] + len(last)
    if not len(found):
        return None
    return int(found[min(int(found.searchsorted(place)), len(found) - 1)])


class PredictionDrafter(TextDrafter[Copy]):
    """Keeps each sequence's place in its prediction."""

    def __init__(self, options: Options) -> None:
        super().__init__(self._copy)
        self.options = options

    def behind(self, text: Copy, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        token = text.next_token(len(drafted))
        return None if token is None else Probs.of_point(token)

    def _copy(self, seq: Sequence) -> Copy:
        num = seq.num_prompt_tokens
        if seq.prediction_ids:
            return Copy(seq.prediction_ids, num, self.options.resync_n, is_at_start=True)
        if seq.source_ids:
            copy = Copy(seq.source_ids, 0, self.options.resync_n, is_at_start=False)
            copy.read(seq.tokens, num)  # an answer may be begun, by decoder_prompt
            copy.at = copy.at or 0
            return copy
        # The last prompt token is read: with it the place of the copy is looked for the first time.
        return Copy(seq.tokens[:num], num - 1, self.options.resync_n, is_at_start=False)


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return PredictionDrafter(options)
