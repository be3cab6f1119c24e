"""Copy a text that the output is expected to resemble: SamplingParams.prediction, as for an edit of a file.

A pointer into the prediction follows the output: it points to the token after the part that the output has reproduced.
The tokens from the pointer on are drafted. If the output leaves the prediction, the pointer is lost, until the last
`resync_n` committed tokens occur in the prediction. Then the pointer is set to the token after an occurrence of these
tokens: the first occurrence after the place where the pointer was lost, or else the last one before that place. Without
a prediction the prompt is copied, and at first there is no pointer. For an encoder-decoder the source is copied from
its beginning, which is shallow aggressive decoding (Sun et al. 2021, arXiv 2106.04970).

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
    """The options: how the drafter finds its place in the prediction again."""

    resync_n: int = option(2, "last tokens that must occur in the prediction, once the output left it", min=1, max=64)


class Copy:
    """The pointer into one prediction. It depends on the committed tokens alone.

    prediction: the token ids to copy. num_read: the number of committed tokens that were read. at: the index of the
    next token of `prediction` to draft; None = the pointer is lost.
    """

    def __init__(self, prediction: Seq[int], num_read: int, resync_n: int, is_at_start: bool) -> None:
        self.prediction, self.num_read = prediction, num_read
        self.at: int | None = 0 if is_at_start else None
        self._found_at, self._lost_at = 0, 0
        self._resync_n, self._ids = resync_n, np.array(prediction, dtype=np.int64)

    def read(self, tokens: Seq[int], stop: int) -> None:
        """Update the pointer for each committed token from index `num_read` to `stop` - 1, as the module says."""
        for i in range(self.num_read, stop):
            if self.at is not None and self.next_token(0) == tokens[i]:
                self.at += 1
                continue
            if self.at is not None and self.at > self._found_at:  # otherwise the place was wrong, and tells nothing
                self._lost_at = self.at
            last = tokens[max(0, i + 1 - self._resync_n) : i + 1]
            self.at = behind(self._ids, last, self._lost_at) if len(last) == self._resync_n else None
            self._found_at = -1 if self.at is None else self.at
        self.num_read = stop

    def next_token(self, depth: int) -> int | None:
        """Return the token `depth` places after the pointer; None if the pointer or that token does not exist."""
        place = None if self.at is None else self.at + depth
        return None if place is None or place >= len(self.prediction) else self.prediction[place]


def behind(ids: np.ndarray, last: Seq[int], place: int) -> int | None:
    """Return the index after an occurrence of `last` in ids [n]; None if `last` does not occur before the end of `ids`.

    Of several such indices, the first one at or after `place` is returned, or else the last one before `place`. The
    index is always below n.
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
    """Drafts the tokens of each sequence's prediction, from a pointer into the prediction on."""

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
            copy.read(seq.tokens, num)  # decoder_prompt may have begun the answer
            copy.at = copy.at or 0
            return copy
        # The last prompt token is left to read, because reading it looks for the first place to copy from.
        return Copy(seq.tokens[:num], num - 1, self.options.resync_n, is_at_start=False)


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return PredictionDrafter(options)
