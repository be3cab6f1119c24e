"""Guess the token that is most frequent at all, or draw one by its frequency: the least that any drafter can know.

It is the floor that other methods are compared with (Leviathan et al. 2023, arXiv 2211.17192, section 3.6, use tables).
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters import Drafter, Target
from forerun.drafters.shared import tables
from forerun.drafters.shared.tables import TableOptions, needs as needs


@dataclass(frozen=True)
class Options(TableOptions):
    """Where the frequencies are from, and how they are used."""

    method = "unigram"


def build(options: Options, target: Target) -> Drafter:
    """Make a drafter with a fitted table or none. Raises UserError for a file of another target."""
    return tables.drafter(options, target, order=1)
