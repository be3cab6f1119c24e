"""How many ids a draft model drafts: the first ones of the tokenizer, as many as pay in the text at hand.

The LM head of a small model is a large part of what a pass reads: more than a quarter for Qwen2.5 0.5B. Byte pair
encoding gave out ids from frequent to rare, so most of a text needs only the first rows of the head (FR-Spec, Zhao et
al. 2025, arXiv 2502.14856, which ranks ids by counts of a large corpus). The share of the text that does is counted in
the texts themselves, prompts included: a text in another script gets more rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.types import Sequence

SIZES = (8192, 16384, 32768, 65536)
LARGE = 65536  # ids; of a larger vocabulary only a part is drafted by default
MEMORY = 1000  # tokens of text until the weight of a token is 1/e
FIRST_COUNTS = (82.0, 7.0, 5.5, 4.0, 1.5)  # tokens by size before any was counted: from English and code
ACCEPTED = 0.8  # share of drafted tokens that are accepted, if the target's token can be drafted
MOST_TOKENS = 8  # of a draft


@dataclass
class ShortVocabulary:
    """Counts the ids of texts, and says how many ids to draft.

    head_share: the whole head's share of a pass of the draft model. pass_cost: a pass of the draft model with the whole
    head, in passes of the target. num_ids: rows of the whole head.
    """

    num_ids: int
    head_share: float
    pass_cost: float
    counts: list[float] = field(default_factory=lambda: list(FIRST_COUNTS))
    _seen: dict[int, int] = field(default_factory=dict)

    def read(self, seqs: Seq[Sequence]) -> None:
        """Count the tokens committed since the last call."""
        for seq in seqs:
            new = seq.tokens[self._seen.get(seq.id, 0) :]
            self._seen[seq.id] = len(seq.tokens)
            keep = max(0.0, 1 - len(new) / MEMORY)
            self.counts = [keep * count for count in self.counts]
            for token in new[-MEMORY:]:
                self.counts[bisect_left(SIZES, token + 1)] += 1

    def forget(self, seq: Sequence) -> None:
        """Forget how far a sequence was read."""
        self._seen.pop(seq.id, None)

    def best(self) -> int:
        """Return how many ids promise the most tokens in the time of a target pass."""
        total, covered, choices = sum(self.counts), 0.0, [(0.0, self.num_ids)]
        for size, count in zip((*SIZES, self.num_ids), self.counts, strict=True):
            covered += count
            cost = self.pass_cost * (1 - self.head_share * (1 - size / self.num_ids))
            choices.append((_rate(ACCEPTED * covered / total, cost), size))
        return max(choices)[1]


def _rate(accepted: float, cost: float) -> float:
    """Return tokens in the time of a target pass, at the best fixed length (Leviathan et al. 2023, theorem 3.8)."""
    tokens, rates = 1.0, list[float]()
    for length in range(1, MOST_TOKENS + 1):
        tokens += accepted**length
        rates.append(tokens / (1 + length * cost))
    return max(rates)
