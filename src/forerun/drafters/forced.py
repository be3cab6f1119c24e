"""Draft the text that the request's grammar forces: keys, punctuation, the rest of a choice.

The draft has the tokens in which the tokenizer writes the forced text, as far as these tokens are certain. If more text
may follow, it can change how the end of the forced text is split into tokens, so the draft stops one token earlier
(llguidance's fast-forward tokens). The target gives each drafted token probability 1, because the same grammar masks
the target's distribution. So one pass runs all keys of an object, as it would run a prompt, and no rule rejects a key
(jump-forward decoding of SGLang, Zheng et al. 2024, arXiv 2312.07104).

The engine asks this drafter first, for every request that has a grammar and may draft. Where the grammar leaves a
choice, the request's own drafter drafts. Without a grammar this drafter drafts nothing.
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
    """A drafter that asks the grammar of each sequence for the tokens that must come next."""

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
