"""The choice of the ids that a draft model drafts: the tokenizer's first ids, as many as the current texts need.

The LM head of a small model is a large part of the weights that a pass reads: more than a quarter for Qwen2.5 0.5B.
Byte pair encoding numbers ids from frequent to rare, so most tokens of a text need only the first rows of the LM head.
(FR-Spec, Zhao et al. 2025, arXiv 2502.14856, ranks ids by counts of a large corpus instead.) The share of these tokens
is counted in the texts themselves, prompts included. So a text in another script gets more rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.types import Sequence

SIZES = (8192, 16384, 32768, 65536)
LARGE = 65536  # number of ids; of a larger vocabulary only a part is drafted by default
MEMORY = 1000  # tokens of text until the weight of a token is 1/e
FIRST_COUNTS = (82.0, 7.0, 5.5, 4.0, 1.5)  # the counts by size before any token is counted, from English and code
ACCEPTED = 0.8  # share of drafted tokens that are accepted, if the target's token can be drafted
MOST_TOKENS = 8  # most tokens of a draft that are considered


@dataclass
class ShortVocabulary:
    """Counts the token ids in recent texts, and chooses from these counts how many ids to draft.

    num_ids: the number of rows of the whole LM head. head_share: the whole LM head's share of the time of a draft
    model's pass. pass_cost: the time of a draft model's pass with the whole LM head, in passes of the target. counts:
    the recent tokens, counted by the smallest size in SIZES that covers the token's id. The last count is for ids
    beyond all sizes.
    """

    num_ids: int
    head_share: float
    pass_cost: float
    counts: list[float] = field(default_factory=lambda: list(FIRST_COUNTS))
    _seen: dict[int, int] = field(default_factory=dict)

    def read(self, seqs: Seq[Sequence]) -> None:
        """Count the tokens of these sequences that were committed since the last call."""
        for seq in seqs:
            new = seq.tokens[self._seen.get(seq.id, 0) :]
            self._seen[seq.id] = len(seq.tokens)
            keep = max(0.0, 1 - len(new) / MEMORY)
            self.counts = [keep * count for count in self.counts]
            for token in new[-MEMORY:]:
                self.counts[bisect_left(SIZES, token + 1)] += 1

    def forget(self, seq: Sequence) -> None:
        """Forget how many tokens of a sequence were counted."""
        self._seen.pop(seq.id, None)

    def best(self) -> int:
        """Return the number of ids to draft that gives the most expected tokens in the time of one target pass."""
        total = sum(self.counts)
        covered = 0.0
        choices = [(0.0, self.num_ids)]
        for size, count in zip((*SIZES, self.num_ids), self.counts, strict=True):
            covered += count
            cost = self.pass_cost * (1 - self.head_share * (1 - size / self.num_ids))
            choices.append((_rate(ACCEPTED * covered / total, cost), size))
        return max(choices)[1]


def _rate(accepted: float, cost: float) -> float:
    """Return the expected number of tokens in the time of one target pass, at the best fixed draft length.

    accepted: the share of drafted tokens that are accepted. cost: the time of a draft model's pass, in passes of the
    target. See Leviathan et al. 2023, theorem 3.8.
    """
    tokens, rates = 1.0, list[float]()
    for length in range(1, MOST_TOKENS + 1):
        tokens += accepted**length
        rates.append(tokens / (1 + length * cost))
    return max(rates)
