"""What drafters of chains share: one token after another, each from what the method expects behind those before it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Generic, Protocol, TypeVar

from forerun.drafters import Drafter, Seen
from forerun.types import Budget, Coins, Draft, Probs, Sequence

READ_TOKENS = 2048  # that one call reads of a text: a prompt found in the prefix cache comes as one long piece


class ChainDrafter(Drafter):
    """Drafts a chain for each sequence; a method only says what it expects next, in `expected`."""

    def expected(self, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        """Return the distribution of the token behind the committed ones and `drafted`; None where none is known."""
        raise NotImplementedError

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        chains = [self._chain(seq, b, budget, coins[b]) for b, seq in enumerate(seqs)]
        return Draft.chains([tokens for tokens, _ in chains], [probs for _, probs in chains])

    def _chain(self, seq: Sequence, b: int, budget: Budget, coins: Coins) -> tuple[list[int], list[Probs]]:
        tokens: list[int] = []
        probs: list[Probs] = []
        # Match verification accepts most when drafter and target share the noise (docs/exactness.md).
        draw = coins.pick if seq.acceptance == "match" else coins.draft
        while len(tokens) < budget.num_tokens[b]:
            next_probs = self.expected(seq, tokens)
            if next_probs is None or not budget.go_on(b, len(tokens), next_probs):
                break
            token = draw(next_probs, len(tokens))
            tokens.append(token)
            probs.append(next_probs)
            if next_probs.point is not None and token in seq.end_ids:
                break  # nothing follows the end; admissible, for a point mass is known before it is "drawn"
        return tokens, probs


class Text(Protocol):
    """What a drafter knows of the committed tokens of one sequence; it has read the first `num_read` of them."""

    num_read: int

    def read(self, tokens: Seq[int], stop: int) -> None:
        """Read on, up to the token with index `stop`, which is not read."""


T = TypeVar("T", bound=Text)


class ReadingDrafter(ChainDrafter, Generic[T]):
    """A drafter of chains that learns from each text by itself, in order, at most READ_TOKENS in one call.

    A prompt is read chunk by chunk while the target runs it. As long as tokens are left to read, nothing is drafted.
    """

    def __init__(self) -> None:
        self._texts: dict[int, T] = {}

    def new_text(self, seq: Sequence) -> T:
        """Return what is known of a sequence before any of its tokens was read."""
        raise NotImplementedError

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, own in zip(seqs, seen, strict=True):
            self._read(seq, own.start + len(own.kept) + 1)  # the token behind those that were run is committed, too

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        for seq in seqs:
            self._read(seq, len(seq.tokens))
        return super().propose(seqs, budget, coins)

    def text(self, seq: Sequence) -> T | None:
        """Return what is known of a sequence; None where tokens are left to read."""
        text = self._texts[seq.id]
        return text if text.num_read == len(seq.tokens) else None

    def end(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)

    def _read(self, seq: Sequence, stop: int) -> T:
        text = self._texts.get(seq.id)
        if text is None:
            text = self._texts[seq.id] = self.new_text(seq)
        stop = min(stop, len(seq.tokens), text.num_read + READ_TOKENS)
        if stop > text.num_read:
            text.read(seq.tokens, stop)
        return text
