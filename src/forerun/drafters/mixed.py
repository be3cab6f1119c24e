"""Several drafters in order: the first one that has a guess drafts.

The option `of` gives the order. A search in the text costs almost nothing, and its guesses are often right, but it does
not always find one. A draft model guesses everywhere. Together they are better than either alone. Whether a member has
a guess is known before any of its tokens is drawn, so drafts stay exact (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.drafters import Drafter, Known, Needs, Target
from forerun.drafters.shared.compound import Compound, made, specs
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Sequence


@dataclass(frozen=True)
class Options:
    """The options: the member drafters, in the order in which they are asked."""

    of: str = option("lookup+model", "specs of drafters with + between, as in (lookup:max_n=8)+model")

    def __post_init__(self) -> None:
        specs("mixed", self.of)


class MixedDrafter(Compound):
    """A drafter that asks its members in turn, until a member has a guess for the sequence."""

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.start()
        drafts = [Draft.empty(1)] * len(seqs)
        left = [b for b, granted in enumerate(budget.num_tokens) if granted > 0]
        for member in self.members:
            for b, draft in zip(left, self.ask(member, left, seqs, budget, coins), strict=True):
                if draft.num_asked(0):  # extra rows alone count, too, until the nodes of a later member replace them
                    drafts[b] = draft
            left = [b for b in left if not drafts[b].tokens]
        return Draft.joined(drafts)

    def ahead(self, seq: Sequence, drafted: Seq[int], num_tokens: int) -> Seq[int]:
        guesses = (member.ahead(seq, drafted, num_tokens) for member in self.members)
        return next((guess for guess in guesses if guess), ())


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the specs of the members."""
    return Needs(parts=tuple(specs("mixed", options.of)))


def build(options: Options, target: Target) -> Drafter:
    """Build all members. A member with a draft model loads the model."""
    return MixedDrafter(made(specs("mixed", options.of), target))
