"""Guess the token that most often followed the last one, or draw by these frequencies (Leviathan et al. 2023, 3.6).

Draws have the distribution q(v | u) = (C2[u][v] + k U1[v]) / (sum C2[u] + k) with U1 = C1 / sum C1. So the counts C2 of
pairs back off to the frequencies U1 of single tokens. Point masses do not back off, so nothing is drafted after a token
that was never seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters import Drafter, Target
from forerun.drafters.shared import tables
from forerun.drafters.shared.tables import TableOptions, needs as needs
from forerun.registry import option


@dataclass(frozen=True)
class Options(TableOptions):
    """Where the counts come from, and how they are used."""

    method = "bigram"
    k: float = option(1.0, "weight of the back-off to single tokens, in occurrences of the last token", min=0.0)


def build(options: Options, target: Target) -> Drafter:
    """Make the drafter, with or without a fitted table. Raises UserError for a file of another target."""
    return tables.drafter(options, target, order=2, k=options.k)
