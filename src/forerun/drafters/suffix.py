"""Suffix decoding: look up the text's last tokens, and draft what most often followed them (Oliaro et al. 2411.04975).

Two histories are searched: the request's own prompt and output, and the texts of finished requests. Each suffix of the
text that occurred before gives a guess. A suffix of m tokens may draft max_spec_factor * m + max_spec_offset tokens,
because a long match is rarely an accident. The tokens after the latest NUM_OCCURRENCES occurrences of a suffix are
counted. The guess continues with the most frequent token, whose share of the counts is its probability. The score of a
guess is the sum of its nodes' probabilities: the number of tokens accepted on average, if the counts are right. The
guess with the best score is drafted. Of guesses with equal scores, the guess of the longer suffix is drafted. Finished
texts are searched only for suffixes that are longer than the match in the request's own text.

The paper keeps suffix trees. Here numpy searches the tokens themselves, so that no index is built while a prompt is
read, and a token of history takes four bytes. docs/methods/suffix.md compares the times of both.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun import verify
from forerun.drafters import Drafter, Target
from forerun.drafters.shared.chains import TextDrafter, Tokens
from forerun.drafters.shared.continuations import END_OF_TEXT, SHAPE_HELP, SHAPES, Guess, check_shape, grow, levels
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Sequence

NUM_OCCURRENCES = 64  # counted occurrences of a suffix: more would change drafts little, and cost time


@dataclass(frozen=True)
class Options:
    """The options: how many tokens are drafted, and how many finished requests are remembered."""

    max_match: int = option(64, "longest suffix looked for, in tokens", min=1, max=255)
    max_spec_factor: float = option(4.0, "drafted tokens for each token of the match", min=0.0, max=1000.0)
    max_spec_offset: float = option(0.0, "drafted tokens beside those of max_spec_factor", min=0.0, max=1000.0)
    min_token_prob: float = option(0.1, "least probability of a node by the counts, 0 to 1", min=0.0, max=1.0)
    shape: str = option("path", SHAPE_HELP)
    max_cached_requests: int = option(10_000, "finished requests remembered, 0 = none; the oldest go first", min=0)
    max_cached_tokens: int = option(100_000, "their tokens remembered, 0 = none", min=0, max=10**8)

    def __post_init__(self) -> None:
        check_shape("suffix", self.shape)


class Past:
    """Stores the texts of finished requests, separately for each cache salt. At the limits, the oldest are dropped.

    max_requests, max_tokens: the limits for all salts together. Each text counts one token more, its END_OF_TEXT.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._texts: dict[str | None, array[int]] = {}  # by salt: text, END_OF_TEXT, text, END_OF_TEXT ...
        self._order: deque[tuple[str | None, int]] = deque()  # salt and length of each text, the oldest first

    def of(self, salt: str | None) -> array[int]:
        """Return all texts of a salt, the oldest first, each followed by END_OF_TEXT."""
        return self._texts.get(salt, array("i"))

    def add(self, salt: str | None, text: array[int]) -> None:
        """Store a text. If the text is longer than the limit, only its end is stored."""
        if not self._max_requests or self._max_tokens < 2:
            return
        text = text[-(self._max_tokens - 1) :]
        text.append(END_OF_TEXT)
        self._num_tokens += len(text)
        self._order.append((salt, len(text)))
        while self._num_tokens > self._max_tokens or len(self._order) > self._max_requests:
            self._drop_oldest()
        self._texts.setdefault(salt, array("i")).extend(text)

    def _drop_oldest(self) -> None:
        salt, length = self._order.popleft()
        self._num_tokens -= length
        del self._texts[salt][:length]
        if not self._texts[salt]:
            del self._texts[salt]


class SuffixDrafter(TextDrafter[Tokens]):
    """A drafter that searches the text of a sequence, and the texts of finished requests.

    With shape=tree it drafts trees for the requests whose rule judges trees, and chains for all others.
    """

    also_chains = True
    tells_confidence = True

    def __init__(self, options: Options) -> None:
        super().__init__(Tokens, is_fast=True)
        self.options, self.shape = options, SHAPES[options.shape]
        self._past = Past(options.max_cached_requests, options.max_cached_tokens)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        begun = self.clock()
        guesses = [self._guess(seq, budget.num_tokens[b]) for b, seq in enumerate(seqs)]
        draft = Draft.joined([guess.draft(seqs[b], b, budget) for b, guess in enumerate(guesses)])
        self.search_s = self.clock() - begun
        self.num_searched = len(seqs)
        return draft

    def end(self, seq: Sequence) -> None:
        """Forget a sequence. If the request has finished, store its text for later requests.

        The text of a request that was aborted, or that will begin again, is not stored.
        """
        if seq.finish_reason in ("stop", "length"):
            self._past.add(seq.params.cache_salt, self._texts.whole(seq).ids)
        super().end(seq)

    def _guess(self, seq: Sequence, most: int) -> Guess:
        text = self._texts.whole(seq).ids
        context = text[-self.options.max_match :]
        # The text's last token is left out of the search, because nothing has followed it yet.
        guess = self._better(Guess(), text, len(text) - 1, context, most, seq)
        past = self._past.of(seq.params.cache_salt)
        return self._better(guess, past, len(past), context, most, seq)

    def _better(
        self, guess: Guess, text: array[int], stop: int, context: array[int], most: int, seq: Sequence
    ) -> Guess:
        """Return the best guess from the first `stop` tokens of `text`, or `guess` if its score is at least as high.

        context: the end of the request's text, whose suffixes are searched. most: the largest number of nodes in a
        guess. seq: the request's sequence. Its rule may judge chains only; then the guess is a chain.
        """
        o = self.options
        is_tree = self.shape == "tree" and verify.find(seq.acceptance).judges("tree", self.draws)
        if most <= guess.score:
            return guess
        least = guess.match  # an equally long match in the request's own text says more than a match in other texts
        for level in reversed(levels(np.frombuffer(text, np.intc)[:stop], context)):
            limit = min(most, int(o.max_spec_factor * level.length + o.max_spec_offset))
            if level.length <= least or limit <= guess.score:
                break  # no node has more than probability 1, and a shorter suffix may draft no more
            rows = [text[end : end + limit] for end in level.ends(NUM_OCCURRENCES)]
            candidate = grow(rows, limit, is_tree, o.min_token_prob, seq.end_ids)
            if candidate.score > guess.score:
                candidate.match = level.length
                guess = candidate
        return guess


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return SuffixDrafter(options)
