"""Guess the most frequent token, or draw one by its frequency: the least that any drafter can know.

This is the floor that other methods are compared with. Leviathan et al. 2023, arXiv 2211.17192, section 3.6, use such
tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters import Drafter, Target
from forerun.drafters.shared import tables
from forerun.drafters.shared.tables import TableOptions, needs as needs


@dataclass(frozen=True)
class Options(TableOptions):
    """Where the frequencies come from, and how they are used."""

    method = "unigram"


def build(options: Options, target: Target) -> Drafter:
    """Make the drafter, with or without a fitted table. Raises UserError for a file of another target."""
    return tables.drafter(options, target, order=1)
