"""Prompt lookup: continue as the text itself went on, the last time its final words occurred (Saxena 2023).

The guess is a point mass, so it is accepted with the target's own probability for it. Among several occurrences the
most recent one wins. A continuation that reaches the end of the text is read on from the draft itself, so a run such
as "ab ab ab" is continued for as long as the budget goes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.drafters import Drafter, Target
from forerun.errors import BadOption
from forerun.types import Budget, Coins, Draft, Probs, Sequence


@dataclass(frozen=True)
class Options:
    """How long a match must be."""

    max_n: int = field(default=3, metadata={"help": "longest n-gram that is looked up, in tokens", "min": 1, "max": 64})
    min_n: int = field(
        default=1, metadata={"help": "shortest n-gram that is looked up, in tokens", "min": 1, "max": 64}
    )

    def __post_init__(self) -> None:
        if self.min_n > self.max_n:
            raise BadOption(f"lookup:min_n={self.min_n} is not possible: it must be at most max_n={self.max_n}")


class LookupDrafter(Drafter):
    """Keeps, per sequence, where each n-gram of committed tokens last went on."""

    draws = "point"
    is_free = True

    def __init__(self, options: Options) -> None:
        self.options = options
        self._indexes: dict[int, _Index] = {}

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        chains = [self._chain(seq, b, budget) for b, seq in enumerate(seqs)]
        return Draft.chains(chains, [[Probs(point=t) for t in chain] for chain in chains])

    def end(self, seq: Sequence) -> None:
        self._indexes.pop(seq.id, None)

    def _chain(self, seq: Sequence, b: int, budget: Budget) -> list[int]:
        index = self._indexes.setdefault(seq.id, _Index(self.options))
        index.extend(seq.tokens)
        start = index.find(seq.tokens)
        chain: list[int] = []
        while start is not None and len(chain) < budget.num_tokens[b]:
            source = start + len(chain)
            token = seq.tokens[source] if source < len(seq.tokens) else chain[source - len(seq.tokens)]
            if not budget.go_on(b, len(chain), Probs(point=token)):
                break
            chain.append(token)
            if token in seq.end_ids:
                break  # nothing follows the end; admissible, for a point mass is known before it is "drawn"
        return chain


class _Index:
    """n-gram -> index of the token that followed its most recent occurrence. Holds committed tokens only."""

    def __init__(self, options: Options) -> None:
        self.sizes = range(options.min_n, options.max_n + 1)
        self.follows: dict[tuple[int, ...], int] = {}
        self.num_seen = 1  # tokens [1 .. num_seen) are known as followers

    def extend(self, tokens: list[int]) -> None:
        """Take in new tokens: each is the follower of the n-grams that end right before it."""
        for end in range(self.num_seen, len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.follows[tuple(tokens[end - n : end])] = end
        self.num_seen = max(self.num_seen, len(tokens))

    def find(self, tokens: list[int]) -> int | None:
        """Where the longest known suffix of `tokens` went on; None where no suffix occurred before."""
        for n in reversed(self.sizes):
            start = self.follows.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                return start
        return None


def build(options: Options, target: Target) -> Drafter:
    """A drafter that needs no model."""
    return LookupDrafter(options)
