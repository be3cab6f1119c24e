"""Prompt lookup: continue as the text itself went on, the last time its final words occurred (Saxena 2023).

The guess is a point mass, so it is accepted with the probability that the target gives to it. Of several occurrences
the most recent one is used. If a continuation reaches the end of the text, it goes on with its own first token. So a
repetition such as "ab ab ab" continues as far as the budget allows.

There is no index. For a prompt of 32k tokens, building an index took 29 ms of the first drafting step, and megabytes of
memory. A vectorised search of 32k tokens takes less than 0.1 ms, which is negligible beside the attention to these
tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun.drafters import Drafter, Target
from forerun.drafters.shared.chains import TextDrafter, Tokens
from forerun.drafters.shared.continuations import END_OF_TEXT
from forerun.errors import BadOption
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Probs, Sequence


@dataclass(frozen=True)
class Options:
    """The options: the lengths of the n-grams that are looked up."""

    max_n: int = option(3, "longest n-gram that is looked up, in tokens", min=1, max=64)
    min_n: int = option(1, "shortest n-gram that is looked up, in tokens", min=1, max=64)

    def __post_init__(self) -> None:
        if self.min_n > self.max_n:
            raise BadOption(f"lookup:min_n={self.min_n} is not possible: it must be at most max_n={self.max_n}")


class LookupDrafter(TextDrafter[Tokens]):
    """A drafter that keeps each sequence's committed tokens in an array that can be searched fast."""

    branches = True

    def __init__(self, options: Options) -> None:
        super().__init__(Tokens, is_fast=True)
        self.options = options

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        chains = [self._chain(seq, b, budget) for b, seq in enumerate(seqs)]
        return Draft.chains(chains, [[Probs(point=t) for t in chain] for chain in chains])

    def ahead(self, seq: Sequence, drafted: Seq[int], num_tokens: int) -> Seq[int]:
        text = self._texts.whole(seq).ids[:]
        text.extend(drafted)
        return self._follow(text, num_tokens)

    def _chain(self, seq: Sequence, b: int, budget: Budget) -> list[int]:
        if not budget.num_tokens[b]:
            return []
        chain: list[int] = []
        for token in self._follow(self._texts.whole(seq).ids, budget.num_tokens[b]):
            if not budget.go_on(b, len(chain), Probs(point=token)):
                break
            chain.append(token)
            if token in seq.end_ids:
                break  # nothing follows an end id; to look at it is exact, as a point mass is not drawn
        return chain

    def _follow(self, text: array[int], num_tokens: int) -> list[int]:
        """Return the tokens that followed the latest earlier occurrence of the end of `text`, at most `num_tokens`.

        If these tokens reach the end of `text`, they are repeated from the first one on.
        """
        start = follower(np.frombuffer(text, np.intc), self.options.min_n, self.options.max_n)
        if start is None:
            return []
        chain = list(text[start : start + num_tokens])
        if END_OF_TEXT in chain:  # the end of a source; nothing follows it
            return chain[: chain.index(END_OF_TEXT)]
        while len(chain) < num_tokens:
            chain.append(chain[start + len(chain) - len(text)])
        return chain


def follower(text: np.ndarray, min_n: int, max_n: int) -> int | None:
    """Return the index after the last earlier occurrence of a suffix of `text` [L]; None if no suffix occurred before.

    The suffix is the longest one of min_n to max_n tokens that occurred before.
    """
    start = None
    matches = np.ones(len(text), dtype=bool)  # [i] = the suffix of n - 1 tokens begins at i, too
    for n in range(1, min(max_n, len(text) - 1) + 1):
        matches = (text[:-n] == text[-n]) & matches[1:]
        last = len(matches) - 1 - int(matches[::-1].argmax())
        if not matches[last]:
            break
        if n >= min_n:
            start = last + n
    return start


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return LookupDrafter(options)
