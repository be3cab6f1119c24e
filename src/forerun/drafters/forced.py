"""Draft what the request's grammar leaves no choice about: keys, punctuation, what is left of a choice.

The draft is the tokenizer's spelling of that text, up to the last token with a sure end: where more text may follow and
change how the end is cut into tokens, the draft stops one token short (llguidance's fast-forward tokens). The target
gives each of these tokens probability 1, because its distribution is masked by the same grammar. So one pass writes all
keys of an object, as it would read a prompt (as in jump-forward decoding of SGLang, Zheng et al. 2024, arXiv
2312.07104), and no rule rejects one.

An engine asks it first for every request that has a grammar and may draft; the request's own drafter drafts where there
is a choice. Without a grammar it drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.drafters import Drafter, Target
from forerun.types import Budget, Coins, Draft, Probs, Sequence


@dataclass(frozen=True)
class Options:
    """No options: the grammar decides everything."""


class ForcedDrafter(Drafter):
    """Asks the grammar of each sequence, which stands behind its committed tokens."""

    draws = "point"
    is_free = True
    num_passes = 0

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        chains = [self.ahead(seq, (), most) for seq, most in zip(seqs, budget.num_tokens, strict=True)]
        return Draft.chains(chains, [[Probs.of_point(token) for token in chain] for chain in chains])

    def ahead(self, seq: Sequence, drafted: Seq[int], num_tokens: int) -> Seq[int]:
        if seq.grammar is None or num_tokens <= 0:
            return ()
        return seq.grammar.forced(seq.tokens, drafted)[:num_tokens]


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return ForcedDrafter()
