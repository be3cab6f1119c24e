"""Helpers for drafters of chains: they draw one token after another, and read each text in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence as Seq
from typing import Generic, Protocol, TypeVar

from forerun.drafters import Drafter, Seen
from forerun.drafters.shared.continuations import END_OF_TEXT
from forerun.sampling.arithmetic import Row
from forerun.types import Budget, Coins, Draft, Probs, Sequence

READ_TOKENS = 2048  # most tokens of a text to read in one call; a prompt in the prefix cache comes as one long piece

Expected = Callable[[Sequence, Seq[int]], Probs | None]
Logits = Callable[[Sequence, int], Row | None]


def draw_chains(
    seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins], expected: Expected, logits: Logits | None = None
) -> Draft:
    """Draft a chain for each sequence, within a budget.

    coins: for each sequence, its random numbers (see `Coins`). expected(seq, drafted): returns the distribution of the
    token after the committed tokens and the tokens `drafted`; None ends the chain. logits(seq, depth): returns the
    model's logits [V] at that depth, or None if the model has not computed them. A drafter without a model passes no
    `logits`.
    """
    chains = [_chain(seq, b, budget, coins[b], expected, logits) for b, seq in enumerate(seqs)]
    return Draft.chains([tokens for tokens, _ in chains], [probs for _, probs in chains])


def _chain(
    seq: Sequence, b: int, budget: Budget, coins: Coins, expected: Expected, logits: Logits | None
) -> tuple[list[int], list[Probs]]:
    tokens: list[int] = []
    probs: list[Probs] = []
    # Match verification accepts most when drafter and target share the noise (docs/exactness.md).
    draw = coins.pick if seq.acceptance == "match" else coins.draft
    while len(tokens) < budget.num_tokens[b]:
        next_probs, depth = expected(seq, tokens), len(tokens)
        if next_probs is None:
            break
        logits_here = () if logits is None else (logits(seq, depth),)
        if not budget.go_on(b, depth, next_probs, *logits_here):
            break
        token = draw(next_probs, depth)
        tokens.append(token)
        probs.append(next_probs)
        if logits is not None and not budget.go_behind(b, depth, token, next_probs, *logits_here):
            break
        if next_probs.point is not None and token in seq.end_ids:
            break  # nothing follows an end id; to look at it is exact, as a point mass is known before the "draw"
    return tokens, probs


class Text(Protocol):
    """A drafter's state that depends on the committed tokens of one sequence."""

    @property
    def num_read(self) -> int:
        """The number of tokens read so far, counted from the first token."""

    def read(self, tokens: Seq[int], stop: int) -> None:
        """Read the tokens from index `num_read` up to `stop`, exclusive."""


T = TypeVar("T", bound=Text)


class Tokens:
    """The committed tokens of one sequence, in an array that numpy can search.

    While a numpy view of the array exists, the array cannot grow. For an encoder-decoder, the array begins with the
    token ids of the encoder's input, as a separate text.
    """

    def __init__(self, seq: Sequence) -> None:
        self.ids = array("i", [*seq.source_ids, END_OF_TEXT] if seq.source_ids else ())
        self._num_before = len(self.ids)

    @property
    def num_read(self) -> int:
        """The number of committed tokens that were read."""
        return len(self.ids) - self._num_before

    def read(self, tokens: Seq[int], stop: int) -> None:
        """Copy the unread tokens before index `stop` into the array."""
        self.ids.extend(tokens[self.num_read : stop])


class Texts(Generic[T]):
    """A drafter's states for all sequences. Each state depends on the text of one sequence alone.

    A text is read in order, at most READ_TOKENS tokens in one call. A prompt is read chunk by chunk while the target
    runs it. new(seq): returns the state before any token is read. is_fast: whether reading only copies tokens; then one
    call may read any number of tokens. by_id: the states by sequence id.
    """

    def __init__(self, new: Callable[[Sequence], T], is_fast: bool = False) -> None:
        self._new = new
        self._is_fast = is_fast
        self.by_id = dict[int, T]()

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Read the tokens that a pass ran and that were not rejected, and the committed token after these."""
        for seq, view in zip(seqs, seen, strict=True):
            self._read(seq, view.start + len(view.kept) + 1)

    def catch_up(self, seqs: Seq[Sequence]) -> None:
        """Read the unread tokens of these sequences, at most READ_TOKENS for each unless `is_fast`."""
        for seq in seqs:
            self._read(seq, len(seq.tokens))

    def of(self, seq: Sequence) -> T | None:
        """Return the state of a sequence; None if the sequence has unread tokens. Nothing may be drafted then."""
        text = self.by_id[seq.id]
        return text if text.num_read == len(seq.tokens) else None

    def whole(self, seq: Sequence) -> T:
        """Read a sequence's text to its end, and return the state. Only for states with `is_fast`."""
        return self._read(seq, len(seq.tokens))

    def end(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self.by_id.pop(seq.id, None)

    def _read(self, seq: Sequence, stop: int) -> T:
        text = self.by_id.get(seq.id)
        if text is None:
            text = self.by_id[seq.id] = self._new(seq)
        stop = min(stop, len(seq.tokens))
        if not self._is_fast:
            stop = min(stop, text.num_read + READ_TOKENS)
        if stop > text.num_read:
            text.read(seq.tokens, stop)
        return text


class TextDrafter(Drafter, Generic[T]):
    """A drafter that guesses from the text of each sequence alone. A subclass defines the guess in `behind`.

    new, is_fast: as in Texts.
    """

    draws = "point"
    is_free = True

    def __init__(self, new: Callable[[Sequence], T], is_fast: bool = False) -> None:
        self._texts = Texts(new, is_fast)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self._texts.catch_up(seqs)
        return draw_chains(seqs, budget, coins, self._expected)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        self._texts.observe(seqs, seen)

    def end(self, seq: Sequence) -> None:
        self._texts.end(seq)

    def behind(self, text: T, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        """Return the distribution of the next token; None if there is no guess.

        text: the sequence's state after its whole text was read. drafted: the tokens drafted after this text.
        """
        raise NotImplementedError

    def _expected(self, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        text = self._texts.of(seq)
        return None if text is None else self.behind(text, seq, drafted)
