"""Guess the token that most often followed the last one, or draw by these frequencies (Leviathan et al. 2023, 3.6).

With draws=sampled, the token v after the token u is drawn from q(v | u) = (C2[u][v] + k U1[v]) / (sum C2[u] + k). C2
counts pairs of tokens, and U1 = C1 / sum C1 are the frequencies of single tokens, to which the pairs back off. With
draws=point there is no back-off, so nothing is drafted after a token that has no counted successor.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters import Drafter, Target
from forerun.drafters.shared import tables
from forerun.drafters.shared.tables import TableOptions, needs as needs
from forerun.registry import option


@dataclass(frozen=True)
class Options(TableOptions):
    """The options: the source of the counts, and how tokens are chosen from the counts."""

    method = "bigram"
    k: float = option(1.0, "weight of the back-off to single tokens, in occurrences of the last token", min=0.0)


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter from a fitted table or from each text's counts. Raises UserError for another target's file."""
    return tables.drafter(options, target, order=2, k=options.k)
