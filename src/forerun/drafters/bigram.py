"""Guess what followed the last token most often, or draw from what followed it (Leviathan et al. 2023, section 3.6).

q(v | u) = (C2[u][v] + k U1[v]) / (sum C2[u] + k) with U1 = C1 / sum C1: counts of pairs, which back off to the
frequencies of tokens. Point masses do not back off: behind a token that was never seen nothing is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters import Drafter, Target
from forerun.drafters.shared import tables
from forerun.drafters.shared.tables import TableOptions, needs as needs
from forerun.registry import option


@dataclass(frozen=True)
class Options(TableOptions):
    """Where the counts are from, and how they are used."""

    method = "bigram"
    k: float = option(1.0, "weight of the back-off to single tokens, in occurrences of the last token", min=0.0)


def build(options: Options, target: Target) -> Drafter:
    """Make a drafter with a fitted table or none. Raises UserError for a file of another target."""
    return tables.drafter(options, target, order=2, k=options.k)
