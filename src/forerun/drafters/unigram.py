"""Guess the most frequent token, or draw one by its frequency: the least that any drafter can know.

This is the baseline with which other methods are compared. Leviathan et al. 2023, arXiv 2211.17192, section 3.6, use
such tables of frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters import Drafter, Target
from forerun.drafters.shared import tables
from forerun.drafters.shared.tables import TableOptions, needs as needs


@dataclass(frozen=True)
class Options(TableOptions):
    """The options: the source of the frequencies, and how tokens are chosen from the frequencies."""

    method = "unigram"


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter from a fitted table or from each text's counts. Raises UserError for another target's file."""
    return tables.drafter(options, target, order=1)
