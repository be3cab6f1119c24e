"""Draft the text that the request's grammar forces: keys, punctuation, the rest of a choice.

The draft has the tokens into which the tokenizer splits the forced text, as far as these tokens are certain. Text that
may follow the forced text can change how its end is split into tokens. In that case the draft stops one token earlier
(llguidance's fast-forward tokens). The target gives each drafted token probability 1, because the same grammar masks
the target's distribution. So one pass runs all keys of an object, as it would run a prompt, and no rule rejects a key
(jump-forward decoding of SGLang, Zheng et al. 2024, arXiv 2312.07104).

The engine asks this drafter first, for every request that has a grammar and may draft. If the grammar allows several
next tokens, the request's own drafter drafts. Without a grammar this drafter drafts nothing.
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
    """Drafts the tokens that the grammar of each sequence forces."""

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
