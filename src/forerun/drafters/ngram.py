"""A store of n-grams that grows with the text (NASD, n-gram assisted speculative decoding).

For each context of 1 to max_n - 1 tokens, the store knows the token that followed most often. A guess uses the longest
known context. There are three differences from the published code. A token is never drawn anew after a rejection.
Contexts of one token are used, too. If no context is known, the draft ends, because a filler token would only cost rows
of the target.

Of tokens with equal counts, the token that reached the count first remains the guess. Only committed tokens are
counted. With the option `filler_top_k`, the target's other likely tokens after each context are counted once, as if
each had followed the context. So such a token needs one occurrence less to become the context's guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

from forerun.drafters import Drafter, Seen, Target
from forerun.drafters.shared.chains import READ_TOKENS, TextDrafter
from forerun.errors import BadOption
from forerun.registry import option
from forerun.types import Probs, Sequence

Gram = tuple[int, ...]
V = TypeVar("V")


@dataclass(frozen=True)
class Options:
    """The options: the lengths of the n-grams, and how many of them are kept."""

    max_n: int = option(4, "longest n-gram, in tokens: the context and the token", min=2, max=16)
    min_n: int = option(2, "shortest n-gram, in tokens", min=2, max=16)
    filler_top_k: int = option(
        0, "likeliest tokens of the target at each place that become known, 0 = none", min=0, max=16
    )
    max_ngrams: int = option(100_000, "n-grams of one request that are kept, about 200 bytes each", min=16, max=10**8)

    def __post_init__(self) -> None:
        if self.min_n > self.max_n:
            raise BadOption(f"ngram:min_n={self.min_n} is not possible: it must be at most max_n={self.max_n}")


class Recent(Generic[V]):
    """A dictionary of at most `most` entries, which drops the entries that were not set for the longest time.

    It has two halves. When the new half is full, the old half is dropped. So nothing is sorted, and no call takes long.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._new = dict[Gram, V]()
        self._old = dict[Gram, V]()

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def get(self, key: Gram) -> V | None:
        """Return the entry of a key; None if the key has no entry."""
        entry = self._new.get(key)
        return self._old.get(key) if entry is None else entry

    def set(self, key: Gram, value: V) -> None:
        """Set the entry of a key. The oldest entries may be dropped to make room."""
        if len(self._new) >= self._half and key not in self._new:
            self._old, self._new = self._new, {}
        self._new[key] = value


class Store:
    """Counts the n-grams of one text, and stores the most frequent next token after each context.

    before: the token ids of a text to count first, such as an encoder's input.
    """

    def __init__(self, options: Options, before: Seq[int] = ()) -> None:
        self.num_read = 0
        self._lengths = range(options.min_n - 1, options.max_n)  # lengths of contexts
        self._counts, self._best = Recent[int](options.max_ngrams), Recent[int](options.max_ngrams)
        self.read(before, len(before))
        self.num_read = 0

    def read(self, tokens: Seq[int], stop: int) -> None:
        """Count each unread token before index `stop` as a follower of all contexts that end right before the token."""
        for i in range(self.num_read, stop):
            for context in self._contexts(tokens, i):
                self._count(context, tokens[i])
        self.num_read = stop

    def make_known(self, tokens: Seq[int], stop: int, fillers: Iterable[int]) -> None:
        """Count each filler once as a successor of every context that ends right before index `stop`.

        fillers: the target's likely tokens at index `stop`. A filler that was counted after a context before is not
        counted again for that context.
        """
        for token in fillers:
            for context in self._contexts(tokens, stop):
                if self._counts.get((*context, token)) is None:
                    self._count(context, token)

    def guess(self, tokens: Seq[int]) -> int | None:
        """Return the most frequent token after the longest known context at the end of `tokens`.

        Returns None if no context is known.
        """
        for length in reversed(self._lengths):
            if length <= len(tokens) and (token := self._best.get(tuple(tokens[-length:]))) is not None:
                return token
        return None

    def _contexts(self, tokens: Seq[int], stop: int) -> Iterable[Gram]:
        """Yield the contexts that end right before index `stop`."""
        return (tuple(tokens[stop - length : stop]) for length in self._lengths if length <= stop)

    def _count(self, context: Gram, token: int) -> None:
        gram = (*context, token)
        count = (self._counts.get(gram) or 0) + 1
        self._counts.set(gram, count)
        best = self._best.get(context)
        if best is None or (best != token and count > (self._counts.get((*context, best)) or 0)):
            best = token
        self._best.set(context, best)


class NgramDrafter(TextDrafter[Store]):
    """Drafts from one store of n-grams for each text. Requests share nothing."""

    def __init__(self, options: Options) -> None:
        super().__init__(lambda seq: Store(options, seq.source_ids[-READ_TOKENS:]))
        self.options, self.top_logits = options, options.filler_top_k

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        super().observe(seqs, seen)
        for seq, view in zip(seqs, seen, strict=True):
            store = self._texts.of(seq) if self.top_logits else None
            ids = [] if store is None else view.top(self.top_logits)[0].tolist()
            # Rows that were not kept follow rejected tokens, and are not learnt from.
            for i, row in enumerate(view.kept if ids else ()):
                assert store is not None
                store.make_known(seq.tokens, view.start + i + 1, ids[row - view.scored.start])

    def behind(self, text: Store, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        longest = self.options.max_n - 1
        token = text.guess([*seq.tokens[-longest:], *drafted][-longest:])
        return None if token is None else Probs.of_point(token)


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return NgramDrafter(options)
